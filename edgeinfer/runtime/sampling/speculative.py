"""Speculative decoding: draft tokens, verified in one step, while they gain more than they cost.

A draft token is only kept if it is the token the sampler picks from the model's own logits, so the text
is the same with and without; only the time differs.

Drafts come from the text itself or from a draft model, which the decode thread alone uses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from edgeinfer.errors import ModelLoadError
from edgeinfer.runtime.kv_cache.cache import common_prefix
from edgeinfer.runtime.llama.context import Batch
from edgeinfer.runtime.llama.model import LlamaModel, open_context
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.llama.weights import free_model, open_model
from edgeinfer.runtime.options import LoadOptions

#: Tokens that must recur before the tokens that followed them are drafted again.
_NGRAM = 3
#: Acceptance rate that is assumed before anything was verified, and the weight of one verified token.
_START = 0.5
_WEIGHT = 0.15
#: The share of the way back to the assumed rate, per step without drafts of a draft model: a rejected
#: drafter is tried again after tens of steps.
_RECOVERY = 0.003
#: Expected gain over cost from which a token is drafted: step times are noisy.
_MARGIN = 1.2
#: The measured cost of draft rows counts as much as the assumed one from so many rows on, and fades by
#: this factor per step without drafts, so that one bad measurement is not for ever.
_ASSUMED_ROWS = 4
_FADING = 0.99


class Price(NamedTuple):
    """Cost of a token without drafts, and of a draft row in the same step (seconds)."""

    token_s: float
    row_s: float


class StepCosts:
    """Learns what decode-only steps cost by their number of sequences. Shared by all sequences."""

    def __init__(self) -> None:
        self._plain_s: dict[int, float] = {}
        self._extra_s: dict[int, float] = {}
        self._extra_rows: dict[int, float] = {}

    def note(self, n_sequences: int, n_drafts: int, seconds: float) -> None:
        """Book a step of `n_sequences` and `n_drafts` draft rows behind them."""
        plain_s = self._plain_s.get(n_sequences)
        rows, extra_s = self._extra_rows.get(n_sequences, 0.0), self._extra_s.get(n_sequences, 0.0)
        if not n_drafts:
            old = seconds if plain_s is None else plain_s
            self._plain_s[n_sequences] = old + 0.1 * (min(seconds, 2 * old) - old)  # no outlier counts
            rows, extra_s = rows * _FADING, extra_s * _FADING
        elif plain_s is not None:
            rows, extra_s = rows + n_drafts, extra_s + seconds - plain_s
        self._extra_rows[n_sequences], self._extra_s[n_sequences] = rows, extra_s

    def mean(self, n_sequences: int) -> float | None:
        """Return the time (s) of a step without drafts, None if there was none."""
        return self._plain_s.get(n_sequences)

    def price(self, n_sequences: int, prefill_s: float) -> Price | None:
        """Return what a token and a draft row cost beside `n_sequences`, None if no step was measured.

        `prefill_s` is the time (s) of a prefilled token: what a row is assumed to cost at least.
        """
        plain_s = self._plain_s.get(n_sequences)
        if plain_s is None:
            return None
        rows = self._extra_rows.get(n_sequences, 0.0)
        extra_s = self._extra_s.get(n_sequences, 0.0)
        assumed_s = max(prefill_s, self._slope_s(n_sequences))
        row_s = (extra_s + _ASSUMED_ROWS * assumed_s) / (rows + _ASSUMED_ROWS)
        return Price(plain_s / n_sequences, max(row_s, 0.0))

    def _slope_s(self, n_sequences: int) -> float:
        """Return what each further sequence has cost, which a draft row of a full batch costs too."""
        alone_s = self._plain_s.get(1)
        if alone_s is None or n_sequences == 1:
            return 0.0
        return (self._plain_s[n_sequences] - alone_s) / (n_sequences - 1)


class Acceptance:
    """A running rate of draft tokens that were right, each after only right ones."""

    def __init__(self, start: float) -> None:
        self.rate = self._start = start

    def note(self, *, is_right: bool) -> None:
        self.rate += _WEIGHT * (is_right - self.rate)

    def recover(self) -> None:
        """Move towards the rate that is assumed, so that a rejected drafter is tried again."""
        self.rate += _RECOVERY * (self._start - self.rate)


class Drafter(Protocol):
    """Proposes the tokens that follow `tokens`.

    `s_per_token` is what one costs (seconds). If that is nothing, the drafter is checked in every step
    at no cost, and drafts only count as rows once its `acceptance` pays for them.
    """

    @property
    def acceptance(self) -> Acceptance: ...

    @property
    def s_per_token(self) -> float: ...

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]: ...

    def close(self) -> None:
        """Free its resources. Idempotent."""


class NgramDrafter:
    """Prompt lookup: draft what followed the last `_NGRAM` tokens at their most recent occurrence."""

    s_per_token = 0.0

    def __init__(self) -> None:
        self.acceptance = Acceptance(_START)
        self._follows: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` tokens; none if the end of `tokens` is new."""
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
        self._follows.clear()


class Drafting:
    """One sequence's speculation. `is_forced`: draft at any price, as the request names a drafter."""

    def __init__(self, drafter: Drafter | None, *, limit: int, is_forced: bool = False) -> None:
        self._drafter, self._limit = drafter, limit
        self._is_forced = is_forced
        self._predicted: list[int] = []
        self._at = 0
        self.drafted = self.accepted = 0

    def propose(self, tokens: Sequence[int], room: int, price: Price | None) -> list[int]:
        """Return the draft tokens of this step, at most `room`."""
        self._predicted = []
        drafter = self._drafter
        if drafter is None or room <= 0:
            return []
        limit = min(self._limit, room)
        if not self._is_forced:
            limit = self._worthwhile(drafter, limit, price)
        if limit or not drafter.s_per_token:
            self._at = len(tokens)
            self._predicted = drafter.draft(tokens, max(limit, 1))
        else:
            drafter.acceptance.recover()
        return self._predicted[:limit]

    def _worthwhile(self, drafter: Drafter, limit: int, price: Price | None) -> int:
        if price is None:
            return 0
        cost_s = _MARGIN * (price.row_s + drafter.s_per_token)
        gain_s, n = price.token_s * drafter.acceptance.rate, 0
        while n < limit and gain_s > cost_s:
            gain_s *= drafter.acceptance.rate
            n += 1
        return n

    def record_acceptance(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        """Compare the prediction with the sampled `tokens`, and count the rows that were drafted."""
        self.drafted += drafted
        self.accepted += accepted
        for predicted, token in zip(self._predicted, tokens[self._at :], strict=False):
            assert self._drafter is not None
            self._drafter.acceptance.note(is_right=predicted == token)
            if predicted != token:
                break

    def close(self) -> None:
        """Free the drafter's resources. Idempotent."""
        if self._drafter is not None:
            self._drafter.close()


#: Draft tokens less likely than this by the draft model are not worth a row in the batch.
_MIN_PROBABILITY = 0.4
#: llama.cpp pads vocabularies: this many unused tokens at the end may differ.
_MAX_PADDING = 128
#: Acceptance rate assumed at the start.
_MODEL_START = 0.8


class DraftModel:
    """A draft model for `main`. Raises ModelLoadError, also for another vocabulary."""

    def __init__(self, paths: tuple[str, ...], options: LoadOptions, main: LlamaModel) -> None:
        self._model = open_model(paths)
        try:
            self._vocab = Vocab(self._model)
            check_same_vocabulary(main.vocab, self._vocab)
            self._active = open_context(
                self._model,
                options,
                n_cells=main.n_cells,
                n_batch=main.n_batch,
                n_seq_max=main.n_parallel,
                n_threads=main.n_threads,
                n_outputs=main.n_parallel,
            )
        except BaseException:
            free_model(self._model)
            raise
        self._batch = Batch(
            capacity=main.n_batch,
            max_outputs=1,
            n_vocab=self._vocab.n_vocab,
            n_seq_max=main.n_parallel,
            n_cells=main.n_cells,
        )
        self._n_vocab = min(main.vocab.n_vocab, self._vocab.n_vocab)
        self._free = list(range(main.n_parallel))
        self._held: dict[int, list[int]] = {}
        self.acceptance = Acceptance(_MODEL_START)
        #: What a draft token costs (seconds): a running mean, next to nothing before the first.
        self.s_per_token = 1e-6

    def take(self) -> int | None:
        """Reserve a sequence id, None if all are in use."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._held[slot] = []
        return slot

    def give_back(self, slot: int) -> None:
        self._active.remove(slot)
        del self._held[slot]
        self._free.append(slot)

    def draft(self, slot: int, tokens: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` draft tokens after `tokens`, while the model is confident enough."""
        if max(tokens[-limit:]) >= self._n_vocab or not self._catch_up(slot, tokens):
            return []
        drafts: list[int] = []
        while True:
            logits = self._active.logits(self._batch.n_tokens - 1, self._vocab.n_vocab)
            best = int(logits.argmax())
            unsure = float(np.exp(logits - logits[best]).sum()) > 1.0 / _MIN_PROBABILITY
            if unsure or best >= self._n_vocab or self._vocab.is_eos(best):
                return drafts
            drafts.append(best)
            if len(drafts) == limit or not self._compute(slot, [best]):
                return drafts

    def _catch_up(self, slot: int, tokens: Sequence[int]) -> bool:
        held = self._held[slot]
        n = min(common_prefix(held, tokens), len(tokens) - 1)
        self._active.remove(slot, n)
        del held[n:]
        while len(held) < len(tokens):
            if not self._compute(slot, list(tokens[len(held) : len(held) + self._batch.capacity])):
                return False
        return True

    def _compute(self, slot: int, tokens: list[int]) -> bool:
        held = self._held[slot]
        self._batch.clear()
        self._batch.add(tokens, len(held), slot, outputs=1)
        if self._batch.decode(self._active):
            self._forget_all()  # no cells left, or worse: start again, a draft is never needed
            return False
        held += tokens
        return True

    def _forget_all(self) -> None:
        self._active.clear()
        for held in self._held.values():
            held.clear()

    def park(self) -> None:
        self._forget_all()

    def set_threads(self, n: int) -> None:
        self._active.set_threads(n)

    def close(self) -> None:
        """Free model and context. Idempotent."""
        if self._model:
            self._active.free()
            free_model(self._model)
            self._model = None


class ModelDrafter:
    """One request's use of a draft model."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._slot: int | None = None

    @property
    def acceptance(self) -> Acceptance:
        return self._model.acceptance

    @property
    def s_per_token(self) -> float:
        return self._model.s_per_token

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return draft tokens, none if every sequence of the draft model is taken."""
        is_first = self._slot is None
        self._slot = self._model.take() if self._slot is None else self._slot
        if self._slot is None:
            return []
        began = time.perf_counter()
        drafts = self._model.draft(self._slot, tokens, limit)
        if not is_first:  # which computes the whole prompt, once
            took_s = (time.perf_counter() - began) / max(1, len(drafts))
            self._model.s_per_token += 0.1 * (took_s - self._model.s_per_token)
        return drafts

    def close(self) -> None:
        """Free the sequence id. Idempotent."""
        if self._slot is not None:
            self._model.give_back(self._slot)
            self._slot = None


def check_same_vocabulary(main: Vocab, draft: Vocab) -> None:
    """Compare two vocabularies. Raises ModelLoadError if they differ by more than padding."""
    n = min(main.n_vocab, draft.n_vocab)
    is_same = (
        (main.kind, main.bos, main.eos, main.adds_bos)
        == (draft.kind, draft.bos, draft.eos, draft.adds_bos)
        and max(main.n_vocab, draft.n_vocab) - n <= _MAX_PADDING
        and all(main.raw_text(token) == draft.raw_text(token) for token in range(n))
    )
    if not is_same:
        raise ModelLoadError(
            "the draft model has another vocabulary",
            hint="take a smaller model of the same family, or load without: --draft none",
        )
