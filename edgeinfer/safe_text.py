"""Make text of models, files and users safe to print: no text may control the terminal."""

from __future__ import annotations

import re

#: Characters that control a terminal or cannot be shown there: C0 and C1 controls except tab and
#: newline, surrogates, and characters that change the direction of text.
_OBEYED = dict.fromkeys(
    (
        *(code for code in range(0x20) if code not in (0x09, 0x0A)),
        *range(0x7F, 0xA0),
        *(0x200E, 0x200F),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        *range(0xD800, 0xE000),
    )
)
#: Characters that are invisible although `str.isprintable` is true: fillers, variation selectors.
_BLANK = {
    *(0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, 0x16FE4),
    *(*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)),
}


def without_controls(text: str) -> str:
    """Remove the characters of `text` that can control a terminal, except tabs and newlines."""
    return text.translate(_OBEYED)


class _Escapes(dict[int, str]):
    """Maps character codes to escapes, for `str.translate`. Stores none: there are too many codes."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if character in "\n\t" or (character.isprintable() and code not in _BLANK):
            return character
        if code < 0x100:
            return f"\\x{code:02x}"
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_ESCAPES = _Escapes()


def escape_hidden(text: str) -> str:
    r"""Write invisible characters, except tab and newline, as `\x1b`, `\u200b` or `\U000e0041`.

    The result is unambiguous: a backslash that could begin an escape is doubled.
    """

    def double(match: re.Match[str]) -> str:
        following = text[match.end() : match.end() + 1].translate(_ESCAPES)
        return "\\\\" if following[:1] in ("\\", "x", "u", "U") else "\\"

    return re.sub(r"\\", double, text).translate(_ESCAPES)
