"""The chat screen with a scripted engine: asking, stopping, branches, commands, files, errors."""

import contextlib
import random
import re
import threading

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine, SmallEngine, StepGate
from fixed_chat import EMPTY_SHELF, MODEL, OFFERED, SHELF, FixedHost, make_app, wait_until, words
from found_stores import OllamaStore
from made_gguf import gguf_bytes
from msgspec.structs import replace
from textual import events
from textual.selection import SELECT_ALL
from textual.widgets import Static
from tools_here import calling, tools_config

from edgeinfer.chat import formats
from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.history.values import Attachment
from edgeinfer.chat.session import ChatSession
from edgeinfer.config.config_file import ChatConfig, Config, load_config
from edgeinfer.errors import DecodeError, DownloadError, ModelNotPulledError, OutOfMemoryError
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.runtime.events import ReasoningDelta
from edgeinfer.runtime.options import Chosen
from edgeinfer.tui.app import ChatApp
from edgeinfer.tui.composer import Composer
from edgeinfer.tui.screens.dialogs import ChoiceScreen
from edgeinfer.tui.screens.model_picker import ModelScreen


def gated_engine(*before, after=("done",)):
    """Return an engine whose answer waits at a gate, and the gate."""
    gate = StepGate()
    return FakeEngine([[*before, gate, *after]]), gate


async def test_cached_tokens_of_an_opened_conversation_are_shown(drive):
    async with drive(FakeEngine([words("Hello **you**")])) as d:
        await d.ask("Hi there")
        number = d.session.conversation.id
        d.chat.run_command("/new")
        d.chat.run_command(f"/open {number}")
        await d.until(lambda: "tokens cached" in d.status_text())


async def test_status_says_reading_until_the_first_token(drive):
    gate = StepGate(threading.Event())
    async with drive(FakeEngine([words("Hello"), [gate, "done"]])) as d:
        await d.ask("Hi there")
        assert "first " in d.status_text()
        await d.type("a long text", "enter")
        await d.until(lambda: d.chat.streaming and d.chat.streaming.answer.progress)
        assert d.status_text() == f"{MODEL} · reading · context {d.session.engine.info.n_ctx:,}"
        gate.opened.set()
        await d.until(lambda: d.idle() and "first " in d.status_text())


async def test_question_may_be_sent_before_the_model_is_loaded(drive):
    gate = threading.Event()

    class Slow(FixedHost):
        def engine(self, model, options, progress=None):
            progress("loading weights", 0.5)
            assert gate.wait(60)
            return super().engine(model, options, progress)

    async with drive(host=Slow(FakeEngine()), ready=False) as d:
        await d.type("early", "enter")
        assert d.turns() == ["early"]
        await d.until(lambda: "loading weights 50%" in d.status_text())
        gate.set()
        await d.until(lambda: d.turns() == ["early", "Hello world"])


async def test_a_notice_that_quotes_markup_is_shown_as_it_is(drive):
    async with drive(FakeEngine([words("Hello")])) as d:
        await d.ask("look at @docs/[/b]x.txt")
        await d.until(
            lambda: "docs/[/b]x.txt" in str([toast.render() for toast in d.app.screen.query("Toast")])
        )


async def test_partial_answer_is_kept_on_leaving_and_continued_later(drive):
    engine, _ = gated_engine("half an ", "answer")
    async with drive(engine) as d:
        await d.type("q", "enter")
        await d.until(lambda: "half an answer" in d.screen_text())
        await d.press("ctrl+q")
    async with drive(FakeEngine([[" and the rest"]]), continue_last=True, ready=False) as d:
        await d.until(lambda: d.turns() == ["q", "half an answer"])
        assert d.session.head.status == "stopped"
        await d.ready()
        await d.press("ctrl+g")
        await d.until(lambda: d.turns() == ["q", "half an answer and the rest"] and d.idle())
        assert d.session.head.status == "complete"
        (request,) = d.host.fake.requests
        assert (request.continue_final, request.messages[-1].content) == (True, "half an answer")


async def test_regenerated_answers_are_paged_through(drive):
    async with drive(FakeEngine([["first"], ["second"]])) as d:
        await d.ask("q")
        await d.press("ctrl+r")
        await d.until(lambda: d.turns() == ["q", "second"] and d.idle())
        assert "‹ 2/2 ›" in d.screen_text()
        await d.press("alt+left")
        assert d.turns() == ["q", "first"]
        await d.press("alt+right")
        assert d.turns() == ["q", "second"]


async def test_earlier_question_is_chosen_edited_and_forks(drive):
    async with drive(FakeEngine([["a1"], ["a2"], ["b1"]])) as d:
        await d.ask("q1")
        await d.ask("q2")
        await d.press("ctrl+up")
        assert d.chat.status._hint.startswith("c copy"), "an answer cannot be edited"
        await d.press("ctrl+up", "ctrl+up", "ctrl+up")
        assert d.chat.transcript.selection.turn.content == "q1"
        assert d.chat.status._hint.startswith("e edit")
        await d.press("e")
        assert d.chat.composer.text == "q1"
        assert d.chat.composer.has_focus
        await d.type("q1 anew", "enter")
        await d.until(lambda: d.turns() == ["q1 anew", "b1"] and d.idle())
        await d.press("ctrl+up", "ctrl+up", "left")
        assert d.turns() == ["q1", "a1", "q2", "a2"]
        await d.press("escape")
        assert d.chat.composer.has_focus


async def test_escape_leaves_an_edit(drive):
    async with drive(FakeEngine()) as d:
        await d.ask("q1")
        await d.press("ctrl+up", "ctrl+up", "enter")
        assert d.chat.composer.editing == d.session.path[0].id
        await d.press("escape")
        assert (d.chat.composer.editing, d.chat.composer.text) == (None, "")


async def test_text_typed_before_an_edit_returns_after_it(drive):
    async with drive(FakeEngine()) as d:
        await d.ask("q1")
        await d.type("half a thou")
        await d.press("ctrl+up", "ctrl+up", "e")
        assert d.chat.composer.text == "q1"
        await d.until(lambda: d.session.conversation.draft == "half a thou")
        await d.press("escape")
        assert (d.chat.composer.editing, d.chat.composer.text) == (None, "half a thou")
        await d.press("ctrl+up", "ctrl+up", "e")
        await d.type("q1 anew", "enter")
        await d.until(lambda: d.idle() and d.turns()[0] == "q1 anew")
        assert (d.chat.composer.editing, d.chat.composer.text) == (None, "half a thou")
        await d.press("ctrl+up", "ctrl+up", "e")
        assert d.chat.composer.text == "q1 anew"
    async with drive(FakeEngine(), continue_last=True, ready=False) as d:
        await d.until(lambda: d.chat.composer.text == "half a thou")


async def test_keys_copy_answers_and_code(drive):
    async with drive(FakeEngine([["see\n```py\none\n```\n```\ntwo\n```"]])) as d:
        await d.ask("q")
        await d.press("ctrl+y")
        assert d.app.clipboard.startswith("see\n```py")
        await d.press("ctrl+b")
        assert d.app.clipboard == "two"
        await d.press("ctrl+up", "y")
        assert d.app.clipboard == "one"
        await d.press("y")
        assert d.app.clipboard == "two"
        await d.press("c")
        assert d.app.clipboard.startswith("see")


async def test_clicked_marks_copy_and_unfold(drive):
    script = [[ReasoningDelta("hm, hm"), "text\n\n```py\ncode\n```"]]
    async with drive(FakeEngine(script)) as d:
        await d.ask("q")
        await d.click("copy 1")
        assert d.app.clipboard == "code"
        await d.click("Thought")
        assert "│ hm, hm" in d.screen_text()


async def test_reasoning_is_folded_while_it_streams_and_unfolds(drive):
    engine, gate = gated_engine(ReasoningDelta("let me think"), after=("answer",))
    async with drive(engine) as d:
        await d.type("q", "enter")
        await d.until(lambda: "Thinking · 3 words" in d.screen_text())
        await d.press("ctrl+t")
        assert "│ let me think" in d.screen_text()
        gate.opened.set()
        await d.until(d.idle)
        assert "Thought · 3 words" in d.screen_text()


async def test_transcript_follows_its_end_only_when_already_there(drive):
    lines = "".join(f"line {n}\n\n" for n in range(60))
    engine, gate = gated_engine(lines, after=(lines,))
    async with drive(engine) as d:
        await d.type("q", "enter")
        transcript = d.chat.transcript
        await d.until(
            lambda: transcript.max_scroll_y > 60 and transcript.scroll_y == transcript.max_scroll_y
        )
        await d.press("pageup")
        scroll_y = transcript.scroll_y
        gate.opened.set()
        await d.until(d.idle)
        assert transcript.max_scroll_y > 180
        assert transcript.scroll_y == scroll_y
        await d.press("ctrl+end")
        assert transcript.scroll_y == transcript.max_scroll_y
        assert transcript.following


def typed_by(keys):
    """Return the sent texts and the rest of the text, as an editor without any queue has them."""
    sent = []
    before = after = ""  # the text up to the cursor, and after it
    for key in keys:
        if key == "enter" and (before + after).strip():
            sent.append(before + after)
            before = after = ""
        elif key == "ctrl+j":
            before += "\n"
        elif key == "backspace":
            before = before[:-1]
        elif key == "left":
            before, after = before[:-1], before[-1:] + after
        elif key == "right":
            before, after = before + after[:1], after[1:]
        elif len(key) == 1:
            before += key
    return sent, before + after


@pytest.mark.parametrize("seed", range(6))
async def test_keys_that_arrive_together_take_effect_in_their_order(drive, seed):
    choose = random.Random(seed).choice
    keys = [
        choose([*"abcdef", "enter", "backspace", "left", "left", "right", "ctrl+j"]) for _ in range(60)
    ]
    sent, unsent = typed_by(keys)
    async with drive(FakeEngine()) as d:
        await d.burst(*keys)
        await d.until(lambda: d.idle() and not d.chat.composer.has_queue)
        assert [t.content for t in d.session.path if t.role == "user"] == sent
        assert d.chat.composer.text == unsent


async def test_keys_that_arrive_together_reach_commands_lists_and_dialogs(drive):
    async with drive(FakeEngine()) as d:
        await d.burst(*"Say yes", "enter", *"/temp 1", "enter", *"/tem", "tab", "2", "enter")
        await d.until(lambda: d.idle() and d.turns() == ["Say yes", "Hello world"])
        assert d.session.conversation.sampling == {"temperature": 2.0}
        await d.burst("ctrl+n", "f3", *"yes", "enter", *"abc", "left", "X")
        assert (d.turns()[:1], d.chat.composer.text) == (["Say yes"], "abXc")


async def test_composer_has_lines_and_history(drive):
    async with drive(FakeEngine()) as d:
        await d.press("a", "ctrl+j", "b", "enter")
        await d.until(lambda: d.turns()[:1] == ["a\nb"] and d.idle())
        await d.ask("second")
        await d.press("up")
        assert d.chat.composer.text == "second"
        assert d.chat.composer.before_cursor == "second", "typed text is appended"
        await d.press("up", "up")
        assert d.chat.composer.text == "a\nb"
        await d.press("down", "down", "down")
        assert d.chat.composer.text in ("second", "")


async def test_recalled_command_offers_no_completions_which_would_take_up(drive):
    async with drive(FakeEngine()) as d:
        await d.ask("q")
        for line in ("/temp 1", "/temp 0.5", "/set"):
            await d.type(line, "escape", "enter")
        await d.press("up")
        assert (d.chat.composer.text, d.chat.composer.completing) == ("/set", False)
        await d.press("up", "up", "up")
        assert d.chat.composer.text == "q"


async def test_paste_keeps_its_lines(drive):
    async with drive() as d:
        d.app.post_message(events.Paste("one\ntwo\n  three"))
        await d.until(lambda: d.chat.composer.text == "one\ntwo\n  three")
        assert d.session.path == []


async def test_picture_that_is_dropped_is_attached(drive, tmp_path):
    (tmp_path / "cat.gif").write_bytes(b"GIF89a")
    async with drive() as d:
        d.app.post_message(events.Paste(f"'{tmp_path}/cat.gif'"))
        await d.until(lambda: d.chat.composer.text == f'@"{tmp_path}/cat.gif" ')
        line = d.chat.query_one("#attachments")
        await d.until(lambda: "+ cat.gif · picture" in str(line.render()))


async def test_commands_are_completed(drive):
    async with drive() as d:
        await d.press("slash", "t", "e")
        assert d.chat.completions.choice.label == "/temp [NUMBER]"
        await d.press("tab")
        assert d.chat.composer.text == "/temp "
        await d.press("0", "enter")
        assert d.session.conversation.sampling == {"temperature": 0.0}
        assert "temperature 0" in d.screen_text()
        await d.press("ctrl+n")
        assert "Still set: temperature 0 (`/preset model` resets)" in d.screen_text()


async def test_pulled_models_are_completed_before_the_catalogues(drive, tmp_path):
    (tmp_path / "x.gguf").write_bytes(gguf_bytes(seed=1))
    pull(str(tmp_path / "x.gguf"), options=PullOptions(name="smollm-mine", in_place=True))
    async with drive() as d:
        await d.type("/model smo")
        first, second, *_ = d.chat.completions.offered
        assert (first.label, first.summary, second.label) == ("smollm-mine", "pulled", MODEL)


async def test_arrows_choose_a_completion_and_escape_closes_them(drive):
    async with drive() as d:
        await d.press("slash", "s", "a")
        first = d.chat.completions.choice
        await d.press("down")
        assert d.chat.completions.choice != first
        await d.press("escape")
        assert not d.chat.completions.display
        assert d.chat.composer.text == "/sa"


async def test_attached_files_are_shown_with_their_tokens(drive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("12345")
    engine = FakeEngine()
    async with drive(engine, attachments=[Attachment(name="stdin", text="piped")]) as d:
        line = d.chat.query_one("#attachments")
        await d.until(lambda: "stdin · 5 tokens" in str(line.render()))
        await d.press("@", "n")
        assert [c.label for c in d.chat.completions.offered] == ["notes.txt"]
        await d.press("tab", "enter")
        await d.until(lambda: d.idle() and len(d.turns()) == 2)
        sent = engine.requests[0].messages[0].content
        assert sent.startswith("File `stdin`:\n```\npiped\n```\n\nFile `notes.txt`:\n```\n12345\n```")
        assert "+ notes.txt · 5 tokens" in d.screen_text()
        assert not line.display


async def test_binary_file_is_refused_and_the_input_stays(drive, tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\0\1")
    async with drive() as d:
        await d.type(f"look @{tmp_path}/x.bin", "enter")
        assert "x.bin is a binary file" in d.screen_text()
        assert d.chat.composer.text.startswith("look @")
        assert d.turns() == []


async def test_engine_error_is_shown_with_its_hint_and_the_input_restored(drive):
    async with drive(FakeEngine([[DecodeError("llama_decode failed")], ["fine"]])) as d:
        await d.type("my question", "enter")
        await d.until(lambda: d.chat.composer.text == "my question")
        assert "llama_decode failed" in d.screen_text()
        assert "if it fails again, report it" in d.screen_text()
        await d.press("enter")
        await d.until(lambda: d.idle() and d.turns() == ["my question", "fine"])


async def test_failed_load_is_reported_and_the_question_kept(drive):
    host = FixedHost(errors=[OutOfMemoryError("needs 8 GB"), OutOfMemoryError("needs 9 GB")])
    async with drive(host=host, ready=False) as d:
        await d.until(lambda: "needs 8 GB" in d.screen_text())
        await d.type("q", "enter")
        await d.until(lambda: "needs 9 GB" in d.screen_text())
        assert "--ctx 2048" in d.screen_text()
        assert d.chat.composer.text == "q"
        await d.press("enter")
        await d.until(lambda: d.idle() and d.turns() == ["q", "Hello world"])


@pytest.fixture
def first_run(monkeypatch):
    """No model is pulled, two are offered, and `pull` fails for the names in the returned set."""
    unreachable = set()

    def pull(name, report=None, cancel=None):
        if name in unreachable:
            raise DownloadError("no route to host")
        return next(row for row in EMPTY_SHELF if row.name == name)

    monkeypatch.setattr("edgeinfer.models.pull.pull", pull)
    monkeypatch.setattr("edgeinfer.tui.screens.model_picker.list_choices", lambda warm=(): EMPTY_SHELF)
    monkeypatch.setattr("edgeinfer.chat.model_choices.first_run_choices", lambda: OFFERED)
    return unreachable


@pytest.mark.parametrize(("reached", "model"), [(True, "qwen3-0.6b"), (False, MODEL)])
async def test_first_run_offers_models_and_saves_the_choice(drive, first_run, reached, model):
    if not reached:
        first_run.add("qwen3-0.6b")
    host = FixedHost(errors=[ModelNotPulledError(f"{MODEL} is not on this machine yet")])
    async with drive(host=host, ready=False) as d:
        screen = await d.until(lambda: isinstance(d.app.screen, ModelScreen) and d.app.screen)
        await d.until(lambda: [row.name for row in screen.rows] == ["qwen3-0.6b", MODEL])
        await d.until(lambda: "faster than you can read" in str(screen.query_one(".detail").render()))
        await d.press("enter")
        await d.until(lambda: d.app.screen is d.chat and d.session.conversation.model == model)
        assert load_config().default_model == model


async def picker_of(d):
    return await d.until(lambda: isinstance(d.app.screen, ModelScreen) and d.app.screen.rows)


async def close_picker(d):
    await picker_of(d)
    await d.press("escape")


@pytest.mark.parametrize("way", ["before", "at once", "after", "later"])
async def test_first_question_is_answered_once_a_model_is_picked(drive, first_run, way):
    missing = [ModelNotPulledError(f"{MODEL} is not on this machine yet") for _ in range(2)]
    host, gate = FixedHost(errors=missing[: 1 if way == "before" else 2]), threading.Event()
    load = host.engine
    host.engine = lambda *arguments: gate.wait(60) and load(*arguments)
    async with drive(host=host, ready=False) as d:
        if way == "before":
            await d.type("Why is the sky blue?", "enter")
        gate.set()
        await picker_of(d)
        if way == "at once":  # Enter was pressed before the picker was open
            d.chat.composer.post_message(Composer.Sent("Why is the sky blue?", None))
            await d.until(lambda: len(host.opened) == 2 and not d.chat.loader.progress)
        elif way != "before":
            await d.press("escape")
            await d.type("Why is the sky blue?", "enter")
            await picker_of(d)
        if way == "later":
            await d.press("escape")
            await d.until(lambda: "answered once a model is pulled" in d.screen_text())
            d.chat.run_command("/model")
            await picker_of(d)
        await d.press("enter")
        await d.until(lambda: d.idle() and d.turns() == ["Why is the sky blue?", "Hello world"])
        assert d.app.screen is d.chat
        assert not d.chat.loader.progress


async def test_every_question_without_a_model_is_told_what_it_waits_for(drive, first_run):
    host = FixedHost(errors=[ModelNotPulledError("is not here") for _ in range(3)])
    async with drive(host=host, ready=False) as d:
        await close_picker(d)
        for question in ("first", "second"):
            await d.type(question, "enter")
            await close_picker(d)
            await d.until(lambda: "answered once a model is pulled" in d.screen_text())
            assert d.turns() == [question]


async def test_waiting_question_of_another_conversation_is_not_answered(drive, first_run):
    host = FixedHost(errors=[ModelNotPulledError("is not here"), ModelNotPulledError("is not here")])
    async with drive(host=host, ready=False) as d:
        await close_picker(d)
        await d.type("first", "enter")
        await close_picker(d)
        d.chat.run_command("/new")
        d.chat.run_command("/model")
        await picker_of(d)
        await d.press("enter")
        await d.ready()
        await d.ask("second")
        assert len(d.host.fake.requests) == 1


async def test_first_screen_marks_no_model_before_its_list_is_here(drive, monkeypatch):
    listed = threading.Event()
    list_choices = "edgeinfer.tui.screens.model_picker.list_choices"
    monkeypatch.setattr(list_choices, lambda warm=(): listed.wait(60) and SHELF)
    host = FixedHost(errors=[ModelNotPulledError(f"{MODEL} is not on this machine yet")])
    async with drive(host=host, ready=False) as d:
        screen = await d.until(lambda: isinstance(d.app.screen, ModelScreen) and d.app.screen)
        text = screen.query_one(".first", Static)
        assert str(text.render()) == "Looking for models…"
        await d.press("enter")
        listed.set()
        await d.until(lambda: screen.rows)
        assert d.app.screen is screen
        assert f"{MODEL} is not here." in str(text.render())
        assert screen.query_one(".sheet").border_title == "This model is not here yet"


async def test_first_screen_offers_models_of_other_programs(drive):
    store = OllamaStore(gguf_bytes())
    host = FixedHost(errors=[ModelNotPulledError(f"{MODEL} is not on this machine yet")])
    async with drive(host=host, ready=False) as d:
        screen = await d.until(lambda: isinstance(d.app.screen, ModelScreen) and d.app.screen)
        await d.until(lambda: screen.selection and screen.selection.name == store.name)
        assert "is here from Ollama" in str(screen.query_one(".first", Static).render())
        await d.press("enter")
        await d.until(lambda: d.app.screen is d.chat and d.session.conversation.model == store.name)


@pytest.mark.parametrize(
    ("keys", "shown", "systems"),
    [
        (["enter"], "no longer sent above", []),
        (["down", "enter"], "summarised above", ["Summary of the conversation so far:\nthey talked"]),
    ],
)
async def test_full_context_offers_to_drop_or_summarise(drive, keys, shown, systems):
    engine = SmallEngine(
        lambda r: ["they talked"] if "Summarise" in r.messages[0].content else ["x" * 400], longest=1500
    )
    async with drive(engine) as d:
        await d.ask("y" * 400)
        await d.ask("z" * 250)
        await d.type("w" * 200, "enter")
        await d.until(lambda: isinstance(d.app.screen, ChoiceScreen))
        await d.press(*keys)
        await d.until(lambda: d.idle() and d.session.head.content == "x" * 400 and len(d.turns()) == 6)
        assert shown in d.screen_text()
        assert [m.content for m in engine.requests[-1].messages if m.role == "system"] == systems


async def test_a_stopped_summary_drops_no_turn(drive):
    gate = StepGate()
    engine = FakeEngine(lambda r: ["they", gate] if r.messages[0].role == "system" else ["x"])
    async with drive(engine) as d:
        await d.ask("y")
        await d.ask("z")
        d.chat.run_command("/summarise")
        await d.until(gate.reached.is_set)
        await d.press("escape")
        await d.until(lambda: d.chat.view.summarising is None)
        assert [turn.cut_summary for turn in d.session.path] == [None] * 4


async def test_switching_the_model_keeps_the_conversation(drive):
    async with drive(FakeEngine([["one"], ["two"]])) as d:
        await d.ask("q")
        await d.type("/model other", "enter")
        await d.until(lambda: d.session.conversation.model == "other")
        await d.ask("q2")
        assert d.turns() == ["q", "one", "q2", "two"]
        assert [name for name, _ in d.host.opened] == [MODEL, "other"]
        assert d.session.path[-1].model == "other"


async def test_start_and_figures_of_one_model_are_not_shown_for_the_next(drive):
    gate = threading.Event()

    class Workers(FixedHost):
        def worker(self, model, options, progress=None):
            assert gate.wait(60)
            return FakeEngine([["two"]])

    async with drive(host=Workers(FakeEngine([["one"], ["three"]]))) as d:
        assert "resumed in 84 ms" in d.status_text()
        await d.ask("q")
        assert re.search(r"tok/s · first \d+ ms", d.status_text())
        d.chat.run_command("/model other")
        await d.until(lambda: d.status_text().startswith("other · loading"))
        assert not re.search(r"tok/s|first \d+ ms", d.status_text())
        gate.set()
        await d.ready()
        assert re.fullmatch(r"other · loaded in [^·]+ · context 4,096", d.status_text())
        d.chat.front.show_stats()
        assert "tokens/s" not in d.chat.transcript.entries[-1].text
        await d.ask("q2")
        assert "tok/s" in d.status_text()
        d.chat.run_command(f"/model {MODEL}")
        await d.ready()
        assert d.status_text() == f"{MODEL} · stayed loaded · context 4,096"


async def test_load_shows_the_warnings_of_the_model(drive):
    info = replace(DEFAULT_INFO, warnings=("context of 9 tokens: [x] was trained on 8",))
    async with drive(FakeEngine(info=info)) as d:
        await d.until(
            lambda: "[x] was trained on 8" in str([t.render() for t in d.app.screen.query("Toast")])
        )


def model_names(d):
    """Return each name that the chat gives the answering model, once."""
    conversation = d.session.conversation
    d.chat.front.show_stats()
    stats = d.chat.transcript.entries[-1].text.splitlines()[0].split()[-1]
    exported = formats.to_markdown(conversation, d.session.path)
    stored = d.session.store.conversation(conversation.id).model
    shown = d.status_text().split(" ")[0]
    return {shown, stats, stored, d.session.path[-1].model, exported.split("*")[1].split(",")[0]}


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("opened", ["by number", "in the list", "by undo"])
async def test_an_opened_conversation_names_the_model_that_answers(drive, opened, is_here):
    async with drive(FakeEngine([["one"], ["two"], ["three"]])) as d:
        await d.ask("q")
        number = d.session.conversation.id
        d.session.set(model="other")
        d.host.errors += [] if is_here else [ModelNotPulledError("other is not here")]
        d.chat.run_command("/delete" if opened == "by undo" else "/new")
        assert d.session.conversation.model == MODEL
        if opened == "in the list":
            await d.press("f3", "enter")
        else:
            d.chat.run_command("/undo" if opened == "by undo" else f"/open {number}")
        await d.type("q2", "enter")
        await d.until(lambda: d.idle() and d.turns() == ["q", "one", "q2", "two"])
        answering = "other" if is_here else MODEL
        assert [name for name, _ in d.host.opened] == [MODEL, "other"]
        assert model_names(d) == {answering}
        d.chat.run_command("/new")
        await d.ask("q3")
        assert model_names(d) == {answering}


async def test_model_that_cannot_be_loaded_for_a_conversation_is_named(drive):
    async with drive() as d:
        await d.ask("q")
        d.session.set(model="other")
        d.host.errors.append(ModelNotPulledError("other is not here"))
        d.chat.run_command(f"/open {d.session.conversation.id}")
        await d.until(lambda: f"other is not here. {MODEL} answers in this" in d.screen_text())
        assert d.session.store.conversation(d.session.conversation.id).model == "other"


@pytest.mark.parametrize("last", [MODEL, "other"])
async def test_conversation_opened_while_another_model_loads_gets_its_own(drive, last):
    gate = threading.Event()

    class Slow(FixedHost):
        def worker(self, model, options, progress=None):
            assert gate.wait(60)
            return super().engine(model, options, progress)

    async with drive(host=Slow(FakeEngine([["one"], ["two"]]))) as d:
        await d.ask("q")
        d.session.store.update(d.session.conversation.id, model=last)
        d.chat.run_command("/model third")
        d.chat.run_command(f"/open {d.session.conversation.id}")
        assert d.status_text().startswith(last)
        await d.type("q2", "enter")
        assert len(d.host.fake.requests) == 1
        gate.set()
        await d.until(lambda: d.idle() and d.turns() == ["q", "one", "q2", "two"])
        assert model_names(d) == {last}


async def test_ctrl_c_copies_stops_or_asks_and_leaves(drive):
    engine, gate = gated_engine("words")
    async with drive(engine) as d:
        d.chat.composer.fill("mark me")
        d.chat.composer.select_all()
        await d.press("ctrl+c")
        assert d.app.clipboard == "mark me"
        await d.type("q", "enter")
        await d.until(gate.reached.is_set)
        await d.press("ctrl+c")
        await d.until(d.idle)
        assert d.session.head.status == "stopped"
        await d.press("ctrl+c")
        assert d.app.is_running
        await d.press("ctrl+c")
        await d.until(lambda: d.app._exit)


async def test_marked_text_of_the_conversation_is_copied(drive):
    async with drive(FakeEngine([["the answer"]])) as d:
        await d.ask("the question")
        d.chat.selections = {d.chat.transcript: SELECT_ALL}
        await d.press("ctrl+c")
        assert "❯ the question" in d.app.clipboard
        assert "the answer" in d.app.clipboard


async def test_draft_survives(drive):
    async with drive(FakeEngine()) as d:
        await d.ask("q")
        await d.type("half a thou")
        await d.until(lambda: d.session.conversation.draft == "half a thou")
    async with drive(FakeEngine(), continue_last=True, ready=False) as d:
        await d.until(lambda: d.chat.composer.text == "half a thou")


@pytest.mark.parametrize("command", ["/new", "/file x"])
async def test_a_command_is_no_draft(drive, command):
    async with drive(FakeEngine()) as d:
        await d.ask("q")
        number = d.session.conversation.id
        await d.type("half a thou")
        await d.until(lambda: d.session.conversation.draft == "half a thou")
        await d.type(command)
        await d.until(lambda: d.session.conversation.draft != "half a thou")
        assert d.session.store.conversation(number).draft == ""
        await d.type("half a thou")
        await d.until(lambda: d.session.conversation.draft == "half a thou")
        await d.burst("ctrl+u", *"/new", "enter")
        assert d.session.store.conversation(number).draft == ""


async def test_a_conversation_opened_by_number_shows_its_draft(drive):
    async with drive(FakeEngine()) as d:
        await d.ask("q")
        number = await d.leave_draft("half a thou")
        d.chat.run_command(f"/open {number}")
        assert d.chat.composer.text == "half a thou"


async def test_ctx_during_a_load_applies_to_the_model_that_is_loading(drive):
    gate = threading.Event()
    async with drive(FakeEngine()) as d:
        load = d.host.engine
        d.host.engine = lambda *arguments: gate.wait(60) and load(*arguments)
        d.chat.run_command("/model qwen3-0.6b")
        d.chat.run_command("/ctx 1024")
        gate.set()
        await d.until(lambda: len(d.host.opened) == 3 and not d.chat.loader.progress)
        assert d.host.opened[1:] == [("qwen3-0.6b", 0), ("qwen3-0.6b", 1024)]
        assert d.session.conversation.model == "qwen3-0.6b"


async def test_keys_are_rebound_by_their_ids(drive):
    async with drive(
        FakeEngine([["a"], ["b"]]), config=ChatConfig(keys={"regenerate": "ctrl+x", "nonsense": "a"})
    ) as d:
        await d.ask("q")
        await d.press("ctrl+x")
        await d.until(lambda: d.turns() == ["q", "b"])


async def test_resize_wraps_anew_and_keeps_the_end(drive):
    async with drive(FakeEngine([["word " * 300]])) as d:
        await d.ask("q")
        for size in ((40, 12), (120, 40), (80, 24)):
            await d.pilot.resize_terminal(*size)
            transcript = d.chat.transcript
            await d.until(
                lambda t=transcript, s=size: t.size.width <= s[0] and t.scroll_y == t.max_scroll_y
            )
            assert all(len(line) <= size[0] for line in d.screen_text().splitlines())


async def test_crash_is_recorded_and_everything_is_stored(tmp_path):
    app = make_app(tmp_path, FixedHost(FakeEngine([["kept"]])))

    def fail_to_load():
        raise ZeroDivisionError("boom")

    async def talk_then_break():
        async with app.run_test() as pilot:
            await wait_until(pilot, lambda: app.chat.session.engine is not None)
            app.chat.send("q", None)
            await wait_until(pilot, lambda: app.chat.streaming is None)
            app.call_later(fail_to_load)
            await wait_until(pilot, lambda: app.crash is not None)

    with pytest.raises(ZeroDivisionError):
        await talk_then_break()
    assert isinstance(app.crash, ZeroDivisionError)
    store = ConversationStore.open(tmp_path / "conversations.db")
    assert [t.content for t in store.turns(1).values()] == ["q", "kept"]
    store.close()


async def test_leaving_does_not_wait_for_a_load(drive):
    gate, loaded = threading.Event(), threading.Event()

    class Stuck(FixedHost):
        def engine(self, model, options, progress=None):
            gate.wait(60)
            loaded.set()
            return super().engine(model, options, progress)

    async with drive(host=Stuck(), ready=False) as d:
        await d.until(lambda: d.chat.loader.progress)
        await d.press("ctrl+q")
    assert not loaded.is_set()
    gate.set()


async def test_typing_after_a_click_goes_to_the_composer(drive):
    async with drive(FakeEngine()) as d:
        await d.ask("q")
        await d.pilot.click("#transcript", offset=(20, 5))
        await d.press("h", "i")
        assert d.chat.composer.text == "hi"
        d.chat.transcript.focus()
        await d.press("!")
        assert d.chat.composer.text == "hi!"
        assert d.chat.composer.has_focus


async def test_editor_that_cannot_be_run_is_reported_and_the_text_stays(drive):
    async with drive() as d:
        await d.type("half a thought", "ctrl+o")
        await d.until(lambda: "this terminal cannot run" in d.screen_text())
        assert d.chat.composer.text == "half a thought"


@pytest.mark.parametrize(
    ("editor", "said"),
    [
        ("/nosuch", "/nosuch cannot be started: No such file or directory"),
        ("/dev/null", "/dev/null cannot be started: Permission denied"),
        ("false", "false exited with 1"),
        ("rm", "rm saved no UTF-8 text"),
    ],
)
async def test_the_app_resumes_after_an_editor_fails(drive, monkeypatch, editor, said):
    resumed = []

    @contextlib.contextmanager
    def suspend(self):
        yield
        resumed.append(self)  # not in `finally`: Textual does not resume after an exception either

    monkeypatch.setattr(ChatApp, "suspend", suspend)
    monkeypatch.setenv("VISUAL", editor)
    async with drive() as d:
        await d.type("half a thought", "ctrl+o")
        await d.until(lambda: said in d.screen_text())
        assert d.chat.composer.text == "half a thought"
    assert resumed


async def test_typed_text_is_prefilled_before_enter(drive):
    engine = FakeEngine([["blue light scatters"]])
    async with drive(engine) as d:
        await d.type("Why is the sky bl")
        await d.until(lambda: engine.read)
        assert engine.read[0].messages[-1].content == "Why is the sky"
        await d.type("Why is the sky blue?", "enter")
        await d.until(lambda: d.turns() == ["Why is the sky blue?", "blue light scatters"])


async def test_read_ahead_that_is_switched_off_prefills_nothing(drive):
    async with drive(config=ChatConfig(read_ahead=False)) as d:
        await d.type("One two three ")
        d.chat._tick()
        d.chat._tick()
        assert d.host.fake.read == []


async def test_typed_joiners_are_kept(drive):
    async with drive() as d:
        for character in "می\u200cخواهم👨\u200d👩":
            d.chat.composer.post_message(events.Key(f"key_{ord(character):x}", character))
        await d.until(lambda: d.chat.composer.text == "می\u200cخواهم👨\u200d👩")


async def queue_second(d):
    """Ask "first", and queue "second" while it is answered."""
    await d.type("first", "enter")
    await d.until(lambda: d.chat.streaming is not None and d.chat.streaming.answer.text)
    await d.type("second", "enter")


async def test_message_is_queued_while_an_answer_is_written(drive):
    engine, gate = gated_engine("so far ")
    async with drive(engine) as d:
        await queue_second(d)
        assert d.chat.composer.text == ""
        assert "queued: second" in str(d.chat.query_one("#queued", Static).render())
        gate.opened.set()
        await d.until(lambda: d.idle() and len(d.turns()) == 4)
        assert d.turns()[2] == "second"
        assert not d.chat.query_one("#queued").display


@pytest.mark.parametrize("key", ["escape", "up"])
async def test_queued_message_is_taken_back(drive, key):
    engine, gate = gated_engine("so far ")
    async with drive(engine) as d:
        await queue_second(d)
        await d.press(key)
        assert d.chat.composer.text == "second"
        assert d.session.busy
        gate.opened.set()
        await d.until(lambda: d.idle() and len(d.turns()) == 2)


async def test_queued_message_comes_back_after_a_failure(drive):
    engine, gate = gated_engine("so far ", after=(DecodeError("it broke"),))
    async with drive(engine) as d:
        await queue_second(d)
        gate.opened.set()
        await d.until(lambda: d.idle() and d.chat.composer.text == "second")
        assert len(d.turns()) == 2


@pytest.fixture
def page(tmp_path):
    """`page(d, engine)`: a session in which another program has opened the same conversation."""
    with contextlib.ExitStack() as stores:

        def open_two(d, engine=None):
            store = ConversationStore.open(tmp_path / "conversations.db")
            session = ChatSession(lambda: store, engine=engine or FakeEngine())
            stores.callback(store.close)
            session.open(d.session.conversation.id)
            return session

        yield open_two


async def test_answer_of_another_program_is_followed_while_it_streams(drive, page):
    engine, gate = gated_engine("**One** ", ReasoningDelta("hm"))
    async with drive(FakeEngine([["Ready."], ["Mine."]])) as d:
        await d.ask("hello")
        d.chat.run_command("/stats")
        other = page(d, engine)
        other.ask("count")
        await d.until(lambda: "count" in d.screen_text())
        assert d.chat.streaming is None
        answer = other.begin_answer()
        events = iter(answer.generation)
        while "hm" not in answer.reasoning:
            answer.add(next(events))
            answer.flush()
        await d.until(lambda: "One" in d.screen_text())
        await d.until(lambda: "Thought" in d.screen_text())
        assert "another program is writing" in d.status_text()
        d.chat.run_command("/regen")
        assert "being written elsewhere" in d.screen_text()
        await d.type("and then?", "enter")
        assert "queued: and then?" in str(d.chat.query_one("#queued", Static).render())
        await d.press("up", "escape")
        assert "stop it there" in d.screen_text()
        await d.press("enter")
        gate.opened.set()
        for event in events:
            answer.add(event)
            answer.flush()
        await d.until(lambda: d.idle() and len(d.turns()) == 6)
        assert d.turns()[2:] == ["count", "**One** done", "and then?", "Mine."]
        messages = d.host.fake.requests[-1].messages
        assert [m.content for m in messages[-3:]] == ["count", "**One** done", "and then?"]


async def test_changes_of_another_program_are_shown_and_the_place_kept(drive, page):
    async with drive(FakeEngine([["one\n\n" * 60], ["Yes."]])) as d:
        await d.ask("long")
        d.chat.run_command("/stats")
        await d.press("pageup")
        scroll_y = d.chat.transcript.scroll_y
        await d.until(lambda: d.session._seen)
        assert "tokens/s" in d.screen_text()  # this program's own answer does not count as a change
        other = page(d)
        other.set(title="Another title")
        await d.until(lambda: d.session.conversation.title == "Another title")
        assert abs(d.chat.transcript.scroll_y - scroll_y) < 3
        other.store.delete(other.conversation.id)
        await d.until(lambda: "deleted the conversation" in d.screen_text())
        await d.ask("anew")
        assert d.turns() == ["anew", "Yes."]


async def test_long_paste_is_attached_with_its_tokens(drive):
    async with drive() as d:
        d.app.post_message(events.Paste("a line\n" * 60))
        line = d.chat.query_one("#attachments", Static)
        await d.until(lambda: "pasted text 1" in str(line.render()))
        assert "tokens" in str(line.render())
        assert d.chat.composer.text == ""
        await d.press("backspace")
        assert not line.display


@pytest.mark.parametrize(
    ("steps", "done"),
    [
        (0, lambda d: 0 < d.chat.attachments.unnamed[-1].tokens <= 1024),
        (1, lambda d: d.host.opened[-1] == (MODEL, 8192)),
        (2, lambda d: not d.chat.attachments.unnamed),
    ],
)
async def test_paste_that_does_not_fit_offers_ways_out_at_once(drive, steps, done):
    info = replace(DEFAULT_INFO, n_ctx=2048, n_ctx_train=32768)
    async with drive(FakeEngine(info=info)) as d:
        d.app.post_message(events.Paste("a line\n" * 900))
        await d.until(lambda: isinstance(d.app.screen, ChoiceScreen))
        assert "of 2,048 tokens" in str(d.chat.query_one("#attachments", Static).render())
        await d.press(*["down"] * steps, "enter")
        await d.until(lambda: done(d))


async def test_one_question_that_is_too_long_can_be_edited(drive):
    async with drive(SmallEngine(longest=1500)) as d:
        await d.type("w" * 1600, "enter")
        await d.until(lambda: isinstance(d.app.screen, ChoiceScreen))
        await d.press("end", "enter")
        await d.until(lambda: d.app.screen is d.chat)
        assert d.chat.composer.text == "w" * 1600
        assert d.chat.composer.editing is not None


async def test_start_has_one_time_and_stats_name_options_as_typed(drive):
    choices = {"n_ctx": Chosen(2048, "as asked")}
    info = replace(DEFAULT_INFO, choices=choices, load_ms=5069.0)
    async with drive(FakeEngine(info=info)) as d:
        assert "resumed" not in d.screen_text()
        d.chat.run_command("/stats")
        assert d.screen_text().count("84 ms") == 1
        assert "5,069" not in d.screen_text()
        assert "--ctx" in d.screen_text()


async def test_narrow_status_line_keeps_context_and_rate(drive):
    engine = FakeEngine([words("Hello you")], info=DEFAULT_INFO)
    async with drive(engine, size=(40, 12)) as d:
        await d.ask("hi")
        line = str(d.chat.status.render())
        assert "context 408/4,096" in line
        assert "42.0 tok/s" in line


def tools_host(*scripts, city="Rome"):
    """A host whose model calls `weather`, then answers by `scripts`."""
    engine = FakeEngine([calling(plain__weather={"city": city}), *scripts])
    return FixedHost(engine, config=Config(tools=tools_config("plain")))


async def card_of(d):
    """Ask a question, and wait for the card of the tool call."""
    await d.until(lambda: d.session.tools is not None)
    await d.type("Rome?", "enter")
    await d.until(lambda: "plain · weather wants to run" in d.screen_text())


async def test_call_waits_for_a_decision_and_its_result_is_answered(drive):
    async with drive(host=tools_host(words("Take an umbrella.")), with_tools=True) as d:
        await card_of(d)
        assert "city: Rome" in d.screen_text()
        assert d.session.busy
        await d.type("y", "enter")
        await d.until(lambda: d.idle() and len(d.session.path) == 3)
        assert "✓ plain · weather" in d.screen_text()
        assert "It rains" not in d.screen_text()
        assert "Take an umbrella." in d.screen_text()
        entry = d.chat.transcript.entries[1]
        d.chat.transcript.toggle_fold(entry)
        assert "It rains in Rome." in d.screen_text()


async def test_a_long_call_takes_a_yes_on_its_last_page(drive):
    host = tools_host(words("Sun."), city="Rome\n" * 99 + "\x1b]END")
    async with drive(host=host, with_tools=True) as d:
        await card_of(d)
        for page in (1, 2):
            await d.until(lambda page=page: f"page {page} of 3" in d.screen_text())
            assert "y once" not in d.screen_text()
            await d.type("y", "enter")
        await d.until(lambda: "y once" in d.screen_text())
        assert r"| \x1b]END" in d.screen_text()
        assert len(host.fake.requests) == 1
        await d.type("y", "enter")
        await d.until(lambda: d.idle() and len(d.session.path) == 3)


@pytest.mark.slow  # the SDK's server
async def test_a_no_and_its_reason_go_to_the_model(drive):
    async with drive(host=tools_host(words("As you like.")), with_tools=True) as d:
        await card_of(d)
        await d.type("n ask me instead", "enter")
        await d.until(lambda: d.idle() and len(d.session.path) == 3)
        assert "✗ plain · weather" in d.screen_text()
        assert "the user said no: ask me instead" in d.host.fake.requests[1].messages[2].content


async def test_escape_stops_calls_and_the_chat_goes_on(drive):
    async with drive(host=tools_host(words("Hello.")), with_tools=True) as d:
        await card_of(d)
        assert "__" not in d.status_text()
        await d.press("escape")
        await d.until(d.idle)
        await d.until(lambda: "Esc stops" not in d.chat.status._hint)
        await d.until(lambda: "◌ plain · weather" in d.screen_text())
        assert "calling" not in str(d.chat.status.render())
        assert "weather" not in str(d.chat.status.render())
        assert len(d.host.fake.requests) == 1
        await d.ask("Hello?")
        assert "Hello." in d.screen_text()


async def test_leaving_while_a_card_is_open_ends(drive):
    async with drive(host=tools_host(words("Hello.")), with_tools=True) as d:
        await card_of(d)
