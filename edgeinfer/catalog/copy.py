"""Another name for a pulled model: its own record and links to the same bytes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from edgeinfer.catalog import names, store
from edgeinfer.catalog.found import stores
from edgeinfer.catalog.lock import model_lock
from edgeinfer.catalog.models import load_catalog
from edgeinfer.catalog.store import PulledFile, PulledModel
from edgeinfer.errors import CatalogError, UsageError
from edgeinfer.system.disk import sync


def copy(text: str, name: str) -> PulledModel:
    """Make the model `text` be here as `name` too; either can be removed without the other.

    Raises UsageError when `name` is taken or no name, UnknownModelError, ModelNotPulledError,
    ModelBusyError.
    """
    ref = names.reference(name)
    source = store.find_pulled(text)
    if source is None:
        raise _not_ours(text)
    with model_lock(ref):
        folder = store.folder_of(ref)
        if store.read_record(folder) is not None:
            raise UsageError(f"a model is called {ref} already", hint=f"`edgeinfer rm {ref}`")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = msgspec.structs.replace(
            source, name=str(ref), files=tuple(_linked(source, file, folder) for file in source.files)
        )
        sync(folder)
        store.write_record(record)
    return record


def _not_ours(text: str) -> CatalogError | UsageError:
    found = stores.find(text)
    if found is None:
        return store.missing(text, load_catalog())
    return UsageError(f"{found.name} belongs to {found.store}: it is used where it is, under its name")


def _linked(source: PulledModel, file: PulledFile, folder: Path) -> PulledFile:
    if os.path.isabs(file.path):
        return file
    place = folder / file.path
    try:
        place.unlink(missing_ok=True)
        os.link(source.folder / file.path, place)
    except OSError as error:
        raise CatalogError(f"{place}: {error.strerror or error}") from error
    return file
