"""Pictures of a message: decoded pixels, and their places in its text and among its tokens.

In a list of tokens each row of a picture is a negative pseudo-token: a hash of the file, the
projector and the row's place. So whatever compares tokens compares pictures (the KV cache, names of
blocks, common prefixes), and two pictures that differ in one pixel share nothing. The last two bits
tell where a picture begins, and with M-RoPE which rows have no position of their own.
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


#: Remainders of a row's token by 4. The first row of a picture is odd, so a list of tokens tells where
#: its pictures begin. With M-RoPE a picture takes fewer positions than rows, all in one place.
_ROW, _FIRST, _WITHOUT_POSITION, _FIRST_IN_PLACE = range(4)


def row_tokens(key: bytes, n_rows: int, n_positions: int = 0) -> list[int]:
    """Return the pseudo-tokens of `n_rows` rows that `key` identifies.

    With M-RoPE they take `n_positions`, 1 to `n_rows`; 0: each has its own.
    """
    hashed = hashlib.shake_128(key).digest(4 * n_rows)
    kinds = [_WITHOUT_POSITION if 0 < n_positions <= i else _ROW for i in range(n_rows)]
    kinds[0] = _FIRST_IN_PLACE if n_positions else _FIRST
    words = struct.unpack(f"<{n_rows}I", hashed)
    return [kind - 4 - 4 * (word >> 3) for kind, word in zip(kinds, words, strict=True)]


def picture_start(tokens: Sequence[int], n: int) -> int:
    """Return `n`, or the start of the picture that it would cut: a prefix holds whole pictures."""
    while 0 < n < len(tokens) and tokens[n] < 0 and not tokens[n] % 2:
        n -= 1
    return n


def uncut_end(tokens: Sequence[int], n: int) -> int:
    """Return `n`, or the end of the picture that it would cut if the rows lie in one place."""
    start = picture_start(tokens, n)
    if start < n and tokens[start] % 4 == _FIRST_IN_PLACE:
        while n < len(tokens) and tokens[n] < 0 and not tokens[n] % 2:
            n += 1
    return n


def position_behind(tokens: Sequence[int], n: int) -> int:
    """Return the position behind the first `n` tokens, which cut no picture in one place."""
    return n - sum(token % 4 == _WITHOUT_POSITION for token in tokens[:n] if token < 0)


def without_rows(tokens: Iterable[int]) -> list[int]:
    """Return the tokens of text."""
    return [token for token in tokens if token >= 0]
