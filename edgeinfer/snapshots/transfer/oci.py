"""OCI image layouts: an image as a folder.

    oci-layout          {"imageLayoutVersion": "1.0.0"}
    index.json          the manifests, each with a name
    blobs/sha256/…      manifests, configs and layers, which are files as they are

https://github.com/opencontainers/image-spec/blob/main/image-layout.md.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgeinfer.errors import SnapshotMissingError
from edgeinfer.platform.disk import CHUNK_BYTES, open_regular, whole_file, write_whole
from edgeinfer.snapshots.transfer.description import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    MAX_BYTES,
    Descriptor,
    corrupt,
    sha256,
)

VERSION = "1.0.0"
_NAME = "org.opencontainers.image.ref.name"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class _Index(msgspec.Struct):
    manifests: list[Descriptor]


class Layout:
    """One folder. Nothing is read or made before it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    # --- reading

    def manifest(self, name: str = "") -> bytes:
        """Return the manifest of that name, or the only one.

        Raises SnapshotMissingError for none or several, SnapshotCorruptError.
        """
        index = self._index()
        found = [entry for entry in index if name in ("", entry.annotations.get(_NAME, ""))]
        if len(found) != 1:
            names = sorted(entry.annotations.get(_NAME, "?") for entry in index)
            typed = shlex.join(["edgeinfer", "snapshots", "import", str(self), "--name", *names[:1]])
            raise SnapshotMissingError(
                f"{self} holds {', '.join(names) or 'nothing'}" + (f", not {name}" if name else ""),
                hint=f"name one: `{typed}`" if names else "export one to it first",
            )
        return self.read(found[0].digest, found[0].size)

    def _index(self) -> list[Descriptor]:
        path = self.folder / "index.json"
        try:
            with open(open_regular(path, os.O_NOFOLLOW), "rb") as file:
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise corrupt(f"{path} has more than {MAX_BYTES} bytes")
            return msgspec.json.decode(content, type=_Index).manifests
        except FileNotFoundError as error:
            no_layout = "is no image layout: it has no index.json"
            raise SnapshotMissingError(
                f"{self} {no_layout if self.folder.is_dir() else 'is not there'}",
                hint="name the folder of an export, or oci://REGISTRY/NAME:TAG",
            ) from error
        except (OSError, msgspec.MsgspecError) as error:
            raise corrupt(f"{path} cannot be understood: {error}") from error

    def read(self, digest: str, size: int) -> bytes:
        """Return a small blob, whole and checked. Raises SnapshotCorruptError."""
        if not 0 <= size <= MAX_BYTES:
            raise corrupt(f"{digest} is said to have {size} bytes")
        return b"".join(self.chunks(digest, size))

    def chunks(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield a blob; check its size and digest at its end. Raises SnapshotCorruptError."""
        hashed, left = hashlib.sha256(), size
        with open(self._opened(digest), "rb", buffering=0) as file:
            while chunk := file.read(min(CHUNK_BYTES, left + 1)):
                left -= len(chunk)
                if left < 0:
                    break
                hashed.update(chunk)
                yield chunk
        if left:
            more = "more" if left < 0 else "fewer"
            raise corrupt(f"{digest} has {more} bytes than the {size} it is said to have")
        if f"sha256:{hashed.hexdigest()}" != digest:
            raise corrupt(f"{digest} holds other bytes than its name says")

    def _opened(self, digest: str) -> int:
        if not _DIGEST.fullmatch(digest):
            raise corrupt(f"{digest!r} is no digest")
        try:
            return open_regular(self.blob(digest), os.O_NOFOLLOW)
        except OSError as error:
            raise corrupt(f"{self} has no {digest}: {error.strerror}") from error

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")

    # --- writing

    def has(self, digest: str, size: int) -> bool:
        """Return whether a blob of that size is there already."""
        path = self.blob(digest)
        return path.is_file() and path.stat().st_size == size

    def put(self, digest: str, size: int, chunks: Iterator[bytes]) -> None:
        """Write a blob. Raises DiskFullError."""
        self.blob(digest).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self.blob(digest)) as file:
            for chunk in chunks:
                file.write(chunk)

    def put_manifest(self, name: str, content: bytes) -> None:
        """Write a manifest and list it under a name; one of that name before is not listed any more."""
        digest = sha256(content)
        self.put(digest, len(content), iter([content]))
        write_whole(self.folder / "oci-layout", msgspec.json.encode({"imageLayoutVersion": VERSION}))
        before = self._index() if (self.folder / "index.json").exists() else []
        kept = [one for one in before if one.annotations.get(_NAME) != name]
        new = Descriptor(MANIFEST_TYPE, digest, len(content), {_NAME: name})
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*kept, new]}
        write_whole(self.folder / "index.json", msgspec.json.encode(index))
