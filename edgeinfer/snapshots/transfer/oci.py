"""OCI image layouts, and layers as reproducible tar archives: no times, owners or modes.

    oci-layout          {"imageLayoutVersion": "1.0.0"}
    index.json          the manifests, each with a name
    blobs/sha256/…      manifests, configs and layers

https://github.com/opencontainers/image-spec/blob/main/image-layout.md. Members of a layer are read by
name: an unexpected one, or one that is no plain file, is refused, and no path comes from an archive.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from edgeinfer.errors import SnapshotCorruptError, SnapshotMissingError
from edgeinfer.platform.disk import CHUNK_BYTES, open_regular, whole_file, write_whole
from edgeinfer.snapshots.transfer.description import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    MAX_BYTES,
    TAR,
    Descriptor,
    Layer,
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
        found = [one for one in index if name in ("", one.annotations.get(_NAME, ""))]
        if len(found) != 1:
            names = sorted(one.annotations.get(_NAME, "?") for one in index)
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
        """Return the path of a blob."""
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


_GZIP = 31
_BLOCK = 512


class Packed:
    """A file as a layer; `chunks` reads the archive as often as it is wanted."""

    def __init__(self, path: Path, member: str) -> None:
        self._path = path
        size = path.stat().st_size
        hashed, unpacked = hashlib.sha256(), 0
        self._info = tarfile.TarInfo(member)
        self._info.size = size
        for chunk in self.chunks():
            hashed.update(chunk)
            unpacked += len(chunk)
        digest = f"sha256:{hashed.hexdigest()}"
        self.layer = Layer(diff_id=digest, unpacked=unpacked, file=member, size=size)
        self.blob = Descriptor(TAR, digest, unpacked)  # not compressed: weights do not shrink

    def chunks(self) -> Iterator[bytes]:
        """Yield the archive. Raises SnapshotCorruptError if the file became shorter."""
        yield self._info.tobuf(tarfile.GNU_FORMAT)
        left = self._info.size
        with open(self._path, "rb", buffering=0) as file:
            while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                left -= len(chunk)
                yield chunk
        if left:
            raise SnapshotCorruptError(f"{self._path} ends {left} bytes early")
        yield bytes(-self._info.size % _BLOCK + 2 * _BLOCK)


class _Stream(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = next(self._chunks, b"")
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def verify(layer: Layer, blob: Descriptor, chunks: Iterator[bytes]) -> None:
    """Read a blob to its end. Raises SnapshotCorruptError when it does not hold the signed archive."""
    hashed = hashlib.sha256()
    for chunk in _archive(layer, blob, chunks):
        hashed.update(chunk)
    if f"sha256:{hashed.hexdigest()}" != layer.diff_id:
        raise corrupt(f"{blob.digest} holds another archive of {layer.file} than was signed")


def unpack(layer: Layer, blob: Descriptor, chunks: Iterator[bytes], path: Path) -> None:
    """Write a layer's file to `path`.

    Raises SnapshotCorruptError when the archive holds anything else than that file, or is not the one
    that was signed.
    """
    hashed = hashlib.sha256()
    archive_bytes = _hashing(_archive(layer, blob, chunks), hashed.update)
    is_written = False
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Stream(archive_bytes)), mode="r|") as archive:
            for member in archive:
                if not member.isreg() or member.issparse():
                    raise corrupt(f"{member.name} in {blob.digest} is no plain file")
                if is_written or (member.name, member.size) != (layer.file, layer.size):
                    raise corrupt(f"{member.name} in {blob.digest} is not expected there")
                _write(archive, member, path)
                is_written = True
    except tarfile.TarError as error:
        raise corrupt(f"{blob.digest} is no archive: {error}") from error
    for _ in archive_bytes:
        pass  # what stands behind the archive's end is hashed too
    if not is_written:
        raise corrupt(f"{blob.digest} lacks {layer.file}")
    if f"sha256:{hashed.hexdigest()}" != layer.diff_id:
        raise corrupt(f"{blob.digest} changed while it was read")


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = archive.extractfile(member)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as out:
        while content is not None and (chunk := content.read(CHUNK_BYTES)):
            out.write(chunk)


def _hashing(chunks: Iterator[bytes], update: Callable[[bytes], None]) -> Iterator[bytes]:
    for chunk in chunks:
        update(chunk)
        yield chunk


def _archive(layer: Layer, blob: Descriptor, chunks: Iterator[bytes]) -> Iterator[bytes]:
    left = layer.unpacked
    try:
        for chunk in chunks if blob.media_type == TAR else _gunzipped(chunks):
            left -= len(chunk)
            if left < 0:
                raise corrupt(
                    f"{blob.digest} unpacks to more than the {layer.unpacked} bytes that were signed"
                )
            yield chunk
    except zlib.error as error:
        raise corrupt(f"{blob.digest} cannot be unpacked: {error}") from error


def _gunzipped(blob: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress the whole blob, so that its digest is checked at its end."""
    unpacker = zlib.decompressobj(_GZIP)
    for chunk in blob:
        while chunk:
            yield unpacker.decompress(chunk, CHUNK_BYTES)
            chunk = unpacker.unconsumed_tail
    yield unpacker.flush()
