"""`warm`, `snapshots`, `ps`, `stop`: snapshots and running processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from edgeinfer.agents.table import AGENTS
from edgeinfer.arguments.launch_args import add_attached_options, add_load_options
from edgeinfer.arguments.verb import Verbs, add_verb, json_option
from edgeinfer.durations import parse_duration


def add(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    _add_warm(verbs)
    _add_snapshots(verbs)
    add_verb(
        verbs,
        "ps",
        "snapshots.ps:ps",
        "what runs, and what it remembered of its latest prompt",
        linux_only=True,
    )
    _add_stop(verbs)


def _add_warm(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "warm",
        "snapshots.warm:warm",
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
        "snapshots.snapshots:snapshots",
        "list, show, take, verify, remove, export and import snapshots",
        linux_only=True,
    )
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(
        dest="action", metavar="list|show|take|verify|rm|prune|export|import|trust"
    )

    def add_action(name: str, about: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=about, parents=[json_option()])

    named = "a snapshot's name, or its model's"
    add_action("show", "one snapshot").add_argument("name", help=named)
    _add_take(add_action("take", "a snapshot of what a running process has loaded; it goes on"))
    add_action("verify", "read every byte and compare").add_argument("name", help=named)
    add_action("rm", "remove").add_argument("name", nargs="+", help=named)
    add_action("list", "all of them (what `edgeinfer snapshots` does)")
    prune = add_action("prune", "remove those this machine refuses, and the oldest beyond the limit")
    prune.add_argument("--all", action="store_true", help="remove every snapshot")
    _add_transfer(add_action)


def _add_transfer(add_action: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """The actions of snapshots that travel."""
    export = add_action("export", "write one, signed, to a folder or a registry for another machine")
    export.add_argument("name", help="a snapshot's name, or its model's")
    export.add_argument(
        "destination", metavar="DEST", help="a folder (an OCI image layout) or oci://REGISTRY/NAME:TAG"
    )
    bring = add_action("import", "take one of another machine, if you trust who signed it")
    bring.add_argument("source", metavar="SRC", help="a folder, or oci://REGISTRY/NAME:TAG")
    bring.add_argument("--name", default="", help="which one of a folder that holds several")
    bring.add_argument(
        "--trust", metavar="FINGERPRINT", default="", help="trust this key from now on, as `trust` does"
    )
    bring.add_argument(
        "--rebuild",
        action="store_true",
        help="have the same built here in the background instead, of the same model and options",
    )
    bring.add_argument("--wait", action="store_true", help="with --rebuild: end when it is built")
    for parser in (export, bring):
        parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    trust = add_action("trust", "say your key and those you trust; or trust one more")
    trust.add_argument("fingerprint", nargs="?", default="", metavar="FINGERPRINT", help="SHA256:…")
    trust.add_argument("--remove", action="store_true", help="do not trust it any more")


def _add_take(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which",
        nargs="?",
        metavar="PID|NAME",
        help="as `edgeinfer ps` shows it, or a model; left out: the endpoint that runs",
    )
    parser.add_argument("--name", default="", help="name of the snapshot, to start from it by name")
    parser.add_argument("--model", help="of a process that has several, this one")
    parser.add_argument(
        "--every",
        type=_duration,
        metavar="DURATION",
        help="again so often while the endpoint runs, if something has changed: 1h, 90s; 0 ends it",
    )
    parser.add_argument("--logged", action="store_true", help=argparse.SUPPRESS)  # by a launcher
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if seconds < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return seconds


def _add_stop(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs, "stop", "snapshots.stop:stop", "end running chats, endpoints or workers", linux_only=True
    )
    parser.add_argument("which", nargs="*", metavar="PID|MODEL", help="as `edgeinfer ps` shows them")
    parser.add_argument("--all", action="store_true", help="all of them")
