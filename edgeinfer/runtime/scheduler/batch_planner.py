"""Plan the next batch: tokens of decoding sequences, draft tokens after them, chunks of prompts."""

from __future__ import annotations

from edgeinfer.runtime.kv_cache import AdapterKey
from edgeinfer.runtime.recurrent_checkpoints import tokens_to_next_checkpoint
from edgeinfer.runtime.sampling.speculative import DraftBudget
from edgeinfer.runtime.scheduler.batch_invariance import BatchInvariance
from edgeinfer.runtime.scheduler.executor import Executor
from edgeinfer.runtime.scheduler.prefill_policy import SHORT_TOKENS, DecodeBudget
from edgeinfer.runtime.scheduler.request_queue import RequestQueue
from edgeinfer.runtime.scheduler.sequence import BatchEntry, Sequence

#: Short prompts of one burst, up to this many tokens, are prefilled before any of them decodes.
_BURST_PROMPT_TOKENS = 256
#: Tokens forced by a constraint that a decode step computes with the next one, at most.
_FORCED_TOKENS = 32


class BatchPlanner:
    """Plan batches for `executor`. `n_ctx` limits one sequence; `batch_invariance` is that of the
    context in use.
    """

    def __init__(
        self, executor: Executor, queue: RequestQueue, *, batch_invariance: BatchInvariance, n_ctx: int
    ) -> None:
        self.kv, self.batch = executor.kv, executor.batch
        self.adapters, self.costs = executor.adapters, executor.costs
        self.queue, self.prefixes = queue, queue.prefixes
        self.chunks = executor.chunks
        self.batch_invariance = batch_invariance
        self.n_ctx = n_ctx
        self._last_group: AdapterKey = ()
        self._is_turn_of_long = self._was_picture = False
        self._turn = 0
        self._decode_budget = DecodeBudget(self.chunks)

    def plan(self) -> list[BatchEntry]:
        """Fill the batch and return its entries; none if no sequence has tokens to compute."""
        group = self._next_group()
        members = [s for s in self._ready_sequences() if self.adapters.of_context(s.adapters) == group]
        for seq in [s for s in members if len(s.tokens) >= self.n_ctx]:
            if not self._make_context_room(seq):
                members.remove(seq)
        decoding = [s for s in members if self._fits_decode_step(s)]
        if self._prefills_burst_first(members, decoding):
            decoding = []
        while not self.kv.make_room(sum(s.n_pending for s in decoding)):
            youngest = decoding.pop()
            members.remove(youngest)
            self.prefixes.preempt(youngest, keep=False)
        self.adapters.use(group)
        self.batch.clear()
        picture = self._next_picture(members)
        if picture is not None:
            return self._add_picture(picture, is_alone=len(members) == 1)
        members = [s for s in members if s.picture is None]
        prefilling = [s for s in members if not self._fits_decode_step(s)]
        entries = self._add_decoding(decoding, is_alone=len(members) == 1)
        self._add_prefill(prefilling, entries)
        return entries

    def _fits_decode_step(self, seq: Sequence) -> bool:
        if seq.pictures.is_pending(seq.n_past):
            return False
        if seq.n_pending == 1 or not self.kv.supports_truncation:
            return seq.is_decoding
        return seq.n_generated > 0 and seq.n_past > 0 and seq.n_pending <= _FORCED_TOKENS

    def _prefills_burst_first(self, members: list[Sequence], decoding: list[Sequence]) -> bool:
        """Return whether to prefill a burst's short prompts before any decoding: 2 % faster at 16
        streams.
        """
        pending = sum(s.n_pending for s in members if not s.is_decoding)
        short = 0 < pending <= min(_BURST_PROMPT_TOKENS, self.kv.free_cells)
        return short and all(s.n_generated == 1 for s in decoding)

    def _ready_sequences(self) -> list[Sequence]:
        ready = [s for s in self.queue.running if s.cached_seq is not None and not s.is_fetching]
        return [s for s in ready if s.encoding is None]

    def _next_picture(self, members: list[Sequence]) -> Sequence | None:
        """Choose a sequence whose next tokens are a picture; pictures and steps of text take turns."""
        pictures = [s for s in members if s.picture is not None]
        is_turn = bool(pictures) and not (self._was_picture and len(pictures) < len(members))
        self._was_picture = is_turn
        return pictures[0] if is_turn else None

    def _add_picture(self, seq: Sequence, *, is_alone: bool) -> list[BatchEntry]:
        """Add rows of a picture, all of them if they attend to each other in both directions."""
        span, past = seq.picture, seq.n_past
        assert span is not None
        n = span.end - past
        if not span.is_whole:
            n = min(n, self.chunks.budget(self.batch.room, int(not is_alone), [n]))
        if not self.kv.make_room(n):
            self._preempt_for(seq, [])
            return []
        has_output = past + n == len(seq.tokens) and seq.max_tokens > 0
        rows = slice(past - span.start, past - span.start + n)
        positions = span.positions
        self.batch.add_picture(
            seq.pictures.rows(span)[rows],
            seq.position,
            seq.cached.seq_id,
            outputs=int(has_output),
            is_causal=not span.is_whole,
            positions=None if positions is None else positions[:, rows],
            adapters=seq.adapters,
        )
        tokens = seq.tokens[past : past + n]
        return [BatchEntry(seq, 0, tokens, has_output=has_output, is_prefill=True)]

    def _next_group(self) -> AdapterKey:
        """Choose the context's adapters of this step; sequences with others take turns."""
        groups = sorted({self.adapters.of_context(s.adapters) for s in self._ready_sequences()})
        if not groups:
            return self._last_group
        later = [g for g in groups if g > self._last_group]
        self._last_group = later[0] if later else groups[0]
        return self._last_group

    def _make_context_room(self, seq: Sequence) -> bool:
        """Shift a sequence that has filled its context, or end it; return False if it has ended."""
        if seq.request.overflow != "shift":
            self.queue.end(seq, "length")
            return False
        keep = min(seq.keep_tokens(), self.n_ctx // 2)
        drop = (len(seq.tokens) - keep) // 2
        if seq.n_pending > 1 or not self.kv.shift(seq.cached, keep, drop):
            self.kv.truncate(seq.cached, min(keep, seq.n_past))
        del seq.tokens[keep : keep + drop]
        return True

    def _add_decoding(self, decoding: list[Sequence], *, is_alone: bool) -> list[BatchEntry]:
        """Add the next tokens of decoding sequences, with draft tokens; rotate which is first."""
        entries: list[BatchEntry] = []
        self._turn += 1
        first = self._turn % max(1, len(decoding))
        decoding = decoding[first:] + decoding[:first]
        rows = sum(s.n_pending for s in decoding)
        spare = min(self.kv.free_cells, self.batch.capacity) - rows
        spare = min(spare, self.batch.max_outputs - len(decoding))
        budget = DraftBudget(self.costs, len(decoding), rows)
        invariant_rows_left = self._invariant_rows(is_alone=is_alone) - rows
        for seq in decoding:
            # rows of a drafter that the request names may round differently
            is_automatic = seq.request.speculative == "auto"
            n_most = min(spare, invariant_rows_left) if is_automatic else spare
            drafts = self._drafts(seq, n_most, budget)
            spare -= len(drafts)
            invariant_rows_left -= len(drafts)
            tokens = [*seq.tokens[seq.n_past :], *drafts]
            row = self.batch.n_outputs
            seq_id, outputs = seq.cached.seq_id, 1 + len(drafts)
            self.batch.add(tokens, seq.position, seq_id, outputs=outputs, adapters=seq.adapters)
            entries.append(BatchEntry(seq, row, tokens, drafts))
        return entries

    def _invariant_rows(self, *, is_alone: bool) -> int:
        """Return how many rows a step may have with answers bit-identical to unbatched ones."""
        invariance = self.batch_invariance
        is_beyond = invariance.cells is not None and self.kv.used_cells > invariance.cells
        # other sequences may get the cells of rejected drafts, and then have their cells out of order
        is_mixed = not (is_alone or invariance.in_order)
        # llama.cpp's products with a LoRA's small matrices round differently in a batch
        return 0 if is_beyond or is_mixed or self._last_group else invariance.rows

    def _drafts(self, seq: Sequence, spare: int, budget: DraftBudget) -> list[int]:
        if not self.kv.supports_truncation or spare <= 0:
            return []
        room = min(spare, seq.max_tokens - seq.n_generated - 1, self.n_ctx - len(seq.tokens) - 1)
        valid = len if seq.matcher is None else seq.matcher.valid
        return seq.drafting.propose(seq.tokens, room, budget, valid)

    def _add_prefill(self, prefilling: list[Sequence], entries: list[BatchEntry]) -> None:
        """Add short prompts and long ones in turn, short first; prefill-only ones last."""
        self._decode_budget.record()
        awaited = [s for s in prefilling if not s.is_prefill_only]
        is_only_long = bool(prefilling) and all(s.n_pending > SHORT_TOKENS for s in prefilling)
        if entries and is_only_long and self._decode_budget.grant((awaited or prefilling)[0]):
            return
        chosen = self._short_or_long(awaited) if awaited else prefilling
        pending = [s.n_pending for s in chosen]
        budget = self.chunks.budget(self.batch.room, self.batch.n_tokens, pending)
        self._add_prompts(chosen, budget, entries)

    def _short_or_long(self, awaited: list[Sequence]) -> list[Sequence]:
        """Choose short prompts or long ones: in a common step, attention would scan the cells of the
        long ones for the short ones too (decision 081).
        """
        short = [s for s in awaited if s.n_pending <= SHORT_TOKENS]
        long = [s for s in awaited if s.n_pending > SHORT_TOKENS]
        is_shorts = bool(short) and not (long and self._is_turn_of_long)
        self._is_turn_of_long = is_shorts
        return short if is_shorts else long

    def _add_prompts(self, prompts: list[Sequence], budget: int, entries: list[BatchEntry]) -> None:
        for seq in prompts:
            if budget <= 0 or self.batch.n_outputs >= self.batch.max_outputs:
                return
            used = self.batch.n_tokens
            if not self.kv.make_room(used + min(budget, seq.n_pending)):
                budget = min(budget, self.kv.free_cells - used)
                if budget <= 0:
                    self._preempt_for(seq, entries)
                    return
            budget -= self._add_chunk(seq, budget, entries)

    def _add_chunk(self, seq: Sequence, budget: int, entries: list[BatchEntry]) -> int:
        past = seq.n_past
        if not self.kv.supports_truncation:
            budget = min(budget, tokens_to_next_checkpoint(past, len(seq.tokens)))
        scores = seq.request.prompt_logprobs is not None
        if scores:
            budget = min(budget, self.batch.max_outputs - self.batch.n_outputs)
        text_end = seq.pictures.text_end(past, len(seq.tokens))
        tokens = seq.tokens[past : min(past + budget, text_end)]
        complete = past + len(tokens) == len(seq.tokens)
        has_output = complete and seq.max_tokens > 0
        n_outputs = len(tokens) if scores else int(has_output)
        seq_id = seq.cached.seq_id
        self.batch.add(tokens, seq.position, seq_id, outputs=n_outputs, adapters=seq.adapters)
        row = self.batch.n_outputs - 1
        entries.append(BatchEntry(seq, row, tokens, has_output=has_output, is_prefill=True))
        return len(tokens)

    def _preempt_for(self, seq: Sequence, entries: list[BatchEntry]) -> None:
        """Preempt the youngest other sequence if no cell is free and the batch is empty."""
        if entries:
            return
        candidates = [s for s in self.queue.running if s.cached_seq is not None and s is not seq]
        if candidates:
            self.prefixes.preempt(candidates[-1], keep=False)
