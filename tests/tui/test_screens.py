"""The screens over the chat: models, conversations, themes, help."""

import threading

import pytest
from fake_engine import FakeEngine, StepGate
from fixed_chat import MEMORY, MODEL, SHELF, FixedHost
from msgspec.structs import replace

from edgeinfer.chat.commands import theme_names
from edgeinfer.chat.model_choices import list_choices
from edgeinfer.config.config_file import BINDING_IDS, ChatConfig, load_config
from edgeinfer.errors import DownloadError, InterruptedByUser
from edgeinfer.models.fits import fit
from edgeinfer.models.progress import PullProgress, progress_text
from edgeinfer.platform.machine import Memory, Rate
from edgeinfer.tui import bindings
from edgeinfer.tui.screens import model_picker
from edgeinfer.tui.screens.dialogs import ChoiceScreen, HelpScreen, help_content
from edgeinfer.tui.screens.model_picker import ModelScreen, pull_text
from edgeinfer.tui.screens.sessions import SessionScreen, format_age


@pytest.fixture(autouse=True)
def fixed_choices(monkeypatch):
    monkeypatch.setattr(model_picker, "list_choices", lambda warm=(): list(SHELF))


@pytest.fixture
def pulling(monkeypatch):
    """A `pull` that reports once, waits for `go` or a cancellation, and raises `error` if set."""

    class Pulling:
        go = threading.Event()
        error = None
        asked = None

        def __call__(self, name, progress, cancel):
            self.asked = name
            sizes = {"done_bytes": 40_000_000, "total_bytes": 92_000_000}
            progress(PullProgress(stage="downloading", file="x.gguf", **sizes))
            while not self.go.wait(0.005):
                if cancel.is_set():
                    raise InterruptedByUser("stopped")
            if self.error:
                raise self.error
            return SHELF[1]

    pulling = Pulling()
    pulling.go = threading.Event()
    monkeypatch.setattr("edgeinfer.models.pull.pull", pulling)
    return pulling


async def open_models(d):
    await d.ready()
    await d.press("f2")
    screen = await d.until(lambda: isinstance(d.app.screen, ModelScreen) and d.app.screen)
    await d.until(lambda: screen.rows)
    return screen


class TestModels:
    def test_detail_tells_the_memory_that_is_missing(self):
        assert "Larger than memory: needs 5.35 of 3.80 GB" in model_picker.detail(SHELF[2])

    async def test_pulled_model_is_used(self, drive):
        async with drive() as d:
            await open_models(d)
            await d.press("enter")
            await d.until(lambda: d.app.screen is d.chat)
            assert d.session.conversation.model == MODEL

    async def test_a_pick_during_an_answer_is_refused(self, drive):
        gate = StepGate()
        async with drive(FakeEngine([["Hello", gate, " world"]])) as d:
            await d.ready()
            await d.type("q", "enter")
            await d.until(gate.reached.is_set)
            await open_models(d)
            await d.press("enter")
            await d.until(lambda: "an answer is being written" in d.screen_text())
            gate.opened.set()
            await d.until(d.idle)
            assert d.turns() == ["q", "Hello world"]

    async def test_another_is_pulled_with_progress_and_then_used(self, drive, pulling):
        async with drive() as d:
            screen = await open_models(d)
            await d.press("down", "enter")
            line = screen.query_one(".progress")
            await d.until(lambda: "40.0 MB of 92.0 MB" in str(line.render()))
            assert pulling.asked == "qwen3-0.6b"
            pulling.go.set()
            await d.until(
                lambda: d.app.screen is d.chat and d.session.conversation.model == "qwen3-0.6b"
            )

    @pytest.mark.parametrize("pull_is", ["pulled", "failed", "left"])
    async def test_text_typed_during_a_pull_becomes_the_question(self, drive, pulling, pull_is):
        pulling.error = DownloadError("no route to host") if pull_is == "failed" else None
        async with drive() as d:
            screen = await open_models(d)
            await d.press(*"qwen")
            await d.until(lambda: len(screen.rows) == 1)
            await d.press("enter")
            await d.until(lambda: pulling.asked)
            await d.burst(*"Why", "enter", "!")
            assert [row.name for row in screen.rows] == ["qwen3-0.6b"]
            if pull_is != "left":
                pulling.go.set()
                await d.until(lambda: not screen._working)
            if pull_is != "pulled":
                assert pull_is == "left" or screen.query_one("#words").value == "qwen"
                await d.press("escape")
            await d.until(lambda: d.app.screen is d.chat)
            await d.burst("1")
            assert d.chat.composer.text == "Why!1"

    async def test_pull_is_stopped(self, drive, pulling):
        async with drive() as d:
            screen = await open_models(d)
            await d.press("down", "enter")
            await d.until(lambda: screen._working and pulling.asked)
            await d.press("ctrl+x")
            await d.until(lambda: not screen._working)
            assert d.app.screen is screen
            assert not screen.query_one(".progress").display

    async def test_failed_pull_says_why_and_what_next(self, drive, pulling):
        pulling.error = DownloadError("the server closed the connection")
        async with drive() as d:
            screen = await open_models(d)
            await d.press("down", "enter")
            pulling.go.set()
            detail = screen.query_one(".detail")
            await d.until(lambda: "closed the connection" in str(detail.render()))
            assert "check network and proxy" in str(detail.render())

    async def test_typing_filters_the_list(self, drive):
        async with drive() as d:
            screen = await open_models(d)
            await d.press(*"mistral")
            await d.until(lambda: [row.name for row in screen.rows] == [SHELF[2].name])
            await d.press(*["backspace"] * 7)
            await d.until(lambda: len(screen.rows) == len(SHELF))

    async def test_small_terminal_shows_several_models(self, drive):
        async with drive(size=(40, 12)) as d:
            screen = await open_models(d)
            await d.until(lambda: screen.query_one("#models").size.height >= 3)

    async def test_ctrl_w_warms_the_chosen_model(self, drive):
        class Warming(FixedHost):
            warmed = None

            def warm(self, model, options, progress=None, cancel=None):
                progress("dump", 0.5)
                self.warmed = model

        host = Warming()
        async with drive(host=host, ready=False) as d:
            await open_models(d)
            await d.press("ctrl+w")
            await d.until(lambda: host.warmed == MODEL)

    async def test_without_a_snapshotter_it_says_so(self, drive):
        async with drive() as d:
            screen = await open_models(d)
            await d.press("ctrl+w")
            await d.until(lambda: "cannot build snapshots" in str(screen.query_one(".detail").render()))


def test_pull_shows_a_bar_and_the_words_of_every_front():
    figures = {"done_bytes": 46_000_000, "total_bytes": 92_000_000, "rate_bytes_per_s": 8.2e6}
    now = PullProgress(stage="downloading", file="a.gguf", left_s=5.6, note="again", **figures)
    text = "downloading a.gguf: 46.0 MB of 92.0 MB, 8.2 MB/s, 6 s left: again"
    assert progress_text(now) == text
    assert pull_text(now) == f"━━━━━━━━━━──────────  {text}"
    assert pull_text(PullProgress(stage="resolving")) == "looking up"


class TestSessions:
    async def two(self, d):
        await d.ready()
        await d.ask("How do I cook a soufflé?")
        await d.press("ctrl+n")
        await d.ask("What is a monad?")
        await d.press("f3")
        return await d.until(lambda: isinstance(d.app.screen, SessionScreen) and d.app.screen)

    async def test_list_search_and_open(self, drive):
        async with drive(FakeEngine([["whip the whites"], ["a monoid"]])) as d:
            screen = await self.two(d)
            titles = [summary.title for summary in screen.summaries]
            assert titles == ["What is a monad?", "How do I cook a soufflé?"]
            rows = [str(screen.query_one("#found").get_option_at_index(n).prompt) for n in (0, 1)]
            assert [row.split()[0] for row in rows] == [str(s.id) for s in screen.summaries]
            await d.press(*"whites")
            await d.until(lambda: [s.title for s in screen.summaries] == ["How do I cook a soufflé?"])
            await d.press("enter")
            await d.until(lambda: d.app.screen is d.chat)
            assert d.turns() == ["How do I cook a soufflé?", "whip the whites"]

    @pytest.mark.parametrize("is_stored", [True, False])
    async def test_opening_loses_neither_the_typed_text_nor_a_draft(self, drive, is_stored):
        async with drive() as d:
            await d.ready()
            await d.ask("first")
            first = await d.leave_draft("half a thou")
            if is_stored:
                await d.ask("second")
            second = d.session.conversation.id
            await d.type("typed later")
            await d.until(lambda: not is_stored or d.session.conversation.draft == "typed later")
            await d.press("f3")
            await d.until(lambda: isinstance(d.app.screen, SessionScreen) and d.app.screen.summaries)
            await d.press(*["down"] * is_stored, "enter")
            await d.until(lambda: d.session.conversation.id == first)
            text = "half a thou" if is_stored else "typed later\nhalf a thou"
            assert d.chat.composer.text == text
            assert not is_stored or d.session.store.conversation(second).draft == "typed later"

    async def test_delete_and_undo(self, drive):
        async with drive() as d:
            screen = await self.two(d)
            await d.press("down", "ctrl+d")
            await d.until(lambda: [s.title for s in screen.summaries] == ["What is a monad?"])
            await d.press("ctrl+u")
            await d.until(lambda: len(screen.summaries) == 2)

    async def test_deleting_the_open_one_begins_a_new_one(self, drive):
        async with drive() as d:
            await self.two(d)
            await d.press("ctrl+d", "escape")
            await d.until(lambda: d.app.screen is d.chat)
            assert d.turns() == []
            assert d.session.conversation.id == 0

    @pytest.mark.parametrize(
        ("ms", "text"), [(0, "now"), (120_000, "2 min"), (7_200_000, "2 h"), (10**9, "11 d")]
    )
    def test_ages_are_formatted(self, ms, text):
        assert format_age(ms) == text


async def test_theme_is_picked_and_kept(drive):
    async with drive() as d:
        await d.ready()
        assert theme_names() == sorted(d.app.available_themes)
        d.chat.run_command("/theme")
        await d.until(lambda: isinstance(d.app.screen, ChoiceScreen))
        await d.press("down", "enter")
        await d.until(lambda: d.app.screen is d.chat)
        assert d.app.theme == load_config().chat.theme == "edgeinfer-light"


async def test_theme_that_does_not_exist_is_named(drive):
    async with drive(config=ChatConfig(theme="no-such")) as d:
        messages = [note.message for note in d.app._notifications]
        assert any("no theme 'no-such' (`chat.theme` in config.toml)" in text for text in messages)


@pytest.mark.parametrize("leave", ["escape", "ctrl+c"])
async def test_every_dialog_is_left_by_esc_and_ctrl_c(drive, leave):
    async with drive() as d:
        await d.ready()
        for command, dialog in (
            ("/help", HelpScreen),
            ("/model", ModelScreen),
            ("/sessions", SessionScreen),
            ("/theme", ChoiceScreen),
        ):
            d.chat.run_command(command)
            await d.until(lambda dialog=dialog: isinstance(d.app.screen, dialog))
            await d.press(leave)
            await d.until(lambda: d.app.screen is d.chat)


class TestHelp:
    def test_it_lists_every_key_also_rebound_ones(self):
        text = str(help_content({"regenerate": "ctrl+x"}, 200))
        assert all(key.id in text and key.tooltip in text for key in bindings.KEYS)
        assert "Ctrl+X" in text

    def test_ids_are_unique_and_keys_of_one_place_do_not_clash(self):
        assert [key.id for key in bindings.KEYS] == BINDING_IDS
        for where in bindings.HEADINGS:
            keys = [k for key in bindings.KEYS if key.where == where for k in key.keys.split(",")]
            assert len(keys) == len(set(keys)), where


async def test_palette_offers_the_commands(drive):
    async with drive() as d:
        titles = [c.title for c in d.app.get_system_commands(d.chat)]
        assert "Regen" in titles
        assert "File" not in titles


@pytest.mark.parametrize(
    ("group", "verdict"), [("comfortable", "fits"), ("slow", "slow"), ("too big", "too big"), ("", "")]
)
def test_model_is_judged_by_memory_and_speed(group, verdict):
    judged = replace(SHELF[1].fit, group=group) if group else None
    row = replace(SHELF[1], fit=judged, licence="LFM-1.0")
    assert row.verdict == verdict
    assert "LFM-1.0: not an open-source licence" in model_picker.detail(row)
    assert "Apache-2.0:" not in model_picker.detail(replace(row, licence="Apache-2.0"))


def test_memory_that_other_programs_take_is_a_note_and_changes_no_figure():
    judged = fit(484_000_000, "chat", 1.0, Rate(40e9, 2, busy=False), memory=MEMORY)
    busy = Memory(total_bytes=MEMORY.total_bytes, available_bytes=10**8, reason="")
    short = fit(484_000_000, "chat", 1.0, Rate(40e9, 2, busy=False), memory=busy)
    assert replace(short, shortage="") == judged
    free, full = (replace(SHELF[1], fit=judged) for judged in (judged, short))
    assert model_picker.detail(full).startswith(model_picker.detail(free).partition("\nEnter")[0])
    assert "Short at the moment: needs 685.7 MB, 100.0 MB free now" in model_picker.detail(full)


def test_models_that_cannot_chat_are_not_offered():
    purposes = {row.purpose for row in list_choices()}
    assert "chat" in purposes
    assert not purposes & {"embedding", "reranker"}
