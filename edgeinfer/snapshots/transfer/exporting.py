"""Export: describe a snapshot by the files it was built from, sign that, and store both."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from edgeinfer.config.load_options import LORA, NO_ADAPTERS
from edgeinfer.errors import SnapshotError, UsageError
from edgeinfer.models import names
from edgeinfer.models.reference import resolve
from edgeinfer.platform.disk import CHUNK_BYTES, sha256_of
from edgeinfer.runtime.options import parse_adapters
from edgeinfer.snapshots import fingerprint, format, registry
from edgeinfer.snapshots.transfer import signing
from edgeinfer.snapshots.transfer.description import (
    FORMAT,
    SIGNATURE,
    SIGNER,
    AdapterFile,
    Blob,
    ModelFile,
    SnapshotDescription,
    config_bytes,
    layers,
    manifest_bytes,
    sha256,
)

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

    Raises SnapshotStaleError for one that could not be resumed here, SnapshotError for one that does
    not travel, and what the store raises.
    """
    key = signing.own_key(make=True)
    assert key is not None
    manifest = format.read_manifest(str(folder))
    fingerprint.refuse_stale(manifest, str(folder))
    described, paths = describe(manifest, registry.read_details(folder).system)
    config, blobs = config_bytes(described), layers(described)
    annotations = {
        SIGNER: base64.b64encode(key.public).decode(),
        SIGNATURE: base64.b64encode(key.sign(config)).decode(),
    }
    image = manifest_bytes(config, blobs, annotations)
    written = 0
    for number, blob in enumerate(blobs):
        progress("write", number / len(blobs))
        if not where.has(blob.digest, blob.size):
            where.put(blob.digest, blob.size, _chunks(paths[blob.digest]))
            written += blob.size
    where.put(sha256(config), len(config), iter([config]))
    where.put_manifest(name, image)
    return Exported(
        name=name,
        digest=sha256(image),
        signer=key.fingerprint,
        layers_bytes=sum(blob.size for blob in blobs),
        written_bytes=written,
    )


def _chunks(path: str) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def describe(manifest: format.Manifest, system: str) -> tuple[SnapshotDescription, dict[str, str]]:
    """Return a snapshot's description, and its files' paths by their digests.

    Raises SnapshotError for a file that no other machine could know by a name.
    """
    paths: dict[str, str] = {}
    found = SnapshotDescription(
        format=FORMAT,
        name=manifest.name,
        model=manifest.model,
        requested=manifest.requested,
        system=system,
        model_files=_files(manifest.model, paths),
        projector=_projector(manifest, paths),
        adapters=_adapters(manifest, paths),
    )
    known = {name for path in paths.values() for name in (path, os.path.realpath(path))}
    _refuse_others(manifest, (path for path in manifest.files if path not in known))
    return found, paths


def _files(model: str, paths: dict[str, str]) -> tuple[ModelFile, ...]:
    """Return the files of a pulled model, their paths in `paths`. Raises SnapshotError for another."""
    pulled = None if "/" in model else resolve(model).pulled
    if pulled is None or pulled.name != model:
        hint = f"`edgeinfer pull {model} --name NAME`, then `edgeinfer warm NAME`"
        if pulled is not None:
            hint = f"it is called {pulled.name}: `edgeinfer warm {pulled.name}`"
        raise SnapshotError(
            f"{model} is no name that another machine could know the model by", hint=hint
        )
    found = tuple(
        ModelFile(name=path.name, size=file.size_bytes, sha256=file.sha256)
        for path, file in zip(pulled.paths, pulled.files, strict=True)
    )
    paths |= {one.digest: str(path) for one, path in zip(found, pulled.paths, strict=True)}
    return found


def _projector(manifest: format.Manifest, paths: dict[str, str]) -> Blob | None:
    path = resolve(manifest.model).files().projector
    if path not in manifest.files:
        return None
    blob = Blob(size=os.path.getsize(path), sha256=sha256_of(Path(path)))
    paths[blob.digest] = path
    return blob


def _adapters(manifest: format.Manifest, paths: dict[str, str]) -> tuple[AdapterFile, ...]:
    found = []
    for adapter in parse_adapters(manifest.requested.get(LORA.field, NO_ADAPTERS)):
        path = Path(adapter.path)
        try:
            names.model_name(adapter.name)
        except UsageError as error:
            raise SnapshotError(
                f"the adapter {path.name} has no name that another machine could store it under",
                hint=f"{error.hint}: rename the file, and `edgeinfer warm` with it again",
            ) from error
        one = AdapterFile(
            name=adapter.name, scale=adapter.scale, size=path.stat().st_size, sha256=sha256_of(path)
        )
        found.append(one)
        paths[one.digest] = adapter.path
    return tuple(found)


def _refuse_others(manifest: format.Manifest, unknown: Iterable[str]) -> None:
    others = [os.path.basename(path) for path in unknown if path.endswith(".gguf")]
    if not others:
        return
    named = f"{LORA.flag} {resolve(manifest.model).files().lora}"
    raise SnapshotError(
        f"{manifest.name} was made with {', '.join(others)}, which your models.toml names: another "
        "machine's may not",
        hint=f"build one that names it itself: `edgeinfer warm {manifest.model} {named}`",
    )
