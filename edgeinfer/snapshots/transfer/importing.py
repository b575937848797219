"""Import: check a snapshot from elsewhere, make it one of this home, publish it if it computes alike.

Nothing of it is unpacked before its signer is known, nothing is mapped before every digest was checked,
and nothing is published before a resume has computed what the exporter's process computed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from edgeinfer.config.config_file import SnapshotsConfig
from edgeinfer.config.load_options import LOAD_OPTIONS
from edgeinfer.errors import DiskFullError, SnapshotStaleError
from edgeinfer.host import Host
from edgeinfer.launcher import messages
from edgeinfer.platform import paths
from edgeinfer.platform.disk import free_bytes, locked, room_errors
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.snapshots import criu, failures, fingerprint, format, prune
from edgeinfer.snapshots.build import jobs
from edgeinfer.snapshots.build.relocate import Places
from edgeinfer.snapshots.registry import Details
from edgeinfer.snapshots.transfer import packing, requirements, rewriting
from edgeinfer.snapshots.transfer.description import (
    LOOSE,
    Layer,
    LayerBlob,
    Offered,
    Piece,
    Source,
    corrupt,
)
from edgeinfer.snapshots.transfer.placing import Placing, as_named_here
from edgeinfer.snapshots.transfer.relocator import ARRIVED
from edgeinfer.units import format_bytes

_RELOCATOR = "edgeinfer.snapshots.transfer.relocator"
_GIB = 1 << 30


class Importing:
    """One import of a snapshot that is offered."""

    def __init__(
        self, source: Source, offer: Offered, config: SnapshotsConfig, progress: jobs.Progress
    ) -> None:
        self._source = source
        self._offer = offer
        self._placing = Placing(source, offer, progress)
        self._what = as_named_here(offer.description)
        self._config = config
        self._progress = progress
        self._criu = criu.available()

    def run(self) -> Details:
        """Raises SnapshotStaleError where it does not fit, SnapshotCorruptError, DiskFullError,
        RestoreError, DumpError, and what pulling the model raises."""
        what = self._what
        self._progress("compare", None)
        requirements.refuse_other_machine(what.requirements, self._libraries(), self._criu.version)
        self._placing.refuse_other_wishes()
        self._check([*self._placing.missing(), *self._layers("weights", "snapshot")])
        placed = self._placing.place()
        root = paths.private_dir(paths.snapshots_dir())
        format.refuse_unsafe_ancestors(str(root))
        with locked(jobs.build_lock(root, what.name)):
            jobs.sweep(root)
            self._make_room(root)
            folder = root / format.folder_name(what.name, time.time_ns(), fingerprint.program_tag())
            details = self._published(folder, placed)
            failures.forget(what.name)
            prune.drop_older(root, what.name)
        prune.to_limit(root, self._config, keep=what.name)
        return details

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

    def _check(self, layers: list[LayerBlob]) -> None:
        for number, (layer, blob) in enumerate(layers):
            self._progress("check", number / len(layers))
            packing.verify(layer, blob, self._source.chunks(blob.digest, blob.size))

    def _layers(self, *roles: str) -> Iterable[LayerBlob]:
        return (pair for pair in self._offer.layers if pair[0].role in roles)

    def _published(self, folder: Path, placed: dict[str, str]) -> Details:
        folder.mkdir(mode=0o700)
        try:
            with locked(folder / format.LOCK), room_errors(folder, "nothing of the snapshot is kept"):
                self._arrive(folder)
                moved = self._folders(str(folder)) | placed
                self._rewrite(folder, moved)
                return jobs.run_builder(folder, self._request(moved), self._progress, _RELOCATOR)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _arrive(self, folder: Path) -> None:
        self._progress("unpack", None)
        arrived = folder / ARRIVED
        (arrived / format.IMAGES).mkdir(mode=0o700, parents=True)
        for layer, blob in self._layers("snapshot", "weights"):
            chunks = self._source.chunks(blob.digest, blob.size)
            packing.unpack(layer, blob, chunks, self._places(folder, layer))
        self._lay_buffers(folder)

    def _places(self, folder: Path, layer: Layer) -> packing.Targets:
        if layer.role == "weights":
            buffers = folder / format.BUFFERS
            return {
                one.file: (buffers, one.offset) for one in self._what.pieces if one.file in layer.files
            }
        return {name: (folder / ARRIVED / _plain(name), 0) for name in layer.files}

    def _lay_buffers(self, folder: Path) -> None:
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

    def _rewrite(self, folder: Path, moved: dict[str, str]) -> None:
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

    def _request(self, moved: dict[str, str]) -> dict[str, messages.Value]:
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
    kind, _, rest = name.partition("/")
    folder, _, file = rest.rpartition("/")
    if kind != "snapshot" or folder not in ("", format.IMAGES) or file.startswith(".") or not file:
        raise corrupt(f"{name!r} is no file of a snapshot")
    return rest


def _copy_part(source: Path, at: int, target: Path, piece: Piece) -> None:
    with open(target, "r+b") as file:
        file.seek(piece.offset)
        for chunk in packing.stretch(source, at, piece.length)():
            file.write(chunk)
