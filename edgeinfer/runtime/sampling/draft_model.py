"""A draft model: a small model with the same vocabulary, whose tokens the large model verifies.

It has a context of its own, in which it must prefill a text before it can draft. It does so only if
that is likely to pay. Used on the decode thread.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from edgeinfer.config.load_options import UNFIT_DRAFT_HINT
from edgeinfer.errors import InvalidRequestError, ModelLoadError, OutOfMemoryError
from edgeinfer.runtime.kv_cache import CachedSequence, KvCache, common_prefix
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import Batch
from edgeinfer.runtime.llama.model import LlamaModel, model_shape, open_context, read_meta
from edgeinfer.runtime.llama.sampler import Sampler
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.llama.weights import free_model, open_model
from edgeinfer.runtime.memory_plan import DRAFT_BATCH, DRAFT_SPARE_SEQUENCES
from edgeinfer.runtime.model_shape import draft_problem
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sampling.grammar import TokenMatcher
from edgeinfer.runtime.sampling.logprobs import LogSum
from edgeinfer.runtime.sampling.speculative import Acceptance, DraftBudget, Run, compare, join

#: Acceptance rates are learned for groups of tokens, by the probability that the draft model gives
#: them: the bounds of the groups, and the rates assumed at first.
_PROBABILITIES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
_START = (0.1, 0.2, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
#: Rate assumed for tokens that are not drafted yet, and how many tokens it counts as in a request: few,
#: so that wrong drafts end soon.
_MEAN_START = 0.7
_MEAN_TOKENS = 3
#: If a grammar forces a text, its usual tokens are drafted without the draft model, as long as their
#: rate is at least the second number; at first it is assumed to be the first. The model may choose
#: other tokens for the text: `"/` instead of `"`.
_LIKELY_START, _LIKELY_LEAST = 0.95, 0.8
#: Each step without a draft moves what was learned towards what was assumed by this share of the
#: difference, so that a draft model that was wrong, or slow, is tried again.
_RECOVERY = 0.0008
#: What drafts may lose before any has gained, and the most that gains let later ones lose, in steps of
#: one row; the share of each token's time that they may lose besides.
_FIRST_LOSS, _MOST_LOSS = 32.0, 200.0
_LOSS_SHARE = 0.01
#: The draft model prefills missing text if the rest of the answer is likely to repay that. The rest is
#: assumed to be as long as the answer so far, and at least this long (tokens). Prefill of a token costs
#: the second number's share of a draft token.
_LEAST_ANSWER_TOKENS = 64
_PREFILL_SHARE = 0.25
#: Weight of a new measurement in the average cost of a draft token.
_WEIGHT = 0.1


class DraftModel:
    """A draft model's weights and, after `open`, its context. Raises ModelLoadError.

    `cost` of a draft token is in steps of one row of the large model; `least_cost` is the cost of
    reading its weights. `balance` is what drafts may still lose, in the same unit: their gains less
    their costs, and a share of all time. When it is used up, nothing is drafted.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._model = open_model(files.draft_paths)
        self.vocab = Vocab(self._model)
        self.shape = model_shape(self._model, read_meta(self._model))
        self.rates = [Acceptance(rate) for rate in _START]
        self.mean, self.likely = Acceptance(_MEAN_START), Acceptance(_LIKELY_START)
        self.balance = _FIRST_LOSS

    def _misfit(self, loaded: LlamaModel) -> str:
        """Return why it cannot draft for `loaded`, "" if it can."""
        if not loaded.plan.has_draft:
            return "there is not enough memory for it"
        problem = draft_problem(self.shape, loaded.shape)
        spellings = ((self.vocab.raw_text(i), loaded.vocab.raw_text(i)) for i in range(self.n_vocab))
        if problem or all(draft == large for draft, large in spellings):
            return problem
        return "its vocabulary differs: its tokens are spelled differently"

    def open(self, loaded: LlamaModel, options: LoadOptions) -> None:
        """Make a context for drafts of `loaded`.

        Raises ModelLoadError if it cannot draft for it, OutOfMemoryError.
        """
        self.n_vocab = min(loaded.vocab.n_vocab, self.vocab.n_vocab)
        if problem := self._misfit(loaded):
            raise ModelLoadError(problem, hint=UNFIT_DRAFT_HINT)
        n_sequences = loaded.n_parallel + DRAFT_SPARE_SEQUENCES
        kv_type = loaded.choices["kv_type"].value if self.shape.can_quantize_kv else "f16"
        self.context = open_context(
            self._model,
            msgspec.structs.replace(options, kv_type=kv_type),
            n_cells=loaded.n_cells,
            n_batch=DRAFT_BATCH,
            n_seq_max=n_sequences,
            n_threads=loaded.n_threads,
            n_outputs=n_sequences,
        )
        self._batch = Batch.of(self.context, max_outputs=1)
        window = int(libllama.L.llama_model_n_swa(self._model))
        n_cells = self.context.n_cells
        self.kv = KvCache(self.context, n_cells=n_cells, n_seq_max=n_sequences, window=window)
        weights_bytes = loaded.shape.weights_bytes_per_token
        self.cost = self.least_cost = self.shape.weights_bytes_per_token / weights_bytes

    def compute(self, cached_seq: CachedSequence, tokens: Sequence[int], *, outputs: int) -> bool:
        """Append `tokens` to a sequence, the last `outputs` with logits, and charge `balance`.

        Return False if they are more than a batch, of another vocabulary, or if there is no room.
        """
        is_valid = len(tokens) <= DRAFT_BATCH and max(tokens) < self.n_vocab
        if not is_valid or not self.kv.make_room(len(tokens)):
            return False
        self._batch.clear()
        self._batch.add(tokens, len(cached_seq.tokens), cached_seq.seq_id, outputs=outputs)
        if self._batch.decode(self.context):
            self.kv.remove_unrecorded_cells(cached_seq)
            return False
        self.kv.record_computed(cached_seq, tokens)
        self.balance -= self.price(len(tokens))
        return True

    def note_cost(self, cost: float) -> None:
        """Record the cost of a draft token, smoothed: one bad measurement must not end drafting."""
        self.cost *= 1.0 + _WEIGHT * (min(max(cost / self.cost, 0.5), 2.0) - 1.0)

    def price(self, n_tokens: int) -> float:
        """Return the cost of computing `n_tokens` together."""
        return self.cost * max(1.0, n_tokens * _PREFILL_SHARE)

    def earn(self, gain: float) -> None:
        """Let drafts lose `gain` more."""
        self.balance = min(_MOST_LOSS, self.balance + gain)

    def park(self) -> None:
        """Forget all texts, and give the memory of the cells back to the OS. Only while idle."""
        self.kv.drop_idle()
        self.context.cells.release_pages()

    def free(self) -> None:
        """Free context and weights. Idempotent."""
        if self._model:
            if hasattr(self, "context"):
                self.context.free()
            free_model(self._model)
            self._model = None


def attach(
    draft: DraftModel | None, files: ModelFiles, options: LoadOptions, loaded: LlamaModel
) -> DraftModel | None:
    """Let `draft` draft for `loaded`, and record the draft model in its choices.

    A draft model of the catalogue is left out with a warning if it does not fit or cannot be loaded.
    Raises ModelLoadError, OutOfMemoryError.
    """
    problem, prefix = files.no_draft, f"{files.draft} cannot draft for {files.name}: "
    if draft is not None:
        try:
            draft.open(loaded, options)
        except (ModelLoadError, OutOfMemoryError) as error:
            draft.free()
            problem = error.message
            if options.draft:
                raise type(error)(prefix + problem, hint=error.hint) from error
        else:
            source = "as asked" if options.draft else "set in models.toml"
            loaded.choices["draft"] = Chosen(files.draft, source)
            return draft
    loaded.choices["draft"] = Chosen("none", problem or "no draft model is set")
    if files.draft:
        loaded.warnings += (prefix + problem,)
    return None


class RequestDrafter:
    """Drafts tokens for one request with a draft model. `banned` tokens are never sampled."""

    def __init__(
        self,
        model: DraftModel,
        request: GenerateRequest,
        sampler: Sampler,
        *,
        matcher: TokenMatcher | None,
        banned: npt.NDArray[np.int64] | None,
    ) -> None:
        self._model, self._request = model, request
        self._sampler = sampler
        self._matcher, self._banned = matcher, banned
        # drafting a token without sampling it uses no random number, which would change later tokens
        is_greedy = request.sampling.temperature <= 0
        self._drafts_likely, self._drafts_forced = is_greedy, is_greedy or request.logprobs is None
        self._mean = Acceptance(model.mean.rate, _MEAN_TOKENS)
        self._cached: CachedSequence | None = None
        self._n_prompt = 0
        self._drafted: list[Run] = []
        #: Steps of one row that a token takes without drafts.
        self._token_cost = 1.0
        self._log_sum = LogSum()

    def draft(
        self, tokens: Sequence[int], limit: int, budget: DraftBudget, least_rate: float
    ) -> list[Run]:
        """Draft some `limit` tokens if `budget` may reach a higher rate than `least_rate`."""
        self._drafted, self._token_cost = [], 1.0 / budget.rate
        self._n_prompt = self._n_prompt or len(tokens)
        model = self._model
        model.earn(_LOSS_SHARE * self._token_cost)
        n, rate = 0, 0.0
        if self._mean.rate > budget.least_chance(limit, model.cost):
            n, rate = budget.best([Run((0,), self._mean)] * limit, draft_cost=model.cost)
        if not n or rate <= least_rate:
            self._recover()
            return []
        n_done, n_most = len(tokens) - self._n_prompt, self._request.max_tokens
        n_left = max(_LEAST_ANSWER_TOKENS, n_done)
        n_left = n_left if n_most is None else min(n_left, n_most - n_done)
        pending = self._catch_up(tokens, n_left * (self._token_cost - 1.0 / rate))
        if pending:
            self._draft(pending, limit, budget)
            model.balance -= max((cost for _, cost, _ in budget.totals(self._drafted)), default=0.0)
        return self._drafted

    def _recover(self) -> None:
        model = self._model
        for learned in (self._mean, model.mean):
            learned.recover(_MEAN_START, _RECOVERY)
        model.likely.recover(_LIKELY_START, _RECOVERY)
        model.cost += _RECOVERY * (model.least_cost - model.cost)

    def _catch_up(self, tokens: Sequence[int], worth: float) -> list[int]:
        """Prefill missing text if that takes at most `worth` steps of one row; return the last tokens,
        which are still to be computed, or none if it would take longer.
        """
        model, request = self._model, self._request
        if self._cached is None and min(tokens) >= 0:  # the draft model cannot read pictures
            salt, reuse = request.cache_salt, request.cache_prompt
            self._cached = model.kv.allocate(PromptTokens(tokens), (), salt, reuse=reuse)
        if self._cached is None:
            return []
        n = min(common_prefix(self._cached.tokens, tokens), len(tokens) - 1)
        model.kv.truncate(self._cached, n)
        pending = list(tokens[n:])
        if model.price(len(pending)) > min(worth, model.balance):
            return []
        if len(pending) <= DRAFT_BATCH:
            return pending
        model.compute(self._cached, pending[:DRAFT_BATCH], outputs=0)
        return []

    def _draft(self, pending: list[int], limit: int, budget: DraftBudget) -> None:
        """Draft some `limit` tokens after the text that ends with `pending`."""
        assert self._cached is not None
        model, runs = self._model, self._drafted
        sampler, matcher = self._sampler.copy(), self._matcher and self._matcher.copy()
        likely = self._draft_likely(sampler, matcher)
        is_end = False
        while not is_end:
            pending = [*pending, *likely]
            began = time.perf_counter()
            if not model.compute(self._cached, pending, outputs=1):
                break
            budget.cost += model.price(len(pending))
            try:
                token, probability = self._pick(sampler, matcher)
            except InvalidRequestError:  # the grammar's parser reached a limit
                break
            if len(pending) <= 2:
                model.note_cost((time.perf_counter() - began) / budget.row_s)
            if token >= model.n_vocab or (matcher is not None and not matcher.accept(token)):
                break
            forced = matcher.accept_forced() if matcher is not None and self._drafts_forced else []
            sampler.accept(forced)
            pending = [token, *forced]
            runs.append(Run(pending, model.rates[bisect_right(_PROBABILITIES, probability)]))
            likely = self._draft_likely(sampler, matcher)
            expected = [*runs, *[Run((0,), self._mean)] * (limit - len(join(runs)))]
            n, _ = budget.best(expected, draft_cost=model.cost, n_drafted=len(runs))
            is_done = matcher is not None and matcher.is_done
            is_end = n <= len(runs) or is_done or model.vocab.is_eos(token)

    def _draft_likely(self, sampler: Sampler, matcher: TokenMatcher | None) -> list[int]:
        """Draft the text that must come next, without the draft model; return its tokens."""
        if matcher is None or not self._drafts_likely or self._model.likely.rate < _LIKELY_LEAST:
            return []
        tokens = matcher.accept_likely()
        sampler.accept(tokens)
        self._drafted += [Run((token,), self._model.likely) for token in tokens]
        return tokens

    def _pick(self, sampler: Sampler, matcher: TokenMatcher | None) -> tuple[int, float]:
        """Sample as the request will; return the token and its probability at temperature 1."""
        model = self._model
        logits: npt.NDArray[np.float32] = model.context.all_logits(1, model.vocab.n_vocab)[0]
        if self._banned is not None:
            logits[self._banned] = -np.inf
        if matcher is not None:
            matcher.mask_into(logits)
        token = sampler.sample(model.context.pointer, -1, logits)
        return token, math.exp(float(logits[token]) - self._log_sum(logits))

    def record(self, sampled: Sequence[int]) -> None:
        """Learn which tokens of the latest draft were sampled."""
        for acceptance, is_right in compare(self._drafted, sampled):
            self._model.earn(self._token_cost * is_right)
            for learned in (acceptance, self._mean, self._model.mean):
                learned.record(is_right=is_right)
        self._drafted = []

    def close(self) -> None:
        """Keep the request's text in the draft model for later requests. Idempotent."""
        if self._cached is not None:
            self._model.kv.release(self._cached, keep=self._request.cache_prompt)
            self._cached = None
