"""The tokens of a prompt, including the rows of its pictures: where it may be cut, and positions.

Each row of a picture is a negative pseudo-token: a hash of the file, the projector and the row's index.
So code that compares tokens also compares pictures (the KV cache, names of blocks, common prefixes),
and two pictures that differ in one pixel share nothing. The last two bits mark where a picture begins
and, with M-RoPE, which rows have no own position.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence

#: Remainders of a row's token by 4. The first row of a picture is odd, so a list of tokens shows where
#: its pictures begin. With M-RoPE a picture takes fewer positions than rows, all in one place.
_ROW, _FIRST, _WITHOUT_POSITION, _FIRST_IN_PLACE = range(4)


def row_tokens(key: bytes, n_rows: int, n_positions: int = 0) -> list[int]:
    """Return the pseudo-tokens of the `n_rows` rows identified by `key`.

    With M-RoPE they take `n_positions` (1 to `n_rows`); 0 means that each row has its own.
    """
    hashed = hashlib.shake_128(key).digest(4 * n_rows)
    kinds = [_WITHOUT_POSITION if 0 < n_positions <= i else _ROW for i in range(n_rows)]
    kinds[0] = _FIRST_IN_PLACE if n_positions else _FIRST
    hashes = struct.unpack(f"<{n_rows}I", hashed)
    return [kind - 4 - 4 * (number >> 3) for kind, number in zip(kinds, hashes, strict=True)]


def text_only(tokens: Iterable[int]) -> list[int]:
    """Return only the tokens of text."""
    return [token for token in tokens if token >= 0]


class PromptTokens(list[int]):
    """Tokens of text and rows of pictures. They change only by the methods of this class, by `append`
    of text, and by deleting from a list of only text.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        super().__init__()
        self._without_position: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:  # type: ignore[override]
        if min(tokens, default=0) < 0:
            rows = ((i, token) for i, token in enumerate(tokens, len(self)) if token < 0)
            self._without_position += [i for i, token in rows if token % 4 == _WITHOUT_POSITION]
        super().extend(tokens)

    def truncate(self, n: int) -> None:
        """Keep the first `n` tokens."""
        del self[n:], self._without_position[bisect_left(self._without_position, n) :]

    def cut(self, n: int) -> int:
        """Return `n`, or the start of a picture that `n` would cut: a prefix has whole pictures."""
        while 0 < n < len(self) and self[n] < 0 and not self[n] % 2:
            n -= 1
        return n

    def block_end(self, n: int) -> int:
        """Return `n`, or a picture's end if `n` is inside it and its rows share a position."""
        if self._is_in_place(n):
            while n < len(self) and self[n] < 0 and not self[n] % 2:
                n += 1
        return n

    def position(self, n: int) -> int:
        """Return the position of token `n`; for rows that share a position, the picture's start."""
        if self._is_in_place(n):
            n = self.cut(n)
        return n - bisect_left(self._without_position, n)

    def _is_in_place(self, n: int) -> bool:
        start = self.cut(n)
        return start < n and self[start] % 4 == _FIRST_IN_PLACE
