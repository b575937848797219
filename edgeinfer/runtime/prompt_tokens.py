"""A list of prompt tokens that may contain pictures: `PromptTokens`.

A picture is a sequence of embedding rows. Each row stands in the list as a negative pseudo-token: a
hash of the image file, the projector and the row's index. So code that compares tokens (the KV cache,
block names) compares pictures too, and pictures that differ in one pixel share no prefix. The two
lowest bits mark a picture's first row and, with M-RoPE, rows that do not advance the position.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence

#: Values of the two lowest bits of a pseudo-token, a negative number that stands for one row of a
#: picture. _FIRST marks a picture's first row. With M-RoPE, _FIRST_IN_PLACE marks the first row of a
#: picture that takes fewer positions than it has rows, and _WITHOUT_POSITION a row that takes no
#: position. All other rows are marked by _ROW.
_ROW, _FIRST, _WITHOUT_POSITION, _FIRST_IN_PLACE = range(4)


def row_tokens(key: bytes, n_rows: int, n_positions: int = 0) -> list[int]:
    """Return the pseudo-tokens of a picture: one negative number for each of its `n_rows` rows.

    `key` identifies the picture. With M-RoPE, the picture takes `n_positions` positions (1 to
    `n_rows`); 0 means one position for each row.
    """
    hashed = hashlib.shake_128(key).digest(4 * n_rows)
    kinds = [_WITHOUT_POSITION if 0 < n_positions <= i else _ROW for i in range(n_rows)]
    kinds[0] = _FIRST_IN_PLACE if n_positions else _FIRST
    hashes = struct.unpack(f"<{n_rows}I", hashed)
    return [kind - 4 - 4 * (number >> 3) for kind, number in zip(kinds, hashes, strict=True)]


def text_only(tokens: Iterable[int]) -> list[int]:
    """Return the tokens of text: those that are not negative, as the pseudo-tokens of pictures are."""
    return [token for token in tokens if token >= 0]


class PromptTokens(list[int]):
    """The tokens of a prompt, with a pseudo-token for each row of a picture.

    Only `append` and the methods defined here may change the list, because it counts positions.
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

    def discard(self, start: int, n: int) -> None:
        """Remove the `n` tokens from index `start` on, which must be text."""
        del self[start : start + n]

    def round_down(self, n: int) -> int:
        """Return the length of the longest prefix, up to `n` tokens, that does not cut a picture."""
        while 0 < n < len(self) and self[n] < 0 and not self[n] % 2:
            n -= 1
        return n

    def block_end(self, n: int) -> int:
        """Return `n`, or the next index at which a KV block can end if it cannot end at `n`.

        A block cannot end inside a picture whose rows share positions (M-RoPE), because llama.cpp saves
        whole positions. Then the block ends after the picture.
        """
        if self._is_in_place(n):
            while n < len(self) and self[n] < 0 and not self[n] % 2:
                n += 1
        return n

    def position(self, n: int) -> int:
        """Return the position of token `n` in the context; rows of a picture may share positions."""
        if self._is_in_place(n):
            n = self.round_down(n)
        return n - bisect_left(self._without_position, n)

    def _is_in_place(self, n: int) -> bool:
        start = self.round_down(n)
        return start < n and self[start] % 4 == _FIRST_IN_PLACE
