"""Every verb is a function with the same signature, and `--json` means the same for each."""

import argparse
import ast
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_processes import run

import edgeinfer
from edgeinfer.cli.main import main
from edgeinfer.cli.parser import EXAMPLES, VERBS, build_parser, module_of, verbs_of, wants_json
from edgeinfer.cli.result import Result, TimedResult
from edgeinfer.cli.verbs import launch
from edgeinfer.config.config_file import Config
from edgeinfer.errors import UsageError, kebab
from edgeinfer.host import EngineHost
from edgeinfer.launcher.argv import LAUNCH_VERBS, SWITCHES, CommandLine, options_and_words, with_verb
from edgeinfer.snapshots.running import RunningLaunch


def verbs() -> dict[str, argparse.ArgumentParser]:
    return verbs_of(build_parser())


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_verb_is_a_function_of_options_and_host_that_returns_a_result(verb):
    signature = inspect.signature(module_of(verb).run, eval_str=True)
    needed = [p.annotation for p in signature.parameters.values() if p.default is p.empty]
    assert needed == [argparse.Namespace, EngineHost]
    assert issubclass(signature.return_annotation, Result)


def test_kinds_of_results_are_those_that_scripts_know():
    kinds = """
        agents backend batch bench chat completion config doctor drift eval forget launch licenses list
        ps ps-usage pull pull-adapter quantize quantize-compare rm run self-check serve show
        snapshot snapshots snapshots-export snapshots-import snapshots-removed snapshots-take
        snapshots-trust snapshots-verify stop tools update verify version warm web
    """.split()
    for verb in (*VERBS, "snapshots_transfer"):
        module_of(verb)
    subclasses = [*Result.__subclasses__(), *TimedResult.__subclasses__()]
    names = {c.__name__ for c in subclasses if c.__module__.startswith("edgeinfer.")} - {"TimedResult"}
    assert sorted(kebab(name.removesuffix("Result")) for name in names) == kinds


@pytest.mark.parametrize(
    ("typed", "is_json"),
    [
        (("list", "--json"), True),
        (("list",), False),
        (("snapshots", "--json", "list"), True),
        (("snapshots", "list", "--json"), True),
        (("run", "m", "--", "--json"), False),
        (("run", "--json", "--", "x"), True),
        (("chat",), False),
    ],
)
def test_json_is_an_option_and_never_a_word(typed, is_json):
    assert build_parser().parse_args(typed).json is is_json
    assert wants_json(typed) is is_json


def test_option_with_a_mistake_may_stand_behind_json(capsys):
    assert main(["show", "--json", "--ctx", "many"]) == 2
    out = capsys.readouterr()
    assert json.loads(out.out)["error"]["code"] == "usage"
    assert out.err == ""


def test_prompt_that_looks_like_an_option_does_not_change_the_output(capsys):
    assert main(["show", "--", "--json"]) != 0
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("error: ")


def test_verb_of_snapshots_is_refused_off_linux(as_json, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    error = as_json("ps", code=7)
    assert error["code"] == "snapshots-unavailable"
    assert "Linux" in error["message"]


@pytest.mark.parametrize(
    ("typed", "scope", "hint"),
    [
        (("warm", "m", "--temperature", "0.5"), "request", "`edgeinfer chat` or `edgeinfer run`"),
        (("serve", "--top-k=5"), "request", 'put "top_k" into the body of the request'),
        (("batch", "a", "b", "--temperature", "0"), "request", 'put "temperature" into the body'),
        (("warm", "m", "--port", "8000"), "launch", "`edgeinfer serve`; it works with any snapshot"),
        (("warm", "--resume", "never"), "launch", "`edgeinfer chat`"),
        (("run", "m", "x", "--port", "8000"), "launch", "`edgeinfer serve`"),
        (("pull", "m", "--ctx", "512"), "load", "`edgeinfer warm`"),
        (("ps", "--kv-type=q8_0"), "load", "`edgeinfer chat`"),
    ],
)
def test_option_of_another_scope_is_refused_with_its_place(typed, scope, hint, as_json):
    error = as_json(*typed, code=2)
    assert error["code"] == "wrong-scope"
    assert f"is a {scope} option: `{typed[0]}` does not take it" in error["message"]
    assert hint in error["hint"]


def every_parser():
    """Return the parser of each verb and of each action, by its words."""
    for name, parser in verbs().items():
        yield name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{name} {inner}", parser) for inner, parser in action.choices.items())


# --- options anywhere


def test_options_may_stand_anywhere_among_the_words():
    pieces = (["m"], ["hi there"], ["--max-tokens", "4"], ["--raw"], ["--seed=1"])
    for order in itertools.permutations(pieces):
        if order.index(["m"]) < order.index(["hi there"]):
            options = build_parser().parse_args(["run", *itertools.chain(*order)])
            assert (options.model_or_prompt, options.prompt) == ("m", "hi there")
            assert (options.max_tokens, options.raw, options.seed) == (4, True, 1)


def test_prompt_may_begin_with_a_dash():
    for typed in (["run", "-5"], ["run", "- what is this?"], ["run", "--", "--raw"], ["run", "-"]):
        options = build_parser().parse_args(typed)
        assert (options.model_or_prompt, options.raw) == (typed[-1], False)


def test_unknown_option_takes_no_option_for_its_value(capsys):
    typed = "run m hi --cold --ctx 512".split()
    assert main(typed) == 2
    assert "unrecognized arguments: --cold" in capsys.readouterr().err
    assert main(["run", "hi", "--temp", "0.5"]) == 2
    assert "unrecognized arguments: --temp\n" in capsys.readouterr().err
    assert CommandLine(typed).values("--ctx") == ["512"]
    assert options_and_words(["--min-p", "-.5", "hi"]) == (["--min-p", "-.5"], ["hi"])


def test_launcher_knows_every_option_without_a_value():
    actions = [action for verb in LAUNCH_VERBS for action in verbs()[verb]._actions]
    options = [action for action in actions if action.option_strings]
    assert {flag for o in options if o.nargs == 0 for flag in o.option_strings} == SWITCHES
    assert {option.nargs for option in options} == {None, 0}


def test_agents_arguments_are_left_as_they_are():
    options = build_parser().parse_args(["launch", "--ctx", "8192", "codex", "--ctx", "1", "x"])
    assert (options.n_ctx, options.arguments) == (8192, ["--ctx", "1", "x"])


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ([], ["chat"]),
        (["--continue"], ["chat", "--continue"]),
        (["--version"], ["--version"]),
        (["run", "x"], ["run", "x"]),
    ],
)
def test_chat_is_meant_where_no_verb_is_typed(typed, completed):
    assert with_verb(typed) == completed


# --- suggestions


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("lst", "did you mean `edgeinfer list`?"),
        ("smollm2-135m-instruct", "did you mean `edgeinfer chat smollm2-135m-instruct`?"),
        ("'hello there'", "did you mean `edgeinfer run 'hello there'`?"),
        ("hello there", "did you mean `edgeinfer run 'hello there'`?"),
        ("rnu hi", "did you mean `edgeinfer run`?"),
        ("rum m hi", "did you mean `edgeinfer run`?"),
        ("rmm m", "did you mean `edgeinfer rm`?"),
        ("sp", "did you mean `edgeinfer ps`?"),
        ("models", "did you mean `edgeinfer list`?"),
        ("convert", "did you mean `edgeinfer pull FOLDER --name NAME`?"),
        ("completion csh", "run `edgeinfer completion --help`"),
        ("snapshots lst", "did you mean list? `edgeinfer snapshots --help` lists them"),
        ("snapshots remove x", "did you mean rm? `edgeinfer snapshots --help` lists them"),
        ("sessions", "the chat lists conversations: `edgeinfer chat`, then F3"),
        ("-v", "did you mean `edgeinfer --version`?"),
        ("xyzzy", "`edgeinfer --help` lists the verbs"),
        ("help lst", "did you mean `edgeinfer list`?"),
        ("launch codx", "did you mean codex? `edgeinfer launch --help` lists them"),
        ("launch vim", "`edgeinfer launch --help` lists them"),
        ("quantize m q4ks", "did you mean Q4_K_S? `edgeinfer quantize --help` lists them"),
        ("run --max-token 4 x", "did you mean --max-tokens?"),
        ("run --temp 0 x", "did you mean --temperature?"),
        ("--modle x", "name the model without `--model`: `edgeinfer chat MODEL`"),
        ("run --model x", "name the model without `--model`: `edgeinfer run MODEL`"),
        ("run -m x", "name the model without `-m`: `edgeinfer run MODEL`"),
        ("run x -p Hi", 'type the prompt without `-p`: `edgeinfer run MODEL "PROMPT"`'),
        ("serve -p 9000", "did you mean --port?"),
        ("serve -c 4096", "did you mean --ctx?"),
        ("warm m --colour red", "run `edgeinfer warm --help`"),
        ("config set offline true", "`edgeinfer config` shows the path of the file: set keys there"),
        ("snapshots verify", "`edgeinfer snapshots verify --all` verifies every snapshot"),
        ("snapshots verify x --all", "`edgeinfer snapshots verify --all` verifies every snapshot"),
        ("run what is two", 'put the prompt in quotes: `edgeinfer run "What is photosynthesis?"`'),
    ],
)
def test_hint_names_what_was_probably_meant(typed, hint, as_json):
    error = as_json(*shlex.split(typed), code=2)
    assert (error["code"], error["hint"]) == ("usage", hint)
    assert len(error["message"]) < 200, "a long list of choices is not quoted"


def test_question_in_place_of_a_model_hints_at_run(capsys):
    assert main(["chat", "what is two"]) == 2
    assert 'ask once with `edgeinfer run "QUESTION"`' in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["pull", "show"])
def test_file_that_looks_like_a_name_is_named_with_its_folder(as_json, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf.partaa").write_bytes(b"GGUF")
    hint = as_json(verb, "x.gguf.partaa", code=3)["hint"]
    assert hint == "the file in this folder is ./x.gguf.partaa"


def test_word_after_the_shell_of_a_completion_script_is_refused(capsys):
    assert main(["completion", "bash", "extra"]) == 2
    assert "unrecognized arguments: extra" in capsys.readouterr().err


@pytest.mark.parametrize("typed", [["completion"], ["completion", "csh"], ["snapshots", "lst"]])
def test_errors_show_no_plumbing(as_json, typed):
    message = as_json(*typed, code=2)["message"]
    assert not {"typed", "words", "|"} & set(re.findall(r"\w+|\|", message))


def test_completion_offers_verbs_after_help_and_only_local_models_to_remove(capsys):
    for typed, first in ((["help", "sn"], "snapshots"), (["run", "smollm2-1"], "smollm2-1")):
        assert main(["completion", "words", *typed]) == 0
        assert capsys.readouterr().out.startswith(first)
    for verb in ("rm", "forget"):
        assert main(["completion", "words", verb, ""]) == 1, "nothing is here"
        assert "qwen3" not in capsys.readouterr().out


def test_web_refuses_an_unknown_model_though_an_endpoint_runs(as_json, monkeypatch):
    monkeypatch.setattr("edgeinfer.cli.verbs.web.own_endpoint", lambda *_: pytest.fail("was asked"))
    assert as_json("web", "nosuch", code=3)["code"] == "unknown-model"


def test_endpoint_of_another_home_is_not_ours(monkeypatch):
    def serving(pid, *arguments):
        return RunningLaunch(
            pid=pid, verb="serve", arguments=arguments, age_s=1, apps=1, private_bytes=0, shared_bytes=0
        )

    own_endpoint, other_endpoint = serving(1, "--port", "9000"), serving(2, "m")
    running_here = [own_endpoint]

    def processes(everywhere=False):
        return [*running_here, other_endpoint] if everywhere else running_here

    monkeypatch.setattr("edgeinfer.cli.verbs.launch.processes", processes)
    assert list(launch.urls(Config())) == ["http://127.0.0.1:9000"]
    running_here.append(serving(3))
    assert next(iter(launch.urls(Config()))) == "http://127.0.0.1:8080"


def test_denied_path_is_an_ordinary_error(monkeypatch, capsys):
    def deny(*_):
        raise PermissionError(13, "Permission denied", "/closed/m.gguf")

    monkeypatch.setattr("edgeinfer.cli.verbs.show.run", deny)
    assert main(["show", "m"]) == 2
    assert capsys.readouterr().err.startswith("error: /closed/m.gguf: Permission denied\n\nhint: ")


def test_hint_of_an_action_names_its_help(as_json):
    error = as_json("snapshots", "prune", "nope", code=2)
    assert error["hint"] == "run `edgeinfer snapshots prune --help`"


def test_extra_words_are_named_as_they_were_typed(as_json):
    message = as_json("config", "set", "offline", "true", code=2)["message"]
    assert message == "unrecognized arguments: set offline true"


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_hint_about_an_option_leads_to_the_help_that_describes_it(verb, capsys):
    for name, parser in every_parser():
        with_value = (a for a in parser._actions if a.nargs != 0 and a.help != argparse.SUPPRESS)
        flags = [flag for action in with_value for flag in action.option_strings]
        for flag in flags if name.split()[0] == verb else ():
            with pytest.raises(UsageError) as caught:
                parser.parse_known_args([flag])
            command = re.fullmatch(r"run `edgeinfer (.*) (--help|--help-all)`", caught.value.hint)
            assert command is not None, caught.value.hint
            assert command[1] == name
            with pytest.raises(SystemExit):
                parser.parse_args([command[2]])
            out = capsys.readouterr().out
            assert re.search(rf"^  (-\w( \S+)?, )?{flag}\b", out, re.MULTILINE), flag


def test_empty_path_is_refused_by_each_argument_that_takes_a_file_or_folder():
    n_refused = 0
    for _, parser in every_parser():
        for action in parser._actions:
            if not re.search(r"(?<![@|])\b(FILE|FOLDER|DEST|SRC)\b|jsonl", str(action.metavar)):
                continue  # "" is a text, or the adapters of models.toml
            positionals = [a for a in parser._get_positional_actions() if a.nargs != "?"]
            typed = ["" if a is action else "x" for a in positionals]
            typed = [*(f"{flag}=" for flag in action.option_strings), *typed]
            with pytest.raises(UsageError, match="'' is not a path"):
                parser.parse_known_args(typed or [""])
            n_refused += 1
    assert n_refused > 15


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ("run m hi --max-tokens", "--max-tokens: a value is missing: `--max-tokens N`"),
        ("run m hi --resume", "--resume: a value is missing: `--resume auto|always|never`"),
        ("chat --continue=yes", "--continue: it takes no value, but got 'yes'"),
        ("pull m --sha256=", "--sha256: '' is not a value; is a shell variable unset?"),
        ("serve --allow-host=", "--allow-host: '' is not a value; is a shell variable unset?"),
        ("run m hi --stop=", "--stop: '' is not a value; is a shell variable unset?"),
        ("run m hi --traces /none/t.json", "there is no folder /none"),
        ("show m --ctx -1", "--ctx: '-1' is not a number between 0 and 16,777,216"),
        (
            "pull ./m.gguf --in-place --quantize q4_0",
            "--quantize makes a smaller copy, so it cannot be combined with --in-place",
        ),
        ("list --json=1", "--json: it takes no value, but got '1'"),
        ("verify r.json --log folder", "FILE and --log cannot be combined"),
        (
            "verify --log folder --content c",
            "--content is for a private receipt, which a payload log does not have",
        ),
        ("bench m --streams 0", "--streams: '0' is not a number between 1 and 1,000,000"),
        ("stop --all m", "leave out either the names or --all"),
    ],
)
def test_missing_empty_and_unwanted_values_are_refused(typed, problem, as_json):
    assert as_json(*typed.split(), code=2)["message"].removeprefix("argument ") == problem


def _texts(path: Path) -> Iterator[str]:
    """Yield the texts of a module; `X` stands for each value in an f-string."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            texts = (getattr(piece, "value", None) for piece in node.values)
            yield "".join(text if isinstance(text, str) else "X" for text in texts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_option_of_a_command_in_a_text_is_one_of_that_verb():
    parsers, n_commands = dict(every_parser()), 0
    for path in Path(edgeinfer.__file__).parent.rglob("*.py"):
        commands = (re.findall(r"`edgeinfer ([a-z]+[^`]*)`", text) for text in _texts(path))
        for command in itertools.chain(*commands):
            verb, *typed = command.split()
            name = f"{verb} {typed[0]}" if typed and f"{verb} {typed[0]}" in parsers else verb
            flags = {word.partition("=")[0] for word in typed if word.startswith("--")}
            if name in parsers:
                assert flags <= parsers[name]._option_string_actions.keys(), (path, command)
                n_commands += bool(flags)
    assert n_commands > 20


# --- help


def test_every_verb_shows_examples_that_parse():
    for name, parser in every_parser():
        heading, *examples = (parser.epilog or "").splitlines()
        assert heading == f"{EXAMPLES}:"
        for example in examples:
            program, *typed = shlex.split(example.partition(" < ")[0].partition(" > ")[0])
            assert program == "edgeinfer"
            assert example.split()[1] == name.split()[0]
            build_parser().parse_args(typed)


@pytest.mark.parametrize("limit", ["0", "-5"])
def test_chat_refuses_an_answer_limit_below_one(capsys, limit):
    assert main(["chat", "--max-tokens", limit]) == 2
    assert f"'{limit}' is not a number between 1 and 1,000,000" in capsys.readouterr().err


def test_help_of_run_fits_a_small_terminal_and_help_all_has_the_rest(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for typed in (["run", "--help"], ["help", "run"]):
        with pytest.raises(SystemExit):
            main(typed)
        shown = capsys.readouterr().out
        assert len(shown.splitlines()) <= 24
        assert "--ctx" not in shown
        assert all(flag in shown for flag in ("--temperature", "--timings", "--receipt"))
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])
    assert "--ctx" in capsys.readouterr().out


# --- streams


@pytest.mark.parametrize(
    ("arguments", "code"), [(("list",), 6), (("list", "--json"), 6), (("show", "nosuch", "--json"), 3)]
)
def test_full_disk_under_stdout_is_one_error_and_no_traceback(arguments, code, tmp_path):
    with open("/dev/full", "wb") as full:
        done = _run_program(*arguments, home=tmp_path, stdout=full)
    assert (done.returncode, done.stderr.count("error: ")) == (code, 1), done.stderr
    assert ("cannot write the output: No space left on device" in done.stderr) == (code == 6)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [("run", "nosuch", "hi"), ("run", "nosuch", "hi", "--resume=never")]
)
def test_closed_stdin_is_an_empty_one(arguments, tmp_path):
    done = _run_program(*arguments, home=tmp_path, preexec_fn=lambda: os.close(0))
    assert done.returncode == 3, done.stderr
    assert "nosuch" in done.stderr


def _run_program(*arguments, home, **streams):
    streams |= {"capture_output": False, "stderr": subprocess.PIPE}
    environment = {**os.environ, "EDGEINFER_HOME": str(home)}
    return run(sys.executable, "-m", "edgeinfer", *arguments, check=False, env=environment, **streams)
