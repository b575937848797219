"""Remove models; a record is removed first, so that no process sees a model without files."""

from __future__ import annotations

import shutil

import msgspec

from edgeinfer.errors import CatalogError, UsageError
from edgeinfer.models import names, sources, store
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import model_lock
from edgeinfer.platform import paths
from edgeinfer.platform.disk import bytes_below


class RemovedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One removed model; files that were used in place stay."""

    name: str
    freed_bytes: int
    left_in_place: tuple[str, ...] = ()
    forgot_pins: bool = False


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
