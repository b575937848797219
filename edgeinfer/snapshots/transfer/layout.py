"""An OCI image layout: one image in a folder.

    oci-layout          {"imageLayoutVersion": "1.0.0"}
    index.json          the manifest's digest
    blobs/sha256/…      the manifest, the config and the layers, which are the files themselves

https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgeinfer.errors import SnapshotMissingError
from edgeinfer.models.fetching.fetch import copy_into
from edgeinfer.models.progress import Job
from edgeinfer.platform.disk import durable_file, open_regular, write_durably
from edgeinfer.snapshots.transfer.image import (
    MANIFEST_TYPE,
    MAX_BYTES,
    Descriptor,
    corrupt,
    refuse_other_bytes,
    sha256,
)


class _Index(msgspec.Struct):
    manifests: list[Descriptor]


class Layout:
    """An `ImageStore` with one image in `folder`; the first write creates the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def manifest_content(self) -> bytes:
        """Return the manifest, after comparing its digest with that in index.json.

        Raises SnapshotMissingError if there is no index, SnapshotCorruptError if a file is invalid.
        """
        path = self.folder / "index.json"
        try:
            content = _read(path)
            (manifest,) = msgspec.json.decode(content, type=_Index).manifests
        except FileNotFoundError as error:
            raise SnapshotMissingError(
                f"{self.folder} has no exported snapshot: {path.name} is missing",
                hint="name the folder of an export, or oci://REGISTRY/NAME:TAG",
            ) from error
        except (OSError, ValueError) as error:  # the JSON is invalid, or does not list one image
            raise corrupt(f"{path} is invalid: {error}") from error
        content = self.read_blob(manifest.digest, manifest.size)
        refuse_other_bytes(manifest.digest, sha256(content))
        return content

    def read_blob(self, digest: str, size: int) -> bytes:
        return _read(self._existing(digest, size))

    def fetch_blob(self, digest: str, size: int, folder: Path, job: Job) -> Path:
        return copy_into(folder, self._existing(digest, size), job)

    def _existing(self, digest: str, size: int) -> Path:
        """Return the path of a blob of this size. Raises SnapshotCorruptError."""
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise corrupt(f"{digest!r} is not a SHA-256 digest")
        try:
            descriptor = open_regular(self.blob(digest), os.O_NOFOLLOW)
        except OSError as error:
            raise corrupt(f"{self.folder} has no blob {digest}: {error.strerror}") from error
        actual = os.fstat(descriptor).st_size
        os.close(descriptor)
        if actual != size:
            raise corrupt(f"the blob {digest} has {actual} bytes, not {size}")
        return self.blob(digest)

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs/sha256" / digest.removeprefix("sha256:")

    def has_blob(self, digest: str, _size: int) -> bool:
        return self.blob(digest).exists()

    def put_blob(self, digest: str, _size: int, chunks: Iterator[bytes]) -> None:
        """Write the `chunks` of a blob to its file. Raises DiskFullError."""
        self.blob(digest).parent.mkdir(parents=True, exist_ok=True)
        with durable_file(self.blob(digest)) as file:
            for chunk in chunks:
                file.write(chunk)

    def put_manifest(self, content: bytes) -> None:
        """Write the manifest, then the index, which makes the image complete."""
        descriptor = Descriptor(MANIFEST_TYPE, sha256(content), len(content))
        self.put_blob(descriptor.digest, len(content), iter([content]))
        write_durably(self.folder / "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        index = {"schemaVersion": 2, "manifests": [descriptor]}
        write_durably(self.folder / "index.json", msgspec.json.encode(index))


def _read(path: Path) -> bytes:
    with open(open_regular(path, os.O_NOFOLLOW), "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise corrupt(f"{path} has more than {MAX_BYTES} bytes")
    return content
