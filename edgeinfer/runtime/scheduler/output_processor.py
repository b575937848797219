"""Process the results of a batch: sample tokens, report prefill progress, end requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.events import PromptLogprobs
from edgeinfer.runtime.kv_cache import common_prefix
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.sampling.logprobs import chosen_logprobs, token_logprobs
from edgeinfer.runtime.scheduler.executor import Executor
from edgeinfer.runtime.scheduler.request_queue import RequestQueue
from edgeinfer.runtime.scheduler.sequence import BatchEntry


class OutputProcessor:
    """Samples tokens from the logits of the batch that `executor` has run."""

    def __init__(self, executor: Executor, queue: RequestQueue, vocab: Vocab) -> None:
        self._executor, self.queue = executor, queue
        self.vocab = vocab
        self._logits: npt.NDArray[np.float32]

    def process(self, entries: list[BatchEntry]) -> None:
        n_outputs = self._executor.batch.n_outputs
        self._logits = self._executor.context.all_logits(n_outputs, self.vocab.n_vocab)
        for entry in entries:
            if entry.is_prefill:
                entry.seq.report_progress()
                self._report_prompt_logprobs(entry)
                self.queue.prefixes.save_checkpoint(entry.seq)
            if entry.has_output:
                try:
                    self._sample(entry)
                except InvalidRequestError as error:  # the parser of a constraint reached a limit
                    self.queue.fail(entry.seq, error)
            elif entry.seq.max_tokens == 0 and not entry.seq.n_pending:
                self.queue.end(entry.seq, "length")

    def _report_prompt_logprobs(self, entry: BatchEntry) -> None:
        """Compute log-probabilities of the prompt's tokens in this batch; emit them after the last one.

        The logits are not stored, because they take 0.2 to 1 MB per token.
        """
        seq, n_top = entry.seq, entry.seq.request.prompt_logprobs
        if n_top is None:
            return
        n_before = seq.n_past - len(entry.tokens)
        outputs = self._logits[entry.first_output - len(entry.tokens) + 1 :]
        following = seq.tokens[n_before + 1 : min(seq.n_past + 1, seq.n_prompt_tokens)]
        for logits, token in zip(outputs, following, strict=False):
            logprobs, top = token_logprobs(logits, n_top)
            seq.prompt_logprobs.append(chosen_logprobs(self.vocab, token, logprobs, top))
        seq.cached_seq.n_top, seq.cached_seq.logprobs = n_top, seq.prompt_logprobs
        if n_before < seq.n_prompt_tokens <= seq.n_past and not seq.n_generated:
            first = self.vocab.piece(seq.tokens[0], special=True)
            seq.stream.put(PromptLogprobs(first, tuple(seq.prompt_logprobs)))

    def _sample(self, entry: BatchEntry) -> None:
        seq, clock = entry.seq, entry.seq.clock
        is_first_token, last_token = not seq.n_generated, clock.last_token
        n_accepted, context = 0, self._executor.context.pointer
        while True:
            i, length = entry.first_output + n_accepted, len(seq.tokens)
            reason = seq.sample(self.vocab, context, i - len(self._logits), self._logits[i])
            sampled = seq.tokens[length:]  # the sampled token and forced tokens after it
            if reason is not None or entry.drafts[n_accepted : n_accepted + len(sampled)] != sampled:
                break
            n_accepted += len(sampled)
        self._verify_drafts(entry)
        if is_first_token:
            self._executor.counters.ttft_ms.append((clock.first_token - clock.submitted) * 1000.0)
        else:
            self._executor.counters.inter_token_ms.append((clock.last_token - last_token) * 1000.0)
        if reason is not None:
            self.queue.end(seq, reason)

    def _verify_drafts(self, entry: BatchEntry) -> None:
        seq, n_drafts = entry.seq, len(entry.drafts)
        n_past = seq.n_past - n_drafts
        sampled = seq.tokens[n_past:]
        # the last token must be computed again, even if a draft equals it: its logits are needed
        n_accepted = min(common_prefix(entry.drafts, sampled), len(sampled) - 1)
        if not entry.is_prefill:  # tokens of a replayed answer do not count as draft tokens
            seq.drafting.record(sampled, n_drafted=n_drafts, n_accepted=n_accepted)
        self._executor.kv.truncate(seq.cached_seq, n_past + n_accepted)
