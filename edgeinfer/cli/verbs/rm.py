"""`edgeinfer rm`: remove models and unfinished pulls, with their snapshots and cached prefixes."""

from __future__ import annotations

import argparse

from edgeinfer.cli.options import add_yes
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import confirm
from edgeinfer.host import EngineHost
from edgeinfer.models.removal import RemovedModel, find_removable, remove_models
from edgeinfer.snapshots.registry import remove_snapshots_of
from edgeinfer.units import format_bytes


class RmResult(Result, frozen=True, kw_only=True):
    removed: tuple[RemovedModel, ...]
    snapshots: tuple[str, ...] = ()

    def human(self) -> str:
        lines = list(map(_line, self.removed))
        lines += [f"removed its snapshot {name}" for name in self.snapshots]
        return "\n".join(lines)


def _line(removed: RemovedModel) -> str:
    if removed.left_in_place:
        paths = ", ".join(removed.left_in_place)
        return f"{removed.name} is removed; {paths} was used in place and is left alone"
    return f"{removed.name} is removed: {format_bytes(removed.freed_bytes)} freed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="NAME or NAME:QUANT")
    add_yes(parser)
    add_option(parser, "--forget", "forget the pinned SHA-256: the next pull accepts another file")


def run(options: argparse.Namespace, _host: EngineHost) -> RmResult:
    """Remove models. Raises UnknownModelError, ModelNotPulledError, ModelBusyError, InterruptedByUser.

    If one of the models is missing or busy, none is removed.
    """
    refs = dict.fromkeys(find_removable(text, forget=options.forget)[0] for text in options.models)
    names = list(map(str, refs))
    confirm(f"Remove {', '.join(names)} and its snapshots?", yes=options.yes, needs_yes=True)
    removed = remove_models(names, forget=options.forget)
    snapshots = (snapshot for model in removed for snapshot in remove_snapshots_of(model.name))
    return RmResult(removed=tuple(removed), snapshots=tuple(snapshots))
