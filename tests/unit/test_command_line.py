"""Every verb is one function of one signature, and `--json` means the same after each of them."""

import argparse
import importlib
import inspect
import json
import typing

import pytest

from edgeinfer import cli
from edgeinfer.arguments.verb import wants_json
from edgeinfer.host import Host
from edgeinfer.result import Result


def verbs() -> dict[str, argparse.ArgumentParser]:
    parser = cli.build_parser()
    actions = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return actions.choices


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_a_verb_is_a_function_of_options_and_host_that_returns_a_result(verb):
    module, _, name = verbs()[verb].get_default("run").partition(":")
    function = getattr(importlib.import_module(module), name)
    hints = typing.get_type_hints(function)
    needed = [
        hints[parameter.name]
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
    ]
    assert needed == [argparse.Namespace, Host]
    assert issubclass(hints["return"], Result)


@pytest.mark.parametrize(
    ("typed", "wanted"),
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
def test_json_is_an_option_and_never_a_word(typed, wanted):
    assert cli.build_parser().parse_args(typed).json is wanted
    assert wants_json(typed) is wanted


@pytest.mark.parametrize(
    "typed",
    [("show", "--json", "--ctx", "many"), ("show", "--ctx", "many", "--json"), ("pul", "--json")],
)
def test_a_command_line_with_a_mistake_still_answers_in_json(typed, capsys):
    assert cli.main(typed) == 2
    out = capsys.readouterr()
    assert json.loads(out.out)["error"]["code"] == "usage"
    assert out.err == ""


def test_a_prompt_that_looks_like_an_option_does_not_change_the_output(capsys):
    assert cli.main(["show", "--", "--json"]) != 0
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("error: ")


def test_a_verb_of_snapshots_is_refused_off_linux(capsys, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert cli.main(["ps", "--json"]) == 7
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "snapshots-unavailable"
    assert "Linux" in error["message"]


@pytest.mark.parametrize(
    ("typed", "time", "place"),
    [
        (("warm", "m", "--temperature", "0.5"), "request", "`edgeinfer chat` or `edgeinfer run`"),
        (("serve", "--top-k=5"), "request", 'put "top_k" into the body of a request'),
        (("batch", "a", "b", "--temp", "0"), "request", 'put "temperature" into the body'),
        (("warm", "m", "--port", "8000"), "launch", "`edgeinfer serve`; any snapshot serves it"),
        (("warm", "--resume", "never"), "launch", "`edgeinfer chat`"),
        (("run", "m", "x", "--port", "8000"), "launch", "`edgeinfer serve`"),
        (("pull", "m", "--ctx", "512"), "load", "`edgeinfer warm`"),
        (("ps", "--kv-type=q8_0"), "load", "`edgeinfer chat`"),
    ],
)
def test_an_option_of_another_time_is_refused_with_its_place(typed, time, place, capsys):
    assert cli.main([*typed, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "wrong-time"
    assert f"is an option of {time} time: `{typed[0]}` does not take it" in error["message"]
    assert place in error["hint"]


def test_an_option_of_no_time_is_just_unknown(capsys):
    assert cli.main(["warm", "m", "--colour", "red", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "usage"
    assert error["hint"] == "run `edgeinfer warm --help`"
