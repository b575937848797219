"""The plain chat on two text streams: the same commands, and no escape sequences."""

import contextlib
import functools
import io
import os
import pty
import re
import signal
import sys
import threading

import pytest
from chats_here import consume
from fake_engine import DEFAULT_INFO, Delay, FakeEngine, SmallEngine, StepGate
from fixed_chat import EMPTY_SHELF, MODEL, OFFERED, FixedHost, end, make_setup, words
from found_stores import OllamaStore
from made_gguf import gguf_bytes
from msgspec.structs import replace
from tools_here import calling, tools_config

from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.history.values import Attachment
from edgeinfer.chat.repl import Repl
from edgeinfer.chat.session import ChatSession
from edgeinfer.config.config_file import Config, load_config
from edgeinfer.errors import DecodeError, ModelNotPulledError, OutOfMemoryError
from edgeinfer.models.progress import PullProgress
from edgeinfer.runtime.events import ReasoningDelta


class Tty(io.StringIO):
    def isatty(self):
        return True


def talk(tmp_path, *lines, engine=None, host=None, kind=Tty, **fields):
    out = kind()
    host = host or FixedHost(engine or FakeEngine([words("Hello you")]))
    repl = Repl(make_setup(tmp_path, host, **fields), kind("".join(f"{line}\n" for line in lines)), out)
    repl.run()
    assert "\x1b" not in out.getvalue()
    return out.getvalue(), repl


def test_question_and_its_answer(tmp_path):
    out, repl = talk(tmp_path, "Hi there", "/quit")
    assert "Resumed in 84 ms" in out
    assert "> Answer: Hello you" in out
    assert [t.content for t in repl.session.path] == ["Hi there", "Hello you "]


class Patient(io.StringIO):
    """Input whose next line is typed once the model has prefilled the previous text."""

    def __init__(self, text, engine):
        super().__init__(text)
        self._engine = engine

    def readline(self, *_):
        waiting = threading.Event()
        while not self._engine.read:
            waiting.wait(0.001)
        return super().readline()


def test_opened_conversation_and_files_are_prefilled_before_a_line_is_typed(tmp_path):
    talk(tmp_path, "Hi there", "/quit")
    engine = FakeEngine()
    notes = Attachment(name="notes.txt", text="the word is swordfish")
    setup = make_setup(tmp_path, FixedHost(engine), continue_last=True, attachments=[notes])
    Repl(setup, Patient("/quit\n", engine), io.StringIO()).run()
    contents = [m.content for m in engine.read[0].messages]
    assert contents[:2] == ["Hi there", "Hello you "]
    assert "swordfish" in contents[2]


def test_backslash_continues_a_line(tmp_path):
    _, repl = talk(tmp_path, "one\\", "two")
    assert repl.session.path[0].content == "one\ntwo"


def test_answer_cannot_steer_the_terminal_and_keeps_its_spaces(tmp_path):
    engine = FakeEngine([["\x1b[2J", "\x9b31m\x07 10\u00a0km\u202e\u2066\tend"]])
    out, repl = talk(tmp_path, "x", engine=engine)
    assert "Answer: [2J31m 10\u00a0km\tend\n" in out
    assert repl.session.path[-1].content.startswith("\x1b")


def test_reasoning_is_folded_until_unfolded(tmp_path):
    engine = FakeEngine([[ReasoningDelta("deep thought"), "42"]])
    out, _ = talk(tmp_path, "q", "/reasoning", "q", engine=engine)
    first, _, second = out.partition("Reasoning is shown.")
    assert "thinking" in first
    assert "deep thought" not in first
    assert "deep thought" in second


def test_commands_work_and_mistakes_are_reported(tmp_path):
    lines = "q|/regen|/prev|/modle|/temp 9999|/edit anew|/sessions|/stats|/help".split("|")
    out, repl = talk(tmp_path, *lines)
    assert "Error: there is no command /modle" in out
    assert "Next: did you mean /model?" in out
    assert "temperature is a number between 0 and 10" in out
    assert repl.session.path[0].content == "anew"
    assert "/set [OPTION VALUE]" in out
    assert re.search(r"^cost +2\.3 s$", out, re.MULTILINE)


def test_editing_without_text_takes_the_next_line(tmp_path):
    _, repl = talk(tmp_path, "q", "/edit", "better q")
    assert [t.content for t in repl.session.path] == ["better q", "Hello you "]


def test_errors_are_reported_and_the_chat_continues(tmp_path):
    out, repl = talk(tmp_path, "q", "q again", engine=FakeEngine([[DecodeError("it broke")], ["fine"]]))
    assert "Error: it broke" in out
    assert "Next: " in out
    assert repl.session.path[-1].content == "fine"


def test_lack_of_memory_is_reported_and_the_next_try_loads_again(tmp_path):
    host = FixedHost(errors=[OutOfMemoryError("needs 9 GB")])
    out, repl = talk(tmp_path, "q", host=host)
    assert "Error: needs 9 GB" in out
    assert repl.session.path[-1].role == "assistant"


NAMED = Config(default_model="another")


def test_missing_model_is_offered_and_may_be_declined(tmp_path):
    host = FixedHost(errors=[ModelNotPulledError("m is not here")], config=NAMED)
    out, _ = talk(tmp_path, "n", host=host)
    assert "m is not here. Fetch it now? (y/n)" in out
    assert "Error: m is not here" in out


@pytest.mark.parametrize(("line", "model"), [("1", "qwen3-0.6b"), ("2", MODEL), ("n", "")])
def test_first_run_offers_models_and_saves_the_choice(tmp_path, monkeypatch, line, model):
    monkeypatch.setattr("edgeinfer.chat.model_choices.first_run_choices", lambda: OFFERED)
    pulled = {row.name: row for row in EMPTY_SHELF}
    monkeypatch.setattr("edgeinfer.models.pull.pull", lambda name, report, cancel: pulled[name])
    host = FixedHost(errors=[ModelNotPulledError("m is not here")])
    out, _ = talk(tmp_path, line, host=host)
    assert "1. qwen3-0.6b: comfortable · 484.0 MB · Apache-2.0 · about 31 tokens/s" in out
    assert (f"Model: {model}, " in out) == bool(model)
    assert load_config().default_model == (model or MODEL)


def test_model_of_another_program_is_offered_if_none_is_pulled(tmp_path):
    OllamaStore(gguf_bytes())
    host = FixedHost(errors=[ModelNotPulledError("m is not here")])
    out, _ = talk(tmp_path, "n", host=host)
    assert "Ollama has it, and it can be used in place: /model ollama/tiny:1b" in out


def test_continue_opens_the_last_conversation(tmp_path):
    talk(tmp_path, "first question")
    out, repl = talk(tmp_path, "second", continue_last=True)
    assert "You: first question" in out
    assert len(repl.session.path) == 4


def test_typed_model_answers_the_continued_conversation(tmp_path):
    talk(tmp_path, "first question")
    host = FixedHost(FakeEngine([words("Hello you")]))
    out, repl = talk(tmp_path, "second", host=host, continue_last=True, typed_model="other")
    assert "You: first question" in out
    assert repl.session.store.conversation(repl.session.conversation.id).model == "other"


def test_turns_of_another_program_are_shown_and_continued(tmp_path):
    def lines():
        yield "hello\n"
        store = ConversationStore.open(tmp_path / "conversations.db")
        other = ChatSession(lambda: store, engine=FakeEngine([["Said there."]]))
        other.open(store.listing()[0].id)
        other.ask("From the page.")
        consume(other.begin_answer())
        store.close()
        yield "again\n"

    setup = make_setup(tmp_path, FixedHost(FakeEngine([["One."], ["Two."]])))
    out, source = Tty(), Tty()
    source.readline = functools.partial(next, lines(), "")  # type: ignore[method-assign]
    Repl(setup, source, out).run()
    said = "changed the conversation.\nYou: From the page.\nAnswer: Said there.\nAnswer: Two."
    assert said in out.getvalue()


def test_files_are_attached(tmp_path):
    (tmp_path / "n.txt").write_text("12345")
    engine = FakeEngine()
    out, _ = talk(tmp_path, f"/file {tmp_path}/n.txt", f"look @{tmp_path}/n.txt", engine=engine)
    assert "Attached n.txt, 5 tokens." in out
    assert engine.requests[0].messages[0].content.count("12345") == 2


def test_ctrl_c_stops_the_answer_and_keeps_it(tmp_path):
    class Interrupting(FakeEngine):
        def submit(self, request):
            # max_tokens 0 is a speculative prefill, which Ctrl-C does not stop
            if request.max_tokens != 0:
                # delivered when the handler is installed, or at once
                os.kill(os.getpid(), signal.SIGINT)
            return super().submit(request)

    before = signal.getsignal(signal.SIGINT)
    hit = []
    signal.signal(signal.SIGINT, lambda *_: hit.append(1))
    try:
        _, repl = talk(tmp_path, "q", engine=Interrupting([["a"]]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert hit == [1]
    assert repl.session.path[-1].content == "a"


def test_ctrl_c_stops_a_summary_and_drops_no_turn(tmp_path):
    gate = StepGate()

    def interrupt():
        gate.reached.wait(60)
        while not gate.opened.wait(0.05):  # a signal just before the chat waits ends no wait
            os.kill(os.getpid(), signal.SIGINT)

    def script(request):
        return ["They", gate] if request.messages[0].role == "system" else ["a"]

    before = signal.signal(signal.SIGINT, lambda *_: None)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        out, repl = talk(tmp_path, "q", "q2", "/summarise", "/temp", engine=FakeEngine(script))
    finally:
        gate.opened.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert "Error: the summary was stopped, so the model still gets every turn\n" in out
    assert out.index("summary was stopped") < out.index("Sampling: ")
    assert [turn.cut_summary for turn in repl.session.path] == [None] * 4


def test_ctrl_c_stops_a_pull_and_not_the_chat(tmp_path, monkeypatch):
    def pull(name, report):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("edgeinfer.models.pull.pull", pull)
    host = FixedHost(errors=[ModelNotPulledError("it is not here")], config=NAMED)
    out, repl = talk(tmp_path, "y", "q", host=host)
    assert "Error: the pull was stopped by Ctrl-C; downloaded data is kept" in out
    assert repl.session.path[-1].role == "assistant"


def test_full_context_offers_ways_out(tmp_path):
    engine = SmallEngine([["x" * 500]], longest=2200)
    out, repl = talk(tmp_path, *(["y" * 600] * 3), "/drop", engine=engine, host=None)
    assert "/drop stops sending the oldest turns" in out
    assert repl.session.path[-1].content == "x" * 500
    assert [t.cut_summary for t in repl.session.path].count("") == 1


def test_unknown_theme_is_not_saved(tmp_path):
    out, _ = talk(tmp_path, "/theme edgeinfer-ligth", "/theme nord", "/theme nope")
    assert "Error: there is no theme 'edgeinfer-ligth'\nNext: did you mean edgeinfer-light?" in out
    assert load_config().chat.theme == "nord"


@pytest.mark.parametrize("line", ["/model", "/theme nord", "/copy", "/undo"])
def test_command_that_finds_nothing_ends_in_a_prompt(tmp_path, line):
    out, _ = talk(tmp_path, line, "/quit")
    assert out.endswith("> ")


def test_pull_reports_progress_in_lines(tmp_path, monkeypatch):
    def pull(name, report):
        for done in range(0, 101, 10):
            report(PullProgress(stage="downloading", file="x", done_bytes=done, total_bytes=100))
        report(PullProgress(stage="verifying", file="x"))

    monkeypatch.setattr("edgeinfer.models.pull.pull", pull)
    host = FixedHost(errors=[ModelNotPulledError("it is not here")], config=NAMED)
    out, _ = talk(tmp_path, "y", host=host)
    assert "it is not here. Fetch it now? (y/n) downloading x\nverifying x\nModel:" in out


def test_script_is_asked_nothing_and_gets_the_error(tmp_path):
    host = FixedHost(errors=[ModelNotPulledError("m is not here")])
    with pytest.raises(ModelNotPulledError):
        talk(tmp_path, "y", host=host, kind=io.StringIO)
    assert host.opened == [(MODEL, 0)]


def test_script_gets_no_prompts(tmp_path):
    out, _ = talk(tmp_path, "Hi", "/quit", kind=io.StringIO)
    assert "Answer: Hello you" in out
    assert ">" not in out


def test_warnings_of_the_model_are_shown(tmp_path):
    warning = "context of 9 tokens: the model was trained on 8"
    engine = FakeEngine(info=replace(DEFAULT_INFO, warnings=(warning,)))
    out, _ = talk(tmp_path, "/quit", engine=engine)
    assert f"Warning: {warning}\n" in out


def test_one_question_is_too_new_to_summarise(tmp_path):
    out, _ = talk(tmp_path, "Hi", "/summarise", "/quit")
    assert "Error: there is no turn before the last question to drop or summarise\nNext: begin" in out


def test_script_continues_after_an_error_and_ends_with_it(tmp_path):
    engine = FakeEngine([[DecodeError("it broke")], ["fine"]])
    with pytest.raises(DecodeError, match="it broke"):
        talk(tmp_path, "q", "q again", engine=engine, kind=io.StringIO)
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("n_ctx", "said"),
    [(2048, "(stopped at 96 tokens · /continue"), (408, "(cut off: the context is full")],
)
def test_reason_of_a_cut_answer_is_shown(tmp_path, n_ctx, said):
    info = replace(DEFAULT_INFO, n_ctx=n_ctx)
    out, _ = talk(tmp_path, "q", engine=FakeEngine([["Hello", end(reason="length")]], info=info))
    assert said in out


def test_answer_that_repeats_itself_is_stopped(tmp_path):
    # the pauses let the chat stop the script before it has ended
    engine = FakeEngine([[*["Avaid, "] * 50, Delay(0.01)] * 4_000])
    out, repl = talk(tmp_path, "/set max-tokens 1000000", "q", engine=engine)
    assert "(the answer repeated itself; stopped" in out
    assert repl.session.path[-1].content.count("Avaid") < 100_000


def with_tools(*scripts, **fields):
    """Return a host with a scripted engine and configured tools."""
    return FixedHost(FakeEngine(scripts), config=Config(tools=tools_config("plain", **fields)))


def test_card_is_answered_by_a_line_and_the_result_by_the_model(tmp_path):
    host = with_tools(calling(plain__weather={"city": "Rome"}), words("Take an umbrella."))
    out, repl = talk(tmp_path, "Rome?", "y", "/tools", "/quit", host=host, with_tools=True)
    assert "plain · weather wants to run\n  city: Rome\ny once" in out
    assert "Tool plain · weather done: It rains in Rome." in out
    assert "Answer: Take an umbrella." in out
    assert "plain: add, weather, fail" in out
    assert [t.calls[0].status for t in repl.session.path if t.calls] == ["done"]


def test_a_long_card_is_answered_on_its_last_page(tmp_path):
    call = calling(plain__weather={"city": "Rome\n" * 60})
    for typed, status in ((("m", "y"), "done"), (("n", "m"), "refused"), (("m", "n"), "refused")):
        host = with_tools(call, words("Well."))
        out, repl = talk(tmp_path, "Rome?", *typed, "/quit", host=host, with_tools=True)
        assert "page 1 of 2" in out
        assert [t.calls[0].status for t in repl.session.path if t.calls] == [status]


def test_script_is_asked_for_no_call(tmp_path):
    host = with_tools(calling(plain__weather={"city": "Rome"}), words("I cannot know."))
    out, _ = talk(tmp_path, "Rome?", "/quit", host=host, kind=io.StringIO, with_tools=True)
    assert "refused: the user said no: there is no user to allow it" in out
    assert "Answer: I cannot know." in out


def test_tools_are_switched_on_and_off(tmp_path):
    out, repl = talk(tmp_path, "/tools", "/tools on", "/tools off", "/tools x", host=with_tools())
    assert "The model has no tools. `/tools on` offers those of config.toml." in out
    assert "plain: add, weather, fail" in out
    assert "The model has no tools." in out
    assert "/tools has no option 'x'" in out
    assert repl.session.tools is None


_PLAIN_CHAT = """
import sys
from pathlib import Path
from fake_engine import FakeEngine
from fixed_chat import FixedHost, make_setup
from edgeinfer.chat.repl import Repl
Repl(make_setup(Path(sys.argv[1]), FixedHost(FakeEngine([["Yes."]] * 9))), sys.stdin, sys.stdout).run()
"""


def test_lines_are_edited_and_remembered_on_a_terminal(tmp_path):
    """Arrow keys edit a line; Up recalls questions, also of an earlier chat."""
    for keys in (["Hllo\x1b[D\x1b[D\x1b[De\r", "\x1b[A\x7fa\r"], ["\x1b[A\x1b[A!\r"]):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ |= {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
            os.execv(sys.executable, [sys.executable, "-c", _PLAIN_CHAT, str(tmp_path)])
        with open(terminal, "rb+", buffering=0) as screen:
            for line in [*keys, "/quit\r"]:
                shown = b""
                while not shown.endswith(b"> "):
                    shown += screen.read(1)
                screen.write(line.encode())
            with contextlib.suppress(OSError):  # the terminal is closed
                while screen.read(4096):
                    pass
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with contextlib.closing(ConversationStore.open(tmp_path / "conversations.db")) as store:
        assert store.past_questions() == ["Hello!", "Hella", "Hello"]


@pytest.mark.parametrize(
    "failure", [None, ModelNotPulledError("other is not here"), KeyboardInterrupt()]
)
def test_an_opened_conversation_stores_the_model_that_answers(tmp_path, failure):
    _, before = talk(tmp_path, "q")
    before.session.set(model="other")

    class Host(FixedHost):
        def engine(self, model, options, progress=None):
            if model == "other" and failure is not None:
                raise failure
            return super().engine(model, options, progress)

    number = before.session.conversation.id
    out, repl = talk(tmp_path, f"/open {number}", "q2", host=Host(FakeEngine([["two"]])))
    answering = MODEL if failure else "other"
    assert (repl.session.head.model, repl.session.conversation.model) == (answering, answering)
    assert (f"{MODEL} answers in this conversation" in out) is bool(failure)
