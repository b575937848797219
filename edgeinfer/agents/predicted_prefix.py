"""Predict the first lines of an agent's session in another folder or on another day from its last one.

Agents name folder and day before the user's first words (`prompt_normalization`), so `launch` can have
both prefilled while the agent starts. A wrong prediction costs the prefill of what follows the mistake.
Without it a new session of Codex on a 4B shape has 50 instead of 9 tokens left to prefill, and takes
three times as long (at least) to its first token (decision 087).
"""

from __future__ import annotations

import re
from datetime import date

_FOLDER = re.compile(r"[Ww]orking directory: (/[^\n]*)|<cwd>(/[^<\n]*)</cwd>")
_DAY_LINE = re.compile(r"(?:[Tt]oday's date(?: is|:)|[Cc]urrent date:|<current_date>)[^\n]*")
_GIT = re.compile(r"((?:Is a git repository|Is directory a git repo): )(true|false|yes|no)\b")
#: Agents keep a project's memory in a folder of its path with these characters replaced.
_NOT_IN_SLUG = re.compile(r"[^A-Za-z0-9]")
#: Characters of markup behind the last line that names a folder, before the user's words.
_MARKUP = 80


def predict_prefix(text: str, folder: str, day: date, *, is_repository: bool) -> str:
    """Return a prompt's prefix with `folder` and `day` in place of its own, without the user's words.

    `text` unchanged if it names no folder.
    """
    found = _FOLDER.findall(text)
    if not found:
        return text
    before = "".join(found[-1]).strip()
    text = _DAY_LINE.sub(lambda line: _with_day(line[0], day), text)
    text = _GIT.sub(lambda line: line[1] + _answer(line[2], is_repository), text)
    for old, new in ((before, folder), (_slug(before), _slug(folder))):
        text = text.replace(old, new)
    return text[: _end_of_lines(text, (folder, _slug(folder)))]


def _slug(folder: str) -> str:
    return _NOT_IN_SLUG.sub("-", folder)


def _with_day(line: str, day: date) -> str:
    for pattern, written in (
        (r"20\d\d-\d\d-\d\d", day.isoformat()),
        (r"[A-Z][a-z][a-z] [A-Z][a-z][a-z] \d\d 20\d\d", f"{day:%a %b %d %Y}"),
        (r"[A-Z][a-z]+day, [A-Z][a-z]+ \d{1,2}, 20\d\d", f"{day:%A, %B} {day.day}, {day.year}"),
    ):
        line = re.sub(pattern, written, line)
    return line


def _answer(before: str, is_repository: bool) -> str:
    positive, negative = ("true", "false") if before in ("true", "false") else ("yes", "no")
    return positive if is_repository else negative


def _end_of_lines(text: str, names: tuple[str, ...]) -> int:
    """Return the end of the last line about the folder, with the markup behind it."""
    last = max(text.rfind(name) + len(name) for name in names)
    last = max([last, *(found.end() for found in _GIT.finditer(text))])
    end = text.find("\n", last) + 1 or len(text)
    return end + 1 if text.startswith("\n", end) else end + _MARKUP
