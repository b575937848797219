"""Convert command-line options to values for the engine; the configuration supplies defaults.

An option has a scope: load (another value needs another snapshot), launch, or request. Only this module
combines options of several scopes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from edgeinfer.config.config_file import Config, LoadConfig
from edgeinfer.config.load_options import LOAD_OPTIONS
from edgeinfer.config.sampling_options import TYPED
from edgeinfer.errors import UsageError
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.requests import Constraint, Grammar, JsonSchema

_MAX_TEXT_BYTES = 64 << 20
_GBNF_HINT = 'write each rule with `::=`, e.g. `root ::= "yes" | "no"`'


def load_options(options: argparse.Namespace, config: LoadConfig) -> LoadOptions:
    """Combine the load options of the command line with the configured ones; typed options win."""
    flags = [option for option in LOAD_OPTIONS if option.flag]
    typed = {option.field: getattr(options, option.field, None) for option in flags}
    configured = {option.field: config.value(option) for option in LOAD_OPTIONS if option.key}
    typed_values = {field: value for field, value in typed.items() if value is not None}
    return msgspec.convert(configured | typed_values, LoadOptions)


def typed_sampling(options: argparse.Namespace) -> dict[str, float | int | None]:
    """Return the sampling options that were typed, such as `{"temperature": 0.2}`."""
    typed = {option.field: getattr(options, option.field, None) for option in TYPED}
    return {field: value for field, value in typed.items() if value is not None}


def system_prompt(typed: str, config: Config) -> str:
    """Return the system prompt that the value of `--system` means.

    `typed` is `@FILE`, the name of a prompt in the configuration, or the prompt itself. Raises
    UsageError if the file cannot be read.
    """
    if typed.startswith("@"):
        return _file_text(typed[1:], "--system")
    return config.chat.system_prompts.get(typed, typed)


def answer_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of GenerateRequest for `--stop`, `--think`, `--schema` and `--grammar`.

    Raises UsageError if a schema or grammar is invalid, or its file cannot be read.
    """
    think = {} if options.think is None else {"enable_thinking": options.think == "on"}
    return {
        "stop": tuple(options.stop),
        "template_options": think,
        "reasoning_budget": 0 if options.think == "off" else None,
        "constraint": _constraint(options.schema, options.grammar),
    }


def _constraint(schema: str | None, grammar: str | None) -> Constraint | None:
    if grammar is not None:
        if ":=" in grammar and "::=" not in grammar:
            raise UsageError("--grammar: `:=` is not GBNF", hint=_GBNF_HINT)
        return Grammar(grammar if "::=" in grammar else _file_text(grammar, "--grammar"))
    if schema is None:
        return None
    text = schema if schema.lstrip().startswith("{") else _file_text(schema, "--schema")
    try:
        return JsonSchema(msgspec.json.decode(text, type=dict[str, Any]))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"--schema: {error}", hint="give a JSON schema, or a file with one") from error


def _file_text(path: str, option: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            return read_text(file, option)
    except (OSError, ValueError) as error:
        reason, hint = "the file is not UTF-8 text", "save the file as UTF-8"
        if isinstance(error, OSError):
            reason, hint = str(error.strerror), "check the path and the file's permissions"
        raise UsageError(f"{option} cannot be read: {path}: {reason}", hint=hint) from error


def read_text(file: BinaryIO, name: str, errors: str = "strict") -> str:
    """Read UTF-8 text to its end; `errors` is that of `bytes.decode`.

    Raises UsageError about `name` after 64 MiB, because files such as /dev/zero have no end.
    """
    data = file.read(_MAX_TEXT_BYTES + 1)
    if len(data) > _MAX_TEXT_BYTES:
        raise UsageError(f"{name} has more than {_MAX_TEXT_BYTES >> 20} MiB", hint="use a shorter text")
    return data.decode("utf-8", errors)
