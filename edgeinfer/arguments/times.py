"""The three times of options, each the title of its group in the parser, and how to name it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from edgeinfer.arguments.verb import nearest
from edgeinfer.errors import UsageError, WrongTimeError

LOAD = "load options (another value needs another snapshot)"
LAUNCH = "launch options"
ENDPOINT = "endpoint options"
SAMPLING = "sampling"
_TIMES = {LOAD: "load", LAUNCH: "launch", ENDPOINT: "launch", SAMPLING: "request"}
#: Groups that `--help` leaves to `--help-all`.
FOLDED = (LOAD, LAUNCH, SAMPLING)
#: Verbs whose requests come from elsewhere, each with its own sampling.
_ENDPOINTS = ("serve", "batch")


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
