"""The parser of every verb: options anywhere among the words, our own errors, a help that fits.

An option has one of three scopes (load, launch, request), told by its group in the parser.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

from edgeinfer.errors import UsageError, WrongTimeError
from edgeinfer.launcher.argv import options_and_words

LOAD = "load options (another value needs another snapshot)"
LAUNCH = "launch options"
ENDPOINT = "endpoint options"
SAMPLING = "sampling"
_TIMES = {LOAD: "load", LAUNCH: "launch", ENDPOINT: "launch", SAMPLING: "request"}
#: Groups that `--help` leaves to `--help-all`.
FOLDED = (LOAD, LAUNCH, SAMPLING)
#: Verbs whose requests come from elsewhere, each with its own sampling.
_ENDPOINTS = ("serve", "batch")
EXAMPLES = "examples"
Verbs = argparse._SubParsersAction  # the name argparse has for what add_subparsers returns
#: More choices than this are not listed in an error.
_MOST_LISTED = 10


class Parser(argparse.ArgumentParser):
    """argparse with options anywhere, none abbreviated, that raises instead of exiting."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"run `{self.prog} --help`")

    def parse_known_args(  # type: ignore[override]  # typeshed: overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse options and words in any order; what follows a verb or an agent is left as it is."""
        positionals = self._get_positional_actions()
        if any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in positionals):
            return super().parse_known_args(args, namespace)
        flags = frozenset(
            flag for action in self._actions if action.nargs == 0 for flag in action.option_strings
        )
        options, words = options_and_words(list(args or ()), flags)
        return super().parse_known_args([*options, *(("--", *words) if words else ())], namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        what = "/".join(action.option_strings) or action.metavar or action.dest
        meant = nearest(str(value), known)
        listed = f": one of {', '.join(known)}" if len(known) <= _MOST_LISTED else ""
        lists = f"`{self.prog} --help` lists them"
        raise UsageError(
            f"{value!r} is not a value of {what}{listed}",
            hint=f"did you mean {meant}? {lists}" if meant else lists,
        )

    def print_help(self, file: Any = None) -> None:
        """Print the help without the groups of options that `--help-all` adds."""
        every, self.usage = self._action_groups, self._short_usage()
        self._action_groups = [group for group in every if group.title not in FOLDED]
        self._print_message(self.format_help(), file or sys.stdout)
        self._action_groups, self.usage = every, None

    def _short_usage(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(None, self._get_positional_actions(), [], prefix="")
        return formatter.format_help().strip().replace(self.prog, f"{self.prog} [options]", 1)

    def format_help(self) -> str:
        """Write the help of the groups there are."""
        actions = [action for group in self._action_groups for action in group._group_actions]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class HelpAll(argparse.Action):
    """`--help-all`: the help with every group of options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(parser.format_help(), end="")  # noqa: T201
        parser.exit()


def refuse_unknown(
    parser: argparse.ArgumentParser, options: argparse.Namespace, unknown: Sequence[str]
) -> None:
    """Raise WrongTimeError for an option of another time, UsageError for anything else left over."""
    verb = options.verb or ""
    for word in unknown:
        found = list(_owners(parser, word.partition("=")[0])) if word.startswith("--") else []
        if found:
            raise _wrong_time(verb, found)
    if unknown:
        prog = f"{parser.prog} {verb}".strip()
        raise UsageError(
            f"unrecognized arguments: {' '.join(unknown)}",
            hint=_what_was_meant(parser, verb, unknown[0]) or f"run `{prog} --help`",
        )


def _what_was_meant(parser: argparse.ArgumentParser, verb: str, word: str) -> str:
    if not word.startswith("-"):
        quoted = 'put the prompt in quotes: `edgeinfer run "Name three colours."`'
        return quoted if verb == "run" else ""
    flags = verbs_of(parser)[verb]._option_string_actions if verb in verbs_of(parser) else {}
    near = nearest(word.partition("=")[0], list(flags))
    return f"did you mean {near}?" if near else ""


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb."""
    verbs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(verbs.choices)


def _owners(parser: argparse.ArgumentParser, flag: str) -> Iterator[tuple[str, argparse.Action, str]]:
    """Find the verbs that take `flag` at one of the times: verb, its action, title of the group."""
    for name, verb in verbs_of(parser).items():
        for group in verb._action_groups:
            for action in group._group_actions:
                if flag in action.option_strings and group.title in _TIMES:
                    yield name, action, group.title


def _wrong_time(verb: str, owners: Sequence[tuple[str, argparse.Action, str]]) -> WrongTimeError:
    _, action, title = owners[0]
    flag, time = action.option_strings[0], _TIMES[title]
    takers = " or ".join(f"`edgeinfer {name}`" for name, _, _ in owners)
    hint = f"give it to {takers}"
    if time == "request" and verb in _ENDPOINTS:
        hint = f'put "{action.dest}" into the body of a request'
    elif time == "launch" and verb == "warm":
        hint += "; any snapshot serves it"
    return WrongTimeError(f"{flag} is an option of {time} time: `{verb}` does not take it", hint=hint)


def add_verb(
    verbs: Verbs[argparse.ArgumentParser],
    name: str,
    run: str,
    about: str,
    *examples: str,
    json: bool = True,
    linux_only: bool = False,
) -> argparse.ArgumentParser:
    """Add a verb that calls `run` (MODULE:FUNCTION in `edgeinfer.cli.verbs`, imported late).

    The function takes the options and the host and returns a `Result`. `examples` are what follows
    `edgeinfer`.
    """
    parser = add_action(verbs, name, about, *examples, json=json)
    parser.set_defaults(run=f"edgeinfer.cli.verbs.{run}", linux_only=linux_only)
    return parser


def add_action(
    actions: Verbs[argparse.ArgumentParser], name: str, about: str, *examples: str, json: bool = True
) -> argparse.ArgumentParser:
    """Add an action of a verb, such as `snapshots show`."""
    return actions.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        parents=[json_option()] if json else [],
        epilog="\n".join([f"{EXAMPLES}:", *(f"  edgeinfer {words}" for words in examples)]),
    )


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option of what deletes something, and asks on a terminal."""
    parser.add_argument("--yes", action="store_true", help="do not ask")


def add_model(
    parser: argparse.ArgumentParser, help: str = "model name or GGUF file (default: the configured one)"
) -> None:
    """Add the model as an optional word."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=help)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option of what reports its progress."""
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


@cache
def json_option() -> argparse.ArgumentParser:
    """Make the parent of every parser that has `--json`; its default stands at the root."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="the outcome as one JSON object"
    )
    return parser


def wants_json(typed: Sequence[str]) -> bool:
    """Tell whether `--json` was typed as an option, for a command line that may have other mistakes."""
    return hasattr(json_option().parse_known_args(list(typed))[0], "json")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the known word that was probably meant, "" if none is close."""
    import difflib  # 5 ms, for mistakes alone

    spelled = {one.lower().lstrip("-"): one for one in known}
    near = difflib.get_close_matches(word.lower().lstrip("-"), spelled, n=1, cutoff=0.65)
    return spelled[near[0]] if near else ""
