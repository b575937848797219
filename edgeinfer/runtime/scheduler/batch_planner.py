"""Plan the next batch: tokens of decoding sequences, draft tokens behind them, chunks of prompts."""

from __future__ import annotations

from typing import Protocol

from edgeinfer.runtime.kv_cache import recurrent_checkpoints
from edgeinfer.runtime.kv_cache.cache import AdapterKey, KvCache
from edgeinfer.runtime.llama.context import Batch
from edgeinfer.runtime.sampling.speculative import Price, StepCosts
from edgeinfer.runtime.scheduler.prefill_policy import SHORT_TOKENS, Chunks, Exactness, Loans
from edgeinfer.runtime.scheduler.prefixes import Prefixes
from edgeinfer.runtime.scheduler.request_queue import Roster
from edgeinfer.runtime.scheduler.sequence import Part, Sequence

#: Short prompts of requests that came together: up to this many tokens are computed before any of them
#: decodes.
_TOGETHER_TOKENS = 256


class Adapters(Protocol):
    """Sets the LoRA adapters of the context."""

    def use(self, adapters: AdapterKey) -> None: ...


class Planner:
    """Plans batches. `n_ctx` is what one sequence may use; `can_cut`: wrong guesses can be cut off."""

    def __init__(
        self,
        *,
        kv: KvCache,
        batch: Batch,
        adapters: Adapters,
        roster: Roster,
        prefixes: Prefixes,
        prefill: Prefill,
        chunks: Chunks,
        costs: StepCosts,
        exactness: Exactness,
        n_ctx: int,
        can_cut: bool,
    ) -> None:
        self._kv = kv
        self._batch = batch
        self._adapters = adapters
        self._roster = roster
        self._prefixes = prefixes
        self._prefill = prefill
        self._chunks, self._costs = chunks, costs
        #: What a step in company may compute without changing a bit, where the context lies.
        self.exactness = exactness
        self._n_ctx, self._can_cut = n_ctx, can_cut
        self._last_group: AdapterKey = ()

    def plan(self) -> list[Part]:
        """Fill the batch; whose tokens are in it, none when there is nothing to compute."""
        group = self._next_group()
        members = [s for s in self._computing() if s.adapters == group]
        for seq in [s for s in members if len(s.tokens) >= self._n_ctx]:
            if not self._make_context_room(seq):
                members.remove(seq)
        decoding = [s for s in members if s.is_decoding]
        if self._is_beginning(members, decoding):
            decoding = []
        while not self._kv.make_room(len(decoding)):
            youngest = decoding.pop()
            members.remove(youngest)
            self._prefixes.give_up(youngest, keep=False)
        self._adapters.use(group)
        self._batch.clear()
        parts = self._add_decoding(decoding)
        self._prefill.add([s for s in members if not s.is_decoding], parts)
        return parts

    def _is_beginning(self, members: list[Sequence], decoding: list[Sequence]) -> bool:
        """Prompts that came together go before second tokens: the whole is 2 % faster at 16 streams."""
        pending = sum(s.n_pending for s in members if not s.is_decoding)
        short = 0 < pending <= min(_TOGETHER_TOKENS, self._kv.free_cells)
        return short and all(s.n_generated == 1 for s in decoding)

    def _computing(self) -> list[Sequence]:
        return [s for s in self._roster.running if s.resident is not None and not s.is_fetching]

    def _next_group(self) -> AdapterKey:
        """Sequences with the same adapters share a step; sets take turns."""
        groups = sorted({s.adapters for s in self._computing()})
        if not groups:
            return self._last_group
        later = [g for g in groups if g > self._last_group]
        self._last_group = later[0] if later else groups[0]
        return self._last_group

    def _make_context_room(self, seq: Sequence) -> bool:
        """The sequence has filled its context: shift it, or end it. False when it has ended."""
        if seq.request.overflow != "shift":
            self._roster.end(seq, "length")
            return False
        assert seq.resident is not None
        keep = min(seq.keep_tokens(), self._n_ctx // 2)
        drop = (len(seq.tokens) - keep) // 2
        if seq.n_pending > 1 or not self._kv.shift(seq.resident, keep, drop):
            self._kv.truncate(seq.resident, min(keep, seq.n_past))
        del seq.tokens[keep : keep + drop]
        return True

    def _add_decoding(self, decoding: list[Sequence]) -> list[Part]:
        parts: list[Part] = []
        spare = min(self._batch.max_outputs, self._kv.free_cells, self._batch.capacity) - len(decoding)
        price = self._costs.price(len(decoding), self._chunks.s_per_token)
        for seq in decoding:
            drafts = self._drafts(seq, min(spare, self._exact_room(seq, decoding)), price)
            spare -= len(drafts)
            assert seq.resident is not None
            tokens = [seq.tokens[-1], *drafts]
            row = self._batch.add(tokens, seq.n_past, seq.resident.seq_id, outputs=len(tokens))
            parts.append(Part(seq, row, tokens, drafts))
        return parts

    def _exact_room(self, seq: Sequence, decoding: list[Sequence]) -> int:
        """Count the draft rows that change no bit; a named drafter may round otherwise."""
        if seq.request.speculative != "auto":
            return self._batch.capacity
        if seq.adapters:  # products with a LoRA's small matrices round otherwise in a batch
            return 0
        exact = self.exactness
        if exact.cells is not None and self._kv.used_cells > exact.cells:
            return 0
        return exact.rows - self._batch.n_tokens - (len(decoding) - decoding.index(seq))

    def _drafts(self, seq: Sequence, spare: int, price: Price | None) -> list[int]:
        if not self._can_cut or spare <= 0:
            return []
        room = min(spare, seq.max_tokens - seq.n_generated - 1, self._n_ctx - len(seq.tokens) - 1)
        return seq.drafting.propose(seq.tokens, room, price)


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
            budget = min(budget, recurrent_checkpoints.tokens_to_next(past, len(seq.tokens)))
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
