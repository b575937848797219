"""Chooses the pieces of prompts that a batch computes."""

from __future__ import annotations

import time

from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.decoding.cache import points
from edgeinfer.runtime.decoding.cache.kvcache import KvCache
from edgeinfer.runtime.decoding.scheduling.chunks import SHORT_TOKENS, Chunks
from edgeinfer.runtime.decoding.scheduling.prefixes import Prefixes
from edgeinfer.runtime.decoding.scheduling.roster import Roster
from edgeinfer.runtime.decoding.sequences.sequence import Part, Sequence

#: The share of a long prompt's time that it lends, and how far ahead of it (seconds).
_SHARE = 0.1
_AHEAD_S = 1.0


class Prefill:
    """Fills what is left of `batch` with prompts. `can_cut`: states can be cut anywhere."""

    def __init__(
        self,
        kv: KvCache,
        batch: Batch,
        chunks: Chunks,
        roster: Roster,
        prefixes: Prefixes,
        *,
        can_cut: bool,
    ) -> None:
        self._kv = kv
        self._batch = batch
        self._chunks = chunks
        self._roster, self._prefixes = roster, prefixes
        self._can_cut = can_cut
        self._is_longs_turn = False
        self._loans = Loans(chunks)

    def add(self, prefilling: list[Sequence], parts: list[Part]) -> None:
        """Short prompts and long ones take turns, short first; those nobody waits for come last."""
        self._loans.settle()
        awaited = [s for s in prefilling if not s.is_prefill_only]
        is_only_long = bool(prefilling) and all(s.n_pending > SHORT_TOKENS for s in prefilling)
        if parts and is_only_long and self._loans.lend((awaited or prefilling)[0]):
            return
        chosen = self._whose_turn(awaited) if awaited else prefilling
        pending = [s.n_pending for s in chosen]
        budget = self._chunks.budget(self._batch.room, self._batch.n_tokens, pending)
        self._add_prompts(chosen, budget, parts)

    def _whose_turn(self, awaited: list[Sequence]) -> list[Sequence]:
        """Short ones or long: attention would walk over the long ones' cells for all (decision 081)."""
        short = [s for s in awaited if s.n_pending <= SHORT_TOKENS]
        long = [s for s in awaited if s.n_pending > SHORT_TOKENS]
        is_shorts = bool(short) and not (long and self._is_longs_turn)
        self._is_longs_turn = is_shorts
        return short if is_shorts else long

    def _add_prompts(self, prompts: list[Sequence], budget: int, parts: list[Part]) -> None:
        for seq in prompts:
            if budget <= 0 or self._batch.n_outputs >= self._batch.max_outputs:
                return
            used = self._batch.n_tokens
            if not self._kv.make_room(used + min(budget, seq.n_pending)):
                budget = min(budget, self._kv.free_cells - used)
                if budget <= 0:
                    self._preempt_for(seq, parts)
                    return
            budget -= self._add_chunk(seq, budget, parts)

    def _add_chunk(self, seq: Sequence, budget: int, parts: list[Part]) -> int:
        assert seq.resident is not None
        past = seq.n_past
        if not self._can_cut:
            budget = min(budget, points.tokens_to_next(past, len(seq.tokens)))
        scores = seq.request.prompt_logprobs is not None
        if scores:
            budget = min(budget, self._batch.max_outputs - self._batch.n_outputs)
        tokens = seq.tokens[past : past + budget]
        complete = past + len(tokens) == len(seq.tokens)
        wanted = complete and seq.max_tokens > 0
        n_outputs = len(tokens) if scores else int(wanted)
        row = self._batch.add(tokens, past, seq.resident.seq_id, outputs=n_outputs)
        parts.append(Part(seq, row + len(tokens) - 1, tokens, has_output=wanted, is_prefill=True))
        return len(tokens)

    def _preempt_for(self, seq: Sequence, parts: list[Part]) -> None:
        """No cell is left. Those who decode go on and free theirs; else the youngest gives way."""
        if parts:
            return
        others = [s for s in self._roster.running if s.resident is not None and s is not seq]
        if others:
            self._prefixes.give_up(others[-1], keep=False)


def lendable_s(elapsed_s: float, rest_s: float) -> float:
    """Seconds that a prompt computed for `elapsed_s`, with `rest_s` to come, may have lent."""
    return _SHARE * elapsed_s + min(_SHARE * rest_s, _AHEAD_S)


class Loans:
    """Lets running streams decode without a piece of a long prompt beside them, now and then.

    A short answer is over before the long prompt has noticed, and is not stretched over many of its
    pieces, which are small while others decode. `chunks` knows what computing its rest costs.
    """

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._lender: Sequence | None = None
        self._began = 0.0

    def settle(self) -> None:
        """A step is over: book it, if it was lent."""
        if self._lender is not None:
            self._lender.lent_s += time.monotonic() - self._began
            self._lender = None

    def lend(self, seq: Sequence) -> bool:
        """Whether the next step is lent by the long prompt of `seq`."""
        now = time.monotonic()
        rest_s = seq.n_pending * self._chunks.s_per_token
        if seq.lent_s >= lendable_s(now - seq.clock.started, rest_s):
            return False
        self._lender, self._began = seq, now
        return True
