"""Built-in tools for the files of a folder: read, glob, grep; and, after approval, write and edit."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from edgeinfer.platform import paths
from edgeinfer.platform.disk import new_file
from edgeinfer.tools.builtin import (
    FIXED_PATH,
    TEXT,
    Builtin,
    RefusedError,
    home_folder_error,
    self_running_warning,
    tool_info,
)
from edgeinfer.tools.tool_use import Stop, StoppedError

#: Largest file (bytes) that is read, searched or edited.
_MAX_FILE = 4 << 20
_MAX_LINES, _MAX_FOUND = 2000, 200
_MAX_VISITED = 50_000
_LINE_CHARACTERS = 400
#: Two texts with more pairs of equal lines than this are shown without a diff. A diff of this many
#: pairs takes up to 3 s.
_MAX_PAIRS = 10_000_000
#: Time limit (s) of a search, and number of files that each run of grep searches.
_GREP_S, _GREP_FILES = 10, 64
_MAX_DEPTH = 64
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WHOLE = {"type": "integer", "minimum": 1}
TOOLS = (
    tool_info(
        "read",
        "Read a text file of the folder. Lines are numbered from 1.",
        {"path": TEXT},
        {"first_line": _WHOLE, "lines": _WHOLE},
        read_only=True,
    ),
    tool_info(
        "glob",
        "List files whose path matches a pattern such as **/*.py.",
        {"pattern": TEXT},
        read_only=True,
    ),
    tool_info(
        "grep",
        "Search the folder's text files for an extended regular expression; glob limits the files.",
        {"pattern": TEXT},
        {"glob": TEXT},
        read_only=True,
    ),
    tool_info("write", "Write a whole file.", {"path": TEXT, "content": TEXT}),
    tool_info(
        "edit",
        "Replace a text that occurs exactly once in a file.",
        {"path": TEXT, "old": TEXT, "new": TEXT},
    ),
)


class BuiltinFiles(Builtin):
    """The `enabled` file tools, with which the model reads and edits `folder`. Thread-safe.

    Before the approval, `canonical` resolves links in the path, so that patterns apply to the real one.
    After the approval, the path is opened folder by folder without following links, because a command
    in the sandbox may have replaced a folder by a link.
    """

    server = "files"

    def __init__(self, folder: Path, enabled: Sequence[str]) -> None:
        super().__init__(TOOLS, enabled)
        self._folder = folder.resolve()
        own_folders = (paths.config_dir(), paths.data_dir(), paths.cache_dir(), paths.state_dir())
        self._own_folders = [path.resolve() for path in own_folders]

    def unavailable(self) -> str:
        return home_folder_error(self._folder)

    def canonical(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            path = (self._folder / arguments["path"]).resolve()
        except (KeyError, TypeError, ValueError, OSError, RuntimeError):
            return arguments  # `call` reports the error
        is_inside = path.is_relative_to(self._folder)
        return arguments | {"path": str(path.relative_to(self._folder) if is_inside else path)}

    def warning(self, name: str, arguments: dict[str, Any]) -> str:
        path = str(arguments.get("path", ""))
        return self_running_warning(path) if name in ("write", "edit") else ""

    def preview(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in ("write", "edit"):
            return ""
        before = ""
        try:
            with suppress(FileNotFoundError):
                before = self._text(str(arguments.get("path", "")))
            written = str(arguments.get("content", ""))
            after = written if name == "write" else _edit_text(before, arguments)
        except (RefusedError, OSError, UnicodeError, ValueError):
            return ""  # without a diff, the user sees the arguments
        old_rows, new_rows = _rows(before), _rows(after)
        counts = Counter(new_rows)
        if sum(counts[row] for row in old_rows) > _MAX_PAIRS:
            return ""
        diff = list(difflib.unified_diff(old_rows, new_rows, lineterm=""))[2:]
        whole = (row if row[0] == "@" or row[-1] == "\n" else f"{row}\n\\ no newline" for row in diff)
        return "\n".join(row.removesuffix("\n") for row in whole)

    @contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the folder of `path`, and the file's name. Links are not followed."""
        *folders, name = path.split("/")
        if path.startswith("/") or ".." in (*folders, name):
            raise RefusedError(f"{path} is outside of the folder of these tools")
        if self._is_own(path):
            raise RefusedError(f"{path} is inside edgeinfer's data folders")
        holder = os.open(self._folder, _FOLDER)
        try:
            for folder in folders:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=holder)
                below = os.open(folder, _FOLDER, dir_fd=holder)
                os.close(holder)
                holder = below
            yield holder, name
        finally:
            os.close(holder)

    def _is_own(self, path: str) -> bool:
        return any((self._folder / path).is_relative_to(folder) for folder in self._own_folders)

    @contextmanager
    def _open(self, path: str) -> Iterator[int]:
        """Yield the descriptor of a file. Raises RefusedError for a folder, or a file over 4 MiB."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self._parent(path) as (holder, name):
            descriptor = os.open(name, flags, dir_fd=holder)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise RefusedError(f"{path} is not a file")
            if info.st_size > _MAX_FILE:
                raise RefusedError(f"the file is larger than {_MAX_FILE >> 20} MiB")
            yield descriptor
        finally:
            os.close(descriptor)

    def _text(self, path: str) -> str:
        with self._open(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            text = file.read(_MAX_FILE + 1).decode()
        if "\0" in text:
            raise RefusedError("the file is binary")
        return text

    def _read(self, stop: Stop, path: str, first_line: int = 1, lines: int = _MAX_LINES) -> str:
        rows = self._text(path).splitlines()
        first = max(first_line, 1)
        last = min(len(rows), first - 1 + min(lines, _MAX_LINES))
        shown = [f"{n}\t{rows[n - 1]}" for n in range(first, last + 1)]
        more = f"\n… {len(rows)} lines in all" if last < len(rows) else ""
        return "\n".join(shown) + more

    def _glob(self, stop: Stop, pattern: str) -> str:
        names = sorted(name for name in self._names(stop) if _matches(name, pattern))
        more = f"\n… {len(names)} in all" if len(names) > _MAX_FOUND else ""
        return "\n".join(names[:_MAX_FOUND]) + more or "no file matches"

    def _grep(self, stop: Stop, pattern: str, glob: str = "**") -> str:
        end_s = time.monotonic() + _GREP_S
        names = [name for name in self._names(stop) if _matches(name, glob)]
        lines: list[str] = []
        for start in range(0, max(len(names), 1), _GREP_FILES):
            with ExitStack() as stack:
                opened = {}
                for name in names[start : start + _GREP_FILES]:
                    with suppress(RefusedError, OSError):
                        opened[stack.enter_context(self._open(name))] = name
                lines += _grep_files(pattern, opened, end_s - time.monotonic(), stop)
            if len(lines) > _MAX_FOUND:
                return "\n".join([*lines[:_MAX_FOUND], "… more"])
        return "\n".join(lines) or "nothing found"

    def _write(self, stop: Stop, path: str, content: str) -> str:
        with self._parent(path, make=True) as (holder, name):
            mode = None
            with suppress(FileNotFoundError):
                mode = os.stat(name, dir_fd=holder, follow_symlinks=False).st_mode
            if mode is not None and not stat.S_ISREG(mode):
                raise RefusedError(f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'not a file'}")
            permissions = None if mode is None else mode & 0o777
            with new_file(Path(name), permissions, folder=holder) as out:
                out.write(content.encode())
        return f"wrote {len(content.encode()):,} bytes"

    def _edit(self, stop: Stop, path: str, old: str, new: str) -> str:
        return self._write(stop, path, _edit_text(self._text(path), {"old": old, "new": new}))

    def _names(self, stop: Stop) -> Iterator[str]:
        """Yield the path of every file, except those in hidden or linked folders."""
        visited = 0
        root = os.open(self._folder, _FOLDER)
        try:
            for folder, below, names, _ in os.fwalk(".", dir_fd=root):
                below[:] = sorted(name for name in below if not name.startswith("."))
                if folder.count("/") >= _MAX_DEPTH:
                    below.clear()
                if self._is_own(folder):
                    below[:], names = [], []
                # "" is first and stands for no file, so that `stop` is also checked in a folder without
                # files
                for name in ("", *sorted(names)):
                    if stop.is_set:
                        raise StoppedError
                    if visited > _MAX_VISITED:
                        return
                    visited += 1
                    if name:
                        yield os.path.normpath(os.path.join(folder, name))
        finally:
            os.close(root)


def _grep_files(pattern: str, opened: dict[int, str], left_s: float, stop: Stop) -> list[str]:
    """Return matching lines as `NAME:NUMBER: TEXT`. `opened` maps descriptors to names.

    Raises RefusedError, StoppedError. Grep can be ended after a time limit; Python's `re` would hold
    the GIL. The user's PATH is not searched for grep: a command may have put another grep there.
    """
    program = shutil.which("grep", path=FIXED_PATH)
    if program is None:
        raise RefusedError("grep is not installed (looked in /usr/local/bin, /usr/bin and /bin)")
    files = [f"/dev/fd/{descriptor}" for descriptor in opened]
    command = [program, "-nHIsEZ", f"-m{_MAX_FOUND}", "-e", pattern, "--", *files]
    try:
        with subprocess.Popen(
            command,
            pass_fds=tuple(opened),
            env={"LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as grep:
            timer = threading.Timer(max(0.0, left_s), grep.kill)
            timer.start()
            assert grep.stdout is not None
            assert grep.stderr is not None
            with stop.calling(grep.kill):
                out, errors = grep.stdout.read(_MAX_FILE), grep.stderr.read(_LINE_CHARACTERS)
            timer.cancel()
            if len(out) == _MAX_FILE:
                grep.kill()
    except OSError as error:
        raise RefusedError(f"grep: {error.strerror}") from error
    if stop.is_set:
        raise StoppedError
    if errors:
        raise RefusedError(f"the pattern is invalid: {errors.decode('utf-8', 'replace').strip()}")
    if grep.returncode == -signal.SIGKILL and len(out) < _MAX_FILE:
        raise RefusedError(f"the search took more than {_GREP_S} s")
    return [_named_line(line, opened) for line in out.decode("utf-8", "replace").split("\n")[:-1]]


def _named_line(line: str, opened: dict[int, str]) -> str:
    file, _, numbered = line.partition("\0")
    number, _, text = numbered.partition(":")
    return f"{opened[int(os.path.basename(file))]}:{number}: {text[:_LINE_CHARACTERS]}"


def _rows(text: str) -> list[str]:
    """Split only at newlines, so that a diff shows other line separators (CR, U+2028)."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _matches(name: str, pattern: str) -> bool:
    """Return whether a path matches: `**/` means any folders; without `/`, the file name must match."""
    if "/" not in pattern and pattern != "**":
        return fnmatch.fnmatchcase(os.path.basename(name), pattern)
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.replace("**/", ""))


def _edit_text(text: str, arguments: dict[str, Any]) -> str:
    old, new = str(arguments.get("old", "")), str(arguments.get("new", ""))
    times = text.count(old) if old else 0
    if times != 1:
        raise RefusedError(f"the old text occurs {times} times in the file; it must occur exactly once")
    return text.replace(old, new)
