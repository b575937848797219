"""GBNF, llama.cpp's grammar notation, made the Lark that llguidance reads.

llguidance's own converter does the work. It does not know escapes of characters in literals (`"\\x1b"`,
`"\\u00e9"`), so they are resolved before.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from edgeinfer.errors import UnsupportedConstraintError

#: A literal, a character class or a comment; what stands between is left alone.
_PARTS = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


def to_lark(gbnf: str) -> str:
    """Raises UnsupportedConstraintError, `param` "gbnf" with the line where there is one."""
    try:
        text = any_to_lark(_PARTS.sub(_resolve, gbnf))
    except GbnfToLarkError as error:
        line = error.pos.text.count("\n", 0, error.pos.pos) + 1
        raise UnsupportedConstraintError(
            f"the grammar does not parse: {error}", param=f"gbnf line {line}"
        ) from error
    except Exception as error:
        raise UnsupportedConstraintError(
            f"the grammar does not parse: {error}", param="gbnf"
        ) from error
    return str(text)


def _resolve(match: re.Match[str]) -> str:
    part = match.group()
    if part.startswith("#"):
        return part
    in_class = part.startswith("[")
    pieces = []
    last = 0
    for escape in _ESCAPE.finditer(part):
        if (escape.start() - len(part[: escape.start()].rstrip("\\"))) % 2:
            continue  # the backslash is itself escaped
        code = int(next(filter(None, escape.groups())), 16)
        pieces.append(
            part[last : escape.start()] + (_in_class(code) if in_class else _in_literal(code))
        )
        last = escape.end()
    whole = "".join([*pieces, part[last:]])
    return f"({whole})" if pieces and not in_class else whole


def _character(code: int) -> str:
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise UnsupportedConstraintError(f"no such character: {code:#x}", param="gbnf")
    return chr(code)


def _in_class(code: int) -> str:
    """A character of a class, which is read as a regular expression's."""
    return f"\\x{code:02x}" if code < 0x80 else _character(code)


def _in_literal(code: int) -> str:
    """A literal's character; one it cannot hold closes it, stands as a class, reopens it."""
    if code < 0x20 or code == 0x7F:
        return f'" [\\x{code:02x}] "'
    character = _character(code)
    return "\\" + character if character in '"\\' else character
