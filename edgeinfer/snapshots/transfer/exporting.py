"""Export: verify a snapshot, describe it, pack it in layers, sign it, and put it where it goes."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from edgeinfer.errors import SnapshotCorruptError
from edgeinfer.platform import paths
from edgeinfer.platform.disk import sha256_of_part
from edgeinfer.snapshots import fingerprint, format, registry
from edgeinfer.snapshots.build import verify
from edgeinfer.snapshots.restore import checks
from edgeinfer.snapshots.transfer import packing, requirements, rewriting, signing
from edgeinfer.snapshots.transfer.description import (
    FORMAT,
    LOOSE,
    SIGNATURE,
    SIGNER,
    Description,
    Piece,
    Sleeper,
    config_bytes,
    manifest_bytes,
    sha256,
)
from edgeinfer.snapshots.transfer.inputs import Inputs, gather
from edgeinfer.snapshots.transfer.packing import Member, Packed

#: Stretches of llama.cpp's buffers from this size on are layers of their own: repacked weights.
_WEIGHTS_BYTES = 8 << 20
Progress = Callable[[str, float | None], None]


class Store(Protocol):
    """Where blobs go: a folder or a registry."""

    def has(self, digest: str, size: int) -> bool: ...

    def put(self, digest: str, size: int, chunks: Iterator[bytes]) -> None: ...

    def put_manifest(self, name: str, content: bytes) -> None: ...


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was exported: bytes in all layers, and those that had to be written."""

    name: str
    digest: str
    signer: str
    layers_bytes: int
    written_bytes: int


def export(folder: Path, where: Store, name: str, progress: Progress) -> Exported:
    """Export the snapshot in `folder` under `name`.

    Raises what `verify.wrong_files` raises, SnapshotCorruptError, SnapshotStaleError for one that could
    not be resumed here, SnapshotError for one that does not travel, RestoreError, and what the store
    raises.
    """
    key = signing.own_key(make=True)
    assert key is not None
    manifest = format.read_manifest(str(folder))
    fingerprint.refuse_stale(manifest, str(folder))
    inputs = gather(manifest)
    progress("verify", None)
    wrong = verify.wrong_files(folder)
    if wrong:
        raise SnapshotCorruptError(f"{', '.join(wrong)} of {folder.name} is not what was built")
    with tempfile.TemporaryDirectory(dir=paths.cache_dir(), prefix="export-") as scratch:
        progress("pack", None)
        description, layers = _described(folder, inputs, Path(scratch))
        config = config_bytes(description)
        annotations = {
            SIGNER: base64.b64encode(key.public).decode(),
            SIGNATURE: base64.b64encode(key.sign(config)).decode(),
        }
        image = manifest_bytes(config, [one.blob for one in layers], annotations)
        progress("write", None)
        written = _put_layers(layers, where)
        where.put(sha256(config), len(config), iter([config]))
        where.put_manifest(name, image)
    return Exported(
        name=name,
        digest=sha256(image),
        signer=key.fingerprint,
        layers_bytes=sum(one.blob.size for one in layers),
        written_bytes=written,
    )


def _put_layers(layers: list[Packed], where: Store) -> int:
    written = 0
    for packed in layers:
        blob = packed.blob
        if not where.has(blob.digest, blob.size):
            where.put(blob.digest, blob.size, packed.chunks())
            written += blob.size
    return written


def _described(folder: Path, inputs: Inputs, scratch: Path) -> tuple[Description, list[Packed]]:
    manifest, details = format.read_manifest(str(folder)), registry.read_details(folder)
    places = requirements.places(str(folder))
    pieces, dense, packed_size = _buffers(folder)
    layers = inputs.layers()
    buffers = folder / format.BUFFERS
    layers += [
        packing.stored(
            "weights",
            [Member(piece.file, piece.length, packing.stretch(buffers, piece.offset, piece.length))],
        )
        for piece in dense
    ]
    members = [
        packing.whole(folder / one, f"snapshot/{one}")
        for one in manifest.images
        if one != format.BUFFERS
    ]
    loose = [piece for piece in pieces if piece not in dense]
    if packed_size:
        members.append(Member(LOOSE, packed_size, lambda: _joined(buffers, loose)))
    layers.append(packing.compressed("snapshot", members, scratch / "layer"))
    return (
        Description(
            format=FORMAT,
            name=manifest.name,
            model=manifest.model,
            requested=manifest.requested,
            actual=manifest.actual,
            system=details.system,
            system_tokens=details.system_tokens,
            canary=checks.ask(manifest, str(folder), "canary"),
            sleeper=Sleeper(pid=manifest.pid, link=manifest.link_inode, wake=manifest.wake_inode),
            places=places,
            real_places=requirements.real(places),
            model_files=inputs.model,
            buffers_bytes=manifest.images.get(format.BUFFERS, 0),
            pieces=tuple(pieces),
            requirements=requirements.gather(_libraries(folder, inputs), manifest.keys["criu"]),
            layers=tuple(one.layer for one in layers),
            draft=inputs.draft,
            adapters=inputs.adapters,
        ),
        layers,
    )


def _libraries(folder: Path, inputs: Inputs) -> list[str]:
    own = {one.mapped for one in inputs.models}
    return [
        path
        for path in rewriting.paths(folder / format.IMAGES)
        if path not in own and not path.startswith(f"{folder}/") and os.path.isfile(path)
    ]


def _buffers(folder: Path) -> tuple[list[Piece], list[Piece], int]:
    """Return the mapped stretches of `buffers.img`, the layers among them, the bytes of the others."""
    pieces: list[Piece] = []
    dense: list[Piece] = []
    for low, high in rewriting.mapped_ranges(folder / format.IMAGES, str(folder / format.BUFFERS)):
        is_large = high - low >= _WEIGHTS_BYTES
        piece = Piece(offset=low, length=high - low, file=f"weights/{low}" if is_large else LOOSE)
        if is_large:
            piece = msgspec.structs.replace(piece, file=f"weights/{_digest(folder, piece)}")
            dense.append(piece)
        pieces.append(piece)
    return pieces, dense, sum(piece.length for piece in pieces if piece not in dense)


def _digest(folder: Path, piece: Piece) -> str:
    with open(folder / format.BUFFERS, "rb", buffering=0) as file:
        return sha256_of_part(file.fileno(), piece.offset, piece.length, lambda _chunk, _done: None)


def _joined(path: Path, pieces: list[Piece]) -> Iterator[bytes]:
    for piece in pieces:
        yield from packing.stretch(path, piece.offset, piece.length)()
