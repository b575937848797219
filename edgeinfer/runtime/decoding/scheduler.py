"""The decode loop's step: who joins, what goes into the next batch, and what comes out of it.

Each step is one llama_decode. It carries the next token of every decoding sequence (and guesses behind
it), and fills what is left of the batch with the prompts of those still prefilling, so a long prompt
never stalls the others. One thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgeinfer.errors import DecodeError, EngineError, InvalidRequestError
from edgeinfer.runtime.decoding import points
from edgeinfer.runtime.decoding.abort import Abort
from edgeinfer.runtime.decoding.batch import Batch, Logits
from edgeinfer.runtime.decoding.block_cache import BlockCache
from edgeinfer.runtime.decoding.chunks import SHORT_TOKENS, Chunks, Exactness
from edgeinfer.runtime.decoding.divergence import closest, describe_divergence
from edgeinfer.runtime.decoding.interruptions import Interruptions
from edgeinfer.runtime.decoding.kvcache import AdapterKey, KvCache, common_prefix
from edgeinfer.runtime.decoding.metrics import Counters
from edgeinfer.runtime.decoding.restore import Restore
from edgeinfer.runtime.decoding.sequence import Sequence
from edgeinfer.runtime.decoding.speculative import StepCosts
from edgeinfer.runtime.events import FinishReason
from edgeinfer.runtime.vocab import Vocab

#: A prefix that another sequence is about to compute is waited for when it saves at least this many
#: tokens.
_WORTH_WAITING = 32
#: Short prompts of requests that came together: up to this many tokens are computed before any of them
#: decodes.
_TOGETHER_TOKENS = 256
#: What llama_decode returns when it was ended early.
_ABORTED = 2
#: Blocks are put back for so long in a step (seconds) beside running streams, and when nobody runs.
_RESTORE_BESIDE_S = 0.02
_RESTORE_ALONE_S = 0.1
#: A step that could only wait for the disk waits so long (seconds).
_DISK_WAIT_S = 0.02


class Adapters(Protocol):
    """Sets the LoRA adapters of the context."""

    def use(self, adapters: AdapterKey) -> None: ...


@dataclass(slots=True)
class Part:
    """A sequence's share of a batch: its tokens, guesses at their end included, and the first row that
    has logits.
    """

    seq: Sequence
    row: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    has_output: bool = True
    is_prefill: bool = False


class Scheduler:
    """Owns the context while it runs. `n_ctx` is what one sequence may use."""

    def __init__(
        self,
        *,
        context: Any,
        vocab: Vocab,
        kv: KvCache,
        batch: Batch,
        adapters: Adapters,
        n_parallel: int,
        n_ctx: int,
        can_cut: bool,
        exactness: Exactness,
    ) -> None:
        self._context = context
        self._vocab = vocab
        self.kv = kv
        self._batch = batch
        self._adapters = adapters
        self._n_parallel = n_parallel
        self._n_ctx = n_ctx
        self.can_cut = can_cut
        self._exactness = exactness
        self._logits = Logits(context, vocab.n_vocab)
        self._costs = StepCosts()
        self._chunks = Chunks(exactness)
        self._last_group: AdapterKey = ()
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.on_end: Callable[[Sequence], None] = lambda seq: None
        self.blocks: BlockCache | None = None
        self._abort = Abort(context) if can_cut else None
        self.interruptions = Interruptions(self._abort.ask if self._abort else lambda: None)
        self._in_step: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queue a request."""
        self.counters.requests += 1
        self.waiting.append(seq)

    def step(self) -> None:
        """End what is cancelled or late, let others in, decode one batch, sample from it."""
        began = time.perf_counter()
        self._end_cancelled_and_late()
        self._admit()
        self._start()
        self._restore()
        parts = self._plan()
        if not parts:
            self._wait_for_disk()
            return
        decode_s = self._decode(parts)
        if decode_s is None:
            return
        self._harvest(parts)
        self.counters.steps += 1
        self.counters.python_s += time.perf_counter() - began - decode_s
        if self.blocks is not None:
            self.blocks.work(is_idle=False)

    @property
    def has_chores(self) -> bool:
        """Whether computed blocks wait to be written."""
        return self.blocks is not None and self.blocks.has_work

    def do_chore(self) -> None:
        """Write a piece of what waits to be written. Only while idle."""
        if self.blocks is not None:
            self.blocks.work(is_idle=True)

    def fail_all(self, error: EngineError) -> None:
        """End every request with `error` and forget the cache."""
        for seq in [*self.running, *self.waiting]:
            self._leave(seq, lambda s: s.fail(error), keep=False)
        self.kv.drop_idle(pinned=True)

    def pin(self, tokens: list[int], adapters: AdapterKey = ()) -> int:
        """Compute a prefix that many requests will begin with, and keep it; how many tokens. Only while
        idle.
        """
        for old in [r for r in self.kv.residents if r.pinned]:
            self.kv.drop(old)
        resident = self.kv.claim(tokens, adapters, reuse=False)
        if resident is None or not self.kv.make_room(len(tokens)):
            return 0
        self._adapters.use(adapters)
        for start in range(0, len(tokens), self._batch.capacity):
            chunk = tokens[start : start + self._batch.capacity]
            self._batch.clear()
            self._batch.add(chunk, start, resident.seq_id, outputs=0)
            code = self._batch.decode(self._context)
            if code:
                raise DecodeError(
                    f"llama_decode returned {code} for a system prompt of {len(tokens)} tokens"
                )
            self.kv.extend(resident, chunk)
        self.kv.release(resident, keep=True)
        resident.pinned = True
        return len(tokens)

    # who is in

    def _end_cancelled_and_late(self) -> None:
        now = time.monotonic()
        for seq in [*self.running, *self.waiting]:
            if seq.cancelled:
                self.counters.cancelled += 1
                self._end(seq, "cancelled")
            elif seq.deadline is not None and now >= seq.deadline:
                self._end(seq, "deadline")

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        self._leave(seq, lambda s: s.finish(reason), keep=seq.request.cache_prompt)

    def _leave(self, seq: Sequence, farewell: Callable[[Sequence], None], *, keep: bool) -> None:
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self._end_restore(seq)
        if seq.resident is not None:
            resident, seq.resident = seq.resident, None
            resident.conversation = seq.request.conversation
            if keep:
                self.kv.take_point(resident)
            self.kv.release(resident, keep=keep)
            if keep and self.blocks is not None:
                self.blocks.write(resident, self._chunks.s_per_token)
        self._book(seq)
        self.on_end(seq)  # before the consumer learns of it, who may look at the metrics then
        farewell(seq)

    def _book(self, seq: Sequence) -> None:
        c = self.counters
        c.completion_tokens += seq.n_generated
        c.constraint_s += seq.constraint_s
        c.draft_tokens += seq.drafting.drafted
        c.draft_accepted += seq.drafting.accepted

    def _admit(self) -> None:
        """Let requests in, those that only compute a prompt when nobody else wants the place."""
        while self.waiting:
            seq = next((s for s in self.waiting if not s.is_prefill_only), self.waiting[0])
            if len(self.running) >= self._n_parallel and not self._make_place(seq):
                return
            self.waiting.remove(seq)
            self.running.append(seq)

    def _make_place(self, seq: Sequence) -> bool:
        """Send one that only computes a prompt back to the queue, with what it has computed kept."""
        early = [s for s in self.running if s.is_prefill_only]
        if seq.is_prefill_only or not early:
            return False
        self._end_restore(early[-1])
        if early[-1].resident is not None:
            self.kv.release(early[-1].resident, keep=True)
            early[-1].resident = None
        self.running.remove(early[-1])
        self.waiting.append(early[-1])
        return True

    def _start(self) -> None:
        """Give cache sequences to those that have none, in order.

        One that waits for a prefix lets later ones pass; one that waits for cells does not, or it might
        wait for ever.
        """
        for seq in [s for s in self.running if s.resident is None]:
            request = seq.request
            cached = 0
            if request.cache_prompt:
                cached = self.kv.match(seq.tokens, seq.adapters, request.cache_salt)[1]
            active = [s for s in self.running if s.resident is not None]
            if request.cache_prompt and self._soon_shared(seq, active) >= cached + _WORTH_WAITING:
                continue
            if active and not self._fits(seq, cached, active):
                return
            self._give_resident(seq)

    def _fits(self, seq: Sequence, cached: int, active: list[Sequence]) -> bool:
        """Whether there are cells for `seq` besides those in use and those promised to the prompts
        being computed.
        """
        in_use = len(set().union(*(s.resident.cells for s in active if s.resident)))
        promised = sum(s.n_pending for s in active)
        return in_use + promised + len(seq.tokens) - cached <= self.kv.n_cells

    def _soon_shared(self, seq: Sequence, active: list[Sequence]) -> int:
        """The longest prefix of `seq` that a sequence still prefilling is going to have."""
        if not self.can_cut:
            return 0
        prefilling = [
            s
            for s in active
            if s.n_pending > 1
            and s.adapters == seq.adapters
            and s.request.cache_prompt
            and s.request.cache_salt == seq.request.cache_salt
            and not s.is_prefill_only
        ]
        limit = len(seq.tokens) - 1
        return max((min(limit, common_prefix(s.tokens, seq.tokens)) for s in prefilling), default=0)

    def _give_resident(self, seq: Sequence) -> None:
        request = seq.request
        if request.cache_prompt and not seq.clock.started:
            residents = self.kv.residents
            seq.closest = closest(residents, seq.tokens, seq.adapters, request.cache_salt)
        resident = self.kv.claim(
            seq.tokens, seq.adapters, request.cache_salt, reuse=request.cache_prompt
        )
        if resident is None:
            return
        seq.resident = resident
        kept = common_prefix(resident.tokens, seq.tokens[:-1])
        if not self.kv.truncate(resident, kept):
            kept = 0
        if request.cache_prompt and self.blocks is not None:
            is_alone = len(self.running) == 1
            seq.restore = self.blocks.match(
                seq.tokens, seq.adapters, request.cache_salt, kept, is_alone=is_alone
            )
        if seq.restore is None:
            self._begin(seq, kept, 0)
            return
        self.kv.truncate(resident, seq.restore.start)
        seq.restore.cached = kept if self.can_cut else 0

    def _begin(self, seq: Sequence, cached: int, from_disk: int) -> None:
        """What could be found is there: the rest is to be computed."""
        if not seq.clock.started:
            seq.clock.started = time.monotonic()
            seq.cached_tokens = cached
            seq.cached_disk_tokens = from_disk
            self.counters.prompt_tokens += seq.prompt_tokens
            self.counters.cached_tokens += cached
            self.counters.cached_disk_tokens += from_disk
            if seq.request.cache_prompt:
                seq.divergence = describe_divergence(
                    seq.tokens, seq.closest, cached, self._vocab.detokenize
                )
        seq.progress()

    # what comes from the store

    def _restore(self) -> None:
        """Put back blocks that have been read, for a while, so that running streams do not stall."""
        streams = any(s.is_decoding for s in self.running)
        until = time.monotonic() + (_RESTORE_BESIDE_S if streams else _RESTORE_ALONE_S)
        for seq in [s for s in self.running if s.restore is not None]:
            while seq.restore is not None and seq.restore.is_ready and time.monotonic() < until:
                self._restore_one(seq, seq.restore)
            block_s = self.blocks.block_tokens * self._chunks.s_per_token if self.blocks else 0.0
            if seq.restore is not None and seq.restore.is_too_slow(block_s):
                self._end_restore(seq)

    def _restore_one(self, seq: Sequence, restore: Restore) -> None:
        assert self.blocks is not None
        assert seq.resident is not None
        goes_on = self.blocks.read(restore, seq.resident, seq.tokens)
        if restore.is_over or not goes_on:
            restore.has_ended_well = goes_on
            self._end_restore(seq)

    def _end_restore(self, seq: Sequence) -> None:
        """Take what has come, and compute the rest."""
        if seq.restore is None:
            return
        restore, seq.restore = seq.restore, None
        restore.cancel()
        if self.blocks is not None and seq.resident is not None and not restore.has_ended_well:
            self.blocks.drop_unfinished(seq.resident)
        from_memory = min(restore.cached, seq.n_past)
        self._begin(seq, seq.n_past, seq.n_past - from_memory)

    def _wait_for_disk(self) -> None:
        waiting = [s.restore for s in self.running if s.restore is not None]
        if waiting:
            waiting[0].wait(_DISK_WAIT_S)

    # what goes into the batch

    def _plan(self) -> list[Part]:
        group = self._next_group()
        members = [s for s in self._computing() if s.adapters == group]
        for seq in [s for s in members if len(s.tokens) >= self._n_ctx]:
            if not self._make_context_room(seq):
                members.remove(seq)
        decoding = [s for s in members if s.is_decoding]
        if self._is_beginning(members, decoding):
            decoding = []
        while not self.kv.make_room(len(decoding)):
            victim = decoding.pop()
            members.remove(victim)
            self._preempt(victim)
        self._adapters.use(group)
        self._batch.clear()
        parts = self._add_decoding(decoding)
        self._add_prefill([s for s in members if not s.is_decoding], parts)
        return parts

    def _is_beginning(self, members: list[Sequence], decoding: list[Sequence]) -> bool:
        """Requests that came together, and the first of them have their first token: the others' short
        prompts come before the second, or the last stream goes on alone at the end and the whole takes
        longer (2 % at 16 streams).
        """
        pending = sum(s.n_pending for s in members if not s.is_decoding)
        short = 0 < pending <= min(_TOGETHER_TOKENS, self.kv.free_cells)
        return short and all(s.n_generated == 1 for s in decoding)

    def _computing(self) -> list[Sequence]:
        """Those that have a cache sequence, and in it what could be found."""
        return [s for s in self.running if s.resident is not None and s.restore is None]

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
            self._end(seq, "length")
            return False
        assert seq.resident is not None
        keep = min(seq.keep_tokens(), self._n_ctx // 2)
        drop = (len(seq.tokens) - keep) // 2
        if seq.n_pending > 1 or not self.kv.shift(seq.resident, keep, drop):
            self.kv.truncate(seq.resident, min(keep, seq.n_past))
        del seq.tokens[keep : keep + drop]
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Take the youngest sequence's cells; it computes its tokens again when there is room."""
        self._end_restore(seq)
        assert seq.resident is not None
        self.kv.release(seq.resident, keep=False)
        seq.resident = None

    def _add_decoding(self, decoding: list[Sequence]) -> list[Part]:
        parts: list[Part] = []
        spare = min(self._batch.max_outputs, self.kv.free_cells, self._batch.capacity) - len(decoding)
        for seq in decoding:
            drafts = self._drafts(seq, min(spare, self._exact_room(seq, decoding)))
            spare -= len(drafts)
            assert seq.resident is not None
            tokens = [seq.tokens[-1], *drafts]
            row = self._batch.add(tokens, seq.n_past, seq.resident.seq_id, outputs=len(tokens))
            parts.append(Part(seq, row, tokens, drafts))
        return parts

    def _exact_room(self, seq: Sequence, decoding: list[Sequence]) -> int:
        """Guesses that change no bit of the answer. Who asks for a drafter by name takes the last bits
        as they come.
        """
        if seq.request.speculative != "auto":
            return self._batch.capacity
        exact = self._exactness
        if exact.cells is not None and self.kv.used_cells > exact.cells:
            return 0
        return exact.rows - self._batch.n_tokens - (len(decoding) - decoding.index(seq))

    def _drafts(self, seq: Sequence, spare: int) -> list[int]:
        if not self.can_cut or spare <= 0:
            return []
        room = min(spare, seq.max_tokens - seq.n_generated - 1, self._n_ctx - len(seq.tokens) - 1)
        return seq.drafting.propose(seq.tokens, room)

    def _add_prefill(self, prefilling: list[Sequence], parts: list[Part]) -> None:
        """Short prompts first, so that they do not wait for a long one; the long keep half of a step at
        least. Prompts that nobody waits for yet come when there are no others.
        """
        awaited = [s for s in prefilling if not s.is_prefill_only]
        short = [s for s in awaited if s.n_pending <= SHORT_TOKENS]
        long = [s for s in awaited if s.n_pending > SHORT_TOKENS]
        pending = [s.n_pending for s in prefilling]
        budget = self._chunks.budget(self._batch.room, self._batch.n_tokens, pending)
        left = self._add_prompts(short, budget, parts)
        left = self._add_prompts(long, max(left, min(budget // 2, self._batch.room)), parts)
        if not awaited:
            self._add_prompts(prefilling, left, parts)

    def _add_prompts(self, prompts: list[Sequence], budget: int, parts: list[Part]) -> int:
        """Add up to `budget` tokens of them, in order; how much of it is left."""
        for seq in prompts:
            if budget <= 0 or self._batch.n_outputs >= self._batch.max_outputs:
                return budget
            used = self._batch.n_tokens
            if not self.kv.make_room(used + min(budget, seq.n_pending)):
                budget = min(budget, self.kv.free_cells - used)
                if budget <= 0:
                    self._preempt_for_prefill(seq, parts)
                    return 0
            budget -= self._add_chunk(seq, budget, parts)
        return budget

    def _add_chunk(self, seq: Sequence, budget: int, parts: list[Part]) -> int:
        assert seq.resident is not None
        past = seq.n_past
        if not self.can_cut:
            budget = min(budget, points.tokens_to_next(past, len(seq.tokens)))
        tokens = seq.tokens[past : past + budget]
        complete = past + len(tokens) == len(seq.tokens)
        wanted = complete and not seq.is_prefill_only
        row = self._batch.add(tokens, past, seq.resident.seq_id, outputs=int(wanted))
        parts.append(Part(seq, row + len(tokens) - 1, tokens, has_output=wanted, is_prefill=True))
        return len(tokens)

    def _preempt_for_prefill(self, seq: Sequence, parts: list[Part]) -> None:
        """No cell is left for a prompt. Those who decode go on and free theirs; without any, the
        youngest gives way.
        """
        if parts:
            return
        others = [s for s in self.running if s.resident is not None and s is not seq]
        if others:
            self._preempt(others[-1])

    # what comes out of it

    def _decode(self, parts: list[Part]) -> float | None:
        """Run the batch; seconds in llama.cpp, None when it was given up for a newcomer.

        Raises DecodeError when llama.cpp fails.
        """
        began = time.perf_counter()
        code = self._decode_or_abort(parts)
        if code == _ABORTED:
            return None
        if code == 1:  # no cells, although our books say there are: free what can be spared, once more
            self.kv.drop_idle(pinned=True)
            code = self._batch.decode(self._context)
        seconds = time.perf_counter() - began
        if code:
            raise DecodeError(
                f"llama_decode returned {code} for a batch of {self._batch.n_tokens} tokens"
            )
        for part in parts:
            assert part.seq.resident is not None
            self.kv.extend(part.seq.resident, part.tokens)
        self._book_time(parts, seconds)
        return seconds

    def _decode_or_abort(self, parts: list[Part]) -> int:
        """A step of nothing but prefill can be given up while it runs; what it computed is dropped."""
        if self._abort is None or not all(part.is_prefill for part in parts):
            return self._batch.decode(self._context)
        self._abort.clear()
        self._in_step = [part.seq for part in parts]
        self.interruptions.begin(is_early=all(seq.is_prefill_only for seq in self._in_step))
        code = self._batch.decode(self._context)
        self.interruptions.end(lost=code == _ABORTED)
        self._in_step = []
        self._abort.clear()
        if code == _ABORTED:
            for seq in {
                part.seq.resident.seq_id: part.seq for part in parts if part.seq.resident
            }.values():
                assert seq.resident is not None
                self.kv.remove_behind(seq.resident)
        return code

    def look_at_cancelled(self) -> None:
        """Something was cancelled: a step that nobody waits for any more is given up. Any thread."""
        self.interruptions.for_cancel([seq.cancelled for seq in self._in_step])

    def _book_time(self, parts: list[Part], seconds: float) -> None:
        decode_tokens = sum(len(p.tokens) for p in parts if not p.is_prefill)
        prefill_tokens = self._batch.n_tokens - decode_tokens
        if not prefill_tokens:
            self._costs.note(decode_tokens, seconds)
            self.counters.decode_s += seconds
            return
        decode_share = min(seconds, self._costs.mean(decode_tokens) or 0.0) if decode_tokens else 0.0
        self.counters.decode_s += decode_share
        self.counters.prefill_s += seconds - decode_share
        self._chunks.note(prefill_tokens, seconds - decode_share)

    def _harvest(self, parts: list[Part]) -> None:
        plain = sum(1 for p in parts if p.has_output)
        for part in parts:
            if part.is_prefill:
                part.seq.progress()
                self._take_point(part.seq)
            if part.has_output:
                self._sample_or_fail(part, plain)
            elif part.seq.is_prefill_only and not part.seq.n_pending:
                self._end(part.seq, "length")

    def _take_point(self, seq: Sequence) -> None:
        """Note where a state that cannot be cut is, where a later request may want to go back to."""
        worth = seq.request.cache_prompt and points.is_worth_a_point(seq.n_past, len(seq.tokens))
        if worth and seq.resident is not None:
            self.kv.take_point(seq.resident)

    def _sample_or_fail(self, part: Part, plain: int) -> None:
        """A constraint that outgrew its parser ends its own request and no other."""
        try:
            self._sample(part, plain)
        except InvalidRequestError as error:
            failed = error
            self._leave(part.seq, lambda s: s.fail(failed), keep=False)

    def _sample(self, part: Part, plain: int) -> None:
        seq = part.seq
        first = not seq.n_generated
        before = seq.clock.last
        reason = None
        for i in range(len(part.drafts) + 1):
            length = len(seq.tokens)
            reason = seq.sample(
                self._vocab, self._context, part.row + i, self._logits.row(part.row + i)
            )
            guessed = (
                i < len(part.drafts)
                and len(seq.tokens) == length + 1
                and seq.tokens[-1] == part.drafts[i]
            )
            if reason is not None or not guessed:
                break
        self._settle(part, plain)
        if first:
            self.counters.ttft_ms.append((seq.clock.first - seq.clock.submitted) * 1000.0)
        else:
            self.counters.inter_token_ms.append((seq.clock.last - before) * 1000.0)
        if reason is not None:
            self._end(seq, reason)

    def _settle(self, part: Part, plain: int) -> None:
        """Take back from the cache what was guessed wrong."""
        if not part.drafts:
            return
        seq = part.seq
        assert seq.resident is not None
        right = common_prefix(seq.resident.tokens, seq.tokens, seq.n_past - len(part.drafts))
        # tokens that a constraint forced may equal the rest of the drafts; the last one's logits are
        # still to come
        right = min(right, len(seq.tokens) - 1)
        seq.drafting.settle(
            len(part.drafts), len(part.drafts) - (seq.n_past - right), self._costs, plain
        )
        self.kv.truncate(seq.resident, right)
