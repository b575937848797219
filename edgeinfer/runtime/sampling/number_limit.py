"""Limit the digits of numbers in a JSON answer: `NumberLimit`.

A grammar does not limit them, and at a higher temperature a model may never end a number: of 12 heights
in metres, 4 continued `1.8000000447…` to the end of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from edgeinfer.runtime.llama.vocab import Vocab

#: Most digits of a number (a double has 17 significant ones), and most after its `e`.
MAX_DIGITS = 17
_EXPONENT_DIGITS = 3


class DigitTokens:
    """Which tokens of a vocabulary begin with a digit."""

    def __init__(self, vocab: Vocab, pieces: Sequence[bytes]) -> None:
        self.vocab = vocab
        self.mask = np.fromiter((piece[:1].isdigit() for piece in pieces), np.bool_, len(pieces))


class NumberLimit:
    """Follows one JSON answer, and forbids digits where a number has enough."""

    __slots__ = ("_is_escaped", "_is_text", "_n_digits", "_tokens")

    def __init__(self, tokens: DigitTokens) -> None:
        self._tokens = tokens
        self._n_digits = 0
        self._is_text = self._is_escaped = False

    def forbid_into(self, forbidden: npt.NDArray[np.bool_]) -> None:
        """Forbid digits after the last allowed one, unless nothing else may come."""
        if self._n_digits >= MAX_DIGITS:
            more = forbidden | self._tokens.mask
            if not more.all():
                np.copyto(forbidden, more)

    def accept(self, token: int) -> None:
        """Advance by the characters of `token`."""
        piece = self._tokens.vocab.piece(token)
        if self._is_text and not self._is_escaped and b'"' not in piece and b"\\" not in piece:
            return
        for character in piece:
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped = character == 0x5C
                self._is_text = character != 0x22
            elif 0x30 <= character <= 0x39:
                self._n_digits += 1
            elif character == 0x22:
                self._is_text, self._n_digits = True, 0
            elif character in b"eE" and self._n_digits:
                self._n_digits = MAX_DIGITS - _EXPONENT_DIGITS
            elif character not in b".+-":
                self._n_digits = 0
