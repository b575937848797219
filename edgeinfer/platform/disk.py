"""Files: free space, atomic and durable writing, locks, shared blocks, digests."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from edgeinfer.errors import DiskFullError, EdgeInferError, UsageError
from edgeinfer.platform import paths
from edgeinfer.units import format_bytes

CHUNK_BYTES = 4 << 20
#: Largest file (bytes) that `read_regular` reads.
_SMALL_BYTES = 16 << 20
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: ioctl (linux/fs.h) that lets a file share disk blocks of another one.
_FICLONERANGE = 0x4020940D

# --- free space


def free_bytes(path: str | Path) -> int:
    """Return the free space (bytes) on the disk on which `path` is or would be."""
    absolute = Path(path).absolute()
    info = os.statvfs(next(p for p in (absolute, *absolute.parents) if p.exists()))
    return info.f_bavail * info.f_frsize


def require_free_space(folder: Path, n_bytes: int, content: str) -> None:
    """Raise DiskFullError if fewer than `n_bytes` are free for `content` in `folder`."""
    free = free_bytes(folder)
    if free < n_bytes:
        sizes = f"{format_bytes(n_bytes)} on the disk of {folder}; {format_bytes(free)} are free"
        raise DiskFullError(f"{content} needs {sizes}")


@contextmanager
def disk_full_errors(path: Path, not_lost: str = "") -> Iterator[None]:
    """Turn an OSError of a full disk or quota in the block into DiskFullError; `path` names the disk.

    The message ends with the sentence `not_lost`, which says what is kept.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        problem = f"the disk of {path} is full: {error.strerror}"
        raise DiskFullError(f"{problem}; {not_lost}" if not_lost else problem) from error


@contextmanager
def path_errors(path: str | Path, hint: str, kind: type[EdgeInferError] = UsageError) -> Iterator[None]:
    """Turn an OSError in the block into an error of class `kind` with the path, reason and `hint`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: {error.strerror}", hint=hint) from error


def folder_for(path: Path, hint: str) -> Path:
    """Return the folder in which the file `path` exists or can be created.

    Raises UsageError with `hint` if `path` itself is a folder, or if its folder does not exist.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint=hint)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", hint=f"make it, or {hint}")
    return folder


# --- opening and writing


def open_regular(path: str | Path, flags: int = 0) -> int:
    """Open a regular file, by default for reading; `flags` are those of open(2). A new file is 0600.

    Raises OSError, also for a FIFO, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular(path: str | Path) -> bytes:
    """Read a file of up to 16 MiB. Raises OSError, also for a longer one, a FIFO, device or folder."""
    with open(open_regular(path), "rb") as file:
        content = file.read(_SMALL_BYTES + 1)
    if len(content) > _SMALL_BYTES:
        raise OSError(errno.EINVAL, f"the file is longer than {_SMALL_BYTES:,} bytes", str(path))
    return content


def sync(path: str | Path) -> None:
    """Flush a file or folder to the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_file(
    path: Path, mode: int | None = None, *, replaces: bool = True, folder: int | None = None
) -> Iterator[BinaryIO]:
    """Yield a new file. If the block succeeds, it is renamed to `path`, otherwise deleted.

    An existing file is replaced, or stays if `replaces` is False. `mode` None is 0666 without the
    umask's bits. If a `folder` (a descriptor) is given, `path` is relative to it. The temporary name is
    random, because all resumed processes have the same pid. Raises OSError.
    """
    scratch = path.with_name(f".{path.name}.{os.urandom(8).hex()}.new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        permissions = 0o666 if mode is None else 0o600
        with open(os.open(scratch, flags, permissions, dir_fd=folder), "w+b") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
        if replaces:
            os.replace(scratch, path, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            with suppress(FileExistsError):
                os.link(scratch, path, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(scratch, dir_fd=folder)


@contextmanager
def durable_file(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Like `new_file`, but also flush the file and its folder to the disk. Raises DiskFullError."""
    with disk_full_errors(path), new_file(path, mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def open_private(path: Path) -> int:
    """Open a regular file for reading. Raises OSError unless only this user can access the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(f"{path} is not a regular file that only this user can access")
    return descriptor


def write_durably(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace `path` by a file with `content`, flushed to the disk. Raises DiskFullError."""
    with durable_file(path, mode) as file:
        file.write(content)


def share_blocks(source: int, target: int, start: int = 0, length: int = 0) -> bool:
    """Let the file `target` share disk blocks with `source`; return False if that is not supported.

    Both are descriptors. `start` and `length` (bytes) are whole blocks; `length` 0 means up to the end.
    """
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("<qQQQ", source, start, length, 0))
    except OSError:
        return False
    return True


# --- locks, which the kernel releases when their process ends


def try_lock(descriptor: int) -> bool:
    """Lock an open file; return False if it is locked through another descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: str | Path, busy: Callable[[], None] | None = None) -> Iterator[int]:
    """Hold the lock of a file, created if missing, during the block; yield its descriptor.

    If another process or thread holds the lock, `busy` is called, which may raise an exception instead
    of letting this call wait.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        if not try_lock(descriptor):
            if busy is not None:
                busy()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(path: str | Path) -> bool:
    """Return whether a file is locked; False if it is missing."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


# --- identity, digests, sizes


def stamps(files: Sequence[str]) -> str:
    """Return a text that changes with the files: path, size, mtime, inode of each. Raises OSError."""
    stats = [(path, os.stat(path)) for path in files]
    return "\0".join(f"{path} {s.st_size} {s.st_mtime_ns} {s.st_ino}" for path, s in stats)


def sha256_of(path: Path, progress: Callable[[int], None] = lambda _done: None) -> str:
    """Return a file's SHA-256 (hex); `progress` is called with the bytes read so far."""
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return sha256_of_part(file.fileno(), 0, size, lambda _chunk, done: progress(done))


def sha256_of_part(
    descriptor: int, start: int, length: int, on_chunk: Callable[[bytes, int], Any]
) -> str:
    """Return the SHA-256 (hex) of `length` bytes of an open file from the offset `start` on.

    `on_chunk` gets each chunk, and the number of bytes read so far.
    """
    import hashlib  # slow import (2 ms): it loads OpenSSL

    hasher = hashlib.sha256()
    done = 0
    while chunk := os.pread(descriptor, min(CHUNK_BYTES, length - done), start + done):
        hasher.update(chunk)
        done += len(chunk)
        on_chunk(chunk, done)
    return hasher.hexdigest()


def bytes_below(folder: Path, ending: str = "") -> int:
    """Return the size (bytes) of all files below a folder whose names end in `ending`."""
    files_below = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(size_or_zero(path) for path in files_below if path.name.endswith(ending))


def size_or_zero(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


T = TypeVar("T")
#: Maximum number of entries of a CacheTable; the oldest are dropped first.
MOST_ENTRIES = 1000


class CacheTable(Generic[T]):
    """A table of values by key, stored as the JSON file `name` in the cache folder."""

    def __init__(self, name: str, kind: type[dict[str, T]]) -> None:
        self._name = name
        self._kind = kind

    def read(self) -> dict[str, T]:
        """Return all values by key, the oldest first; {} if the file is missing or damaged."""
        import msgspec

        try:
            return msgspec.json.decode(read_regular(paths.cache_dir() / self._name), type=self._kind)
        except (OSError, msgspec.MsgspecError, RecursionError):
            return {}

    def put(self, key: str, value: T) -> None:
        """Store a value as the newest; beyond `MOST_ENTRIES`, drop the oldest. Ignore disk errors."""
        import msgspec

        table = self.read()
        table.pop(key, None)
        table[key] = value
        raw = msgspec.json.encode(dict(list(table.items())[-MOST_ENTRIES:]))
        with contextlib.suppress(OSError, DiskFullError):
            paths.make_folder(paths.cache_dir())
            write_durably(paths.cache_dir() / self._name, raw)
