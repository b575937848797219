"""`warm`, `snapshots`, `ps`, `stop`: snapshots and running processes."""

from __future__ import annotations

import argparse

from edgeinfer.agents.table import AGENTS
from edgeinfer.arguments.launch_args import add_attached_options, add_load_options
from edgeinfer.arguments.verb import Verbs, add_verb, json_option


def add(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    _add_warm(verbs)
    _add_snapshots(verbs)
    add_verb(
        verbs, "ps", "ps:ps", "what runs, and what it remembered of its latest prompt", linux_only=True
    )
    _add_stop(verbs)


def _add_warm(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "warm",
        "warm:warm",
        "build a snapshot of the loaded model: later launches take a tenth of a second",
        linux_only=True,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model's name or a GGUF file; left out: the default"
    )
    parser.add_argument(
        "--system", metavar="TEXT|@FILE", default="", help="system prompt to compute in advance"
    )
    parser.add_argument(
        "--agent",
        choices=tuple(AGENTS),
        metavar="NAME",
        help="no snapshot: read what this agent (`launch --list`) begins with, and keep it on the disk",
    )
    parser.add_argument("--name", default="", help="name of this snapshot, beside others of the model")
    add_attached_options(parser)
    parser.add_argument("--load-options", help=argparse.SUPPRESS)  # all of them in JSON (`watch_build`)
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_load_options(parser)


def _add_snapshots(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "snapshots",
        "snapshots:snapshots",
        "list, show, verify and remove snapshots",
        linux_only=True,
    )
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(dest="action", metavar="list|show|verify|rm|prune")

    def add_action(name: str, about: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=about, parents=[json_option()])

    named = "a snapshot's name, or its model's"
    add_action("show", "one snapshot").add_argument("name", help=named)
    add_action("verify", "read every byte and compare").add_argument("name", help=named)
    add_action("rm", "remove").add_argument("name", nargs="+", help=named)
    add_action("list", "all of them (what `edgeinfer snapshots` does)")
    prune = add_action("prune", "remove those this machine refuses, and the oldest beyond the limit")
    prune.add_argument("--all", action="store_true", help="remove every snapshot")


def _add_stop(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs, "stop", "stop:stop", "end running chats, endpoints or workers", linux_only=True
    )
    parser.add_argument("which", nargs="*", metavar="PID|MODEL", help="as `edgeinfer ps` shows them")
    parser.add_argument("--all", action="store_true", help="all of them")
