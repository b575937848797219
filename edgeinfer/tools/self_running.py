"""Files at the top of a folder that other programs execute: a shell prompt, git, an editor."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

#: git takes a folder with HEAD, objects and refs for a bare repository, and obeys its `config`.
NAMES = """
    .git .hg .husky .vscode .idea .zed .devcontainer .envrc .exrc .nvim.lua .mcp.json .claude .cursor
    HEAD
""".split()
_OF_BARE_REPOSITORY = ["config", "config.worktree", "commondir", "hooks"]


class SelfRunning:
    """These files of `folder`, and the folder's permissions, as they are when this is made."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._mode = stat.S_IMODE(os.fstat(self._descriptor).st_mode)
        is_bare = os.path.lexists(f"{folder}/HEAD")
        self._before = dict.fromkeys([*NAMES, *(_OF_BARE_REPOSITORY if is_bare else ())], "")
        self._before = {name: self._identity(name) for name in self._before}

    def paths(self) -> set[str]:
        """Return what exists of them below the folder: without links, and where `.git` leads."""
        found = {path for name in self._before for path in self._real_paths(name)}
        return {path for path in found if self._is_inside(path) and os.path.exists(path)}

    def changed(self) -> list[str]:
        """Return the names that have come, gone or lead elsewhere."""
        return [name for name, before in self._before.items() if self._identity(name) != before]

    def restore(self) -> str:
        """Rename what a command has put under these names; return a message, or ""."""
        if stat.S_IMODE(os.fstat(self._descriptor).st_mode) != self._mode:  # only its owner changes it
            os.fchmod(self._descriptor, self._mode)  # first: without it nothing below could be seen
        ending = f".from-sandbox-{os.urandom(4).hex()}"
        renamed: list[str] = []
        left: list[str] = []
        here = {"src_dir_fd": self._descriptor, "dst_dir_fd": self._descriptor}
        for name in self.changed():
            try:
                os.rename(name, name + ending, **here)
                renamed.append(name)
            except FileNotFoundError:
                pass
            except OSError as error:
                left.append(f"{name} ({error.strerror})")
        texts = [f"{', '.join(renamed)} would be executed by other programs; renamed to *{ending}"]
        texts += [f"other programs would execute {', '.join(left)}: remove it"]
        return "; ".join(text for text, names in zip(texts, (renamed, left), strict=True) if names)

    def close(self) -> None:
        os.close(self._descriptor)

    def _identity(self, name: str) -> str:
        """Return device, inode, type and link of a name, and where it leads; "" if missing."""
        try:
            info = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            is_link = stat.S_ISLNK(info.st_mode)  # inode numbers are reused: compare the target too
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
        """Return where a name leads: through links, and as git reads a file `.git`."""
        path = os.path.realpath(f"{self._folder}/{name}")
        return [path, *(_git_folder(path) if name == ".git" and os.path.isfile(path) else ())]


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
