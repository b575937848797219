"""Pictures of a message: decoded pixels, and their places in its text and among its tokens.

In a list of tokens each row of a picture is a negative pseudo-token: a hash of the file, the
projector and the row's place. So whatever compares tokens compares pictures (the KV cache, names of
blocks, common prefixes), and two pictures that differ in one pixel share nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Stands in `Message.content` for each of its pictures, in order. A noncharacter: no text has it.
PICTURE_MARK = "\ufdd1"
#: What a person sees in its place.
SHOWN = "[picture]"


@dataclass(frozen=True, slots=True)
class Picture:
    """Decoded pixels: 8-bit RGB, row by row, `3 * width * height` bytes."""

    width: int
    height: int
    rgb: bytes

    def __post_init__(self) -> None:
        if min(self.width, self.height) < 1 or len(self.rgb) != 3 * self.width * self.height:
            raise ValueError(f"{len(self.rgb)} bytes are no picture of {self.width}x{self.height}")


def join_parts(parts: Iterable[str | bytes]) -> tuple[str, tuple[bytes, ...]]:
    """Return the `content` and `pictures` of a message of texts and files of pictures, in order."""
    content: list[str] = []
    pictures: list[bytes] = []
    for part in parts:
        if isinstance(part, bytes):
            pictures.append(part)
            content.append(PICTURE_MARK)
        else:
            content.append(part.replace(PICTURE_MARK, ""))
    return "".join(content), tuple(pictures)


def row_tokens(key: bytes, n_rows: int) -> list[int]:
    """Return the pseudo-tokens of `n_rows` rows that `key` identifies; only the first is odd.

    A later row never equals a first one, so a list of tokens tells where its pictures begin.
    """
    hashed = hashlib.shake_128(key).digest(4 * n_rows)
    tokens = [-2 - 2 * (word >> 2) for word in struct.unpack(f"<{n_rows}I", hashed)]
    return [tokens[0] + 1, *tokens[1:]]


def picture_start(tokens: Sequence[int], n: int) -> int:
    """Return `n`, or the start of the picture that it would cut: a prefix holds whole pictures."""
    while 0 < n < len(tokens) and tokens[n] < 0 and not tokens[n] % 2:
        n -= 1
    return n


def without_rows(tokens: Iterable[int]) -> list[int]:
    """Return the tokens of text."""
    return [token for token in tokens if token >= 0]
