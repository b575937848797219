"""Import: check a snapshot from elsewhere, make it one of this home, publish it if it computes alike.

Nothing of it is unpacked before its signer is known, nothing is mapped before every digest was checked,
and nothing is published before a resume has computed what the exporter's process computed.
"""

from __future__ import annotations

import base64
import binascii
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from edgeinfer import paths
from edgeinfer.catalog import pull, store
from edgeinfer.catalog.names import tamed_file_name
from edgeinfer.config import SnapshotsConfig
from edgeinfer.disk import free_bytes, locked, need_room, room_errors
from edgeinfer.errors import (
    DiskFullError,
    SnapshotCorruptError,
    SnapshotStaleError,
    SnapshotUntrustedError,
)
from edgeinfer.host import Host
from edgeinfer.load_options import LOAD_OPTIONS
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.snapshots import criu, frames
from edgeinfer.snapshots.building import build_order
from edgeinfer.snapshots.building.relocating import Places
from edgeinfer.snapshots.shelf import failures, fingerprint, format, prune
from edgeinfer.snapshots.shelf.records import Details
from edgeinfer.snapshots.transfer import packing, requirements, rewriting, signing, trust
from edgeinfer.snapshots.transfer.description import (
    LOOSE,
    SIGNATURE,
    SIGNER,
    Description,
    Descriptor,
    Layer,
    Piece,
    paired,
    read_config,
    read_manifest,
)
from edgeinfer.snapshots.transfer.relocator import ARRIVED
from edgeinfer.units import format_bytes

_RELOCATOR = "edgeinfer.snapshots.transfer.relocator"
_GIB = 1 << 30
Progress = Callable[[str, float | None], None]


class Source(Protocol):
    """Where a snapshot comes from: a folder, or what was fetched of a registry."""

    def manifest(self, name: str = "") -> bytes: ...

    def read(self, digest: str, size: int) -> bytes: ...

    def chunks(self, digest: str, size: int) -> Iterator[bytes]: ...


class Offered(msgspec.Struct, frozen=True):
    """A snapshot that is offered: described, its layers with their blobs, who signed it (trusted)."""

    description: Description
    layers: list[tuple[Layer, Descriptor]]
    signer: str


def offered(source: Source, name: str = "") -> Offered:
    """What a source offers under a name, signed by somebody whom this user trusts.

    Raises SnapshotCorruptError, SnapshotUntrustedError.
    """
    manifest = read_manifest(source.manifest(name))
    config = source.read(manifest.config.digest, manifest.config.size)
    signer = _signer(manifest.annotations, config)
    description = read_config(config)
    return Offered(description, paired(manifest, description), signer)


def _signer(annotations: dict[str, str], config: bytes) -> str:
    try:
        public = base64.b64decode(annotations[SIGNER], validate=True)
        signature = base64.b64decode(annotations[SIGNATURE], validate=True)
    except (KeyError, binascii.Error, ValueError) as error:
        raise SnapshotUntrustedError(
            "the snapshot is not signed", hint="export it again: `edgeinfer snapshots export`"
        ) from error
    if not signing.is_signed_by(public, signature, config):
        raise SnapshotUntrustedError(
            "the snapshot's signature is not of what it describes: it was altered after it was signed",
            hint="fetch or export it again",
        )
    return trust.refuse_unknown(public)


class Importing:
    """One import of a snapshot that is offered."""

    def __init__(
        self, source: Source, offer: Offered, config: SnapshotsConfig, progress: Progress
    ) -> None:
        self._source = source
        self._layers_here = offer.layers
        self._what = offer.description
        self._config = config
        self._progress = progress
        self._criu = criu.available()

    def run(self) -> Details:
        """Raises SnapshotStaleError where it does not fit, SnapshotCorruptError, DiskFullError,
        RestoreError, DumpError, and what pulling the model raises."""
        what = self._what
        self._progress("compare", None)
        requirements.refuse_other_machine(what.requirements, self._libraries(), self._criu.version)
        self._check("model", "weights", "snapshot")
        model = self._model()
        root = paths.private_dir(paths.snapshots_dir())
        format.refuse_unsafe_ancestors(str(root))
        with locked(build_order.build_lock(root, what.name)):
            build_order.sweep(root)
            self._make_room(root)
            folder = root / format.folder_name(what.name, time.time_ns(), fingerprint.program_tag())
            details = self._published(folder, model)
            failures.forget(what.name)
            prune.drop_older(root, what.name)
        prune.to_limit(root, self._config, keep=what.name)
        return details

    def rebuild(self, host: Host) -> Details:
        """Build the same snapshot here, of the model with that digest. Raises what a build raises."""
        what = self._what
        self._check("model")
        self._model()
        typed = {
            option.field: option.parse(what.requested[option.field])
            for option in LOAD_OPTIONS
            if option.field in what.requested
        }
        is_given = format.is_given(what.name, what.model, what.requested)
        order = build_order.Order(
            model=what.model,
            files=host.files(what.model),
            options=msgspec.convert(typed, LoadOptions),
            system=what.system,
            given_name=what.name.partition(format.OPTION_SEPARATOR)[2] if is_given else "",
        )
        return build_order.build(order, self._config, self._progress)

    def _libraries(self) -> dict[str, str]:
        """The exporter's libraries → where they must be here."""
        places = Places(self._folders(""))
        return {path: places.of(path) for path in self._what.requirements.libraries}

    def _folders(self, folder: str) -> dict[str, str]:
        """The exporter's folders → ours, by both their names; `folder` is the snapshot's."""
        ours, what = requirements.places(folder), self._what
        real = requirements.told(what.real_places, requirements.real(ours))
        return real | requirements.told(what.places, ours)

    def _make_room(self, root: Path) -> None:
        what = self._what
        need = what.buffers_bytes + sum(
            2 * layer.unpacked for layer in what.layers if layer.role == "snapshot"
        )
        prune.make_room(root, need, self._config, keep=what.name)
        free = free_bytes(root)
        if free - need < self._config.disk_margin_gib * _GIB:
            raise DiskFullError(
                f"importing {what.name} needs about {format_bytes(need)} and {format_bytes(free)} "
                "are free; "
                f"{self._config.disk_margin_gib:g} GiB stay free (snapshots.disk-margin-gib)"
            )

    def _check(self, *roles: str) -> None:
        """Read the layers whole; not the model's where the model is here.

        Raises SnapshotCorruptError, SnapshotStaleError as `_known_model` does.
        """
        wanted = [role for role in roles if role != "model" or self._known_model() is None]
        layers = self._layers(*wanted)
        for number, (layer, blob) in enumerate(layers):
            self._progress("check", number / len(layers))
            packing.verify(layer, blob, self._source.chunks(blob.digest, blob.size))

    # --- the model

    def _known_model(self) -> store.PulledModel | None:
        """The model under its name, or under another one, where this machine has its files.

        Raises SnapshotStaleError when another model has its name.
        """
        name, wanted = self._what.model, [one.sha256 for one in self._what.model_files]
        here = store.find_pulled(name)
        if here is None:
            pulled = store.list_pulled()
            return next((one for one in pulled if [file.sha256 for file in one.files] == wanted), None)
        if [file.sha256 for file in here.files] != wanted:
            raise SnapshotStaleError(
                f"the snapshot does not fit this machine: model: {name} is sha256 {', '.join(wanted)} "
                f"there, {', '.join(file.sha256 for file in here.files)} here",
                key="model",
                hint=f"remove or rename yours: `edgeinfer rm {name}`",
            )
        return here

    def _model(self) -> list[Path]:
        """The model's files under its name here, unpacked from its layers where they are not."""
        here = self._known_model()
        if here is None:
            here = self._unpacked()
        elif here.name != self._what.model:
            here = self._pulled(list(here.paths), in_place=True)
        return list(here.paths)

    def _pulled(self, files: list[Path], *, in_place: bool) -> store.PulledModel:
        options = pull.PullOptions(name=self._what.model, in_place=in_place)
        return pull.pull(str(files[0]), options=options)

    def _unpacked(self) -> store.PulledModel:
        """Take the model out of its layers."""
        self._progress("model", None)
        files = self._what.model_files
        need_room(paths.models_dir(), 2 * sum(one.size for one in files), self._what.model)
        work = paths.models_dir() / store.PARTIAL / f"snapshot-{os.getpid()}"
        work.mkdir(mode=0o700, parents=True)
        names = [work / tamed_file_name(one.path) for one in files]
        places = {
            f"models/{one.sha256}.gguf": (path, 0) for one, path in zip(files, names, strict=True)
        }
        try:
            with room_errors(work):
                for layer, blob in self._layers("model"):
                    self._unpack(layer, blob, places)
            return self._pulled(names, in_place=False)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    # --- the snapshot

    def _layers(self, *roles: str) -> list[tuple[Layer, Descriptor]]:
        return [pair for pair in self._layers_here if pair[0].role in roles]

    def _published(self, folder: Path, model: list[Path]) -> Details:
        folder.mkdir(mode=0o700)
        try:
            with locked(folder / format.LOCK), room_errors(folder, "nothing of the snapshot is kept"):
                self._arrive(folder)
                moved = self._moved(folder, model)
                self._rewrite(folder, moved)
                return build_order.run_builder(
                    folder, self._request(folder, moved), self._progress, _RELOCATOR
                )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _arrive(self, folder: Path) -> None:
        """Unpack the layers: llama.cpp's buffers in their place, the rest beside."""
        self._progress("unpack", None)
        arrived = folder / ARRIVED
        (arrived / format.IMAGES).mkdir(mode=0o700, parents=True)
        for layer, blob in self._layers("snapshot", "weights"):
            self._unpack(layer, blob, self._places(folder, layer))
        self._lay_buffers(folder)

    def _places(self, folder: Path, layer: Layer) -> dict[str, tuple[Path, int]]:
        """Where each file of a layer is written, and from which offset on."""
        if layer.role == "weights":
            buffers = folder / format.BUFFERS
            return {
                one.file: (buffers, one.offset) for one in self._what.pieces if one.file in layer.files
            }
        return {name: (folder / ARRIVED / _plain(name), 0) for name in layer.files}

    def _unpack(self, layer: Layer, blob: Descriptor, places: dict[str, tuple[Path, int]]) -> None:
        @contextmanager
        def opened(name: str) -> Iterator[BinaryIO]:
            path, offset = places[name]
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.seek(offset)
                yield file

        packing.unpack(layer, blob, self._source.chunks(blob.digest, blob.size), opened)

    def _lay_buffers(self, folder: Path) -> None:
        """Put the small stretches of llama.cpp's buffers where they belong, holes between."""
        if not self._what.buffers_bytes:
            return
        loose = folder / ARRIVED / format.BUFFERS
        descriptor = os.open(folder / format.BUFFERS, os.O_WRONLY | os.O_CREAT, 0o600)
        with open(descriptor, "wb") as file:
            file.truncate(self._what.buffers_bytes)
        at = 0
        for piece in self._what.pieces:
            if piece.file != LOOSE:
                continue
            _copy_part(loose, at, folder / format.BUFFERS, piece)
            at += piece.length

    def _moved(self, folder: Path, model: list[Path]) -> dict[str, str]:
        """Every path of the exporter's that stands in the process, and what it is here."""
        what = self._what
        files = {
            old: str(new)
            for one, path in zip(what.model_files, model, strict=True)
            for old, new in ((one.mapped, os.path.realpath(path)), (one.path, path))
        }
        return self._folders(str(folder)) | files

    def _rewrite(self, folder: Path, moved: dict[str, str]) -> None:
        """Make CRIU's images those of this user's process, with the files where they are now."""
        images, old = folder / ARRIVED / format.IMAGES, self._what.real_places.snapshot
        places = Places(moved | {f"{old}/{format.MEMORY}": str(folder / ARRIVED / format.MEMORY)})
        try:
            rewriting.move_files(images, {path: places.of(path) for path in rewriting.paths(images)})
        except OSError as error:
            raise SnapshotStaleError(
                f"the snapshot needs {error.filename}, which is not here", key=str(error.filename)
            ) from error
        for core in images.glob("core-*.img"):
            rewriting.become_ours(core)

    def _request(self, folder: Path, moved: dict[str, str]) -> dict[str, frames.Value]:
        what, found = self._what, self._criu
        return {
            "model": what.model,
            "name": what.name,
            "requested": msgspec.json.encode(what.requested),
            "system": what.system,
            "system_tokens": what.system_tokens,
            "canary": what.canary,
            "sleeper": msgspec.json.encode(what.sleeper),
            "moved": msgspec.json.encode(moved),
            "criu": found.criu,
            "version": found.version,
            "tier": found.tier or "",
        }


def _plain(name: str) -> str:
    """The place of a file of the snapshot's layer under what arrived. Raises SnapshotCorruptError."""
    kind, _, rest = name.partition("/")
    folder, _, file = rest.rpartition("/")
    if kind != "snapshot" or folder not in ("", format.IMAGES) or file.startswith(".") or not file:
        raise SnapshotCorruptError(f"{name!r} is no file of a snapshot", hint="")
    return rest


def _copy_part(source: Path, at: int, target: Path, piece: Piece) -> None:
    with open(target, "r+b") as file:
        file.seek(piece.offset)
        for chunk in packing.stretch(source, at, piece.length)():
            file.write(chunk)
