"""Export a snapshot: describe its build, sign the description, store it with the model's files."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from edgeinfer.config.load_options import DRAFT, LORA, NO_ADAPTERS
from edgeinfer.errors import SnapshotError, UsageError
from edgeinfer.models import names
from edgeinfer.models.reference import ModelRef, resolve
from edgeinfer.models.store import PulledModel
from edgeinfer.platform.disk import CHUNK_BYTES, sha256_of
from edgeinfer.runtime.options import Adapter, parse_adapters
from edgeinfer.snapshot_format import fingerprint, storage
from edgeinfer.snapshots import registry
from edgeinfer.snapshots.transfer import signing
from edgeinfer.snapshots.transfer.image import (
    ImageStore,
    Kind,
    SnapshotDescription,
    SnapshotFile,
    layers,
    sha256,
    sign,
)


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    signer: str
    layers_bytes: int
    written_bytes: int


def export(
    folder: Path, store: ImageStore, progress: Callable[[str, float | None], None]
) -> ExportResult:
    """Export the snapshot in `folder` to `store`: a signed description, and the model's files.

    `progress` gets the stage "write" and its fraction. Raises SnapshotStaleError if this machine cannot
    resume the snapshot, SnapshotError if no other machine can build it, and the errors of `store`, such
    as DiskFullError.
    """
    key = signing.own_key(make=True)
    assert key is not None
    manifest = storage.read_manifest(str(folder))
    fingerprint.refuse_stale(manifest, str(folder))
    described, paths = describe(manifest, registry.read_details(folder).system)
    config, image = sign(described, key)
    blobs = layers(described)
    written_bytes = 0
    for number, blob in enumerate(blobs):
        progress("write", number / len(blobs))
        if not store.has_blob(blob.digest, blob.size):
            with open(paths[blob.digest], "rb", buffering=0) as file:
                store.put_blob(blob.digest, blob.size, iter(partial(file.read, CHUNK_BYTES), b""))
            written_bytes += blob.size
    store.put_blob(sha256(config), len(config), iter([config]))
    store.put_manifest(image)
    return ExportResult(
        digest=sha256(image),
        signer=key.fingerprint,
        layers_bytes=sum(blob.size for blob in blobs),
        written_bytes=written_bytes,
    )


def describe(manifest: storage.Manifest, system: str) -> tuple[SnapshotDescription, dict[str, Path]]:
    """Return the description of a snapshot with this system prompt, and digest → path of its files.

    Raises SnapshotError if another machine could not build the snapshot.
    """
    ref, pulled = _find_pulled(manifest.model)
    loaded = ref.files(draft=manifest.requested.get(DRAFT.field, ""))
    paths = list(pulled.paths)
    files = [
        _file("model", names.sanitize_file_name(path.name), path, sha256=file.sha256)
        for path, file in zip(paths, pulled.files, strict=True)
    ]
    if loaded.projector in manifest.files:
        paths.append(Path(loaded.projector))
        files.append(_file("projector", "mmproj.gguf", Path(loaded.projector)))
    for adapter in parse_adapters(manifest.requested.get(LORA.field, NO_ADAPTERS)):
        paths.append(Path(adapter.path))
        _refuse_nameless(adapter)
        files.append(_file("adapter", adapter.name, Path(adapter.path), scale=adapter.scale))
    _refuse_others(manifest, [*paths, *map(Path, loaded.draft_paths)], loaded.lora)
    description = SnapshotDescription(
        name=manifest.name,
        model=manifest.model,
        requested=manifest.requested,
        system=system,
        files=tuple(files),
    )
    return description, {file.digest: path for file, path in zip(files, paths, strict=True)}


def _file(kind: Kind, name: str, path: Path, *, sha256: str = "", scale: float = 1.0) -> SnapshotFile:
    digest, size = sha256 or sha256_of(path), path.stat().st_size
    return SnapshotFile(kind=kind, name=name, size=size, sha256=digest, scale=scale)


def _find_pulled(model: str) -> tuple[ModelRef, PulledModel]:
    ref = None if "/" in model else resolve(model)
    pulled = ref.pulled if ref is not None else None
    if ref is None or pulled is None or pulled.name != model:
        hint = f"`edgeinfer pull {model} --name NAME`, then `edgeinfer warm NAME`"
        if pulled is not None:
            hint = f"use the model's own name: `edgeinfer warm {pulled.name}`"
        problem = f"another machine would not know the model name {model}"
        raise SnapshotError(problem, hint=hint)
    return ref, pulled


def _refuse_nameless(adapter: Adapter) -> None:
    try:
        names.model_name(adapter.name)
    except UsageError as error:
        adapter_file = Path(adapter.path).name
        problem = f"the file name of the adapter {adapter_file} is not a valid name on other machines"
        hint = f"{error.hint}: rename the file, then run `edgeinfer warm` with it again"
        raise SnapshotError(problem, hint=hint) from error


def _refuse_others(manifest: storage.Manifest, paths: list[Path], lora: str) -> None:
    described = {name for path in paths for name in (str(path), os.path.realpath(path))}
    ggufs = [path for path in manifest.files if path.endswith(".gguf")]
    if undescribed := [os.path.basename(path) for path in ggufs if path not in described]:
        files = ", ".join(undescribed)
        problem = f"{manifest.name} was made with {files}, which only this machine's models.toml names"
        command = f"`edgeinfer warm {manifest.model} {LORA.flag} {lora}`"
        hint = f"name adapters on the command line, then export that snapshot: {command}"
        raise SnapshotError(problem, hint=hint)
