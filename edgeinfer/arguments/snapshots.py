"""`warm`, `snapshots`, `ps`, `stop`: snapshots and running processes."""

from __future__ import annotations

import argparse
import sys

from edgeinfer.arguments.launch_args import add_load_option, add_load_options
from edgeinfer.errors import SnapshotsUnavailableError
from edgeinfer.host import Host
from edgeinfer.load_options import N_THREADS
from edgeinfer.result import Result


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    _add_warm(verbs)
    _add_snapshots(verbs)
    _add_ps(verbs)
    _add_stop(verbs)


def _linux_only() -> None:
    """Raise SnapshotsUnavailableError elsewhere: launches work there, cold."""
    if sys.platform != "linux":
        raise SnapshotsUnavailableError(
            "snapshots need Linux; every launch here is a cold start", hint=""
        )


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _add_warm(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "warm", help="build a snapshot of the loaded model: later launches take a tenth of a second"
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model's name or a GGUF file; left out: the default"
    )
    parser.add_argument(
        "--system", metavar="TEXT|@FILE", default="", help="system prompt to compute in advance"
    )
    parser.add_argument("--name", default="", help="name of this snapshot, beside others of the model")
    add_load_option(parser, N_THREADS)
    parser.add_argument("--load-options", help=argparse.SUPPRESS)  # all of them in JSON (`watch_build`)
    parser.add_argument(
        "--lora",
        action="append",
        metavar="FILE",
        default=[],
        help="LoRA adapter to load with the model",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_load_options(parser)
    _json(parser)
    parser.set_defaults(command=_cmd_warm)


def _cmd_warm(options: argparse.Namespace, host: Host) -> Result:
    _linux_only()
    from edgeinfer.commands.warm import warm

    return warm(options, host)


def _add_snapshots(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("snapshots", help="list, show, verify and remove snapshots")
    actions = parser.add_subparsers(dest="action", metavar="list|show|verify|rm|prune")
    for name, words in (
        ("show", "one snapshot"),
        ("verify", "read every byte and compare"),
        ("rm", "remove"),
    ):
        action = actions.add_parser(name, help=words)
        action.add_argument(
            "name", nargs="+" if name == "rm" else None, help="a snapshot's name, or its model's"
        )
        _json(action)
    _json(actions.add_parser("list", help="all of them (what `edgeinfer snapshots` does)"))
    prune = actions.add_parser(
        "prune", help="remove those this machine refuses, and the oldest beyond the limit"
    )
    prune.add_argument("--all", action="store_true", help="remove every snapshot")
    _json(prune)
    _json(parser)
    parser.set_defaults(command=_cmd_snapshots, action="list")


def _cmd_snapshots(options: argparse.Namespace, host: Host) -> Result:
    _linux_only()
    from edgeinfer.commands.snapshots import snapshots

    return snapshots(options, host)


def _add_ps(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("ps", help="running chats, endpoints and workers")
    _json(parser)
    parser.set_defaults(command=_cmd_ps)


def _cmd_ps(options: argparse.Namespace, host: Host) -> Result:
    _linux_only()
    from edgeinfer.commands.ps import ps

    return ps()


def _add_stop(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("stop", help="end running chats, endpoints or workers")
    parser.add_argument("which", nargs="*", metavar="PID|MODEL", help="as `edgeinfer ps` shows them")
    parser.add_argument("--all", action="store_true", help="all of them")
    _json(parser)
    parser.set_defaults(command=_cmd_stop)


def _cmd_stop(options: argparse.Namespace, host: Host) -> Result:
    _linux_only()
    from edgeinfer.commands.stop import stop

    return stop(options)
