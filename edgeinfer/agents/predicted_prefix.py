"""What a session of an agent begins with in another folder or on another day: guessed from one before.

Agents name both before the first words of a session (changing_lines.py), so what they will say can be
computed before they say it. A guess that is wrong costs what is computed behind the mistake.
"""

from __future__ import annotations

import re
from datetime import date

_FOLDER = re.compile(r"[Ww]orking directory: (/[^\n]*)|<cwd>(/[^<\n]*)</cwd>")
_DAY_LINE = re.compile(r"(?:[Tt]oday's date(?: is|:)|[Cc]urrent date:|<current_date>)[^\n]*")
_GIT = re.compile(r"((?:Is a git repository|Is directory a git repo): )(?:true|false|yes|no)\b")
#: How projects are called in the names of folders for what is remembered of them.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]")
#: Characters of markup behind the last line that names a folder, before somebody's words.
_MARKUP = 80


def begin_elsewhere(text: str, folder: str, day: date, *, is_repository: bool) -> str:
    """The beginning of a prompt with `folder` in place of its own, cut where somebody's words begin.

    `text` as it is where it names no folder.
    """
    found = _FOLDER.findall(text)
    if not found:
        return text
    before = "".join(found[-1]).strip()
    text = _DAY_LINE.sub(lambda line: _on(day, line[0]), text)
    text = _GIT.sub(lambda line: line[1] + _answer(line[0], is_repository), text)
    for old, new in ((before, folder), (_name(before), _name(folder))):
        text = text.replace(old, new)
    return text[: _end_of_lines(text, (folder, _name(folder)))]


def _name(folder: str) -> str:
    return _NOT_IN_NAMES.sub("-", folder)


def _on(day: date, line: str) -> str:
    """A line that says a day, with another, in the ways in which agents say it."""
    for pattern, said in (
        (r"20\d\d-\d\d-\d\d", day.isoformat()),
        (r"[A-Z][a-z][a-z] [A-Z][a-z][a-z] \d\d 20\d\d", f"{day:%a %b %d %Y}"),
        (r"[A-Z][a-z]+day, [A-Z][a-z]+ \d{1,2}, 20\d\d", f"{day:%A, %B} {day.day}, {day.year}"),
    ):
        line = re.sub(pattern, said, line)
    return line


def _answer(line: str, is_repository: bool) -> str:
    words = ("true", "false") if line.endswith(("true", "false")) else ("yes", "no")
    return words[0] if is_repository else words[1]


def _end_of_lines(text: str, names: tuple[str, ...]) -> int:
    """Where the last line ends that names the folder or says what it is, and the markup behind it."""
    last = max(text.rfind(name) + len(name) for name in names)
    last = max([last, *(found.end() for found in _GIT.finditer(text))])
    end = text.find("\n", last) + 1 or len(text)
    return end + 1 if text.startswith("\n", end) else end + _MARKUP
