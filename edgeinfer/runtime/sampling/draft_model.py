"""A draft model: a small model with the same vocabulary, whose tokens the large model verifies.

The draft model has a separate context, in which it must prefill a text before it can draft tokens for
that text; it does so only if drafts are likely to save time. Used on the decode thread.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from edgeinfer.config.load_options import UNFIT_DRAFT_HINT
from edgeinfer.errors import InvalidRequestError, ModelLoadError, OutOfMemoryError
from edgeinfer.runtime.kv_cache import CachedSequence, KvCache, common_prefix
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.model import LlamaModel, model_shape, open_context, read_meta
from edgeinfer.runtime.llama.sampler import Sampler
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.llama.weights import free_model, open_model
from edgeinfer.runtime.memory_plan import DRAFT_BATCH, DRAFT_SPARE_SEQUENCES
from edgeinfer.runtime.model_shape import Shape, draft_problem
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.sampling.grammar import TokenMatcher
from edgeinfer.runtime.sampling.logprobs import LogSum
from edgeinfer.runtime.sampling.speculative import (
    Acceptance,
    DraftBudget,
    Drafting,
    Run,
    SuffixDrafter,
    join,
    update_rates,
)

#: Acceptance rates are learned for groups of draft tokens. The draft model's probability of a token
#: decides the token's group. These are the bounds between groups. A group's first rate is its middle.
_PROBABILITIES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
#: Acceptance rate expected of tokens before they are drafted: its first value, and the number of
#: verified tokens that the rate counts as when an answer begins. The number is small, so that wrong
#: drafts end soon.
_MEAN_START, _MEAN_TOKENS = 0.7, 3
#: Text that a grammar forces is drafted without the draft model, in its usual tokens. The large model
#: may write the text in other tokens: `"/` instead of `"`. So these draft tokens have an acceptance
#: rate: its first value, and the least rate with which they are drafted.
_LIKELY_START, _LIKELY_LEAST = 0.95, 0.8
#: Each step in which the draft model drafts nothing moves the expected rate and the cost towards the
#: assumed ones, by this share of the difference, so that a model that was wrong or slow is tried again.
_RECOVERY = 0.0008
#: How much drafts may still lose (`DraftModel.balance`, in steps of one token): at first, and at most.
_FIRST_LOSS, _MOST_LOSS = 32.0, 200.0
#: Each step adds this share of a token's cost to `DraftModel.balance`, so that drafts are tried again
#: after they have lost too much.
_LOSS_SHARE = 0.01
#: Drafts in the rest of an answer must repay the draft model's prefill. The rest is assumed to be as
#: long as the answer so far, and at least this long (tokens).
_LEAST_ANSWER_TOKENS = 64
#: Cost of prefilling a token with the draft model, relative to drafting one.
_PREFILL_SHARE = 0.25
#: Weight of a new measurement in the moving average of a draft token's cost.
_WEIGHT = 0.1


class DraftModel:
    """The draft model of an engine: its weights and, after `open`, its context.

    `shape` (sizes of the draft model) is None if there is no draft model that can be used. If the
    options name one that cannot be used, ModelLoadError or OutOfMemoryError is raised; if models.toml
    names it, a warning is given.

    The unit of costs is a step in which the large model computes one token. `cost` is that of a draft
    token, `least_cost` its part for reading the draft model's weights. `balance` is how much drafts
    may still lose: a first amount, plus their gains and a share of every token's cost, minus the costs
    of drafts and their prefill. Nothing is drafted if that prefill would cost more than `balance`.
    """

    def __init__(self, files: ModelFiles, options: LoadOptions) -> None:
        self._files, self._options = files, options
        self._problem = files.no_draft or "no draft model is set"
        self._model: Any = None
        self.shape: Shape | None = None
        self.context = LlamaContext(None)
        self.log_sum = LogSum()
        bounds = pairwise((0.0, *_PROBABILITIES, 1.0))
        self.rates = [Acceptance((low + high) / 2) for low, high in bounds]
        self.mean = Acceptance(_MEAN_START)
        self.balance = _FIRST_LOSS
        if files.draft_paths:
            with self._leave_out_if_unfit():
                self._model = open_model(files.draft_paths)
                self.vocab = Vocab(self._model)
                self.shape = model_shape(self._model, read_meta(self._model))

    @property
    def _warning(self) -> str:
        return f"{self._files.draft} cannot draft for {self._files.name}: {self._problem}"

    @contextmanager
    def _leave_out_if_unfit(self) -> Iterator[None]:
        """If the block fails, do without the draft model; raise the error if the user requested one."""
        try:
            yield
        except (ModelLoadError, OutOfMemoryError) as error:
            self.free()
            self._problem = error.message
            if self._options.draft:
                raise type(error)(self._warning, hint=error.hint) from error

    def open(self, loaded: LlamaModel) -> None:
        """Make a context for drafts of `loaded`, and record the draft model in `loaded.choices`.

        Raises ModelLoadError or OutOfMemoryError if a requested draft model cannot be used.
        """
        if self.shape is not None:
            with self._leave_out_if_unfit():
                self._make_context(loaded, self.shape)
        if self.shape is not None:
            source = "as asked" if self._options.draft else "set in models.toml"
            loaded.choices["draft"] = Chosen(self._files.draft, source)
            return
        loaded.choices["draft"] = Chosen("none", self._problem)
        loaded.warnings += (self._warning,) if self._files.draft else ()

    def _make_context(self, loaded: LlamaModel, shape: Shape) -> None:
        self.large_vocab = loaded.vocab
        self.n_vocab = min(loaded.vocab.n_vocab, self.vocab.n_vocab)
        spellings = ((self.vocab.raw_text(i), loaded.vocab.raw_text(i)) for i in range(self.n_vocab))
        problem = draft_problem(shape, loaded.shape)
        if not loaded.plan.has_draft:
            problem = "there is not enough memory for the draft model"
        elif not problem and any(draft != large for draft, large in spellings):
            problem = "some token ids have different texts in the draft model and in the model"
        if problem:
            raise ModelLoadError(problem, hint=UNFIT_DRAFT_HINT)
        kv_type = loaded.choices["kv_type"].value if shape.can_quantize_kv else "f16"
        options = msgspec.structs.replace(self._options, kv_type=kv_type)
        n_seq_max = loaded.n_parallel + DRAFT_SPARE_SEQUENCES
        limits = {"n_batch": DRAFT_BATCH, "n_seq_max": n_seq_max, "n_outputs": n_seq_max}
        self.context = open_context(
            self._model, options, n_cells=loaded.n_cells, n_threads=loaded.n_threads, **limits
        )
        self._batch = Batch.of(self.context, max_outputs=1)
        window = int(libllama.L.llama_model_n_swa(self._model))
        n_cells = self.context.n_cells
        self.kv = KvCache(self.context, n_cells=n_cells, n_seq_max=n_seq_max, window=window)
        weights_bytes = loaded.shape.weights_bytes_per_token
        self.cost = self.least_cost = shape.weights_bytes_per_token / weights_bytes

    def compute(self, cached_seq: CachedSequence, tokens: Sequence[int], budget: DraftBudget) -> bool:
        """Append `tokens` to a sequence (logits for the last); add the cost to `budget`.

        Return False if `tokens` exceed a batch, the vocabulary or the free cells, or if decoding fails.
        """
        is_valid = len(tokens) <= DRAFT_BATCH and max(tokens) < self.n_vocab
        if not (is_valid and self.kv.make_room(len(tokens))):
            return False
        self._batch.clear()
        self._batch.add(tokens, len(cached_seq.tokens), cached_seq.seq_id, outputs=1)
        if self._batch.decode(self.context):
            self.kv.remove_unrecorded_cells(cached_seq)
            return False
        self.kv.record_computed(cached_seq, tokens)
        budget.cost += self.price(len(tokens))
        return True

    def price(self, n_tokens: int) -> float:
        """Return the cost of computing `n_tokens` in one batch, in the unit of `cost`."""
        return self.cost * max(1.0, n_tokens * _PREFILL_SHARE)

    def record_cost(self, cost: float) -> None:
        """Update the moving average `cost`; the effect of one measurement is limited."""
        self.cost *= 1.0 + _WEIGHT * (min(max(cost / self.cost, 0.5), 2.0) - 1.0)

    def park(self) -> None:
        """Drop all cached sequences, and give the cells' memory back to the OS. Only while idle."""
        if self.shape is not None:
            self.kv.drop_idle()
            self.context.cells.release_pages()

    def free(self) -> None:
        """Free context and weights. Idempotent."""
        self.context.free()
        if self._model:
            free_model(self._model)
        self._model = self.shape = None


class ModelDrafting(Drafting):
    """Drafts from the draft model or the text, whichever promises the higher rate (tokens/s)."""

    def __init__(
        self,
        drafter: SuffixDrafter,
        matcher: TokenMatcher | None,
        *,
        model: DraftModel,
        request: GenerateRequest,
        sampler: Sampler,
    ) -> None:
        super().__init__(drafter, matcher)
        self._model, self._request = model, request
        self._sampler = sampler
        self._mean = Acceptance(model.mean.rate, _MEAN_TOKENS)
        self._likely = Acceptance(_LIKELY_START)
        self._cached_seq: CachedSequence | None = None
        self._n_prompt = 0
        #: The draft model's draft in the present step, how many of its runs are verified, and its cost.
        self._model_runs: list[Run] = []
        self._n_verified, self._spent = 0, 0.0
        #: Cost of a token of this answer in the present step, if nothing is drafted for this answer.
        self._token_cost = 1.0

    def _take_runs(
        self, text_runs: list[Run], tokens: Sequence[int], limit: int, budget: DraftBudget
    ) -> list[Run]:
        model, cost_before = self._model, budget.cost
        self._token_cost = 1.0 / budget.rate
        self._n_prompt = self._n_prompt or len(tokens)
        _, rate = budget.best(self._expect(limit))
        if rate <= budget.best(text_runs)[1]:
            for mean in (self._mean, model.mean):  # one answer may be too short to recover
                mean.rate += _RECOVERY * (_MEAN_START - mean.rate)
            model.cost += _RECOVERY * (model.least_cost - model.cost)
            return budget.take(text_runs)
        began = time.perf_counter()
        with suppress(InvalidRequestError):  # the grammar's parser reached a limit
            if pending := self._prefill(tokens, self._token_cost - 1.0 / rate, budget):
                self._draft(pending, limit, budget)
        budget.model_s += time.perf_counter() - began
        self._spent = budget.cost - cost_before
        draft = max(text_runs, self._model_runs, key=lambda runs: budget.best(runs)[1])
        runs = budget.take(draft)
        if draft is self._model_runs:
            self._n_verified, self._spent = len(runs), budget.cost - cost_before
        return runs

    def _expect(self, n: int) -> list[Run]:
        """Return `n` runs in place of tokens not drafted yet, with the expected rate and cost."""
        return [Run((0,), self._mean, self._model.cost)] * n

    def _prefill(self, tokens: Sequence[int], gain: float, budget: DraftBudget) -> list[int]:
        """Prefill text that the draft model lacks, if drafts of the rest of the answer gain more.

        `gain` is per token. Return the tokens to compute next; [] if prefill does not pay or continues.
        """
        model, request = self._model, self._request
        if self._cached_seq is None and min(tokens) >= 0:  # the draft model cannot read pictures
            salt, reuse = request.cache_salt, request.cache_prompt
            self._cached_seq = model.kv.allocate(PromptTokens(tokens), (), salt, reuse=reuse)
        if self._cached_seq is None:
            return []
        n = min(common_prefix(self._cached_seq.tokens, tokens), len(tokens) - 1)
        model.kv.truncate(self._cached_seq, n)
        pending = list(tokens[n:])
        n_done = len(tokens) - self._n_prompt
        n_left = max(_LEAST_ANSWER_TOKENS, n_done)
        if request.max_tokens is not None:
            n_left = min(n_left, request.max_tokens - n_done)
        if model.price(len(pending)) > min(n_left * gain, model.balance):
            return []
        if len(pending) <= DRAFT_BATCH:
            return pending
        model.compute(self._cached_seq, pending[:DRAFT_BATCH], budget)
        return []

    def _draft(self, pending: list[int], limit: int, budget: DraftBudget) -> None:
        """Draft runs while one more should pay, and up to about `limit` tokens.

        `pending` is the end of the text, which the draft model must compute first.
        """
        assert self._cached_seq is not None
        model, runs = self._model, self._model_runs
        sampler, matcher = self._sampler.copy(), self._matcher and self._matcher.copy()
        # only if greedy: likely tokens are drafted without random numbers, so later tokens would differ
        is_greedy = self._request.sampling.temperature <= 0
        while True:
            if matcher is not None and is_greedy and self._likely.rate >= _LIKELY_LEAST:
                likely = matcher.accept_likely()
                sampler.accept(likely)
                pending = [*pending, *likely]
                runs += [Run((token,), self._likely) for token in likely]
            n, _ = budget.best([*runs, *self._expect(limit - len(join(runs)))])
            if n <= len(runs) or (matcher is not None and matcher.is_done):
                return
            began = time.perf_counter()
            if not model.compute(self._cached_seq, pending, budget):
                return
            token, probability = self._pick(sampler, matcher)
            if len(pending) <= 2:
                model.record_cost((time.perf_counter() - began) / budget.row_s)
            pending = [token]
            if matcher is not None:
                if not matcher.accept(token):
                    return
                if is_greedy or self._request.logprobs is None:
                    pending += matcher.accept_forced()
                sampler.accept(pending[1:])
            runs.append(Run(pending, model.rates[bisect_right(_PROBABILITIES, probability)]))
            if model.large_vocab.is_eos(token):
                return

    def _pick(self, sampler: Sampler, matcher: TokenMatcher | None) -> tuple[int, float]:
        """Sample the draft model as the request would; return the token and its probability."""
        model = self._model
        logits = model.context.all_logits(1, model.vocab.n_vocab)[0]
        logits[model.n_vocab :] = -np.inf
        if self._request.ignore_eos:
            logits[[token for token in model.large_vocab.eos_tokens if token < len(logits)]] = -np.inf
        if matcher is not None:
            matcher.mask_into(logits)
        token = sampler.sample(model.context.pointer, -1, logits)
        return token, math.exp(float(logits[token]) - model.log_sum(logits))

    def record(self, sampled: Sequence[int], *, n_drafted: int, n_accepted: int) -> None:
        super().record(sampled, n_drafted=n_drafted, n_accepted=n_accepted)
        n_right = update_rates(self._model_runs, sampled, self._mean, self._model.mean)
        gain = self._token_cost * (_LOSS_SHARE + min(n_right, self._n_verified))
        self._model.balance = min(_MOST_LOSS, self._model.balance + gain - self._spent)
        self._model_runs = []
        self._n_verified, self._spent = 0, 0.0

    def close(self) -> None:
        """Release past answers and the draft model's sequence. Idempotent.

        Later requests may reuse the sequence, unless this request does not use the prefix cache.
        """
        super().close()
        if self._cached_seq is not None:
            self._model.kv.release(self._cached_seq, keep=self._request.cache_prompt)
            self._cached_seq = None
