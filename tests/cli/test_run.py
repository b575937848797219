"""`edgeinfer run` with a scripted engine: model and prompt, output, exit statuses."""

import io
import json
import os
import sys

import pytest
from fake_engine import FakeEngine
from msgspec.structs import replace
from tools_here import calling, tools_config

from edgeinfer import typed_options
from edgeinfer.chat.startup import describe_start
from edgeinfer.cli.main import main
from edgeinfer.cli.parser import build_parser
from edgeinfer.config.config_file import ChatConfig, Config, ReceiptsConfig
from edgeinfer.errors import QueueFullError, UnknownModelError, UsageError
from edgeinfer.host import EngineHost, ProcessStart
from edgeinfer.media.pictures import PICTURE_MARK
from edgeinfer.models import reference
from edgeinfer.models.reference import ModelRef
from edgeinfer.runtime.events import Finished, ReasoningDelta, Timings, Usage
from edgeinfer.runtime.options import EngineInfo, LoadOptions, ModelFiles
from edgeinfer.runtime.requests import Grammar, JsonSchema, Sampling

USAGE, TIMINGS = Usage(prompt_tokens=5, completion_tokens=2), Timings(ttft_ms=9.0, decode_ms=10.0)
END = Finished(reason="stop", usage=USAGE, timings=TIMINGS)


def script_engine(*script, **info):
    """Return an engine that answers every request with the same events."""
    return FakeEngine([script], info=EngineInfo(model="m", n_ctx=4096, **info))


class ScriptedHost(EngineHost):
    def __init__(self, engine, config=None):
        super().__init__(ProcessStart(how="resumed", stages_ms={"restore": 80.0}), config)
        self.scripted, self.opened = engine, []

    def engine(self, model, options, progress=None):
        self.opened.append((getattr(model, "text", model), options))
        return self.scripted


@pytest.fixture
def engine():
    script = (ReasoningDelta("hm"), "Red, ", "green.", END)
    return script_engine(*script, system_prompt="You are brief.", can_see=True)


def run(engine, *typed):
    return main(["run", "tiny", *typed], ScriptedHost(engine))


def result(engine, capsys, *typed, code=0):
    """Return the result of `run --json`, or its error."""
    assert run(engine, *typed, "--json") == code
    body = json.loads(capsys.readouterr().out)
    assert body["kind"] == ("error" if code else "run")
    return body["result" if code == 0 else "error"]


@pytest.fixture(autouse=True)
def _no_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)


@pytest.fixture(autouse=True)
def _scripted_models(monkeypatch):
    """Let `tiny` and `small` be models."""

    def find(text, default_model, find=reference.find_unless_misspelt):
        if text in ("tiny", "small"):
            return ModelRef(text=text, kind="absent", name=text)
        return find(text, default_model)

    monkeypatch.setattr(reference, "find_unless_misspelt", find)


def test_answer_is_streamed_to_stdout(engine, capsys):
    assert run(engine, "Name colours") == 0
    out = capsys.readouterr()
    assert out.out == "Red, green.\n"
    assert out.err == ""
    turns = engine.requests[0].messages
    said = [(turn.role, turn.content) for turn in turns]
    assert said == [("system", "You are brief."), ("user", "Name colours")]


@pytest.mark.parametrize("kind", ["missing", "fifo", "not a key"])
def test_wrong_signing_key_is_found_before_the_answer(engine, capsys, tmp_path, kind):
    key = tmp_path / "key.pem"
    if kind == "fifo":
        os.mkfifo(key)
    elif kind == "not a key":
        key.touch(0o600)
    host = ScriptedHost(engine, Config(receipts=ReceiptsConfig(key=str(key))))
    assert main(["run", "tiny", "x", "--receipt", str(tmp_path / "receipt")], host) == 2
    assert "receipts.key" in capsys.readouterr().err
    assert engine.requests == []


def test_raw_prompt_is_sent_unchanged(engine, capsys):
    assert run(engine, "Once upon", "--raw") == 0
    assert (engine.requests[0].prompt, engine.requests[0].messages) == ("Once upon", ())
    assert run(engine, "x", "--raw", "--system", "s") == 2
    assert "--system" in capsys.readouterr().err


def test_json_is_one_envelope(engine, capsys):
    envelope = result(engine, capsys, "x")
    assert (envelope["text"], envelope["reasoning"]) == ("Red, green.", "hm")
    assert envelope["finish_reason"] == "stop"
    assert envelope["usage"]["prompt_tokens"] == 5
    assert envelope["start"]["how"] == "resumed"


@pytest.mark.parametrize(
    ("typed", "model", "prompt"),
    [
        (["tiny", "hello"], "tiny", "hello"),
        (["hello there"], "smollm2-135m-instruct", "hello there"),
        (["tiny"], "tiny", None),
        (["unknown", "hello"], "unknown", "hello"),
        ([], "smollm2-135m-instruct", None),
    ],
)
def test_words_are_split_into_model_and_prompt(engine, monkeypatch, typed, model, prompt):
    host = ScriptedHost(engine)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"" if prompt else b"piped")))
    assert main(["run", *typed], host) == 0
    assert host.opened[0][0] == model
    assert engine.requests[0].messages[-1].content == (prompt or "piped")


@pytest.mark.parametrize("word", ["smolm2", "qwen34b", "qwen3:4b", "gemma", "smollm2-135"])
def test_prompt_that_is_nearly_a_model_is_refused_with_two_hints(as_json, word):
    hint = as_json("run", word, code=3)["hint"]
    assert hint.startswith("did you mean ")
    assert hint.endswith(f"if it is the prompt: `edgeinfer run smollm2-135m-instruct {word}`")


def test_piped_text_follows_the_prompt(engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("añ\n".encode())))
    assert run(engine, "Summarise:") == 0
    assert engine.requests[0].messages[-1].content == "Summarise:\n\nañ\n"


@pytest.mark.parametrize(
    "data", [b"\x7fELF\0\1", b"a" * 100_000 + b"\0", "añ".encode("utf-16")], ids=len
)
def test_piped_binary_is_refused_as_a_binary_file_is(engine, capsys, monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run(engine, "what is it") == 2
    assert capsys.readouterr().err.startswith("error: stdin is a binary file\n\nhint: pipe text")
    assert engine.requests == []


def test_no_prompt_says_what_to_type(engine, capsys):
    assert run(engine) == 2
    assert "hint: give one" in capsys.readouterr().err
    assert engine.requests == []


def test_options_reach_the_request(engine):
    host = ScriptedHost(engine)
    typed = "run tiny x --temperature 0 --seed 7 --max-tokens 3 --ctx 512".split()
    assert main([*typed, "--system", ""], host) == 0
    request = engine.requests[0]
    assert (request.sampling.temperature, request.sampling.seed, request.max_tokens) == (0.0, 7, 3)
    assert [turn.role for turn in request.messages] == ["user"]
    assert host.opened[0][1].n_ctx == 512


def test_time_between_a_failed_load_and_the_next_is_not_of_the_start(monkeypatch):
    """The 30 s between the loads do not count, 0.5 s before and 1 s of loading do (fake clock)."""
    clock = [500_000_000]
    monkeypatch.setattr("edgeinfer.host.time.monotonic_ns", lambda: clock[0])
    monkeypatch.setattr(EngineHost, "attach_devices", lambda *_: None)
    host = EngineHost(ProcessStart(reason="no snapshot yet"), Config(), exec_ns=1)
    with pytest.raises(UnknownModelError):
        host.engine("nosuch", LoadOptions())
    clock[0] += 30_000_000_000
    monkeypatch.setattr(EngineHost, "files", lambda *_, **__: None)
    monkeypatch.setattr(
        EngineHost,
        "_load",
        lambda self, *_: (clock.__setitem__(0, clock[0] + 10**9), self._note_stage("ready")),
    )
    host.engine("tiny", LoadOptions())
    assert describe_start(host.start) == "cold start in 1.5 s: no snapshot yet"


LENGTH = replace(END, reason="length", usage=Usage(prompt_tokens=5, completion_tokens=1500))


@pytest.mark.parametrize(
    ("typed", "info", "limit"),
    [
        ((), {}, 1500),
        (("--raw",), {}, 1500),
        (("--max-tokens", "9000"), {}, 9000),
        ((), {"can_think": True}, 8000),
        (("--schema", "{}"), {}, None),
    ],
)
def test_answer_has_a_limit_unless_told_otherwise(typed, info, limit):
    engine = script_engine("x", **info)
    assert run(engine, "x", *typed) == 0
    assert engine.requests[0].max_tokens == limit


def test_answer_cut_by_no_typed_option_says_where_and_how_to_get_more(capsys):
    assert run(script_engine("x", LENGTH), "x") == 0
    said = capsys.readouterr()
    assert said.out == "x\n"
    assert said.err == "edgeinfer: stopped at 1,500 tokens; more with --max-tokens N\n"
    assert run(script_engine("x", LENGTH), "x", "--schema", "{}") == 0
    assert "1,505 tokens fill the context; more with --ctx TOKENS" in capsys.readouterr().err
    assert run(script_engine("x", LENGTH, n_ctx_train=4096), "x", "--schema", "{}") == 0
    assert "fill the context, and the model was trained on no more" in capsys.readouterr().err
    assert run(script_engine("x", LENGTH), "x", "--max-tokens", "1500") == 0
    assert capsys.readouterr().err == ""


def test_timings_go_to_stderr(engine, capsys):
    assert run(engine, "x", "--timings") == 0
    line = capsys.readouterr().err
    assert "resumed in 80 ms" in line
    assert "2 tokens at 100.0/s" in line
    assert line.endswith("; 19 ms\n"), "what it took; savings are not known"


def test_timings_name_accepted_drafts(capsys):
    drafted = replace(LENGTH, timings=Timings(draft_tokens=20, draft_accepted_tokens=12))
    assert run(script_engine("x", drafted), "x", "--timings") == 0
    assert "; drafts: 12/20 accepted; " in capsys.readouterr().err


def test_cold_start_lasts_until_the_model_can_compute(engine, capsys, monkeypatch):
    """Fake clock: 0.5 s until an engine is requested, then 7 s of loading."""
    clock, said = [500_000_000], ""

    def load(_files, _options, _progress=None):
        clock[0] += 7_000_000_000
        return engine

    monkeypatch.setattr("edgeinfer.host.time.monotonic_ns", lambda: clock[0])
    monkeypatch.setattr("edgeinfer.runtime.engine.load_engine", load)
    for more in (["--timings"], ["--json"]):
        clock[0] = 500_000_000
        host = EngineHost(ProcessStart(how="cold", reason="no snapshot yet"), exec_ns=1)
        monkeypatch.setattr(host, "files", lambda model, *_, **__: ModelFiles(name=model, paths=()))
        monkeypatch.setattr(host, "_prepare", lambda *_, host=host: host._note_stage("ready"))
        assert main(["run", "tiny", "x", *more], host) == 0
        out = capsys.readouterr()
        said = out.err.partition(";")[0] or said
    startup = json.loads(out.out)["result"]["startup"]
    assert startup == {"ready_ms": 7500.0, "start_ms": 500.0, "load_ms": 7000.0, "prefill_ms": 0.0}
    assert describe_start(host.start) == "cold start in 7.5 s: no snapshot yet"
    assert said == "tiny: cold in 7.5 s (start 500 ms, load 7.0 s)"


def test_stopped_answer_keeps_its_text_and_exits_130(capsys):
    stopped = Finished(reason="cancelled", usage=Usage(), timings=Timings())
    assert run(script_engine("so f", stopped), "x") == 130
    assert capsys.readouterr().out == "so f\n"


def test_engine_error_is_words_and_an_exit_code(capsys):
    assert result(script_engine(QueueFullError("full")), capsys, "x", code=8)["code"] == "queue-full"


def test_unexpected_error_shows_no_traceback_unasked(capsys, monkeypatch):
    class Broken(ScriptedHost):
        def engine(self, model, options, progress=None):
            raise ZeroDivisionError("oops")

    for debug, shown in (("0", False), ("1", True)):
        monkeypatch.setenv("EDGEINFER_DEBUG", debug)
        assert main(["run", "tiny", "x"], Broken(None)) == 70
        assert ("Traceback" in capsys.readouterr().err) == shown


def test_answer_that_repeats_itself_is_ended_and_said(capsys):
    looping = script_engine(*["Avaid, "] * 20_000)
    assert run(looping, "x") == 0
    said = capsys.readouterr()
    assert said.err == "edgeinfer: the answer repeated itself; stopped\n"
    assert len(said.out) < 1000
    assert result(looping, capsys, "x")["finish_reason"] == "repetition"


@pytest.mark.parametrize(
    ("typed", "penalties"),
    [([], (0.4, 1.1)), (["--temperature", "0"], (0, 1)), (["--top-p", "1"], (0.4, 1.1))],
)
def test_greedy_output_is_without_the_penalties_of_the_defaults(typed, penalties):
    engine = script_engine("x", sampling=Sampling(dry_multiplier=0.4, repeat_penalty=1.1))
    assert run(engine, "x", *typed) == 0
    sampling = engine.requests[0].sampling
    assert (sampling.dry_multiplier, sampling.repeat_penalty) == penalties


# --- options that the endpoint has, too


def test_answer_options_reach_the_request(engine, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    typed = ["run", "tiny", "x", "--stop", "END", "--stop", ".", "--think", "off"]
    assert main([*typed, "--schema", str(tmp_path / "schema.json")], ScriptedHost(engine)) == 0
    request = engine.requests[-1]
    assert request.stop == ("END", ".")
    assert request.constraint == JsonSchema({"type": "object"})
    assert (request.template_options, request.reasoning_budget) == ({"enable_thinking": False}, 0)
    assert main(["run", "x", "--schema", '{"type": "array"}'], ScriptedHost(engine)) == 0
    assert engine.requests[-1].constraint == JsonSchema({"type": "array"})
    assert main(["run", "x", "--grammar", 'root ::= "a"'], ScriptedHost(engine)) == 0
    assert engine.requests[-1].constraint == Grammar('root ::= "a"')


@pytest.mark.parametrize(
    ("typed", "can_think", "said"),
    [
        (["--think", "on"], False, "edgeinfer: tiny does not think: --think on changes nothing\n"),
        (["--think", "on"], True, ""),
        (["--think", "off"], False, ""),
        ([], False, ""),
    ],
)
def test_think_of_a_model_that_cannot_is_said_and_the_prompt_answered(capsys, typed, can_think, said):
    assert run(script_engine("Red.", END, can_think=can_think), *typed, "hi") == 0
    assert capsys.readouterr() == ("Red.\n", said)


def test_file_stands_before_the_prompt(engine, tmp_path):
    (tmp_path / "notes.txt").write_text("be there at nine")
    assert run(engine, "When?", "--file", str(tmp_path / "notes.txt")) == 0
    content = engine.requests[0].messages[-1].content
    assert content.startswith("File `notes.txt`:")
    assert content.index("be there at nine") < content.index("When?")


@pytest.mark.parametrize("option", ["--image", "--file"])
def test_pictures_stand_before_the_prompt(engine, tmp_path, option):
    files = b"\xff\xd8\xffred", b"GIF8blue"
    for name, data in zip(("red.jpg", "blue.gif"), files, strict=True):
        (tmp_path / name).write_bytes(data)
    images = [f"{option}={tmp_path / name}" for name in ("red.jpg", "blue.gif")]
    assert run(engine, "Which is red?", *images) == 0
    turn = engine.requests[0].messages[-1]
    assert turn.content == f"{PICTURE_MARK * 2}Which is red?"
    assert turn.pictures == files
    assert run(engine, "Which is red?", "--raw", option, str(tmp_path / "red.jpg")) == 0
    assert engine.requests[1].prompt == f"{PICTURE_MARK}Which is red?"
    assert engine.requests[1].pictures == files[:1]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--image", "/nosuch"], "/nosuch: No such file or directory"),
        (["--image", __file__], "the file is not a JPEG, PNG, WebP or GIF file"),
        (["--schema", "{not json"], "--schema: "),
        (["--schema", "/nosuch"], "--schema cannot be read: /nosuch: No such file or directory"),
        (["--schema", "/bin/true"], "--schema cannot be read: /bin/true: the file is not UTF-8 text"),
        (["--grammar", "/nosuch"], "--grammar cannot be read: /nosuch: No such file or directory"),
        (["--grammar", 'root := "a"'], "--grammar: `:=` is not GBNF"),
        (["--system", "@/nosuch"], "--system cannot be read: /nosuch: No such file or directory"),
        (["--receipt", "-"], "--receipt needs a file, not -"),
        (["--private"], "--private needs --receipt FILE"),
        (["--file", "/nosuch"], "/nosuch cannot be read: No such file"),
        (["--schema", "{}", "--grammar", "x ::= y"], "not allowed with argument"),
        (["--max-tokens", "-5"], "'-5' is not a number between 1 and 1,000,000"),
        (["--temperature", "abc"], "'abc' is not a number between 0 and 10"),
        (
            ["--gpu-layers", "some"],
            '\'some\' is not "auto", "none", "all" or a number between 0 and 65536',
        ),
    ],
)
def test_invalid_options_are_refused_before_the_model_is_loaded(engine, capsys, typed, said):
    host = ScriptedHost(engine)
    assert main(["run", "tiny", "x", *typed], host) == 2
    assert said in capsys.readouterr().err
    assert host.opened == []


@pytest.mark.parametrize("verb", ["run", "chat", "warm"])
def test_system_means_the_same_in_every_verb(verb, tmp_path):
    (tmp_path / "pirate.txt").write_text("You are a pirate.")
    config = Config(chat=ChatConfig(system_prompts={"pirate": "Arr."}))
    for typed, prompt in (
        (f"@{tmp_path}/pirate.txt", "You are a pirate."),
        ("pirate", "Arr."),
        ("Be brief.", "Be brief."),
    ):
        options = build_parser().parse_args([verb, "--system", typed])
        assert typed_options.system_prompt(options.system, config) == prompt


def test_saved_system_prompt_is_sent(engine, monkeypatch):
    host = ScriptedHost(engine)
    host._config = Config(chat=ChatConfig(system_prompts={"pirate": "Arr."}))
    assert main(["run", "tiny", "x", "--system", "pirate"], host) == 0
    assert engine.requests[0].messages[0].content == "Arr."


def test_hint_for_an_unknown_model_before_a_prompt_names_both_mistakes(capsys):
    class Unknown(ScriptedHost):
        def engine(self, model, options, progress=None):
            raise UnknownModelError(f"no model is called {model!r}")

    assert main(["run", "name", "three"], Unknown(None)) == 3
    hint = capsys.readouterr().err.partition("hint: ")[2]
    assert hint == "`edgeinfer list` shows the models; a prompt of several words needs quotes\n"


def weather_host(*scripts, **fields):
    """A host whose model calls `weather`, then answers by `scripts`."""
    engine = FakeEngine([calling(plain__weather={"city": "Rome"}), *scripts])
    return ScriptedHost(engine, Config(tools=tools_config("plain", **fields)))


def test_tools_are_called_and_their_results_answered(capsys):
    host = weather_host(["Take an umbrella.", END], allow=("plain.weather",))
    assert main(["run", "tiny", "Rome?", "--tools"], host) == 0
    out, err = capsys.readouterr()
    assert out == "Take an umbrella.\n"
    assert 'tools: plain__weather {"city": "Rome"}: done, 17 bytes' in err
    assert host.scripted.requests[1].messages[-1].content.endswith("It rains in Rome.")


def test_call_that_would_ask_is_refused_with_the_pattern_that_allows_it(capsys):
    host = weather_host(["No idea.", END])
    assert main(["run", "tiny", "Rome?", "--tools", "--json"], host) == 0
    out, err = capsys.readouterr()
    assert '"plain.weather(city=Rome)"' in err
    result = json.loads(out)["result"]
    assert (result["text"], result["calls"][0]["status"]) == ("No idea.", "refused")


def test_model_that_calls_for_ever_is_ended(capsys):
    host = weather_host(allow=("plain.*",))
    assert main(["run", "tiny", "Rome?", "--tools"], host) == 0
    modes = [request.tool_choice.mode for request in host.scripted.requests]
    assert modes == ["auto", "auto", "auto", "none"], "the same result came twice"
    assert "the same call was made before" in host.scripted.requests[-1].messages[-1].content


def test_tools_need_a_configuration_and_no_raw_prompt(engine, capsys):
    assert run(engine, "Hi", "--tools") == 2
    assert "no tools are configured" in capsys.readouterr().err
    assert run(engine, "Hi", "--tools", "--raw") == 2


def test_traces_of_a_run_begin_with_its_start(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(engine, "x", "--traces", "t.jsonl") == 0
    [line] = (tmp_path / "t.jsonl").read_text().splitlines()
    [scope] = json.loads(line)["resourceSpans"][0]["scopeSpans"]
    names = ["run", "resume", "tokenize", "queue", "prefill", "decode"]
    assert [span["name"] for span in scope["spans"]] == names
    assert run(engine, "x", "--traces", "missing/t.jsonl") == 2


def test_input_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(typed_options, "_MAX_TEXT_BYTES", 1 << 20)
    with pytest.raises(UsageError, match="stdin has more than 1 MiB"), open("/dev/zero", "rb") as zeros:
        typed_options.read_text(zeros, "stdin")
    with pytest.raises(UsageError, match="--schema has more than 1 MiB"):
        typed_options._file_text("/dev/zero", "--schema")


@pytest.mark.parametrize("typed", [["nosuch"], ["qwen3-4b"], ["./gone.gguf"], ["nosuch", "--plain"]])
def test_chat_refuses_a_missing_model_as_run_does_before_it_shows_anything(typed, capsys):
    code = main(["run", typed[0], "hi"], EngineHost())
    problem = capsys.readouterr().err.splitlines()[0]
    assert main(["chat", *typed], EngineHost()) == code != 0
    output = capsys.readouterr()
    assert (output.out, output.err.splitlines()[0]) == ("", problem)
    assert "hint: " in output.err
