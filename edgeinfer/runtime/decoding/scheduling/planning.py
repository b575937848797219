"""Plans the next batch: decoding sequences' next tokens, guesses behind them, pieces of prompts."""

from __future__ import annotations

from typing import Protocol

from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.decoding.cache.kvcache import AdapterKey, KvCache
from edgeinfer.runtime.decoding.drafting.speculative import Price, StepCosts
from edgeinfer.runtime.decoding.scheduling.chunks import Chunks, Exactness
from edgeinfer.runtime.decoding.scheduling.prefill import Prefill
from edgeinfer.runtime.decoding.scheduling.prefixes import Prefixes
from edgeinfer.runtime.decoding.scheduling.roster import Roster
from edgeinfer.runtime.decoding.sequences.sequence import Part, Sequence

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
