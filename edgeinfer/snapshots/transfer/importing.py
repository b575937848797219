"""Import: check a snapshot from elsewhere, make it one of this home, publish it if it computes alike.

Nothing of it is unpacked before its signer is known, nothing is mapped before every digest was checked,
and nothing is published before a resume has computed what the exporter's process computed. Models and
adapters are found here by their digests, else stored where `pull` stores them, under the exporter's
names.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edgeinfer.config.config_file import SnapshotsConfig
from edgeinfer.config.load_options import DRAFT, LOAD_OPTIONS, LORA
from edgeinfer.errors import SnapshotStaleError
from edgeinfer.host import Host
from edgeinfer.models import adapters, pull, store
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.names import Reference, parse_reference, sanitize_file_name
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import model_lock
from edgeinfer.platform import paths
from edgeinfer.platform.disk import need_room, room_errors, sha256_of, stamps, sync
from edgeinfer.runtime.options import Adapter, LoadOptions
from edgeinfer.snapshots import criu, format
from edgeinfer.snapshots.build import criu_images, jobs
from edgeinfer.snapshots.build.jobs import Progress
from edgeinfer.snapshots.build.relocate import Places
from edgeinfer.snapshots.registry import Details
from edgeinfer.snapshots.running import adapters_text
from edgeinfer.snapshots.transfer import description, oci
from edgeinfer.snapshots.transfer.description import (
    AdapterFile,
    LayerBlob,
    ModelFile,
    Offered,
    SnapshotDescription,
    Source,
    corrupt,
)
from edgeinfer.snapshots.transfer.relocator import ARRIVED, ImportRequest

_RELOCATOR = "edgeinfer.snapshots.transfer.relocator"


class Importing:
    """One import of a snapshot that is offered."""

    def __init__(
        self, source: Source, offer: Offered, config: SnapshotsConfig, progress: jobs.Progress
    ) -> None:
        self._source = source
        self._offer = offer
        self._placing = Placing(source, offer, progress)
        self._what = with_local_names(offer.description)
        self._config = config
        self._progress = progress
        self._criu = criu.available()

    def run(self) -> Details:
        """Import, publish, and remove the snapshot of that name before.

        Raises SnapshotStaleError if it does not fit, SnapshotCorruptError, DiskFullError, RestoreError,
        DumpError, and what pulling the model raises.
        """
        what = self._what
        self._progress("compare", None)
        description.refuse_other_machine(what.requirements, self._libraries(), self._criu.version)
        self._placing.refuse_other_options()
        self._check([*self._placing.missing(), *self._layers()])
        placed = self._placing.place()
        need = sum(2 * layer.unpacked for layer, _ in self._layers())
        with (
            jobs.new_generation(what.name, need, self._config, self._progress) as folder,
            room_errors(folder, "nothing of the snapshot is kept"),
        ):
            self._arrive(folder)
            moved = self._folders(str(folder)) | placed
            self._rewrite(folder, moved)
            return jobs.run_builder(folder, self._request(moved), self._progress, _RELOCATOR)

    def order(self, host: Host) -> jobs.Order:
        """Have models and adapters here, and say what to build for the same snapshot.

        Raises SnapshotStaleError, SnapshotCorruptError, DiskFullError, and what pulling them raises.
        """
        what = self._what
        self._check(self._placing.missing())
        self._placing.place()
        typed = {
            option.field: option.parse(what.requested[option.field])
            for option in LOAD_OPTIONS
            if option.field in what.requested
        }
        options = msgspec.convert(typed, LoadOptions)
        return jobs.Order(
            model=what.model,
            files=host.files(what.model, options.draft),
            options=options,
            system=what.system,
            given_name=format.given_part(what.name, what.model, what.requested),
        )

    def _libraries(self) -> dict[str, str]:
        places = Places(self._folders(""))
        return {path: places.of(path) for path in self._what.requirements.libraries}

    def _folders(self, folder: str) -> dict[str, str]:
        ours, what = description.own_folders(folder), self._what
        real = description.folder_map(what.real_places, description.without_symlinks(ours))
        return real | description.folder_map(what.places, ours)

    def _check(self, layers: list[LayerBlob]) -> None:
        for number, (layer, blob) in enumerate(layers):
            self._progress("check", number / len(layers))
            oci.verify(layer, blob, self._source.chunks(blob.digest, blob.size))

    def _layers(self) -> Iterable[LayerBlob]:
        return (pair for pair in self._offer.layers if pair[0].role == "snapshot")

    def _arrive(self, folder: Path) -> None:
        self._progress("unpack", None)
        (folder / ARRIVED / format.IMAGES).mkdir(mode=0o700, parents=True)
        for layer, blob in self._layers():
            chunks = self._source.chunks(blob.digest, blob.size)
            targets = {name: folder / ARRIVED / _plain(name) for name in layer.files}
            oci.unpack(layer, blob, chunks, targets)

    def _rewrite(self, folder: Path, moved: dict[str, str]) -> None:
        images, old = folder / ARRIVED / format.IMAGES, self._what.real_places.get("snapshot", "")
        places = Places(moved | {f"{old}/{format.MEMORY}": str(folder / ARRIVED / format.MEMORY)})
        try:
            criu_images.move_files(
                images, {path: places.of(path) for path in criu_images.file_paths(images)}
            )
        except OSError as error:
            raise SnapshotStaleError(
                f"the snapshot needs {error.filename}, which is not here", key=str(error.filename)
            ) from error
        for core in images.glob("core-*.img"):
            criu_images.become_ours(core)

    def _request(self, moved: dict[str, str]) -> ImportRequest:
        what, found = self._what, self._criu
        return ImportRequest(
            name=what.name,
            model=what.model,
            requested=what.requested,
            system=what.system,
            system_tokens=what.system_tokens,
            canary=what.canary,
            parked_process=what.parked_process,
            moved=moved,
            criu=found.criu,
            version=found.version,
            tier=found.tier or "",
        )


def _plain(name: str) -> str:
    kind, _, rest = name.partition("/")
    folder, _, file = rest.rpartition("/")
    if kind != "snapshot" or folder not in ("", format.IMAGES) or file.startswith(".") or not file:
        raise corrupt(f"{name!r} is no file of a snapshot")
    return rest


_ROLES = ("model", "adapter")


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
        """List the layers of what is not here. Raises SnapshotStaleError if a name is taken."""
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
            one.requested.get(LORA.field, "") for one in (self._what, with_local_names(self._what))
        )
        return moved | {before: now}

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

    def _unpack(self, files: dict[str, Path]) -> None:
        for member, path in files.items():
            layer, blob = self._layer(member)
            chunks = self._source.chunks(blob.digest, blob.size)
            oci.unpack(layer, blob, chunks, {member: path})

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
            found = {one.member: work / sanitize_file_name(one.path) for one in files}
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
