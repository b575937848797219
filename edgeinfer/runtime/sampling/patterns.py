"""Rewrite a schema's `pattern` (ECMAScript) so that llguidance enforces it exactly: `enforceable`.

For a character class with control characters but without `"` or backslash, llguidance also allows the
JSON escapes `\\"` and `\\\\`. Such a class is rewritten as ranges without control characters.
llguidance has no look-aheads: at the beginning of a pattern, they are rewritten as further patterns for
the same string.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache

from edgeinfer.runtime.requests import check_deadline

#: Matches a class such as `[a-z]`, or an escape such as `\s`.
_ATOM = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.", re.DOTALL)
_ESCAPED_CLASSES = ("\\s", "\\S", "\\w", "\\W", "\\d", "\\D")
_WRITTEN_CONTROLS = "\t\n\r"
_SPACES = "\\t\\n\\v\\f\\r \\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff"
_AFTER_BASIC_PLANE = "\U0001f600"
#: Set operations of llguidance; in ECMAScript these are plain characters.
_SET_OPERATION = re.compile(r"&&|--|~~")
_LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
_AHEAD = re.compile(r"\^?\(\?([=!])")


@lru_cache(maxsize=1)
def _basic_plane() -> str:
    return "".join(map(chr, (*range(0xD800), *range(0xE000, 0x10000))))


def enforceable(pattern: str) -> list[str] | None:
    """Return patterns that llguidance can enforce; a text that matches all of them matches `pattern`.

    Returns None if a look-around cannot be replaced. Raises ValueError as `narrow` does.
    """
    parts = without_look_aheads(pattern) if _LOOK_AROUND.search(pattern) else [pattern]
    return parts and [narrow(pattern_part) for pattern_part in parts]


@lru_cache(maxsize=256)
def narrow(pattern: str) -> str:
    """Rewrite the character classes of `pattern` that llguidance enforces too loosely in JSON.

    Raises ValueError, which names the class, if a class cannot be rewritten.
    """
    return _ATOM.sub(lambda atom: _narrow_class(atom[0]), pattern)


def _narrow_class(atom: str) -> str:
    if atom[0] != "[" and atom not in _ESCAPED_CLASSES:
        return atom
    check_deadline()
    body = re.sub(r"(?<!\\)[\[|]", r"\\\g<0>", atom[1:-1]) if atom[0] == "[" else atom
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            characters = re.compile(f"[{_spaces(body)}]", re.ASCII)
    except re.error:
        if atom.startswith("[^") and ('"' in atom or "\\\\" in atom):
            raise ValueError(f"the class {atom} cannot be combined with JSON's escapes") from None
        return atom
    controls = [c for c in map(chr, range(32)) if c not in _WRITTEN_CONTROLS and characters.match(c)]
    if not controls or (characters.match('"') and characters.match("\\")):
        return atom
    if _SET_OPERATION.search(atom) or max(atom) > "\uffff":
        raise ValueError(f"the class {atom} cannot be combined with JSON's escapes")
    return _ranges(characters)


def _spaces(body: str) -> str:
    r"""Replace `\s` by its characters: re.ASCII, which `\w` and `\d` need, would leave some out."""
    return re.sub(r"\\(.)", lambda escape: _SPACES if escape[1] == "s" else escape[0], body)


def _ranges(characters: re.Pattern[str]) -> str:
    written = "".join(c for c in _WRITTEN_CONTROLS if characters.match(c))
    runs = [
        (max(run[0][0], " "), run[0][-1])
        for run in re.finditer(f"{characters.pattern}+", _basic_plane(), re.ASCII)
        if run[0][-1] >= " "
    ]
    if characters.match(_AFTER_BASIC_PLANE):
        runs.append(("\U00010000", "\U0010ffff"))
    pieces = [_escape(c) for c in written]
    pieces += [f"{_escape(first)}-{_escape(last)}" for first, last in runs]
    return f"[{''.join(pieces)}]"


def _escape(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def without_look_aheads(pattern: str) -> list[str] | None:
    """Return patterns without look-arounds; a text that matches all of them matches `pattern`.

    Returns None unless all look-arounds are look-aheads at the start: `(?=…)`, `(?!^[ab]*$)` (the text
    has another character than a and b) or `(?![ab])` (the text does not begin with a or b).
    """
    parts, remaining = [], pattern
    anchor = "^" if pattern.startswith("^") else ""
    while ahead := _AHEAD.match(remaining):
        group_end = _closing(remaining, ahead.end())
        inside = remaining[ahead.end() : group_end]
        if group_end < 0 or not (anchor or ahead[0].startswith("^")):
            return None
        if ahead[1] == "=":
            parts.append(f"^(?:{inside.removeprefix('^')})")
        elif only := re.fullmatch(r"\^?\[([^\]\\^]*)\][*+]?\$", inside):
            parts.append(f"[^{only[1]}]")
        elif first := re.fullmatch(r"\^?(?:\[([^\]\\^]+)\]|([\w-]))", inside):
            parts.append(f"^(?:[^{first[1] or first[2]}][\\s\\S]*)?$")
        else:
            return None
        remaining = remaining[group_end + 1 :]
        anchor = "^"
    tail = anchor + remaining.removeprefix("^")
    return None if _LOOK_AROUND.search("".join((*parts, tail))) else [*parts, tail]


def _closing(text: str, start: int) -> int:
    """Return the index of the `)` of the group whose content begins at `start`, -1 without one."""
    depth = 1
    for token in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]", text[start:], re.DOTALL):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return start + token.start()
    return -1
