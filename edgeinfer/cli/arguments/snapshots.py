"""`warm`, `snapshots`, `ps`, `stop`: snapshots and running processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from edgeinfer.cli.options import SYSTEM, add_attached_options, add_load_options
from edgeinfer.cli.parser import Verbs, add_action, add_model, add_quiet, add_verb, add_yes


def add(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Register this family's verbs."""
    _add_warm(verbs)
    _add_snapshots(verbs)
    ps = add_verb(
        verbs,
        "ps",
        "ps:ps",
        "list running processes, and what each had cached of its latest prompt",
        "ps",
        linux_only=True,
    )
    _add_everywhere(ps)
    _add_stop(verbs)


def _add_warm(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "warm",
        "warm:warm",
        "build a snapshot of the loaded model: later launches take a tenth of a second",
        "warm qwen3-4b",
        'warm qwen3-4b --system "You are a pirate." --name pirate',
        linux_only=True,
    )
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT|@FILE", default="", help=SYSTEM)
    parser.add_argument("--agent", help=argparse.SUPPRESS)  # removed: answered with what to type
    parser.add_argument(
        "--preload",
        action="store_true",
        help="no snapshot: read the model's files into memory before they are needed",
    )
    parser.add_argument("--name", default="", help="name of this snapshot")
    add_attached_options(parser)
    parser.add_argument("--load-options", help=argparse.SUPPRESS)  # all of them in JSON (`watch_build`)
    add_quiet(parser)
    add_load_options(parser)


def _add_snapshots(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "snapshots",
        "snapshots:snapshots",
        "list, show, take, verify, remove, export and import snapshots",
        "snapshots",
        "snapshots show my-snapshot",
        linux_only=True,
    )
    parser.set_defaults(action="list")
    actions = parser.add_subparsers(
        dest="action", metavar="list|show|take|verify|rm|prune|export|import|trust"
    )

    def add(name: str, about: str, *words: str) -> argparse.ArgumentParser:
        return add_action(actions, name, about, " ".join(("snapshots", name, *words)))

    add("list", "list all of them, as `edgeinfer snapshots` does")
    _add_name(add("show", "show one", "my-snapshot"))
    _add_take(add("take", "build one of what a running process has loaded", "--name my-snapshot"))
    _add_name(add("verify", "read every byte and compare", "my-snapshot"))
    rm = add("rm", "remove one or more", "my-snapshot")
    _add_name(rm, nargs="+")
    prune = add("prune", "remove those this machine refuses, and the oldest beyond the limit")
    prune.add_argument("--all", action="store_true", help="remove every snapshot")
    for parser in (rm, prune):
        add_yes(parser)
    _add_transfer(add)


def _add_name(parser: argparse.ArgumentParser, **more: Any) -> None:
    parser.add_argument(
        "name", metavar="SNAPSHOT", help="its name, or its model's if it has one", **more
    )


def _add_transfer(add: Callable[..., argparse.ArgumentParser]) -> None:
    export = add(
        "export",
        "write one, signed, to a folder or a registry for another machine",
        "my-snapshot ~/exported",
    )
    _add_name(export)
    export.add_argument(
        "destination", metavar="DEST", help="a folder (an OCI image layout) or oci://REGISTRY/NAME:TAG"
    )
    bring = add("import", "import one of another machine, if you trust who signed it", "~/exported")
    bring.add_argument("source", metavar="SRC", help="a folder, or oci://REGISTRY/NAME:TAG")
    bring.add_argument("--name", default="", help="which one of a folder that holds several")
    bring.add_argument(
        "--trust", metavar="FINGERPRINT", default="", help="trust this key from now on, as `trust` does"
    )
    bring.add_argument(
        "--rebuild",
        action="store_true",
        help="build the same here in the background instead, from the same model and options",
    )
    bring.add_argument("--wait", action="store_true", help="with --rebuild: return once it is built")
    for parser in (export, bring):
        add_quiet(parser)
    trust = add("trust", "list your key and those you trust, or trust one more", "SHA256:…")
    trust.add_argument("fingerprint", nargs="?", default="", metavar="FINGERPRINT", help="SHA256:…")
    trust.add_argument("--remove", action="store_true", help="stop trusting FINGERPRINT")


def _add_take(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which",
        nargs="?",
        metavar="PID|NAME",
        help="as `edgeinfer ps` shows it, or a model (default: the endpoint that runs)",
    )
    parser.add_argument("--name", default="", help="name of the snapshot")
    parser.add_argument("--model", help="of a process that has several, this one")
    add_quiet(parser)


def _add_stop(verbs: Verbs[argparse.ArgumentParser]) -> None:
    parser = add_verb(
        verbs,
        "stop",
        "stop:stop",
        "end running chats, endpoints or workers",
        "stop qwen3-4b",
        "stop --all",
        linux_only=True,
    )
    parser.add_argument("which", nargs="*", metavar="PID|MODEL", help="as `edgeinfer ps` shows them")
    parser.add_argument("--all", action="store_true", help="end all of them")
    _add_everywhere(parser)


def _add_everywhere(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--everywhere",
        action="store_true",
        help="include processes that keep their data elsewhere (EDGEINFER_HOME)",
    )
