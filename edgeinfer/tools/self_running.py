"""Files that other programs execute by themselves, e.g. `.envrc` (a shell), `.git` (git), `.vscode`."""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from contextlib import suppress

#: Names of self-running files, which other programs execute by themselves. HEAD is among them because
#: git executes commands in the file `config` of a bare repository, i.e. a folder that has HEAD and
#: either `objects` and `refs`, or `commondir`.
NAMES = """
    .git .hg .husky .vscode .idea .zed .devcontainer .envrc .exrc .nvim.lua .mcp.json .claude .cursor
    HEAD
""".split()
_OF_BARE_REPOSITORY = ["config", "config.worktree", "commondir", "hooks"]
#: Maximum number of names in subfolders that are examined, the nearest folders first (takes 30 ms).
MAX_NAMES = 20_000
#: Maximum number of files that one command may create. Among more files, a new self-running file could
#: be overlooked.
NEW_FILES = 100_000
_MAX_REPORTED = 20
#: By how much (ns) the times of a new file may be older than the clock: the kernel rounds them down to
#: a tick.
_TICK_NS = 50_000_000


class SelfRunning:
    """Finds self-running files (other programs execute them, e.g. `.envrc`) that a command changed.

    With `looks_below`, such files in subfolders of `folder` are found, too.
    """

    def __init__(self, folder: str, *, looks_below: bool = True) -> None:
        self._folder = folder
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._mode = stat.S_IMODE(os.fstat(self._descriptor).st_mode)
        is_bare = os.path.lexists(f"{folder}/HEAD")
        self._before = dict.fromkeys([*NAMES, *(_OF_BARE_REPOSITORY if is_bare else ())], "")
        self._before = {name: self._identity(name) for name in self._before}
        self._start_ns = time.time_ns() - _TICK_NS
        self._below, self._is_whole = _find_below(folder, MAX_NAMES) if looks_below else ({}, True)

    def paths(self) -> set[str]:
        """Return the paths, without links, of existing self-running files inside the folder.

        Folders to which a file `.git` refers are self-running, too.
        """
        names = [*self._before, *self._below]
        paths = {path for name in names for path in self._real_paths(name)}
        return {path for path in paths if self._is_inside(path) and os.path.exists(path)}

    def changed_names(self) -> list[str]:
        """Return the self-running files in the folder itself that were added, removed or replaced."""
        return [name for name, before in self._before.items() if self._identity(name) != before]

    def _new_below(self) -> list[str]:
        """Return new self-running paths in subfolders, except those that moved with their folder."""
        before = {(info.st_dev, info.st_ino) for info in self._below.values()}
        now, _ = _find_below(self._folder, MAX_NAMES + NEW_FILES, opens=True)
        return [
            path
            for path, info in now.items()
            if (info.st_dev, info.st_ino) not in before
            and (self._is_whole or info.st_ctime_ns >= self._start_ns)
        ]

    def restore(self) -> str:
        """Rename the self-running files that the command has created or replaced.

        Under the new names, other programs do not execute the files. The folder's mode is restored.
        Call this after the command has ended. Returns a message that names these files, and those that
        the command has removed; "" if there are none.
        """
        # call fchmod only if the command has changed the mode: only the owner of the folder may call it
        if stat.S_IMODE(os.fstat(self._descriptor).st_mode) != self._mode:
            # restore the mode of the folder before its files, which cannot be seen without permissions
            os.fchmod(self._descriptor, self._mode)
        ending = f".from-sandbox-{os.urandom(4).hex()}"
        renamed: list[str] = []
        failed: list[str] = []
        removed: list[str] = []
        for name in [*self.changed_names(), *self._new_below()]:
            try:
                os.rename(name, name + ending, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
                renamed.append(name)
            except FileNotFoundError:
                removed.append(name)
            except OSError as error:
                failed.append(f"{name} ({error.strerror})")
        texts = [f"{_join(renamed)} would be executed by other programs; renamed to *{ending}"]
        texts += [f"other programs would execute {_join(failed)}: remove it"]
        texts += [f"{_join(removed)} was removed"]
        names = (renamed, failed, removed)
        return "; ".join(text for text, named in zip(texts, names, strict=True) if named)

    def close(self) -> None:
        os.close(self._descriptor)

    def _identity(self, name: str) -> str:
        """Return a text that differs if `name` is replaced by another file or link; "" if missing."""
        try:
            info = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            # compare the targets of links, too: a new link may get the inode number of a deleted one
            is_link = stat.S_ISLNK(info.st_mode)
            link = os.readlink(name, dir_fd=self._descriptor) if is_link else ""
        except OSError:
            return ""
        identity = f"{info.st_dev} {info.st_ino} {stat.S_IFMT(info.st_mode)} {link}"
        for path in filter(self._is_inside, self._real_paths(name)):
            identity += f" {path}"
            with suppress(OSError):
                target = os.stat(path)
                identity += f" {target.st_dev} {target.st_ino}"
        return identity

    def _is_inside(self, path: str) -> bool:
        return path.startswith(f"{self._folder}/")

    def _real_paths(self, name: str) -> list[str]:
        """Return the real path of `name`; for a file `.git`, also that of the folder that it names."""
        path = os.path.realpath(f"{self._folder}/{name}")
        is_git = os.path.basename(name) == ".git" and os.path.isfile(path)
        return [path, *(_git_folder(path) if is_git else ())]


def _find_below(
    folder: str, max_names: int, *, opens: bool = False
) -> tuple[dict[str, os.stat_result], bool]:
    """Return the self-running files in subfolders, and whether all subfolders were searched.

    Links are not followed. With `opens`, make unreadable folders readable first.
    """
    infos: dict[str, os.stat_result] = {}
    folders = deque([""])
    n_names = 0
    while folders:
        parent = folders.popleft()
        entries = _entries(f"{folder}/{parent}", opens=opens)
        n_names += len(entries)
        if n_names > max_names:
            return infos, False
        is_bare = "HEAD" in entries and (
            "commondir" in entries or {"objects", "refs"} <= entries.keys()
        )
        names = {*NAMES, *_OF_BARE_REPOSITORY} if is_bare else {*NAMES} - {"HEAD"}
        for name, entry in entries.items():
            with suppress(OSError):
                if name in names and parent:
                    infos[parent + name] = entry.stat(follow_symlinks=False)
                elif name not in NAMES and entry.is_dir(follow_symlinks=False):
                    folders.append(f"{parent}{name}/")
    return infos, True


def _entries(path: str, *, opens: bool) -> dict[str, os.DirEntry[str]]:
    with suppress(OSError):
        try:
            with os.scandir(path) as entries:
                return {entry.name: entry for entry in entries}
        except PermissionError:
            if opens:
                os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | stat.S_IRWXU)
                return _entries(path, opens=False)
    return {}


def _join(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_REPORTED} more" if len(names) > _MAX_REPORTED else ""
    return ", ".join(names[:_MAX_REPORTED]) + more


def _git_folder(path: str) -> list[str]:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            label, _, target = os.read(descriptor, 4096).partition(b":")
        finally:
            os.close(descriptor)
        if label == b"gitdir" and b"\0" not in target:
            folder = os.path.join(os.path.dirname(path), os.fsdecode(target.strip()))
            return [os.path.realpath(folder)]
    return []
