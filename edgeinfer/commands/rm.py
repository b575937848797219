"""`edgeinfer rm`: remove models, finished or half fetched, and the snapshots made of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import ClassVar

from edgeinfer.catalog.remove import Removed, remove
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.snapshots.shelf import failures
from edgeinfer.snapshots.shelf.format import generations, model_part, safe_name
from edgeinfer.snapshots.shelf.prune import remove as remove_snapshot
from edgeinfer.units import format_bytes


class RmResult(Result, frozen=True, kw_only=True):
    """What is gone."""

    kind: ClassVar[str] = "rm"

    removed: tuple[Removed, ...]
    snapshots: tuple[str, ...] = ()

    def human(self) -> str:
        lines = [_line(one) for one in self.removed]
        lines += [f"its snapshot {name} is removed" for name in self.snapshots]
        return "\n".join(lines)


def _line(one: Removed) -> str:
    if one.left_in_place:
        return (
            f"{one.name} is removed; {', '.join(one.left_in_place)} was used in place and is left alone"
        )
    return f"{one.name} is removed: {format_bytes(one.freed_bytes)} freed"


def rm(options: argparse.Namespace, _host: Host) -> RmResult:
    """Raises UnknownModelError, ModelNotPulledError, ModelBusyError; others are gone then."""
    removed, snapshots = [], []
    for text in options.models:
        one = remove(text, forget=options.forget)
        removed.append(one)
        snapshots += _without_model(one.name)
    return RmResult(removed=tuple(removed), snapshots=tuple(snapshots))


def _without_model(name: str) -> list[str]:
    """Remove the snapshots of a model that is gone: they could not be resumed. Returns their names."""
    failures.forget_model(name)
    gone = []
    for snapshot, folders in generations().items():
        if model_part(snapshot) == safe_name(name):
            for folder in folders:
                remove_snapshot(Path(folder))
            gone.append(snapshot)
    return gone
