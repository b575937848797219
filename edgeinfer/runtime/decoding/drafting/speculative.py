"""Speculative decoding: guesses at the next tokens, verified by the model in one step, and switched off
where they lose.

A guess is only ever kept when it is the token the sampler picks from the model's own logits, so the
text is the same with and without; only the time differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

#: Tokens that must recur before what followed them is guessed again.
_NGRAM = 3
#: Guesses that are tried before the account is settled, and steps a losing drafter then rests.
_TRIAL = 32
_REST_STEPS = 96


class Drafter(Protocol):
    """Guesses what comes after `tokens`."""

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]: ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""


class NgramDrafter:
    """Prompt lookup: what followed the last `_NGRAM` tokens where they occurred before, most
    recently.
    """

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens; none when the end of `tokens` is new."""
        n = len(tokens)
        if n <= _NGRAM or limit <= 0:
            return []
        if n < self._indexed:  # a context shift dropped tokens
            self._follows.clear()
            self._indexed = 0
        for end in range(max(self._indexed, _NGRAM), n):
            self._follows[tuple(tokens[end - _NGRAM : end])] = end
        self._indexed = n
        place = self._follows.get(tuple(tokens[n - _NGRAM : n]))
        return [] if place is None else list(tokens[place : place + limit])

    def close(self) -> None:
        """Forget the text."""
        self._follows.clear()


class StepCosts:
    """What a decode step costs by how many tokens it computes: a running mean, shared by all sequences.
    Seconds.
    """

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}

    def note(self, n_tokens: int, seconds: float) -> None:
        """A step of `n_tokens` decode tokens took `seconds`."""
        old = self._mean.get(n_tokens)
        self._mean[n_tokens] = seconds if old is None else old + 0.1 * (seconds - old)

    def mean(self, n_tokens: int) -> float | None:
        """Seconds of a step of `n_tokens` decode tokens; None while it was never measured."""
        return self._mean.get(n_tokens)


class Drafting:
    """One sequence's guessing: its drafter, what came of it, and whether to go on."""

    def __init__(self, drafter: Drafter | None, *, limit: int) -> None:
        self._drafter, self._limit = drafter, limit
        self._rest = 0
        self._trial_drafted = self._trial_accepted = self._trial_steps = 0
        self._trial_s = 0.0
        self.drafted = self.accepted = 0

    def propose(self, tokens: Sequence[int], room: int) -> list[int]:
        """Guesses for this step, at most `room`."""
        if self._drafter is None or room <= 0:
            return []
        if self._rest:
            self._rest -= 1
            return []
        began = time.perf_counter()
        guesses = self._drafter.draft(tokens, min(self._limit, room))
        self._trial_s += time.perf_counter() - began
        return guesses

    def settle(self, drafted: int, accepted: int, costs: StepCosts, n_tokens: int) -> None:
        """Book a step's outcome; `n_tokens` is what the step would have computed without guesses."""
        self.drafted += drafted
        self.accepted += accepted
        self._trial_drafted += drafted
        self._trial_accepted += accepted
        self._trial_steps += 1
        if self._trial_drafted < _TRIAL:
            return
        self._rest = _REST_STEPS if self._loses(costs, n_tokens) else 0
        self._trial_drafted = self._trial_accepted = self._trial_steps = 0
        self._trial_s = 0.0

    def _loses(self, costs: StepCosts, n_tokens: int) -> bool:
        """Whether the tokens gained in this trial cost more time than steps without guesses would have
        taken.
        """
        extra = max(1, round(self._trial_drafted / self._trial_steps))
        plain, longer = costs.mean(n_tokens), costs.mean(n_tokens + extra)
        if plain is None or longer is None:
            return False
        gain = 1.0 + self._trial_accepted / self._trial_steps
        return longer + self._trial_s / self._trial_steps > gain * plain

    def close(self) -> None:
        """Free what the drafter holds. Idempotent."""
        if self._drafter is not None:
            self._drafter.close()
