"""Closes a reasoning span that has run for as many tokens as its request allows."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.runtime.decoding.sequences.output import Output


class ReasoningBudget:
    """One request's budget: `n_tokens` of reasoning; `close`: its end marker's tokens."""

    def __init__(self, n_tokens: int, close: Sequence[int], *, opened: bool) -> None:
        self._n_tokens = n_tokens
        self.close = close
        self._was_inside = opened
        self._n = 0

    def is_spent(self, output: Output) -> bool:
        """Whether the span is to be closed now. Asked once behind each token that was sampled.

        Not within a character or what may become a marker: the next token is waited for then.
        """
        is_inside = output.is_reasoning
        self._n += self._was_inside and is_inside  # the marker that opens it is no part of it
        self._was_inside = is_inside
        return is_inside and self._n >= self._n_tokens and not output.is_holding
