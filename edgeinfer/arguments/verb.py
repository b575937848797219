"""Adds one verb to the command line, with what every verb has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache

EXAMPLES = "examples"
Verbs = argparse._SubParsersAction  # the name argparse has for what add_subparsers returns


def add_verb(
    verbs: Verbs[argparse.ArgumentParser],
    name: str,
    run: str,
    about: str,
    *examples: str,
    json: bool = True,
    linux_only: bool = False,
) -> argparse.ArgumentParser:
    """Add a verb that calls `run` (FAMILY.MODULE:FUNCTION in `edgeinfer.commands`, imported late).

    The function takes the options and the host and returns a `Result`. `examples` are what follows
    `edgeinfer`.
    """
    parser = add_action(verbs, name, about, *examples, json=json)
    parser.set_defaults(run=f"edgeinfer.commands.{run}", linux_only=linux_only)
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
