"""Fill the next batch: tokens of decoding sequences, draft tokens after them, chunks of prompts."""

from __future__ import annotations

from edgeinfer.runtime.kv_cache import AdapterKey
from edgeinfer.runtime.recurrent_checkpoints import tokens_to_next_checkpoint
from edgeinfer.runtime.sampling.speculative import DraftBudget
from edgeinfer.runtime.scheduler.batch_invariance import BatchInvariance
from edgeinfer.runtime.scheduler.executor import Executor
from edgeinfer.runtime.scheduler.prefill_policy import SHORT_TOKENS, DecodeBudget
from edgeinfer.runtime.scheduler.request_queue import RequestQueue
from edgeinfer.runtime.scheduler.sequence import BatchEntry, Sequence

#: If requests begin together, and their prompts have at most this many tokens in total, all prompts are
#: prefilled before the first of these requests decodes.
_BURST_PROMPT_TOKENS = 256
#: A decode step computes up to this many tokens of a sequence, if a constraint has forced them.
_MAX_FORCED_TOKENS = 32


class BatchPlanner:
    """Decides what the next step computes, and fills the batch. A sequence has up to `n_ctx` tokens."""

    def __init__(
        self, executor: Executor, queue: RequestQueue, *, batch_invariance: BatchInvariance, n_ctx: int
    ) -> None:
        self.kv, self.batch = executor.kv, executor.batch
        self.adapters, self.step_costs = executor.adapters, executor.step_costs
        self.queue, self.prefixes = queue, queue.prefixes
        self.chunk_sizer, self._counters = executor.chunk_sizer, executor.counters
        self.batch_invariance = batch_invariance
        self.n_ctx = n_ctx
        self._context_adapters: AdapterKey = ()
        self._is_turn_of_long = self._was_picture = False
        self._n_decode_steps = 0
        self._decode_budget = DecodeBudget(self.chunk_sizer)

    def fill_batch(self) -> list[BatchEntry]:
        """Fill the batch and return its entries, [] if no sequence has anything to compute."""
        ready = self._ready_sequences()
        for seq in [s for s in ready if len(s.tokens) >= self.n_ctx]:
            if not self._shift_or_end(seq):
                ready.remove(seq)
        decoding = [s for s in ready if self._fits_decode_step(s)]
        if self._prefills_burst_first(ready, decoding):
            decoding = []
        while not self.kv.make_room(sum(s.n_pending for s in decoding)):
            youngest = decoding.pop()
            ready.remove(youngest)
            self.prefixes.preempt(youngest, keep=False)
        self.adapters.use(self._context_adapters)
        self.batch.clear()
        picture = self._next_picture(ready)
        if picture is not None:
            return self._add_picture(picture, is_unbatched=len(ready) == 1)
        ready = [s for s in ready if s.picture is None]
        prefilling = [s for s in ready if not self._fits_decode_step(s)]
        entries = self._add_decoding(decoding, is_unbatched=len(ready) == 1)
        self._add_prefill(prefilling, entries)
        return entries

    def _ready_sequences(self) -> list[Sequence]:
        """Return the sequences that can be in one batch and have tokens to compute.

        Sequences with different adapters take turns if llama.cpp itself computes the adapters.
        """
        started = [s for s in self.queue.running if s.is_started and not s.is_loading_blocks]
        by_adapters: dict[AdapterKey, list[Sequence]] = {}
        for seq in started:
            if seq.encoding is None:
                by_adapters.setdefault(self.adapters.of_context(seq.adapters), []).append(seq)
        if not by_adapters:
            return []
        later = [adapters for adapters in by_adapters if adapters > self._context_adapters]
        self._context_adapters = min(later or by_adapters)
        return by_adapters[self._context_adapters]

    def _fits_decode_step(self, seq: Sequence) -> bool:
        if seq.pictures.is_pending(seq.n_past) or self._replayable(seq):
            return False
        if seq.n_pending == 1 or not self.kv.supports_truncation:
            return seq.is_decoding
        return seq.n_generated > 0 and seq.n_past > 0 and seq.n_pending <= _MAX_FORCED_TOKENS

    def _prefills_burst_first(self, ready: list[Sequence], decoding: list[Sequence]) -> bool:
        """Return whether to prefill a whole burst before decoding: 2 % faster with 16 requests."""
        n_pending = sum(s.n_pending for s in ready if not s.is_decoding)
        is_short = 0 < n_pending <= min(_BURST_PROMPT_TOKENS, self.kv.free_cells)
        return is_short and all(s.n_generated == 1 for s in decoding)

    def _next_picture(self, ready: list[Sequence]) -> Sequence | None:
        """Return a sequence whose next tokens are a picture; None if there is none.

        If other sequences have text to compute, every second call also returns None, for their steps.
        """
        with_picture = [s for s in ready if s.picture is not None]
        is_turn = bool(with_picture) and not (self._was_picture and len(with_picture) < len(ready))
        self._was_picture = is_turn
        return with_picture[0] if is_turn else None

    def _add_picture(self, seq: Sequence, *, is_unbatched: bool) -> list[BatchEntry]:
        """Add rows of the next picture of `seq`, and nothing else; return [] if cells are lacking."""
        span, past = seq.picture, seq.n_past
        assert span is not None
        n, chunk = span.end - past, span.chunk
        if not chunk.is_whole:
            n = min(n, self.chunk_sizer.token_budget(self.batch.room, int(not is_unbatched), [n]))
        if not self.kv.make_room(n):
            self._preempt_other_than(seq)
            return []
        has_output = past + n == len(seq.tokens) and seq.max_tokens > 0
        rows = slice(past - span.start, past - span.start + n)
        positions = chunk.positions
        self.batch.add_picture(
            seq.pictures.rows(span)[rows],
            seq.position,
            seq.cached_seq.seq_id,
            outputs=int(has_output),
            is_causal=not chunk.is_whole,
            positions=None if positions is None else positions[:, rows],
            adapters=seq.adapters,
        )
        tokens = seq.tokens[past : past + n]
        return [BatchEntry(seq, 0, tokens, has_output=has_output, is_prefill=True)]

    def _shift_or_end(self, seq: Sequence) -> bool:
        """Shift a sequence that fills the context, or end it; return False if it has ended."""
        if seq.request.overflow != "shift":
            self.queue.end(seq, "length")
            return False
        n_keep = min(seq.n_keep, self.n_ctx // 2)
        n_discard = (len(seq.tokens) - n_keep) // 2
        if seq.n_pending > 1 or not self.kv.shift(seq.cached_seq, n_keep, n_discard):
            self.kv.truncate(seq.cached_seq, min(n_keep, seq.n_past))
        seq.tokens.discard(n_keep, n_discard)
        return True

    def _add_decoding(self, decoding: list[Sequence], *, is_unbatched: bool) -> list[BatchEntry]:
        """Add the next tokens of decoding sequences, with draft tokens."""
        entries: list[BatchEntry] = []
        self._n_decode_steps += 1
        first = self._n_decode_steps % max(1, len(decoding))  # in turn: the first gets most drafts
        decoding = decoding[first:] + decoding[:first]
        n_tokens = sum(s.n_pending for s in decoding)
        n_spare = min(self.kv.free_cells, self.batch.capacity) - n_tokens
        n_spare = min(n_spare, self.batch.max_outputs - len(decoding))
        n_invariant = self._max_invariant_tokens(is_unbatched=is_unbatched) - n_tokens
        draft_budget = DraftBudget(self.step_costs, len(decoding), n_tokens)
        for seq in decoding:
            # automatic drafts must leave the step batch-invariant; requested drafts need not
            is_automatic = seq.request.speculative == "auto"
            max_drafts = min(n_spare, n_invariant) if is_automatic else n_spare
            drafts = self._propose_drafts(seq, max_drafts, draft_budget)
            n_spare -= len(drafts)
            n_invariant -= len(drafts)
            tokens = [*seq.tokens[seq.n_past :], *drafts]
            first_output = self.batch.n_outputs
            seq_id, n_outputs = seq.cached_seq.seq_id, 1 + len(drafts)
            self.batch.add(tokens, seq.position, seq_id, outputs=n_outputs, adapters=seq.adapters)
            entries.append(BatchEntry(seq, first_output, tokens, drafts))
        self._counters.decode_seconds_total += draft_budget.model_s
        self._counters.python_seconds_total -= draft_budget.model_s  # `step` counts this as Python's
        return entries

    def _max_invariant_tokens(self, *, is_unbatched: bool) -> int:
        """Return how many tokens a step may have to be batch-invariant; 0 if it cannot be."""
        invariance = self.batch_invariance
        is_beyond = invariance.max_cells is not None and self.kv.used_cells > invariance.max_cells
        # rejected drafts change the order of cells; a sum of floats depends on its order
        is_mixed = not (is_unbatched or invariance.sums_in_order)
        # llama.cpp's products with the small matrices of a LoRA depend on the batch
        return 0 if is_beyond or is_mixed or self._context_adapters else invariance.max_tokens

    def _propose_drafts(self, seq: Sequence, max_drafts: int, draft_budget: DraftBudget) -> list[int]:
        if not self.kv.supports_truncation or max_drafts <= 0:
            return []
        n_answer_left = seq.max_tokens - seq.n_generated - 1
        max_drafts = min(max_drafts, n_answer_left, self.n_ctx - len(seq.tokens) - 1)
        return seq.drafting.propose(seq.tokens, max_drafts, draft_budget)

    def _add_prefill(self, prefilling: list[Sequence], entries: list[BatchEntry]) -> None:
        """Add chunks of short or of long prompts; prefill-only prompts come after all others."""
        self._decode_budget.charge_last_step()
        awaited = [s for s in prefilling if not s.is_prefill_only]
        are_all_long = bool(prefilling) and all(s.n_pending > SHORT_TOKENS for s in prefilling)
        if entries and are_all_long and self._decode_budget.grant_step((awaited or prefilling)[0]):
            return
        prompts = self._short_or_long(awaited) if awaited else prefilling
        pending = [s.n_pending + len(self._replayable(s)) for s in prompts]
        token_budget = self.chunk_sizer.token_budget(self.batch.room, self.batch.n_tokens, pending)
        for seq, n_pending in zip(prompts, pending, strict=True):
            if token_budget <= 0 or self.batch.n_outputs >= self.batch.max_outputs:
                return
            n_used = self.batch.n_tokens
            if not self.kv.make_room(n_used + min(token_budget, n_pending)):
                token_budget = min(token_budget, self.kv.free_cells - n_used)
                if token_budget <= 0:
                    if not entries:
                        self._preempt_other_than(seq)
                    return
            entry = self._add_chunk(seq, token_budget)
            entries.append(entry)
            token_budget -= len(entry.tokens)

    def _short_or_long(self, awaited: list[Sequence]) -> list[Sequence]:
        """Return short and long prompts in turn: in one batch, long ones would slow short ones."""
        short = [s for s in awaited if s.n_pending <= SHORT_TOKENS]
        long = [s for s in awaited if s.n_pending > SHORT_TOKENS]
        is_turn_of_short = bool(short) and not (long and self._is_turn_of_long)
        self._is_turn_of_long = is_turn_of_short
        return short if is_turn_of_short else long

    def _add_chunk(self, seq: Sequence, max_tokens: int) -> BatchEntry:
        """Add the next tokens of a prompt, at most `max_tokens`, up to a checkpoint or a picture.

        If the request replays an answer, that answer's tokens follow as drafts.
        """
        n_past = seq.n_past
        if not self.kv.supports_truncation:
            max_tokens = min(max_tokens, tokens_to_next_checkpoint(n_past, len(seq.tokens)))
        has_logprobs = seq.request.prompt_logprobs is not None
        if has_logprobs:
            max_tokens = min(max_tokens, self.batch.max_outputs - self.batch.n_outputs)
        text_end = seq.pictures.text_end(n_past, len(seq.tokens))
        tokens = seq.tokens[n_past : min(n_past + max_tokens, text_end)]
        is_last = n_past + len(tokens) == len(seq.tokens)
        has_output = is_last and seq.max_tokens > 0
        n_outputs = len(tokens) if has_logprobs else int(has_output)
        first_output = self.batch.n_outputs + n_outputs - 1
        drafts: list[int] = []
        if is_last and not has_logprobs:
            room = min(self.batch.max_outputs - first_output, self.n_ctx - len(seq.tokens)) - 1
            drafts += self._replayable(seq)[: max(0, min(max_tokens - len(tokens), room))]
        tokens += drafts
        seq_id, n_outputs = seq.cached_seq.seq_id, n_outputs + len(drafts)
        self.batch.add(tokens, seq.position, seq_id, outputs=n_outputs, adapters=seq.adapters)
        return BatchEntry(seq, first_output, tokens, drafts, has_output=has_output, is_prefill=True)

    def _replayable(self, seq: Sequence) -> tuple[int, ...]:
        """Return the next tokens of a replayed answer, to verify like drafts; () if there are none."""
        replay = seq.request.replay
        if replay is None or not self.kv.supports_truncation:
            return ()
        return replay.answer[:-1][seq.n_generated : max(0, seq.max_tokens - 1)]

    def _preempt_other_than(self, seq: Sequence) -> None:
        """Preempt the youngest other sequence. Called if no cell is free and the batch is empty."""
        candidates = [s for s in self.queue.running if s.is_started and s is not seq]
        if candidates:
            self.prefixes.preempt(candidates[-1], keep=False)
