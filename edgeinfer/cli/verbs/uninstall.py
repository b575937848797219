"""`edgeinfer uninstall`: lists everything edgeinfer has here for this user, asks, removes it."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import msgspec

from edgeinfer.cli.options import add_yes
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import confirm
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.host import Host
from edgeinfer.platform import paths
from edgeinfer.runtime.llama.backends.files import added_dir
from edgeinfer.shipping import shipped, unpack
from edgeinfer.snapshots.running import processes, shares_folders
from edgeinfer.units import format_bytes


class InstalledPart(msgspec.Struct, frozen=True, kw_only=True):
    """A folder or the shipped file to remove. `mine`: user data, which `--keep-data` keeps."""

    what: str
    path: str
    size_bytes: int
    mine: bool = False


class UninstallResult(Result, frozen=True, kw_only=True):
    """The removed and the kept parts."""

    removed: tuple[InstalledPart, ...]
    kept: tuple[InstalledPart, ...]

    def human(self) -> str:
        freed = sum(part.size_bytes for part in self.removed)
        text = f"removed: {format_bytes(freed)}" if self.removed else "there was nothing to remove"
        return text + "".join(f"\nkept {part.what}: {part.path}" for part in self.kept)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_yes(parser)
    parser.add_argument(
        "--keep-data", action="store_true", help="keep models, conversations and configuration"
    )


def run(options: argparse.Namespace, _host: Host) -> UninstallResult:
    """List what is installed, ask, and remove it.

    Raises UsageError without a terminal, InterruptedByUser on a no, EdgeInferError while it is in use.
    """
    all_parts = parts()
    kept = tuple(part for part in all_parts if options.keep_data and part.mine)
    to_remove = tuple(part for part in all_parts if part not in kept)
    if not to_remove:
        return UninstallResult(removed=(), kept=kept)
    _refuse_while_running()
    if not options.yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError(
            "cannot ask for confirmation: stdin is not a terminal",
            hint="`edgeinfer uninstall --yes` removes without asking",
        )
    confirm(f"{_listing(to_remove, kept)}\n\nRemove it?", yes=options.yes)
    for part in to_remove:
        _remove(Path(part.path))
    return UninstallResult(removed=to_remove, kept=kept)


def parts() -> list[InstalledPart]:
    """List everything that is there, the running program last."""
    wanted = [
        ("snapshots", paths.snapshots_dir(), False),
        ("cache", paths.cache_dir(), False),
        ("sockets and records of running processes", paths.runtime_dir(), False),
        ("logs and histories", paths.state_dir(), True),
        ("configuration", paths.config_dir(), True),
        ("models", paths.models_dir(), True),
        ("GPU backends", added_dir(), True),
        *((f"{p.name}, a file of yours", p, True) for p in _data_files()),
        ("unpacked application", unpack.app_root(), False),
    ]
    present = [
        InstalledPart(what=what, path=str(p), size_bytes=_size(p), mine=mine)
        for what, p, mine in wanted
        if os.path.lexists(p)
    ]
    program = shipped.program_file()
    if program and os.access(program.parent, os.W_OK):
        present.append(
            InstalledPart(what="the program", path=str(program), size_bytes=program.stat().st_size)
        )
    return present


def _data_files() -> list[Path]:
    data = paths.data_dir()
    known = {paths.models_dir(), unpack.app_root(), added_dir()}
    return sorted(p for p in data.iterdir() if p not in known) if data.is_dir() else []


def _size(path: Path) -> int:
    """Return the bytes on disk under `path` (holes excluded); of the cache, without its snapshots."""
    if path == paths.cache_dir():
        return sum(_size(p) for p in path.iterdir() if p != paths.snapshots_dir())
    files = (
        [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        if path.is_dir()
        else [path]
    )
    return sum(os.lstat(f).st_blocks * 512 for f in files if os.path.lexists(f))


def _refuse_while_running() -> None:
    family = {os.getpid(), os.getppid()}  # this process, and the launcher that waits for it
    unpacked = {pid for folder in unpack.versions() for pid in unpack.users(folder)} - family
    launches = [
        one
        for one in processes(everywhere=True)
        if one.pid in unpacked or (shares_folders(one.pid) and one.pid not in family)
    ]
    named = [f"{one.pid} ({one.command[:40]})" for one in launches] or sorted(map(str, unpacked))
    if named:
        raise EdgeInferError(
            f"edgeinfer is running: {', '.join(named)}",
            hint="close them first, or run `edgeinfer stop --all`",
        )


def _listing(to_remove: tuple[InstalledPart, ...], kept: tuple[InstalledPart, ...]) -> str:
    lines = [f"  {format_bytes(part.size_bytes):>9}  {part.what}: {part.path}" for part in to_remove]
    lines += [f"       kept  {part.what}: {part.path}" for part in kept]
    return "\n".join(["This is everything edgeinfer has here, and it would be removed:", *lines])


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        for parent in (paths.cache_dir(), paths.data_dir()):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        raise EdgeInferError(
            f"cannot remove {path}: {error.strerror}",
            hint="remove it by hand, then run the command again",
        ) from error
