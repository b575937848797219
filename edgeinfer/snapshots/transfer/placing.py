"""What a snapshot from elsewhere was made of, here: found by its digests, else out of its layers.

Models are put where `pull` puts them and adapters where `pull --base` does, under the names that they
had at the exporter's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edgeinfer.config.load_options import DRAFT, LORA
from edgeinfer.errors import SnapshotStaleError
from edgeinfer.models import adapters, pull, store
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.names import Reference, reference, tamed_file_name
from edgeinfer.models.store import model_lock
from edgeinfer.platform import paths
from edgeinfer.platform.disk import need_room, room_errors, sha256_of, stamps, sync
from edgeinfer.runtime.options import Adapter
from edgeinfer.snapshots import format
from edgeinfer.snapshots.build.jobs import Progress
from edgeinfer.snapshots.process_description import adapters_text
from edgeinfer.snapshots.transfer import packing
from edgeinfer.snapshots.transfer.description import (
    AdapterFile,
    Description,
    LayerBlob,
    ModelFile,
    Offered,
    Source,
    corrupt,
)

_ROLES = ("model", "adapter")


def as_named_here(what: Description) -> Description:
    """The same snapshot with its adapters where they are here, which are part of its name."""
    if not what.adapters:
        return what
    ours = [Adapter(one.name, str(adapters.place(one.name)), one.scale) for one in what.adapters]
    requested = what.requested | {LORA.field: adapters_text(ours)}
    given = format.given_part(what.name, what.model, what.requested)
    name = format.snapshot_name(what.model, requested, given)
    return msgspec.structs.replace(what, name=name, requested=requested)


class Placing:
    """The models and adapters of one snapshot that is offered."""

    def __init__(self, source: Source, offer: Offered, progress: Progress) -> None:
        self._source = source
        self._what = offer.description
        self._progress = progress
        self._blobs = {
            member: (layer, blob)
            for layer, blob in offer.layers
            if layer.role in _ROLES
            for member in layer.files
        }

    def missing(self) -> list[LayerBlob]:
        """The layers of what is not here. Raises SnapshotStaleError when something else has a name."""
        wanted: list[ModelFile | AdapterFile] = []
        for name, files in self._what.models.items():
            wanted += () if self._known_model(name, files) else files
        wanted += (one for one in self._what.adapters if self._known_adapter(one) is None)
        return [self._layer(one.member) for one in {one.member: one for one in wanted}.values()]

    def place(self) -> dict[str, str]:
        """Have everything here; the exporter's paths → ours."""
        moved: dict[str, str] = {}
        for name, files in self._what.models.items():
            for one, path in zip(files, self._model(name, files), strict=True):
                moved |= {one.mapped: os.path.realpath(path), one.path: str(path)}
        for adapter in self._what.adapters:
            path = self._adapter(adapter)
            moved |= {adapter.path: str(path), adapter.stamp: stamps([os.path.realpath(path)])}
        before, now = (
            one.requested.get(LORA.field, "") for one in (self._what, as_named_here(self._what))
        )
        return moved | {before: now}

    def refuse_other_wishes(self) -> None:
        """Raises SnapshotStaleError where this user's models.toml names what the snapshot lacks."""
        what = self._what
        entry = load_catalog().get(reference(what.model).name)
        for option in (LORA, DRAFT):
            wish = entry and getattr(entry, option.field)
            if wish and option.field not in what.requested:
                raise SnapshotStaleError(
                    f"the snapshot does not fit this machine: models.toml: yours gives {what.model} "
                    f"`{option.field}`, and the snapshot was made without",
                    key="models.toml",
                )

    def _layer(self, member: str) -> LayerBlob:
        try:
            return self._blobs[member]
        except KeyError:
            raise corrupt(f"no layer of the snapshot holds {member}") from None

    def _unpack(self, files: dict[str, Path]) -> None:
        for member, path in files.items():
            layer, blob = self._layer(member)
            chunks = self._source.chunks(blob.digest, blob.size)
            packing.unpack(layer, blob, chunks, {member: (path, 0)})

    # --- models

    def _known_model(self, name: str, files: tuple[ModelFile, ...]) -> store.PulledModel | None:
        """Find these files here, by any name. Raises SnapshotStaleError if others have this one."""
        wanted = [one.sha256 for one in files]
        here = store.find_pulled(name)
        if here is None:
            pulled = store.list_pulled()
            return next((one for one in pulled if [file.sha256 for file in one.files] == wanted), None)
        if [file.sha256 for file in here.files] != wanted:
            ours = ", ".join(file.sha256 for file in here.files)
            raise _other_here("model", name, ", ".join(wanted), ours)
        return here

    def _model(self, name: str, files: tuple[ModelFile, ...]) -> tuple[Path, ...]:
        here = self._known_model(name, files)
        if here is None:
            here = self._unpacked(name, files)
        elif here.name != name:
            here = _pulled(name, here.paths[0], in_place=True)
        return here.paths

    def _unpacked(self, name: str, files: tuple[ModelFile, ...]) -> store.PulledModel:
        self._progress("model", None)
        need_room(paths.models_dir(), 2 * sum(one.size for one in files), name)
        with _scratch() as work:
            found = {one.member: work / tamed_file_name(one.path) for one in files}
            self._unpack(found)
            return _pulled(name, found[files[0].member], in_place=False)

    # --- adapters

    def _known_adapter(self, wanted: AdapterFile) -> Path | None:
        """Find this file here, by any name. Raises SnapshotStaleError if another has this one."""
        place = adapters.place(wanted.name)
        if place.exists():
            ours = sha256_of(place, lambda _done: None)
            if ours != wanted.sha256:
                raise _other_here("adapter", wanted.name, wanted.sha256, ours)
            return place
        return next((path for path in paths.adapters_dir().glob("*.gguf") if _is(path, wanted)), None)

    def _adapter(self, wanted: AdapterFile) -> Path:
        place = adapters.place(wanted.name)
        paths.private_dir(paths.adapters_dir())
        with model_lock(Reference(wanted.name)):
            known = self._known_adapter(wanted)
            if known is None:
                self._unpack_adapter(wanted, place)
            elif known != place:
                os.link(known, place)
        return place

    def _unpack_adapter(self, wanted: AdapterFile, place: Path) -> None:
        self._progress("adapter", None)
        need_room(paths.models_dir(), wanted.size, f"the adapter {wanted.name}")
        with _scratch() as work:
            target = work / place.name
            self._unpack({wanted.member: target})
            if not _is(target, wanted):
                raise corrupt(
                    f"the layer of the adapter {wanted.name} holds another than {wanted.sha256}"
                )
            sync(target)
            os.replace(target, place)


def _is(path: Path, wanted: AdapterFile) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == wanted.size
        and sha256_of(path, lambda _done: None) == wanted.sha256
    )


def _pulled(name: str, first: Path, *, in_place: bool) -> store.PulledModel:
    return pull.pull(str(first), options=pull.PullOptions(name=name, in_place=in_place))


@contextmanager
def _scratch() -> Iterator[Path]:
    partial = paths.models_dir() / store.PARTIAL
    partial.mkdir(mode=0o700, parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="snapshot-", dir=partial))
    try:
        with room_errors(work):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _other_here(what: str, name: str, there: str, here: str) -> SnapshotStaleError:
    return SnapshotStaleError(
        f"the snapshot does not fit this machine: {what}: {name} is sha256 {there} there, {here} here",
        key=what,
        hint=f"remove or rename yours: `edgeinfer rm {name}`",
    )
