"""Remove models and adapters, with unfinished pulls and cached prefixes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from edgeinfer.errors import CatalogError, UsageError
from edgeinfer.models import names, sources, store
from edgeinfer.models.names import Reference
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import PulledModel, model_lock
from edgeinfer.platform import paths
from edgeinfer.platform.disk import bytes_below, size_or_zero


class RemovedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was removed. `left_in_place` are files outside the store, which stay.

    `forgot_pins`: the SHA-256 values that a later pull would have to match were removed, too.
    """

    name: str
    freed_bytes: int
    left_in_place: tuple[str, ...] = ()
    forgot_pins: bool = False


def find_removable(text: str, *, forget: bool = False) -> tuple[Reference, PulledModel | None]:
    """Return the reference in `text`, and the pulled model; None stands for anything else to remove.

    That is an unfinished pull, an adapter, a model with a damaged record or, with `forget`, a
    removed model if SHA-256 values of its first pull are stored. Raises UnknownModelError,
    ModelNotPulledError, and UsageError for a file or another program's model.
    """
    try:
        model = resolve(text)
    except CatalogError:
        ref = names.parse_reference(text)
        if names.pulled_folder(ref).exists():  # a damaged record must not prevent a removal
            return ref, None
        raise
    if model.pulled is not None:
        return model.pulled.reference, model.pulled
    if model.external is not None:
        owner = model.external.store
        problem = f"{model.name} belongs to {owner}, whose files edgeinfer never changes"
        raise UsageError(problem, hint=f"remove it with {owner}")
    if model.kind == "file":
        of_file = store.find_pulled(f"file:{model.name}")
        command = f"`edgeinfer rm {of_file.name}`" if of_file else ""
        hint = f"to remove the model: {command}" if command else "delete it yourself"
        raise UsageError(f"{text} is a file, which edgeinfer never deletes", hint=hint)
    typed_ref = None if sources.looks_like_source(text) else names.find_reference(text)
    if typed_ref is None or not any(path.exists() for path in _paths_of(typed_ref, forget=forget)):
        raise model.absence()
    return typed_ref, None


def _paths_of(ref: Reference, *, forget: bool) -> list[Path]:
    """Return a model's paths (folder, unfinished pull, pins if `forget`), then an adapter's path."""
    partial = paths.models_dir() / store.PARTIAL / ref.folder
    pins = [store.pins_path(ref)] if forget else []
    return [names.pulled_folder(ref), partial, *pins, paths.adapters_dir() / f"{ref.folder}.gguf"]


def remove_models(texts: Iterable[str], *, forget: bool = False) -> list[RemovedModel]:
    """Remove models and their cached prefixes; for a name that no model has, remove the adapter.

    `forget` also removes the SHA-256 that the next pull would have to match. Raises ModelBusyError, and
    what `find_removable` raises; then nothing was removed.
    """
    models = dict(find_removable(text, forget=forget) for text in texts)
    with ExitStack() as locks:
        for ref in models:
            locks.enter_context(model_lock(ref))
        return [_remove(*item, forget=forget) for item in models.items()]


def _remove(ref: Reference, pulled: PulledModel | None, *, forget: bool) -> RemovedModel:
    # slow import: 80 ms (numpy)
    from edgeinfer.runtime.prefix_cache.retention import forget_model

    files = pulled.files if pulled is not None else ()
    *of_model, adapter = _paths_of(ref, forget=forget)
    removed = [path for path in of_model if path.exists()] or [adapter]
    freed_bytes = sum(bytes_below(path) or size_or_zero(path) for path in removed)
    (names.pulled_folder(ref) / store.RECORD).unlink(missing_ok=True)
    for path in removed:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if pulled is not None:
        forget_model(paths.blocks_dir(), pulled.sha256)
    return RemovedModel(
        name=str(ref),
        freed_bytes=freed_bytes,
        left_in_place=tuple(file.path for file in files if file.path.startswith("/")),
        forgot_pins=forget and store.pins_path(ref) in removed,
    )
