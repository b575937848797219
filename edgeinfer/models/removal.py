"""Remove models and adapters, with unfinished pulls and cached prefixes."""

from __future__ import annotations

import contextlib
import shutil

import msgspec

from edgeinfer.errors import CatalogError, UsageError
from edgeinfer.models import names, sources, store
from edgeinfer.models.names import Reference
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import PulledModel, model_lock
from edgeinfer.platform import paths
from edgeinfer.platform.disk import bytes_below


class RemovedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was removed. `left_in_place` are files outside the store, which stay."""

    name: str
    freed_bytes: int
    left_in_place: tuple[str, ...] = ()
    forgot_pins: bool = False


def remove_model(text: str, *, forget: bool = False) -> RemovedModel:
    """Remove the model or adapter `text` and its cached prefixes.

    `forget` also removes the SHA-256 that the next pull would have to match. Raises UnknownModelError,
    ModelNotPulledError, ModelBusyError, UsageError for another program's model.
    """
    # slow import: 80 ms (numpy)
    from edgeinfer.runtime.prefix_cache.block_folder import forget_model
    from edgeinfer.runtime.prefix_cache.block_names import model_key

    try:
        ref = resolve(text)
    except CatalogError:  # its record is damaged: remove it by its name
        return _remove(text, None, forget=forget)
    if ref.external is not None:
        owner = ref.external.store
        problem = f"{ref.name} belongs to {owner}, whose files edgeinfer never changes"
        raise UsageError(problem, hint=f"remove it with {owner}")
    if ref.kind == "absent" and (sources.looks_like_source(text) or not names.find_reference(text)):
        raise ref.absence()
    key = ""
    with contextlib.suppress(CatalogError):
        files = ref.files()
        key = model_key(files.sha256, files.paths)
    removed = _remove(text, ref.pulled, forget=forget)
    if key:
        forget_model(paths.blocks_dir(), key)
    return removed


def _remove(text: str, pulled: PulledModel | None, *, forget: bool) -> RemovedModel:
    ref = pulled.reference if pulled is not None else names.parse_reference(text)
    with model_lock(ref):
        folder, partial = names.pulled_folder(ref), paths.models_dir() / store.PARTIAL / ref.folder
        has_pin = forget and store.pins_path(ref).exists()
        if not (folder.exists() or partial.exists() or has_pin):
            return _remove_adapter(text, ref)
        files = pulled.files if pulled is not None else ()
        in_place = tuple(file.path for file in files if file.path.startswith("/"))
        freed_bytes = bytes_below(folder) + bytes_below(partial)
        (folder / store.RECORD).unlink(missing_ok=True)
        for path in (folder, partial):
            shutil.rmtree(path, ignore_errors=True)
        if forget:
            store.pins_path(ref).unlink(missing_ok=True)
    return RemovedModel(
        name=str(ref), freed_bytes=freed_bytes, left_in_place=in_place, forgot_pins=has_pin
    )


def _remove_adapter(text: str, ref: Reference) -> RemovedModel:
    adapter = paths.adapters_dir() / f"{ref.folder}.gguf"
    if not adapter.is_file():
        raise resolve(text).absence()
    freed_bytes = adapter.stat().st_size
    adapter.unlink()
    return RemovedModel(name=str(ref), freed_bytes=freed_bytes)
