"""Unpack a one-file program's application under the user's data, once. Standard library only.

    DATA/app/.lock                   flock of the process that unpacks or removes
    DATA/app/.unpacking-XXXX/        an unpacking in progress; the next one removes it after a crash
    DATA/app/VERSION-DIGEST/         an application, renamed when complete; `payload.json` is its index
    DATA/app/VERSION-DIGEST/.source  path of the one-file program from which it was unpacked
    DATA/app/MODEL-DIGEST.model      marks that the model of a bundle is in the model store

A version is removed once no process uses it and its one-file program was removed or has another
version. Each unpacked file is compared with its SHA-256 in the index, and the index with the digest in
the bootloader.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from edgeinfer.errors import DiskFullError, EdgeInferError, ShippingError, SnapshotUnsafeError
from edgeinfer.platform import disk, paths
from edgeinfer.shipping import payload
from edgeinfer.shipping.payload import Index, Shipped
from edgeinfer.shipping.shipped import restore_environment

INDEX = "payload.json"
SOURCE = ".source"
_UNPACKING = ".unpacking-"
_REMOVING = ".removing-"
#: Free disk space (bytes) that unpacking requires in addition to the application's size.
_MARGIN_BYTES = 16 << 20
_DISK_FULL_HINT = "free some space on that disk, or set EDGEINFER_HOME to a folder on another one"

#: Progress callback: bytes written, total bytes; called on any thread.
Progress = Callable[[int, int], None]


def app_root() -> Path:
    """Return the folder of unpacked applications."""
    return paths.data_dir() / "app"


def ensure_unpacked(
    file: Path, progress: Progress | None = None, waiting: Callable[[], None] | None = None
) -> Path:
    """Unpack the application of the one-file program `file` unless that is done; return its folder.

    `waiting` is called if another process is unpacking, before the wait for that process. Raises
    ChecksumError, DiskFullError, SnapshotUnsafeError if other users can change the folder, and
    ShippingError if the folder cannot be written or `file` is not a one-file program.
    """
    shipped = payload.open_shipped(file)
    folder = app_root() / shipped.app
    with _disk_errors(folder):
        if folder.is_dir():
            return _refuse_unsafe(folder)
        with locked(waiting):
            if not folder.is_dir():
                _remove_leftovers()
                _unpack(shipped, folder, progress or (lambda _done, _all: None))
                remove_unused(keep=folder)
        return _refuse_unsafe(folder)


def _refuse_unsafe(folder: Path) -> Path:
    info = os.lstat(folder)
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        message = f"other users can change {folder}"
        hint = f"set EDGEINFER_HOME to a folder of your own, or remove {folder} and start again"
        raise SnapshotUnsafeError(message, hint=hint)
    return folder


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Add hints to the errors of a full disk and of an unwritable folder."""
    try:
        with disk.disk_full_errors(folder.parent, "the unpacked files were removed"):
            yield
    except DiskFullError as error:
        raise DiskFullError(error.message, hint=_DISK_FULL_HINT) from error
    except OSError as error:
        problem = f"cannot unpack to {folder.parent}: {error.strerror}"
        raise ShippingError(problem, hint=paths.DENIED_HINT) from error


@contextlib.contextmanager
def locked(waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock for unpacking and removing. If another process holds it, call `waiting` first."""
    root = app_root()
    paths.make_folder(root)
    with disk.locked(root / ".lock", waiting):
        yield


def _unpack(shipped: Shipped, folder: Path, progress: Progress) -> None:
    with shipped.path.open("rb") as file:
        index = payload.read_index(file, shipped)
        disk.require_free_space(folder.parent, index.size + _MARGIN_BYTES, "the application")
        scratch = Path(tempfile.mkdtemp(prefix=_UNPACKING, dir=folder.parent))
        try:
            _unpack_blocks(shipped, index, scratch, folder, progress, file.fileno())
            for path, target in index.links:
                (scratch / path).symlink_to(target)
            file.seek(shipped.payload_offset + 8)
            raw = file.read(int.from_bytes(file.read(8), "little"))
            (scratch / INDEX).write_bytes(raw)
            (scratch / SOURCE).write_text(str(shipped.path), "utf-8", "surrogateescape")
            flush(scratch)  # before the rename, which must not reach the disk before the files
            os.rename(scratch, folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def _unpack_blocks(
    shipped: Shipped, index: Index, scratch: Path, folder: Path, progress: Progress, fd: int
) -> None:
    """Write every file to `scratch`, in up to four threads. Raises the first thread's error."""
    names = [*(entry.path for entry in index.files), *(path for path, _ in index.links)]
    for directory in {os.path.dirname(name) for name in names}:
        (scratch / directory).mkdir(mode=0o755, parents=True, exist_ok=True)
    numbers = sorted(range(len(index.blocks)), key=lambda n: index.blocks[n].raw, reverse=True)
    largest_first = iter(numbers)  # shared by the threads: large blocks begin first
    failures: list[BaseException] = []
    lock = threading.Lock()
    done = 0

    def unpack_block(number: int) -> None:
        nonlocal done
        entries = [entry for entry in index.files if entry.block == number]
        raw = payload.block_bytes(fd, shipped, index.blocks[number])
        for entry, content in payload.split_block(raw, entries, shipped.path):
            data: bytes | memoryview = content
            if entry.path in index.relocate:
                data = payload.relocate(content, interpreter(folder, entry.path))
            _write(scratch / entry.path, data, entry.mode)
            with lock:
                done += entry.size
                progress(done, index.size)

    def work() -> None:
        try:
            for number in largest_first:
                if not failures:
                    unpack_block(number)
        except (OSError, EdgeInferError, MemoryError) as error:
            failures.append(error)

    count = min(4, len(os.sched_getaffinity(0)), len(numbers))
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def interpreter(folder: Path, path: str) -> str:
    """Return the path of ld.so: in `lib`, next to the folder of the executable `folder/path`."""
    name = "ld-linux-aarch64.so.1" if os.uname().machine == "aarch64" else "ld-linux-x86-64.so.2"
    return str((folder / path).parent.parent / "lib" / name)


def _write(path: Path, data: bytes | memoryview, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(fd, "wb") as out:
        out.write(data)
        out.flush()
        os.fchmod(fd, mode)  # because the umask may have changed the mode of `os.open`
        os.fsync(fd)  # not at the end, so that the disk writes while other threads unpack


def flush(folder: Path) -> None:
    """Flush `folder` and every folder below it to the disk. Their files must be there already."""
    for directory, _, _ in os.walk(folder):
        disk.sync(directory)


# --- unused versions


def versions() -> list[Path]:
    """List the folders of the unpacked applications."""
    root = app_root()
    folders = root.iterdir() if root.is_dir() else ()
    return sorted(folder for folder in folders if (folder / INDEX).is_file())


def remove_unused(keep: Path | None = None) -> list[Path]:
    """Remove the versions, except `keep`, that no process and no one-file program uses; return them.

    The caller must hold the lock (`locked`).
    """
    removed = []
    for folder in versions():
        if folder != keep and not _has_shipped_file(folder) and not users(folder):
            remove_version(folder)
            removed.append(folder)
    return removed


def _has_shipped_file(folder: Path) -> bool:
    """Return whether the one-file program that `folder` was unpacked from still has this version."""
    try:
        source = Path((folder / SOURCE).read_text("utf-8", "surrogateescape"))
        return payload.open_shipped(source).app == folder.name
    except (OSError, EdgeInferError):
        return False


def users(folder: Path) -> list[int]:
    """List the pids of this user's other processes that have a file of `folder` mapped."""
    needle = os.fsencode(folder) + b"/"
    pids = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            if needle in maps.read():
                pids.append(int(pid))
    return pids


def _give_up() -> None:
    raise BlockingIOError


def tidy() -> None:
    """Remove unused versions, unless another process holds the lock. Takes 0.1 ms for one version."""
    if len(versions()) < 2:
        return
    with contextlib.suppress(OSError), locked(_give_up):
        remove_unused(keep=Path(sys.executable).parent)


def remove_version(folder: Path) -> None:
    """Remove an unpacked application. It is renamed first, so that no incomplete one can start."""
    renamed = folder.with_name(_REMOVING + folder.name)
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(folder, renamed)
    shutil.rmtree(renamed)


def _remove_leftovers() -> None:
    for child in app_root().iterdir():
        if child.name.startswith((_UNPACKING, _REMOVING)):
            shutil.rmtree(child, ignore_errors=True)


# --- the main function of the first start


def main() -> int:
    """Unpack the application, store a bundled model, and execute the one-file program again.

    Returns the exit status of an error; otherwise the new program replaces this process.
    """
    from edgeinfer import error_text

    restore_environment()
    file = Path(os.path.realpath("/proc/self/exe"))
    try:
        waiting = functools.partial(_say, "waiting for another process, which is unpacking")
        app = ensure_unpacked(file, _UnpackProgress(), waiting)
        _store_bundled_model(file, app)
    except EdgeInferError as error:
        print(error_text.describe_error(error), file=sys.stderr)  # noqa: T201
        return error_text.exit_code(error)
    except KeyboardInterrupt:
        return 130
    os.environ["EDGEINFER_UNPACKED"] = app.name
    return os.execv(file, [sys.argv[0], *sys.argv[1:]])


def _store_bundled_model(file: Path, app: Path) -> None:
    shipped = payload.open_shipped(file)
    if not shipped.model or (app.parent / f"{shipped.model}.model").exists():
        return
    import subprocess  # slow import, only needed at a bundle's first start

    _say(f"storing the model {shipped.model.rpartition('-')[0]}, only at this start")
    command = [str(app / "edgeinfer-app"), "--edgeinfer-module", "edgeinfer.shipping.bundle", str(file)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)  # the child has printed the error


def _say(text: str) -> None:
    print(f"edgeinfer: {text}", file=sys.stderr, flush=True)  # noqa: T201


class _UnpackProgress:
    """Shows progress: on a terminal as a percentage in one line, otherwise only that it has begun."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._percent = -1

    def __call__(self, done: int, total: int) -> None:
        percent = done * 100 // max(1, total)
        if self._percent < 0:
            _say(f"first start: unpacking {total >> 20} MiB to {app_root()}")
        if percent == self._percent:
            return
        self._percent = percent
        if self._tty:
            line_end = "\n" if percent == 100 else ""
            print(f"\redgeinfer: unpacking {percent:3d} %", end=line_end, file=sys.stderr, flush=True)  # noqa: T201
