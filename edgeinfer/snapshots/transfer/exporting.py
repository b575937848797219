"""Export: verify a snapshot, describe it and the files it was built from, pack, sign and store it."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from edgeinfer.config.load_options import DRAFT, LORA, NO_ADAPTERS
from edgeinfer.errors import SnapshotCorruptError, SnapshotError, UsageError
from edgeinfer.models import names
from edgeinfer.models.reference import resolve
from edgeinfer.platform import paths
from edgeinfer.platform.disk import sha256_of, stamps
from edgeinfer.runtime.options import Adapter, parse_adapters
from edgeinfer.snapshots import fingerprint, format, registry
from edgeinfer.snapshots.build import builder, criu_images
from edgeinfer.snapshots.restore import checks
from edgeinfer.snapshots.transfer import oci, signing
from edgeinfer.snapshots.transfer.description import (
    FORMAT,
    SIGNATURE,
    SIGNER,
    AdapterFile,
    DraftModel,
    ModelFile,
    ParkedProcess,
    SnapshotDescription,
    config_bytes,
    manifest_bytes,
    own_folders,
    own_requirements,
    sha256,
    without_symlinks,
)
from edgeinfer.snapshots.transfer.oci import Packed

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
    inputs = gather_inputs(manifest)
    progress("verify", None)
    wrong = builder.wrong_files(folder)
    if wrong:
        raise SnapshotCorruptError(f"{folder.name}: {', '.join(wrong)} changed since it was built")
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


def _described(folder: Path, inputs: Inputs, scratch: Path) -> tuple[SnapshotDescription, list[Packed]]:
    manifest, details = format.read_manifest(str(folder)), registry.read_details(folder)
    places = own_folders(str(folder))
    members = [oci.whole(folder / one, f"snapshot/{one}") for one in manifest.images]
    layers = [*inputs.layers(), oci.compressed("snapshot", members, scratch / "layer")]
    return (
        SnapshotDescription(
            format=FORMAT,
            name=manifest.name,
            model=manifest.model,
            requested=manifest.requested,
            actual=manifest.actual,
            system=details.system,
            system_tokens=details.system_tokens,
            canary=checks.ask(manifest, str(folder), checks.nobodys_request("canary")),
            parked_process=ParkedProcess(
                pid=manifest.pid, link=manifest.link_inode, wake=manifest.wake_inode
            ),
            places=places,
            real_places=without_symlinks(places),
            model_files=inputs.model,
            requirements=own_requirements(_libraries(folder, inputs), manifest.keys["criu"]),
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
        for path in criu_images.file_paths(folder / format.IMAGES)
        if path not in own and not path.startswith(f"{folder}/") and os.path.isfile(path)
    ]


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The files that were read to build a snapshot."""

    model: tuple[ModelFile, ...]
    draft: DraftModel | None
    adapters: tuple[AdapterFile, ...]

    @property
    def models(self) -> tuple[ModelFile, ...]:
        """Return the files of the model and of its draft model."""
        return self.model + (self.draft.files if self.draft else ())

    def layers(self) -> list[Packed]:
        """Pack a layer for each file; equal files share one."""
        models = {one.member: one.path for one in self.models}
        adapters = {one.member: one.path for one in self.adapters}
        return [*_layers("model", models), *_layers("adapter", adapters)]


def _layers(role: str, files: dict[str, str]) -> list[Packed]:
    return [oci.stored(role, [oci.whole(Path(path), member)]) for member, path in files.items()]


def gather_inputs(manifest: format.Manifest) -> Inputs:
    """Find the inputs. Raises SnapshotError for one that no other machine could know by a name."""
    found = Inputs(
        model=_files(manifest.model, "edgeinfer warm NAME"),
        draft=_draft(manifest),
        adapters=_adapters(manifest),
    )
    known = {path for file in found.models for path in (file.path, file.mapped)}
    known |= {adapter.path for adapter in found.adapters}
    _refuse_others(manifest, (path for path in manifest.files if path not in known))
    return found


def _files(model: str, warm: str) -> tuple[ModelFile, ...]:
    """Return the files of a pulled model. Raises SnapshotError for another."""
    pulled = None if "/" in model else resolve(model).pulled
    if pulled is None or pulled.name != model:
        first = f"`edgeinfer pull {model} --name NAME`, then "
        if pulled is not None:
            first = f"it is called {pulled.name}: "
            warm = warm.replace("NAME", pulled.name)
        raise SnapshotError(
            f"{model} is no name that another machine could know the model by", hint=f"{first}`{warm}`"
        )
    return tuple(
        ModelFile(
            path=str(path), mapped=os.path.realpath(path), size=file.size_bytes, sha256=file.sha256
        )
        for path, file in zip(pulled.paths, pulled.files, strict=True)
    )


def _draft(manifest: format.Manifest) -> DraftModel | None:
    name = manifest.requested.get(DRAFT.field, "")
    if name in ("", "none"):
        return None
    return DraftModel(name=name, files=_files(name, f"edgeinfer warm {manifest.model} --draft NAME"))


def _adapters(manifest: format.Manifest) -> tuple[AdapterFile, ...]:
    return tuple(map(_adapter, parse_adapters(manifest.requested.get(LORA.field, NO_ADAPTERS))))


def _adapter(adapter: Adapter) -> AdapterFile:
    path = Path(adapter.path)
    try:
        names.model_name(adapter.name)
    except UsageError as error:
        raise SnapshotError(
            f"the adapter {path.name} has no name that another machine could store it under",
            hint=f"{error.hint}: rename the file, and `edgeinfer warm` with it again",
        ) from error
    return AdapterFile(
        name=adapter.name,
        scale=adapter.scale,
        path=adapter.path,
        stamp=stamps([os.path.realpath(path)]),
        size=path.stat().st_size,
        sha256=sha256_of(path, lambda _done: None),
    )


def _refuse_others(manifest: format.Manifest, unknown: Iterable[str]) -> None:
    others = [os.path.basename(path) for path in unknown if path.endswith(".gguf")]
    if not others:
        return
    here = resolve(manifest.model).files()
    words = [f"{one.flag} {text}" for one, text in ((LORA, here.lora), (DRAFT, here.draft)) if text]
    raise SnapshotError(
        f"{manifest.name} was made with {', '.join(others)}, which your models.toml names: another "
        "machine's may not",
        hint=f"build one that names it itself: `edgeinfer warm {manifest.model} {' '.join(words)}`",
    )
