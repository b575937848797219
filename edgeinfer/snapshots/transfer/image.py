"""An exported snapshot as an OCI image, with a signed description of the snapshot's build.

The description is stored in the image's config, under `edgeinfer`. The description has the digest of
every file's layer, so the signature covers the files too.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from edgeinfer.errors import SnapshotCorruptError, SnapshotUntrustedError
from edgeinfer.models.progress import Job
from edgeinfer.platform.ed25519 import SigningKey, is_signed_by

FORMAT = 6
Kind = Literal["model", "projector", "adapter"]
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
#: Kind of file → media type of its layer in the OCI image. A layer is the file itself, not an archive.
MEDIA_TYPES = {
    "model": "application/vnd.docker.ai.gguf.v3",
    "projector": "application/vnd.docker.ai.mmproj",
    "adapter": "application/vnd.edgeinfer.adapter.gguf",
}
SIGNATURE = "io.edgeinfer.snapshot.signature"
SIGNER = "io.edgeinfer.snapshot.signer"
#: Maximum size (bytes) of the manifest of an OCI image, and of its config.
MAX_BYTES = 4 << 20
#: Name of a file or snapshot in an OCI image. It contains no `/`, and does not begin with a dot.
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_+-][A-Za-z0-9._+,=-]*\Z", max_length=200)]
Size = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class ImageStore(Protocol):
    """A place for one image: an OCI layout in a folder, or a tag in a registry."""

    def manifest_content(self) -> bytes: ...

    def read_blob(self, digest: str, size: int, /) -> bytes:
        """Return the content of a blob of at most `MAX_BYTES`. The caller verifies the digest."""

    def fetch_blob(self, digest: str, size: int, folder: Path, job: Job) -> Path:
        """Write a blob to a new file in `folder`; return the path. `job` shows the progress.

        The caller verifies the digest.
        """

    def has_blob(self, digest: str, size: int) -> bool: ...

    def put_blob(self, digest: str, size: int, chunks: Iterator[bytes]) -> None: ...

    def put_manifest(self, content: bytes) -> None: ...


class SnapshotFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the snapshot is built from. `scale` is used only for adapters."""

    kind: Kind
    name: Name
    size: Size
    sha256: Sha256
    scale: float = 1.0

    @property
    def digest(self) -> str:
        """Digest of the file's layer: `sha256:` and 64 hex digits."""
        return f"sha256:{self.sha256}"


class SnapshotDescription(msgspec.Struct, frozen=True, kw_only=True):
    """How to build the snapshot: model, load options (`requested`), system prompt and files.

    `requested` maps fields of LoadOptions to texts. `format` is the version of this description.
    """

    format: int = FORMAT
    name: Name
    model: str
    requested: dict[str, str]
    system: str
    files: tuple[SnapshotFile, ...]

    @property
    def model_files(self) -> list[SnapshotFile]:
        """Model files in order, then the projector if there is one."""
        return [file for file in self.files if file.kind != "adapter"]

    @property
    def adapters(self) -> list[SnapshotFile]:
        return [file for file in self.files if file.kind == "adapter"]


class Descriptor(msgspec.Struct, rename="camel"):
    media_type: str
    digest: str
    size: int


class ImageManifest(msgspec.Struct, rename="camel", kw_only=True):
    schema_version: int = 2
    media_type: str = MANIFEST_TYPE
    config: Descriptor
    layers: list[Descriptor] = []
    annotations: dict[str, str] = {}


class _Config(msgspec.Struct):
    edgeinfer: SnapshotDescription


def sha256(content: bytes) -> str:
    """Return the digest of `content`: `sha256:` and 64 hex digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def corrupt(message: str) -> SnapshotCorruptError:
    """Make the error for an invalid image."""
    return SnapshotCorruptError(message, hint="fetch or export the snapshot again")


def layers(description: SnapshotDescription) -> list[Descriptor]:
    """Return the layers of an image: one for each file; files of equal content share a layer."""
    files = {file.digest: file for file in description.files}.values()
    return [Descriptor(MEDIA_TYPES[file.kind], file.digest, file.size) for file in files]


def sign(description: SnapshotDescription, key: SigningKey) -> tuple[bytes, bytes]:
    """Return an image's config, and its manifest with the signature of the config (both JSON).

    Equal inputs give equal bytes.
    """
    machine = os.uname().machine
    blobs = layers(description)
    config = msgspec.json.encode(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in blobs]},
            "edgeinfer": description,
        }
    )
    manifest = ImageManifest(
        config=Descriptor("application/vnd.oci.image.config.v1+json", sha256(config), len(config)),
        layers=blobs,
        annotations={
            SIGNER: base64.b64encode(key.public).decode(),
            SIGNATURE: base64.b64encode(key.sign(config)).decode(),
        },
    )
    return config, msgspec.json.encode(manifest)


def read_signed(store: ImageStore) -> tuple[SnapshotDescription, bytes]:
    """Verify an image's signature; return its description and the signer's public key.

    The caller decides whether to trust the key. Raises SnapshotUntrustedError without a valid
    signature, SnapshotCorruptError for an invalid image.
    """
    try:
        manifest = msgspec.json.decode(store.manifest_content(), type=ImageManifest)
    except msgspec.MsgspecError as error:
        raise corrupt(f"this is not an OCI image manifest: {error}") from error
    digest, size = manifest.config.digest, manifest.config.size
    if not 0 <= size <= MAX_BYTES:
        raise corrupt(f"the image's config has {size} bytes; at most {MAX_BYTES} are allowed")
    config = store.read_blob(digest, size)
    refuse_other_bytes(digest, sha256(config))
    public = _signer(manifest.annotations, config)
    try:
        description = msgspec.json.decode(config, type=_Config).edgeinfer
    except msgspec.MsgspecError as error:
        raise corrupt(f"this image is not a snapshot of edgeinfer: {error}") from error
    if description.format != FORMAT:
        problem = f"the snapshot has format {description.format}; this edgeinfer reads format {FORMAT}"
        hint = "use the version of edgeinfer that exported the snapshot"
        raise SnapshotCorruptError(problem, hint=hint)
    return description, public


def refuse_other_bytes(digest: str, actual: str) -> None:
    """Raise SnapshotCorruptError if a blob's `actual` digest is not the expected `digest`."""
    if actual != digest:
        raise corrupt(f"the content of the blob {digest} has another digest")


def _signer(annotations: dict[str, str], config: bytes) -> bytes:
    hint = "export the snapshot again: `edgeinfer snapshots export`"
    try:
        public = base64.b64decode(annotations[SIGNER], validate=True)
        signature = base64.b64decode(annotations[SIGNATURE], validate=True)
    except KeyError as error:
        raise SnapshotUntrustedError("the snapshot is not signed", hint=hint) from error
    except ValueError as error:
        problem = f"the snapshot's key or signature is not Base64: {error}"
        raise SnapshotUntrustedError(problem, hint=hint) from error
    if not is_signed_by(public, signature, config):
        problem = "the signature is invalid: the snapshot was changed after it was signed"
        raise SnapshotUntrustedError(problem, hint="fetch or export the snapshot again")
    return public
