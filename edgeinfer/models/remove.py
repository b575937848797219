"""Removing a model: its record first, so that it is gone for everybody before its files are."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from edgeinfer.errors import CatalogError, UsageError
from edgeinfer.models import names, pins, sources, store
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.external_stores import stores
from edgeinfer.models.names import Reference
from edgeinfer.models.store import model_lock
from edgeinfer.platform import paths


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """One removed model; files that were used in place stay."""

    name: str
    freed_bytes: int
    left_in_place: tuple[str, ...] = ()
    forgot_pins: bool = False


def remove(text: str, *, forget: bool = False) -> Removed:
    """Remove the model or the adapter `text`, and whatever an unfinished pull of it left.

    Raises UnknownModelError, ModelNotPulledError, ModelBusyError, UsageError for another program's.
    """
    ref = _reference(text)
    with model_lock(ref):
        folder, partial = names.folder(ref), paths.models_dir() / store.PARTIAL / ref.folder
        pinned = forget and pins.place(ref).exists()
        if not (folder.exists() or partial.exists() or pinned):
            adapter = paths.adapters_dir() / f"{ref.folder}.gguf"
            if adapter.is_file():
                freed = adapter.stat().st_size
                adapter.unlink()
                return Removed(name=str(ref), freed_bytes=freed)
            raise store.missing(text, load_catalog())
        left = _files_in_place(folder)
        freed = _bytes_under(folder) + _bytes_under(partial)
        (folder / store.RECORD).unlink(missing_ok=True)
        for place in (folder, partial):
            shutil.rmtree(place, ignore_errors=True)
        if forget:
            pins.forget(ref)
    return Removed(name=str(ref), freed_bytes=freed, left_in_place=left, forgot_pins=pinned)


def _reference(text: str) -> Reference:
    """Resolve a reference; a name with the plain model's own quantization is the plain one."""
    _refuse_others(text)
    if sources.looks_like_source(text):
        found = store.find_pulled(text)
        if found is None:
            raise store.missing(text, load_catalog())
        return found.reference
    try:
        found = store.find_pulled(text)
    except CatalogError:  # an unreadable record is removed like any other
        found = None
    return found.reference if found else names.reference(text)


def _refuse_others(text: str) -> None:
    if stores.is_name(text) or (sources.looks_like_source(text) and not store.find_pulled(text)):
        found = stores.find(text)
        if found is not None:
            raise UsageError(
                f"{found.name} belongs to {found.store}, and nothing there is ever written",
                hint=f"remove it with {found.store}",
            )


def _files_in_place(folder: Path) -> tuple[str, ...]:
    try:
        record = store.read_record(folder)
    except CatalogError:
        return ()
    return tuple(file.path for file in record.files if file.path.startswith("/")) if record else ()


def _bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
