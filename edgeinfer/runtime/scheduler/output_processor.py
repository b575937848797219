"""Process the output of a batch: sample tokens, report prefill progress, end requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.events import PromptLogprobs
from edgeinfer.runtime.kv_cache import common_prefix
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.sampling.output import chosen_logprobs, token_logprobs
from edgeinfer.runtime.scheduler.executor import Executor
from edgeinfer.runtime.scheduler.request_queue import RequestQueue
from edgeinfer.runtime.scheduler.sequence import BatchEntry


class OutputProcessor:
    """Sample from the logits of the last batch that `executor` has run."""

    def __init__(self, executor: Executor, queue: RequestQueue, vocab: Vocab) -> None:
        self._executor, self.queue = executor, queue
        self.vocab = vocab
        self._rows: npt.NDArray[np.float32]

    def process(self, entries: list[BatchEntry]) -> None:
        self._rows = self._executor.active.rows(self._executor.batch.n_outputs, self.vocab.n_vocab)
        for entry in entries:
            if entry.is_prefill:
                entry.seq.progress()
                self._report_prompt_logprobs(entry)
                self.queue.prefixes.save_checkpoint(entry.seq)
            if entry.has_output:
                self._sample_or_fail(entry)
            elif entry.seq.max_tokens == 0 and not entry.seq.n_pending:
                self.queue.end(entry.seq, "length")

    def _report_prompt_logprobs(self, entry: BatchEntry) -> None:
        """Reduce the prompt's rows of logits immediately: each takes 0.2 to 1 MB."""
        seq, n_top = entry.seq, entry.seq.request.prompt_logprobs
        if n_top is None or seq.cached_seq is None:
            return
        n_before = seq.n_past - len(entry.tokens)
        rows = self._rows[entry.row - len(entry.tokens) + 1 :]
        following = seq.tokens[n_before + 1 : min(seq.n_past + 1, seq.prompt_tokens)]
        for row, token in zip(rows, following, strict=False):
            logprobs, top = token_logprobs(row, n_top)
            seq.prompt_logprobs.append(chosen_logprobs(self.vocab, token, logprobs, top))
        seq.cached_seq.n_top, seq.cached_seq.logprobs = n_top, seq.prompt_logprobs
        if n_before < seq.prompt_tokens <= seq.n_past and not seq.n_generated:
            first = self.vocab.piece(seq.tokens[0], special=True)
            seq.stream.put(PromptLogprobs(first, tuple(seq.prompt_logprobs)))

    def _sample_or_fail(self, entry: BatchEntry) -> None:
        """Sample. If a constraint exceeds its parser's limits, only its own request fails."""
        try:
            self._sample(entry)
        except InvalidRequestError as error:
            self.queue.fail(entry.seq, error)

    def _sample(self, entry: BatchEntry) -> None:
        seq, row = entry.seq, entry.row
        first = not seq.n_generated
        before = seq.clock.last
        n_accepted, context = 0, self._executor.active.context
        while True:
            i, length = row + n_accepted, len(seq.tokens)
            reason = seq.sample(self.vocab, context, i - len(self._rows), self._rows[i])
            new = seq.tokens[length:]  # several, if a constraint forces some
            if reason is not None or entry.drafts[n_accepted : n_accepted + len(new)] != new:
                break
            n_accepted += len(new)
        self._verify_drafts(entry)
        if first:
            self._executor.counters.ttft_ms.append((seq.clock.first - seq.clock.submitted) * 1000.0)
        else:
            self._executor.counters.inter_token_ms.append((seq.clock.last - before) * 1000.0)
        if reason is not None:
            self.queue.end(seq, reason)

    def _verify_drafts(self, entry: BatchEntry) -> None:
        seq = entry.seq
        if not entry.drafts:
            seq.drafting.record_acceptance(seq.tokens, 0, 0)
            return
        accepted_end = common_prefix(seq.cached.tokens, seq.tokens, seq.n_past - len(entry.drafts))
        # tokens that a constraint forced may equal the rest of the drafts; the last one's logits are
        # not computed yet
        accepted_end = min(accepted_end, len(seq.tokens) - 1)
        n_drafts = len(entry.drafts)
        seq.drafting.record_acceptance(seq.tokens, n_drafts, n_drafts - (seq.n_past - accepted_end))
        self._executor.kv.truncate(seq.cached, accepted_end)
