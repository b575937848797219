"""The description of an exported snapshot: the config of an OCI image, signed by the exporter.

The config is an ordinary image config with one more key, `edgeinfer`. It names every file by its
digest, which is that of its layer, so one signature binds all.
"""

from __future__ import annotations

import hashlib
import os
from typing import Annotated

import msgspec

from edgeinfer.errors import SnapshotCorruptError

FORMAT = 5
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
#: A layer that is a file of a model as it is, in Docker's words, and one that is an adapter.
MODEL_TYPE = "application/vnd.docker.ai.gguf.v3"
ADAPTER_TYPE = "application/vnd.edgeinfer.adapter.gguf"
SIGNATURE = "io.edgeinfer.snapshot.signature"
SIGNER = "io.edgeinfer.snapshot.signer"
Size = Annotated[int, msgspec.Meta(ge=0)]
#: A snapshot's name is a folder's: no separators, and nothing hidden.
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_+-][A-Za-z0-9._+,-]*\Z", max_length=200)]
#: An adapter's name is its file's: what `pull` would store it under.
AdapterName = Annotated[
    str, msgspec.Meta(pattern=r"\A(?!.*\.\.)[a-z0-9](?:[a-z0-9._-]{0,94}[a-z0-9])?\Z")
]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
#: A manifest or a config larger than this is none.
MAX_BYTES = 8 << 20


def sha256(content: bytes) -> str:
    """Return the digest of some bytes as OCI writes it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def corrupt(message: str) -> SnapshotCorruptError:
    """Return the error of corrupt input, for which there is no next step."""
    return SnapshotCorruptError(message, hint="")


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A file by its size and SHA-256 in hexadecimal."""

    size: Size
    sha256: Sha256

    @property
    def digest(self) -> str:
        """Return the digest of its layer."""
        return f"sha256:{self.sha256}"


class ModelFile(Blob, frozen=True, kw_only=True):
    """A file of a model and its name at the exporter's."""

    name: str


class AdapterFile(Blob, frozen=True, kw_only=True):
    """A LoRA adapter: its name and scale."""

    name: AdapterName
    scale: float


class SnapshotDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot as its exporter describes it: what to build it of."""

    format: int
    name: Name
    model: str
    requested: dict[str, str]
    system: str
    model_files: tuple[ModelFile, ...]
    projector: Blob | None = None
    adapters: tuple[AdapterFile, ...] = ()

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """Return the files of the model, its projector last."""
        if self.projector is None:
            return self.model_files
        encoder = ModelFile(name="mmproj.gguf", size=self.projector.size, sha256=self.projector.sha256)
        return (*self.model_files, encoder)


def layers(description: SnapshotDescription) -> list[Descriptor]:
    """Return a layer for each file; equal files share one."""
    typed = [
        *((file, MODEL_TYPE) for file in description.files),
        *((file, ADAPTER_TYPE) for file in description.adapters),
    ]
    found = {file.digest: Descriptor(media_type, file.digest, file.size) for file, media_type in typed}
    return list(found.values())


def config_bytes(description: SnapshotDescription) -> bytes:
    """Encode the image config; the same snapshot gives the same bytes."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}
    architecture = os.uname().machine
    config = {
        "architecture": machine.get(architecture, architecture),
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers(description)]},
        "edgeinfer": msgspec.to_builtins(description),
    }
    return msgspec.json.encode(config)


def read_config(config: bytes) -> SnapshotDescription:
    """Read an image config. Raises SnapshotCorruptError if no snapshot or format fits."""

    class Config(msgspec.Struct):
        edgeinfer: SnapshotDescription

    try:
        found = msgspec.json.decode(config, type=Config).edgeinfer
    except msgspec.MsgspecError as error:
        raise corrupt(f"this image is no snapshot of edgeinfer: {error}") from error
    if found.format != FORMAT:
        raise SnapshotCorruptError(
            f"the snapshot was exported in format {found.format}, this edgeinfer reads {FORMAT}",
            hint="use the edgeinfer that exported it",
        )
    return found


class Descriptor(msgspec.Struct, rename="camel", omit_defaults=True):
    """A blob in a manifest."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}


class ImageManifest(msgspec.Struct, rename="camel", kw_only=True):
    """An image manifest, as far as it matters here."""

    schema_version: int = 2
    media_type: str = MANIFEST_TYPE
    config: Descriptor
    layers: list[Descriptor] = []
    annotations: dict[str, str] = {}


def manifest_bytes(config: bytes, layers: list[Descriptor], annotations: dict[str, str]) -> bytes:
    described = Descriptor(CONFIG_TYPE, sha256(config), len(config))
    manifest = ImageManifest(config=described, layers=layers, annotations=annotations)
    return msgspec.json.encode(manifest)


def read_manifest(content: bytes) -> ImageManifest:
    """Read an image manifest. Raises SnapshotCorruptError if it is none."""
    try:
        return msgspec.json.decode(content, type=ImageManifest)
    except msgspec.MsgspecError as error:
        raise corrupt(f"this is no manifest of an image: {error}") from error
