"""Takes what a batch gives: tokens to be sampled, progress of prompts, requests that have ended."""

from __future__ import annotations

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.events import PromptLogprobs
from edgeinfer.runtime.kv_cache.cache import KvCache, common_prefix
from edgeinfer.runtime.llama.context import ActiveContext, Logits
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.sampling.output import chosen_logprobs, token_logprobs
from edgeinfer.runtime.scheduler.metrics import Counters
from edgeinfer.runtime.scheduler.prefixes import Prefixes
from edgeinfer.runtime.scheduler.request_queue import Roster
from edgeinfer.runtime.scheduler.sequence import Part


class Harvest:
    """Samples from the last batch's logits."""

    def __init__(
        self,
        active: ActiveContext,
        vocab: Vocab,
        kv: KvCache,
        *,
        roster: Roster,
        prefixes: Prefixes,
        counters: Counters,
    ) -> None:
        self._active = active
        self._vocab = vocab
        self._kv = kv
        self._logits = Logits(active, vocab.n_vocab)
        self._roster, self._prefixes = roster, prefixes
        self._counters = counters

    def take(self, parts: list[Part]) -> None:
        """Hand over what each part of the batch gave."""
        for part in parts:
            if part.is_prefill:
                part.seq.progress()
                self._take_prompt_logprobs(part)
                self._prefixes.take_point(part.seq)
            if part.has_output:
                self._sample_or_fail(part)
            elif part.seq.max_tokens == 0 and not part.seq.n_pending:
                self._roster.end(part.seq, "length")

    def _take_prompt_logprobs(self, part: Part) -> None:
        """Reduce the prompt's rows at once: a row of logits takes 0.2 to 1 MB."""
        seq, n_top = part.seq, part.seq.request.prompt_logprobs
        if n_top is None or seq.resident is None:
            return
        n_before = seq.n_past - len(part.tokens)
        first_row = part.row - len(part.tokens) + 1
        following = seq.tokens[n_before + 1 : min(seq.n_past + 1, seq.prompt_tokens)]
        for row, token in enumerate(following, first_row):
            logprobs, top = token_logprobs(self._vocab, self._logits.row(row), n_top)
            seq.prompt_logprobs.append(chosen_logprobs(self._vocab, token, logprobs, top))
        seq.resident.n_top, seq.resident.logprobs = n_top, seq.prompt_logprobs
        if n_before < seq.prompt_tokens <= seq.n_past and not seq.n_generated:
            first = self._vocab.piece(seq.tokens[0], special=True)
            seq.stream.put(PromptLogprobs(first, tuple(seq.prompt_logprobs)))

    def _sample_or_fail(self, part: Part) -> None:
        """A constraint that outgrew its parser ends its own request and no other."""
        try:
            self._sample(part)
        except InvalidRequestError as error:
            self._roster.fail(part.seq, error)

    def _sample(self, part: Part) -> None:
        seq = part.seq
        first = not seq.n_generated
        before = seq.clock.last
        reason = None
        for i in range(len(part.drafts) + 1):
            length = len(seq.tokens)
            reason = seq.sample(
                self._vocab, self._active.context, part.row + i, self._logits.row(part.row + i)
            )
            guessed = (
                i < len(part.drafts)
                and len(seq.tokens) == length + 1
                and seq.tokens[-1] == part.drafts[i]
            )
            if reason is not None or not guessed:
                break
        self._settle(part)
        if first:
            self._counters.ttft_ms.append((seq.clock.first - seq.clock.submitted) * 1000.0)
        else:
            self._counters.inter_token_ms.append((seq.clock.last - before) * 1000.0)
        if reason is not None:
            self._roster.end(seq, reason)

    def _settle(self, part: Part) -> None:
        seq = part.seq
        if not part.drafts:
            seq.drafting.settle(seq.tokens, 0, 0)
            return
        assert seq.resident is not None
        right = common_prefix(seq.resident.tokens, seq.tokens, seq.n_past - len(part.drafts))
        # tokens that a constraint forced may equal the rest of the drafts; the last one's logits are
        # still to come
        right = min(right, len(seq.tokens) - 1)
        n_drafts = len(part.drafts)
        seq.drafting.settle(seq.tokens, n_drafts, n_drafts - (seq.n_past - right))
        self._kv.truncate(seq.resident, right)
