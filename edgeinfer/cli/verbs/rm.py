"""`edgeinfer rm`: remove models, finished or half fetched, their snapshots and cached prefixes."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import msgspec

from edgeinfer.cli.options import add_yes
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import confirm
from edgeinfer.errors import CatalogError, UsageError
from edgeinfer.host import Host
from edgeinfer.models import names, sources, store
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import model_lock
from edgeinfer.platform import paths
from edgeinfer.platform.disk import bytes_below
from edgeinfer.snapshots.format import generations, model_part, part_of
from edgeinfer.snapshots.registry import forget_failures_of, remove_snapshot
from edgeinfer.units import format_bytes


class RemovedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One removed model; files that were used in place stay."""

    name: str
    freed_bytes: int
    left_in_place: tuple[str, ...] = ()
    forgot_pins: bool = False


class RmResult(Result, frozen=True, kw_only=True):
    """The removed models and snapshots."""

    removed: tuple[RemovedModel, ...]
    snapshots: tuple[str, ...] = ()

    def human(self) -> str:
        lines = [_line(one) for one in self.removed]
        lines += [f"its snapshot {name} is removed" for name in self.snapshots]
        return "\n".join(lines)


def _line(removed: RemovedModel) -> str:
    if removed.left_in_place:
        paths = ", ".join(removed.left_in_place)
        return f"{removed.name} is removed; {paths} was used in place and is left alone"
    return f"{removed.name} is removed: {format_bytes(removed.freed_bytes)} freed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="NAME or NAME:QUANT")
    add_yes(parser)
    add_option(parser, "--forget", "forget the pinned SHA-256 too: the next pull trusts anew")


def run(options: argparse.Namespace, host: Host) -> RmResult:
    """Remove models. Raises UnknownModelError, ModelNotPulledError, ModelBusyError, InterruptedByUser.

    If one of several fails, the models before it are removed already.
    """
    names = ", ".join(options.models)
    confirm(f"Remove {names} and its snapshots?", yes=options.yes, needs_yes=True)
    removed, snapshots = [], []
    for text in options.models:
        one, gone = remove_model(text, host, forget=options.forget)
        removed.append(one)
        snapshots += gone
    return RmResult(removed=tuple(removed), snapshots=tuple(snapshots))


def remove(text: str, *, forget: bool = False) -> RemovedModel:
    """Remove the model or the adapter `text`, and what an unfinished pull of it left.

    Raises UnknownModelError, ModelNotPulledError, ModelBusyError, UsageError for an external store's.
    """
    try:
        found = resolve(text)
    except CatalogError:  # a record that cannot be read is removed like any other
        found = None
    if found is not None and found.external is not None:
        raise UsageError(
            f"{found.name} belongs to {found.external.store}, and nothing there is ever written",
            hint=f"remove it with {found.external.store}",
        )
    if found is not None and found.kind == "absent" and sources.looks_like_source(text):
        raise found.absence()
    pulled = found.pulled if found is not None else None
    ref = pulled.reference if pulled is not None else names.parse_reference(text)
    with model_lock(ref):
        folder, partial = names.folder(ref), paths.models_dir() / store.PARTIAL / ref.folder
        pinned = forget and store.pins_path(ref).exists()
        if not (folder.exists() or partial.exists() or pinned):
            adapter = paths.adapters_dir() / f"{ref.folder}.gguf"
            if adapter.is_file():
                freed = adapter.stat().st_size
                adapter.unlink()
                return RemovedModel(name=str(ref), freed_bytes=freed)
            raise resolve(text).absence()
        files = pulled.files if pulled is not None else ()
        left = tuple(file.path for file in files if file.path.startswith("/"))
        freed = bytes_below(folder) + bytes_below(partial)
        (folder / store.RECORD).unlink(missing_ok=True)
        for place in (folder, partial):
            shutil.rmtree(place, ignore_errors=True)
        if forget:
            store.pins_path(ref).unlink(missing_ok=True)
    return RemovedModel(name=str(ref), freed_bytes=freed, left_in_place=left, forgot_pins=pinned)


def remove_model(text: str, host: Host, *, forget: bool = False) -> tuple[RemovedModel, list[str]]:
    """Remove a model with its cached prefixes and its snapshots, whose names are returned.

    Raises UnknownModelError, ModelNotPulledError, ModelBusyError.
    """
    # 80 ms: numpy
    from edgeinfer.runtime.prefix_cache.block_folder import forget_model
    from edgeinfer.runtime.prefix_cache.block_names import model_key

    try:
        files = host.files(text)
        key = model_key(files.sha256, files.paths)
    except CatalogError:
        key = ""
    removed = remove(text, forget=forget)
    if key:
        forget_model(paths.blocks_dir(), key)
    return removed, _without_model(removed.name)


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
