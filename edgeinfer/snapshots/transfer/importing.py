"""Import: check a snapshot from elsewhere, store what is missing of its files, build the same here.

Nothing of it is unpacked before its signer is known and every digest was checked. Models and adapters
are found here by their digests, else stored where `pull` stores them, under the exporter's names.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edgeinfer.config.load_options import DRAFT, LOAD_OPTIONS, LORA
from edgeinfer.errors import SnapshotStaleError
from edgeinfer.host import Host
from edgeinfer.models import adapters, pull, store
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.names import Reference, parse_reference, sanitize_file_name
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import model_lock
from edgeinfer.platform import paths
from edgeinfer.platform.disk import need_room, room_errors, sha256_of, sync
from edgeinfer.runtime.options import Adapter, LoadOptions
from edgeinfer.snapshots import format, registry
from edgeinfer.snapshots.build import jobs
from edgeinfer.snapshots.running import adapters_text
from edgeinfer.snapshots.transfer import oci
from edgeinfer.snapshots.transfer.description import (
    AdapterFile,
    LayerBlob,
    ModelFile,
    Offered,
    SnapshotDescription,
    Source,
    corrupt,
)


def import_snapshot(
    source: Source, offer: Offered, host: Host, progress: jobs.Progress
) -> registry.Details:
    """Have models and adapters here, and build the same snapshot of them.

    Raises SnapshotStaleError for a name that means something else here, SnapshotCorruptError,
    DiskFullError, and what pulling and building raise.
    """
    what = with_local_names(offer.description)
    placing = Placing(source, offer, progress)
    placing.refuse_other_options()
    missing = placing.missing()
    for number, (layer, blob) in enumerate(missing):
        progress("check", number / len(missing))
        oci.verify(layer, blob, source.chunks(blob.digest, blob.size))
    placing.place()
    typed = {
        option.field: option.parse(what.requested[option.field])
        for option in LOAD_OPTIONS
        if option.field in what.requested
    }
    options = msgspec.convert(typed, LoadOptions)
    order = jobs.Order(
        model=what.model,
        files=host.files(what.model, options.draft),
        options=options,
        system=what.system,
        given_name=format.given_part(what.name, what.model, what.requested),
    )
    return jobs.build(order, host.config.snapshots, progress)


def with_local_names(what: SnapshotDescription) -> SnapshotDescription:
    """Return the description with the adapters' paths here, which are part of its name."""
    if not what.adapters:
        return what
    ours = [Adapter(one.name, str(adapters.place(one.name)), one.scale) for one in what.adapters]
    requested = what.requested | {LORA.field: adapters_text(ours)}
    given = format.given_part(what.name, what.model, what.requested)
    name = format.snapshot_name(what.model, requested, given)
    return msgspec.structs.replace(what, name=name, requested=requested)


class Placing:
    """The models and adapters of one snapshot that is offered."""

    def __init__(self, source: Source, offer: Offered, progress: jobs.Progress) -> None:
        self._source = source
        self._what = offer.description
        self._progress = progress
        self._blobs = {layer.file: (layer, blob) for layer, blob in offer.layers}

    def missing(self) -> list[LayerBlob]:
        """List the layers of what is not here. Raises SnapshotStaleError if a name is taken."""
        wanted: list[ModelFile | AdapterFile] = []
        for name, files in self._what.models.items():
            wanted += () if self._known_model(name, files) else files
        wanted += (one for one in self._what.adapters if self._known_adapter(one) is None)
        return [self._layer(one.member) for one in {one.member: one for one in wanted}.values()]

    def place(self) -> None:
        """Have everything here."""
        for name, files in self._what.models.items():
            self._place_model(name, files)
        for adapter in self._what.adapters:
            self._place_adapter(adapter)

    def refuse_other_options(self) -> None:
        """Raise SnapshotStaleError if this user's models.toml names what the snapshot lacks."""
        what = self._what
        entry = load_catalog().get(parse_reference(what.model).name)
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

    def _unpack(self, member: str, path: Path) -> None:
        layer, blob = self._layer(member)
        oci.unpack(layer, blob, self._source.chunks(blob.digest, blob.size), path)

    # --- models

    def _known_model(self, name: str, files: tuple[ModelFile, ...]) -> store.PulledModel | None:
        """Find these files here, by any name. Raises SnapshotStaleError if others have this one."""
        wanted = [one.sha256 for one in files]
        here = resolve(name).pulled
        if here is None:
            pulled = store.list_pulled()
            return next((one for one in pulled if [file.sha256 for file in one.files] == wanted), None)
        if [file.sha256 for file in here.files] != wanted:
            ours = ", ".join(file.sha256 for file in here.files)
            raise _other_here("model", name, ", ".join(wanted), ours)
        return here

    def _place_model(self, name: str, files: tuple[ModelFile, ...]) -> None:
        here = self._known_model(name, files)
        if here is None:
            self._unpack_model(name, files)
        elif here.name != name:
            _pull(name, here.paths[0], in_place=True)

    def _unpack_model(self, name: str, files: tuple[ModelFile, ...]) -> None:
        self._progress("model", None)
        need_room(paths.models_dir(), 2 * sum(one.size for one in files), name)
        with _scratch() as work:
            found = [work / sanitize_file_name(one.name) for one in files]
            for one, path in zip(files, found, strict=True):
                self._unpack(one.member, path)
            _pull(name, found[0], in_place=False)

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

    def _place_adapter(self, wanted: AdapterFile) -> None:
        place = adapters.place(wanted.name)
        paths.private_dir(paths.adapters_dir())
        with model_lock(Reference(wanted.name)):
            known = self._known_adapter(wanted)
            if known is None:
                self._unpack_adapter(wanted, place)
            elif known != place:
                os.link(known, place)

    def _unpack_adapter(self, wanted: AdapterFile, place: Path) -> None:
        self._progress("adapter", None)
        need_room(paths.models_dir(), wanted.size, f"the adapter {wanted.name}")
        with _scratch() as work:
            target = work / place.name
            self._unpack(wanted.member, target)
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


def _pull(name: str, first: Path, *, in_place: bool) -> None:
    pull.pull(str(first), options=pull.PullOptions(name=name, in_place=in_place))


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
