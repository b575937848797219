"""`edgeinfer rm`: remove models, finished or half fetched, their snapshots and cached prefixes."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgeinfer.cli.options import add_yes
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import confirm
from edgeinfer.errors import CatalogError
from edgeinfer.host import Host
from edgeinfer.models.remove import RemovedModel, remove
from edgeinfer.platform import paths
from edgeinfer.snapshots.format import generations, model_part, part_of
from edgeinfer.snapshots.registry import forget_failures_of, remove_snapshot
from edgeinfer.units import format_bytes


class RmResult(Result, frozen=True, kw_only=True):
    """The removed models and snapshots."""

    removed: tuple[RemovedModel, ...]
    snapshots: tuple[str, ...] = ()

    def human(self) -> str:
        lines = [_line(one) for one in self.removed]
        lines += [f"its snapshot {name} is removed" for name in self.snapshots]
        return "\n".join(lines)


def _line(one: RemovedModel) -> str:
    if one.left_in_place:
        return (
            f"{one.name} is removed; {', '.join(one.left_in_place)} was used in place and is left alone"
        )
    return f"{one.name} is removed: {format_bytes(one.freed_bytes)} freed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="NAME or NAME:QUANT")
    add_yes(parser)
    parser.add_argument(
        "--forget", action="store_true", help="forget the pinned SHA-256 too: the next pull trusts anew"
    )


def run(options: argparse.Namespace, host: Host) -> RmResult:
    """Remove models. Raises UnknownModelError, ModelNotPulledError, ModelBusyError, InterruptedByUser.

    If one of several fails, the models before it are removed already.
    """
    confirm(f"remove {', '.join(options.models)} and its snapshots?", yes=options.yes)
    removed, snapshots = [], []
    for text in options.models:
        one, gone = remove_model(text, host, forget=options.forget)
        removed.append(one)
        snapshots += gone
    return RmResult(removed=tuple(removed), snapshots=tuple(snapshots))


def remove_model(text: str, host: Host, *, forget: bool = False) -> tuple[RemovedModel, list[str]]:
    """Remove a model with its cached prefixes and its snapshots, whose names are returned.

    Raises UnknownModelError, ModelNotPulledError, ModelBusyError.
    """
    # 80 ms: numpy
    from edgeinfer.runtime.prefix_cache.keys import model_key
    from edgeinfer.runtime.prefix_cache.store import forget_model

    try:
        files = host.files(text)
        key = model_key(files.sha256, files.paths)
    except CatalogError:
        key = ""
    one = remove(text, forget=forget)
    if key:
        forget_model(paths.blocks_dir(), key)
    return one, _without_model(one.name)


def _without_model(name: str) -> list[str]:
    """Remove the snapshots of a removed model, which cannot be resumed; return their names."""
    forget_failures_of(name)
    gone = []
    for snapshot, folders in generations().items():
        if model_part(snapshot) == part_of(name):
            for folder in folders:
                remove_snapshot(Path(folder))
            gone.append(snapshot)
    return gone
