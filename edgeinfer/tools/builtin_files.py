"""Built-in tools for the files below one folder: read, glob, grep; write and edit after approval."""

from __future__ import annotations

import difflib
import fnmatch
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgeinfer.platform.disk import new_file
from edgeinfer.tools.builtin import TEXT, Builtin, RefusedError, tool_info
from edgeinfer.tools.mcp_client import StoppedError
from edgeinfer.tools.uses import Stop

#: Bytes of a file that is read, searched or edited; larger ones are named in the answer.
_MAX_FILE = 4 << 20
_MAX_LINES, _MAX_FOUND = 2000, 200
_MAX_VISITED = 50_000
_LINE_CHARACTERS = 400
#: Seconds of a search, and the files that one grep is given.
_GREP_S, _GREP_FILES = 10, 500
_WHOLE = {"type": "integer", "minimum": 1}
TOOLS = {
    info.name: info
    for info in (
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
            "Replace a text that stands in a file exactly once.",
            {"path": TEXT, "old": TEXT, "new": TEXT},
        ),
    )
}


class BuiltinFiles(Builtin):
    """The enabled tools over `folder`. Links that lead out of it are not followed. Any thread."""

    server = "files"

    def __init__(self, folder: Path, enabled: Sequence[str]) -> None:
        super().__init__(TOOLS[name] for name in TOOLS if name in enabled)
        self._folder = folder.resolve()

    def preview(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in ("write", "edit"):
            return ""
        try:
            path = self._inside(str(arguments.get("path", "")))
            before = self._text(path) if path.exists() else ""
            after = str(arguments.get("content", "")) if name == "write" else _edited(before, arguments)
        except (RefusedError, OSError, UnicodeError, ValueError) as error:
            return f"(no diff: {error})"
        lines = difflib.unified_diff(
            before.splitlines(), after.splitlines(), "now", "then", lineterm=""
        )
        return "\n".join(list(lines)[2:])

    def _inside(self, text: str) -> Path:
        path = (self._folder / text).resolve()
        if not path.is_relative_to(self._folder):
            raise RefusedError(f"{text} is outside of the folder")
        return path

    def _text(self, path: Path) -> str:
        if not path.is_file():
            raise RefusedError(f"{path.relative_to(self._folder)} is not a file")
        if path.stat().st_size > _MAX_FILE:
            raise RefusedError(f"the file is larger than {_MAX_FILE >> 20} MiB")
        text = path.read_bytes().decode()
        if "\0" in text:
            raise RefusedError("the file is binary")
        return text

    def _read(self, stop: Stop, path: str, first_line: int = 1, lines: int = _MAX_LINES) -> str:
        rows = self._text(self._inside(path)).splitlines()
        first = max(first_line, 1)
        last = min(len(rows), first - 1 + min(lines, _MAX_LINES))
        shown = [f"{n}\t{rows[n - 1]}" for n in range(first, last + 1)]
        more = f"\n… {len(rows)} lines in all" if last < len(rows) else ""
        return "\n".join(shown) + more

    def _glob(self, stop: Stop, pattern: str) -> str:
        found = [name for name in self._names(stop) if _matches(name, pattern)]
        more = f"\n… {len(found)} in all" if len(found) > _MAX_FOUND else ""
        return "\n".join(sorted(found)[:_MAX_FOUND]) + more or "no file matches"

    def _grep(self, stop: Stop, pattern: str, glob: str = "**") -> str:
        end = time.monotonic() + _GREP_S
        names = [name for name in self._names(stop) if _matches(name, glob) and self._is_small(name)]
        found: list[str] = []
        for at in range(0, len(names), _GREP_FILES):
            found += _grep_files(
                self._folder, pattern, names[at : at + _GREP_FILES], end - time.monotonic()
            )
            if stop.is_set:
                raise StoppedError("stopped")
            if len(found) > _MAX_FOUND:
                return "\n".join([*found[:_MAX_FOUND], "… more"])
        return "\n".join(found) or "nothing found"

    def _is_small(self, name: str) -> bool:
        try:
            path = self._inside(name)
            return path.is_file() and path.stat().st_size <= _MAX_FILE
        except (RefusedError, OSError):
            return False

    def _write(self, stop: Stop, path: str, content: str) -> str:
        target = self._inside(path)
        if target.is_dir():
            raise RefusedError(f"{path} is a folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else None
        with new_file(target, mode) as out:
            out.write(content.encode())
        return f"wrote {len(content.encode()):,} bytes"

    def _edit(self, stop: Stop, path: str, old: str, new: str) -> str:
        after = _edited(self._text(self._inside(path)), {"old": old, "new": new})
        return self._write(stop, path, after)

    def _names(self, stop: Stop) -> Iterator[str]:
        """Yield the files' paths; hidden folders and links to folders are left out."""
        visited = 0
        for folder, below, names in os.walk(self._folder):
            below[:] = sorted(name for name in below if not name.startswith("."))
            for name in sorted(names):
                visited += 1
                if stop.is_set:
                    raise StoppedError("stopped")
                if visited > _MAX_VISITED:
                    return
                yield os.path.relpath(os.path.join(folder, name), self._folder)


def _grep_files(folder: Path, pattern: str, names: list[str], left_s: float) -> list[str]:
    """Return what grep finds, which a time limit can end: `re` would hold the interpreter's lock."""
    command = ["grep", "-nHIsEZ", f"-m{_MAX_FOUND}", "-e", pattern, "--", *names]
    try:
        with subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as grep:
            timer = threading.Timer(max(0.0, left_s), grep.kill)
            timer.start()
            assert grep.stdout is not None
            assert grep.stderr is not None
            out, said = grep.stdout.read(_MAX_FILE), grep.stderr.read(_LINE_CHARACTERS)
            timer.cancel()
            if len(out) == _MAX_FILE:
                grep.kill()
    except OSError as error:
        raise RefusedError(f"grep: {error.strerror}") from error
    if said:
        raise RefusedError(f"the pattern is wrong: {said.decode('utf-8', 'replace').strip()}")
    if grep.returncode == -signal.SIGKILL and len(out) < _MAX_FILE:
        raise RefusedError(f"the search took more than {_GREP_S} s")
    return [_found_line(line) for line in out.decode("utf-8", "replace").split("\n")[:-1]]


def _found_line(line: str) -> str:
    name, _, rest = line.partition("\0")
    number, _, text = rest.partition(":")
    return f"{name}:{number}: {text[:_LINE_CHARACTERS]}"


def _matches(name: str, pattern: str) -> bool:
    """`**/` stands for any folders, none included; a pattern without `/` looks at the file's name."""
    if "/" not in pattern and pattern != "**":
        return fnmatch.fnmatchcase(os.path.basename(name), pattern)
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern.replace("**/", ""))


def _edited(text: str, arguments: dict[str, Any]) -> str:
    old, new = str(arguments.get("old", "")), str(arguments.get("new", ""))
    times = text.count(old) if old else 0
    if times != 1:
        raise RefusedError(f"the old text stands {times} times in the file; it must stand there once")
    return text.replace(old, new)
