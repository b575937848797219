"""The parsers of all verbs: options may stand anywhere, and mistakes raise UsageError.

Options are grouped by scope (load, launch, request). Some groups are shown only by `--help-all`.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from edgeinfer import __version__
from edgeinfer.errors import UsageError, WrongScopeError
from edgeinfer.launcher.argv import options_and_words

LOAD = "load options (another value needs another snapshot)"
LAUNCH = "launch options"
ENDPOINT = "endpoint options"
SAMPLING = "sampling"
_SCOPES = {LOAD: "load", LAUNCH: "launch", ENDPOINT: "launch", SAMPLING: "request"}
#: Groups of options that only `--help-all` shows.
FOLDED = (LOAD, LAUNCH, SAMPLING)
#: Verbs with load, launch or request options.
_SCOPED_VERBS = ("chat", "run", "serve", "batch", "eval", "warm")
#: Verbs that get sampling options in requests, not on the command line.
_ENDPOINTS = ("serve", "batch")
EXAMPLES = "examples"


class Verb(NamedTuple):
    """A row of the table of verbs: summary in `--help`, and examples (without `edgeinfer`)."""

    summary: str
    examples: tuple[str, ...]


VERBS = {
    "chat": Verb(
        "chat in the terminal; the default of `edgeinfer`", ("chat qwen3-4b", "chat --continue")
    ),
    "run": Verb(
        "answer one prompt on stdout",
        ('run --temperature 0 --timings --receipt r.json "Sum up." < notes.txt',),
    ),
    "serve": Verb(
        "answer OpenAI, Anthropic, Ollama and plain HTTP clients", ("serve qwen3-4b --port 8080",)
    ),
    "web": Verb(
        "chat in the browser, with the same conversations as in the terminal", ("web", "web --json")
    ),
    "launch": Verb(
        "run a coding agent (claude, codex, …) on a local model",
        ("launch codex", "launch --model qwen3-4b claude --resume"),
    ),
    "batch": Verb(
        "answer a file of requests in OpenAI's batch format", ("batch requests.jsonl answers.jsonl",)
    ),
    "verify": Verb(
        "check by a receipt that a model generates an answer",
        ("verify receipt.json", "verify *.json reply.sse", "verify --log payloads --sample 1%"),
    ),
    "eval": Verb(
        "score models, prompts or adapters on a set of items, and compare them",
        ("eval basics qwen3-4b qwen3-1.7b", "eval mine.jsonl qwen3-4b --system A --system B"),
    ),
    "pull": Verb(
        "fetch, verify and store a model; an interrupted pull continues",
        (
            "pull qwen3-4b",
            "pull bartowski/Qwen_Qwen3-4B-GGUF:Q4_K_M",
            "pull ~/Downloads/model.gguf --name mine",
        ),
    ),
    "list": Verb(
        "list models on this machine, and models that can be pulled", ("list --fits", "list coder")
    ),
    "show": Verb(
        "show a model's architecture, sizes, licence, source and memory needs",
        ("show qwen3-4b --ctx 32768",),
    ),
    "rm": Verb("remove models, but not files that are used in place", ("rm qwen3-4b",)),
    "forget": Verb(
        "delete cached prefixes of a model, of a conversation, or all",
        ("forget qwen3-4b", "forget --conversation chat-12"),
    ),
    "quantize": Verb(
        "make a smaller copy of a model, and measure the loss",
        ("quantize qwen3-4b:F16 Q4_K_M", "quantize qwen3-4b:F16 --compare Q4_K_M,Q8_0"),
    ),
    "bench": Verb(
        "benchmark models (pp, tg), optionally against other servers",
        ("bench qwen3-4b", "bench qwen3-4b --against http://127.0.0.1:11434#qwen3:4b"),
    ),
    "warm": Verb(
        "build a snapshot of the loaded model: later launches take about 0.1 s",
        ("warm qwen3-4b", 'warm qwen3-4b --system "You are a pirate." --name pirate'),
    ),
    "snapshots": Verb(
        "list, show, take, verify, remove, export or import snapshots",
        ("snapshots", "snapshots show my-snapshot"),
    ),
    "tools": Verb("list the tools that the model may call in chat and run", ("tools", "tools --check")),
    "ps": Verb("list running processes; --usage: tokens and times by day", ("ps", "ps --usage")),
    "stop": Verb("stop running chats, endpoints or workers", ("stop qwen3-4b", "stop --all")),
    "drift": Verb(
        "compare this week's prompts and answers with last week's",
        ("drift", "drift qwen3-4b --until 2026-11-22 --against 2026-11-01"),
    ),
    "backend": Verb("list, install or remove libraries for GPUs", ("backend", "backend install cuda")),
    "doctor": Verb("check this machine, and print commands that fix it", ("doctor",)),
    "update": Verb(
        "update this program to a release that is verified and has answered here",
        ("update", "update --back"),
    ),
    "version": Verb("show the versions of edgeinfer and its components", ("version --licenses",)),
    "config": Verb(
        "show every configuration key with its value, and the path of the file", ("config",)
    ),
    "completion": Verb(
        "print a completion script for bash, zsh or fish",
        ("completion bash > ~/.local/share/bash-completion/completions/edgeinfer",),
    ),
}

LINUX_ONLY = ("bench", "warm", "snapshots", "ps", "stop", "update")
_WITHOUT_JSON = ("chat", "serve")
#: Verbs and actions that are suggested only if no other one is similar to the typed word.
_DESTRUCTIVE = frozenset(("rm", "forget", "stop", "prune"))
#: Action of another program → the action of edgeinfer that the error message suggests.
_OTHER_COMMANDS = {"remove": "rm", "delete": "rm", "ls": "list"}
#: Verb → hint if more words were typed than the verb takes.
_EXTRA_WORD_HINTS = {
    "run": 'put the prompt in quotes: `edgeinfer run "What is photosynthesis?"`',
    "config": "`edgeinfer config` shows the path of the file: set keys there",
}
#: Arguments that may be "": texts, and options for which "" means the model's own value.
_MAY_BE_EMPTY = ("prompt", "system", "lora", "draft")
#: Matches the metavariable of an argument that is a path.
_PATH = re.compile(r"FILE|FOLDER|DEST|SRC|\w+\.jsonl")
#: An error message lists an option's allowed values if there are at most this many.
_MOST_LISTED = 10


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes options anywhere, but not abbreviated. Mistakes raise UsageError."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "it takes no value, but got")
        raise UsageError(message, hint=f"run `{self.help_command(message)}`")

    def help_command(self, message: str) -> str:
        """Return the help command, for a hint, that describes every option that `message` names.

        The command is `edgeinfer VERB --help-all` if `--help` leaves out one of the options.
        """
        folded = (group for group in self._action_groups if group.title in FOLDED)
        actions = (action for group in folded for action in group._group_actions)
        flags = {flag for action in actions for flag in action.option_strings}
        named = flags.intersection(re.findall(r"--?[\w-]+", message))
        return f"{self.prog} {'--help-all' if named else '--help'}"

    def parse_known_args(  # type: ignore[override]  # typeshed has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse options and positionals in any order.

        Words after the name of a verb, an action or an agent are not parsed here.
        """
        actions = self._get_positional_actions()
        if any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in actions):
            return super().parse_known_args(args, namespace)
        switches = (action for action in self._actions if action.nargs == 0)
        flags = frozenset(flag for action in switches for flag in action.option_strings)
        options, positionals = options_and_words(list(args or ()), flags)
        operands = ["--", *positionals] if positionals else []
        parsed, unknown = super().parse_known_args([*options, *operands], namespace)
        return parsed, [word for word in unknown if word != "--"]

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Return the number of values of an argument. Raises ArgumentError if an option has none."""
        if action.option_strings and action.nargs is None and not arg_strings_pattern.startswith("A"):
            choices = "|".join(map(str, action.choices or ()))
            form = f"{action.option_strings[-1]} {action.metavar or choices or action.dest.upper()}"
            raise argparse.ArgumentError(action, f"a value is missing: `{form}`")
        return super()._match_argument(action, arg_strings_pattern)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Return the values of an argument. Raises ArgumentError if "" is not allowed."""
        # words of another parser or program
        is_passed_on = action.nargs in (argparse.PARSER, argparse.REMAINDER)
        if "" in arg_strings and not is_passed_on and action.dest not in _MAY_BE_EMPTY:
            kind = "path" if _PATH.match(str(action.metavar)) else "value"
            raise argparse.ArgumentError(action, f"'' is not a {kind}; is a shell variable unset?")
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        other = _OTHER_COMMANDS.get(str(value))
        suggestion = other if other in choices else nearest(str(value), choices)
        listed = f" (allowed: {', '.join(choices)})" if len(choices) <= _MOST_LISTED else ""
        if isinstance(action, argparse._SubParsersAction):
            message = f"{self.prog.removeprefix('edgeinfer ')} has no action {value!r}"
        else:
            argument = "/".join(action.option_strings) or action.metavar or action.dest
            message = f"{value!r} is not a value of {argument}{listed}"
        lists = f"`{self.help_command(message)}` lists them"
        raise UsageError(message, hint=f"did you mean {suggestion}? {lists}" if suggestion else lists)

    def print_help(self, file: Any = None) -> None:
        """Print the help without the groups that `--help-all` adds."""
        every, self.usage = self._action_groups, self._short_usage()
        self._action_groups = [group for group in every if group.title not in FOLDED]
        self._print_message(self.format_help(), file or sys.stdout)
        self._action_groups, self.usage = every, None

    def _short_usage(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(None, self._get_positional_actions(), [], prefix="")
        return formatter.format_help().strip().replace(self.prog, f"{self.prog} [options]", 1)


class HelpAll(argparse.Action):
    """The option `--help-all`: prints the help with all groups."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(parser.format_help(), end="")  # noqa: T201
        parser.exit()


@cache
def build_parser(verb: str | None = None) -> Parser:
    """Return the (cached) parser with the arguments of `verb`, or of every verb (None)."""
    parser = Parser(
        prog="edgeinfer",
        description="Local language models that start at once.",
        epilog=f"""{EXAMPLES}:
  edgeinfer                         chat with the default model
  edgeinfer run "What is a virus?"  answer one prompt
  edgeinfer help run                the options of a verb""",
    )
    parser.add_argument("--version", action="version", version=f"edgeinfer {__version__}")
    parser.set_defaults(json=False)
    verbs: argparse._SubParsersAction[Any] = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, row in VERBS.items():
        added = add_action(verbs, name, row.summary, *row.examples, json=name not in _WITHOUT_JSON)
        if verb in (None, name) and hasattr(module_of(name), "add_arguments"):
            module_of(name).add_arguments(added)
    return parser


def module_of(verb: str) -> ModuleType:
    return importlib.import_module(f"edgeinfer.cli.verbs.{verb}")


def refuse_unknown(
    parser: argparse.ArgumentParser, options: argparse.Namespace, unknown: Sequence[str]
) -> None:
    """Raise WrongScopeError for an option that another verb has, UsageError for unknown words."""
    verb = options.verb or ""
    for word in unknown:
        owners = list(_owners(word.partition("=")[0])) if word.startswith("--") else []
        if owners:
            raise _wrong_scope(verb, owners)
    if unknown:
        action = getattr(options, "action", None) if verb == "snapshots" else None
        prog = " ".join(filter(None, (parser.prog, verb, action)))
        # argparse takes the value of an unknown option as a positional argument, which can make a later
        # word unknown; so if an option is unknown, the error names only options
        named = [word for word in unknown if word.startswith("-")] or unknown
        step = _what_was_meant(parser, verb, named[0]) or f"run `{prog} --help`"
        raise UsageError(f"unrecognized arguments: {' '.join(named)}", hint=step)


#: Short options of llama.cpp's programs and of Ollama, and what they are called here.
_LLAMA_CPP_FLAGS = {
    "-c": "--ctx",
    "-n": "--max-tokens",
    "-ngl": "--gpu-layers",
    "-p": "--port",
    "-t": "--threads",
    "--ctx-size": "--ctx",
    "--n-gpu-layers": "--gpu-layers",
    "--n-predict": "--max-tokens",
}


def _what_was_meant(parser: argparse.ArgumentParser, verb: str, word: str) -> str:
    if not word.startswith("-"):
        return _EXTRA_WORD_HINTS.get(verb, "")
    flags = verbs_of(parser)[verb]._option_string_actions if verb in verbs_of(parser) else {}
    flag = word.partition("=")[0]
    near = nearest(flag, [*flags, "--model"])
    if verb == "chat" and flag in ("-v", "-V"):
        return "did you mean `edgeinfer --version`?"
    if flag == "-m" or (near == "--model" and near not in flags):
        typed = flag if flag == "-m" else "--model"
        return f"name the model without `{typed}`: `edgeinfer {verb} MODEL`"
    if verb == "run" and flag in ("-p", "--prompt"):
        return f'type the prompt without `{flag}`: `edgeinfer run MODEL "PROMPT"`'
    near = _LLAMA_CPP_FLAGS[flag] if _LLAMA_CPP_FLAGS.get(flag) in flags else near
    return f"did you mean {near}?" if near else ""


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    verbs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(verbs.choices)


def _owners(flag: str) -> Iterator[tuple[str, argparse.Action, str]]:
    """Yield each verb that has the option `flag`, with its action and the title of its group."""
    for name in _SCOPED_VERBS:
        for group in verbs_of(build_parser(name))[name]._action_groups:
            for action in group._group_actions:
                if flag in action.option_strings and group.title in _SCOPES:
                    yield name, action, group.title


def _wrong_scope(verb: str, owners: Sequence[tuple[str, argparse.Action, str]]) -> WrongScopeError:
    _, action, title = owners[0]
    flag, scope = action.option_strings[0], _SCOPES[title]
    takers = " or ".join(f"`edgeinfer {name}`" for name, _, _ in owners)
    hint = f"use it with {takers}"
    if scope == "request" and verb in _ENDPOINTS:
        hint = f'put "{action.dest}" into the body of the request'
    elif scope == "launch" and verb == "warm":
        hint += "; it works with any snapshot"
    return WrongScopeError(f"{flag} is a {scope} option: `{verb}` does not take it", hint=hint)


def add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    *examples: str,
    json: bool = True,
) -> argparse.ArgumentParser:
    """Add an action of a verb, such as `snapshots show`; return the action's parser.

    `examples` for the help begin without `edgeinfer`. With `json`, the action accepts `--json`.
    """
    return actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        parents=[json_option()] if json else [],
        epilog="\n".join([f"{EXAMPLES}:", *(f"  edgeinfer {positionals}" for positionals in examples)]),
    )


def add_option(parser: argparse._ActionsContainer, usage: str, help: str, **settings: Any) -> None:
    """Add an option by its usage: `--quiet` (a switch), `--name NAME`, or `--file FILE...` (a list)."""
    flag, _, metavar = usage.partition(" ")
    if not metavar:
        settings.setdefault("action", "store_true")
    else:
        settings["metavar"] = metavar.removesuffix("...")
    if metavar.endswith("..."):
        settings = {"action": "append", "default": []} | settings
    parser.add_argument(flag, help=help, **settings)


@cache
def json_option() -> argparse.ArgumentParser:
    """Return a parser with `--json`, for argparse's `parents`. The root parser sets the default."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object"
    )
    return parser


def wants_json(typed: Sequence[str]) -> bool:
    """Return whether `--json` was typed, even if the command line is otherwise wrong."""
    try:
        return hasattr(json_option().parse_known_args(list(typed))[0], "json")
    except argparse.ArgumentError:  # `--json=1`
        return True


def nearest(word: str, candidates: Sequence[str]) -> str:
    """Return the candidate most similar to `word`, or one that begins with `word`; "" for none.

    A candidate with the letters of `word` in another order counts as similar. A verb that deletes or
    stops something is returned only if no other verb is similar.
    """
    from difflib import get_close_matches  # slow import (5 ms)

    from edgeinfer.models.lookup import similar_names  # needed only after a mistake

    swapped = [name for name in candidates if sorted(name) == sorted(word)]
    near = next(iter(similar_names(word, (), candidates) or swapped), "")
    harmless = [name for name in candidates if name not in _DESTRUCTIVE] if near in _DESTRUCTIVE else []
    return next(iter(get_close_matches(word, harmless, 1)), near)
