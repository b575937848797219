"""Sample tokens of a request with llama.cpp's sampler chains."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.requests import Sampling

_NEUTRAL_MIN_KEEP = 1
#: The struct llama_token_data.
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
#: `_best` arranges the logits in this many columns, and sorts only logits that are at least the
#: `top_k`-th largest of the columns' maxima. A `top_k` above the number of columns is left to
#: llama.cpp, which copies the whole vocabulary first.
_COLUMNS = 1024


def _penalises(s: Sampling) -> bool:
    return s.repeat_last_n != 0 and (
        s.repeat_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
    )


class Sampler:
    """The sampler of one request. Not thread-safe; call `close` at the end.

    `history`: how many tokens at the prompt's end must be passed to `accept`, for the penalties.
    """

    def __init__(self, vocab: Vocab, sampling: Sampling, *, seed: int, n_ctx: int) -> None:
        self._choice = _chain(_choice_stages(sampling, seed))
        self._penalties = _chain(_penalty_stages(vocab, sampling, n_ctx))
        self.history = _history(sampling, n_ctx) if sampling.penalize_prompt else 0
        #: Logit bias by token. A token that has no bias, but may be penalized, is entered with 0.0.
        self._biases = dict(sampling.logit_bias)
        self._top_k = sampling.top_k if 0 < sampling.top_k <= _COLUMNS else 0

    def sample(self, context: Any, row: int, logits: npt.NDArray[np.float32]) -> int:
        """Sample a token, and add that token to the penalties' history.

        `logits` is a view of row `row` of the context's logits. A negative row counts from the end.
        """
        if not self._biases:
            token = self._choose(context, row, logits)
        else:
            tokens, before = self._penalize(logits)
            token = self._choose(context, row, logits)
            logits[tokens] = before
        self.accept((token,))
        return token

    def _choose(self, context: Any, row: int, logits: npt.NDArray[np.float32]) -> int:
        if self._choice is None:
            return int(logits.argmax())
        candidates = self._best(logits)
        if not len(candidates):
            return int(L.llama_sampler_sample(self._choice, context, row))
        return int(candidates["id"][_apply(self._choice, candidates, is_sorted=True)])

    def _best(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.void]:
        """Return the `top_k` largest logits in order (equal ones by token); [] if `top_k` is 0.

        Tokens that a constraint excludes, whose logits are -inf, are left out.
        """
        least, n_rows = float(np.finfo(np.float32).min), self._top_k and len(logits) // _COLUMNS
        if n_rows:  # the maxima of `top_k` columns are a lower bound of the `top_k` largest logits
            largest = logits[: n_rows * _COLUMNS].reshape(n_rows, _COLUMNS).max(axis=0)
            least = max(least, float(np.partition(largest, -self._top_k)[-self._top_k]))
        tokens = np.flatnonzero(logits >= least) if self._top_k else np.empty(0, np.int64)
        values = logits[tokens]
        order = np.argsort(-values, kind="stable")[: self._top_k]
        candidates = np.zeros(len(order), _CANDIDATE)
        candidates["id"], candidates["logit"] = tokens[order], values[order]
        return candidates

    def _penalize(
        self, logits: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Add biases and penalties to `logits`; return the changed tokens and their earlier logits.

        Only these tokens are passed to llama.cpp, whose penalties look up each token in a table.
        """
        n = len(self._biases)
        tokens = np.fromiter(self._biases, np.int64, n)
        biases = np.fromiter(self._biases.values(), np.float32, n)
        is_known = tokens < len(logits)  # a draft model's vocabulary may be smaller
        tokens = tokens[is_known]
        before = logits[tokens]
        candidates = np.zeros(len(tokens), _CANDIDATE)
        candidates["id"] = tokens
        candidates["logit"] = before + biases[is_known]
        if self._penalties is not None:
            _apply(self._penalties, candidates)
        logits[tokens] = candidates["logit"]
        return tokens, before

    def accept(self, tokens: Iterable[int]) -> None:
        """Add tokens to the penalties' history."""
        if self._penalties is not None:
            for token in tokens:
                L.llama_sampler_accept(self._penalties, token)
                self._biases.setdefault(token, 0.0)

    def copy(self) -> Sampler:
        """Return a sampler with the same history and the same state of the random generator."""
        twin = object.__new__(Sampler)
        twin._choice, twin._penalties = (
            None if chain is None else L.llama_sampler_clone(chain)
            for chain in (self._choice, self._penalties)
        )
        twin.history, twin._biases = self.history, self._biases.copy()
        twin._top_k = self._top_k
        return twin

    def close(self) -> None:
        """Free llama.cpp's sampler chains. Idempotent."""
        for chain in (self._choice, self._penalties):
            if chain is not None:
                L.llama_sampler_free(chain)
        self._choice = self._penalties = None

    def __del__(self) -> None:
        self.close()


def _apply(chain: Any, candidates: npt.NDArray[np.void], *, is_sorted: bool = False) -> int:
    """Apply the stages of `chain` to candidates, in place; return the chosen index, -1 for none."""
    data = ctypes.cast(candidates.ctypes.data, L.llama_token_data_p)
    array = L.llama_token_data_array(data, len(candidates), -1, is_sorted)
    L.llama_sampler_apply(chain, ctypes.byref(array))
    return int(array.selected)


def _history(s: Sampling, n_ctx: int) -> int:
    """Return how many of the last tokens the penalties need. A negative option means all."""
    lengths = [s.repeat_last_n] if _penalises(s) else []
    if s.dry_multiplier:
        lengths.append(s.dry_penalty_last_n)
    return max((n_ctx if n < 0 else n for n in lengths), default=0)


def _chain(stages: Iterable[Any]) -> Any:
    """Return a llama_sampler chain of the stages, None without stages."""
    if not (stages := list(stages)):
        return None
    params = L.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = L.llama_sampler_chain_init(params)
    for stage in stages:
        L.llama_sampler_chain_add(chain, stage)
    return chain


def _penalty_stages(vocab: Vocab, s: Sampling, n_ctx: int) -> Iterable[Any]:
    """Yield llama.cpp's samplers that penalize repeated tokens."""
    if _penalises(s):
        last_n = n_ctx if s.repeat_last_n < 0 else s.repeat_last_n
        yield L.llama_sampler_init_penalties(
            vocab.n_vocab, last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
        )
    if s.dry_multiplier:
        breakers = [b.encode() for b in s.dry_sequence_breakers]
        array = (ctypes.c_char_p * len(breakers))(*breakers)
        last_n = n_ctx if s.dry_penalty_last_n < 0 else s.dry_penalty_last_n
        lengths = (s.dry_allowed_length, last_n)
        yield L.llama_sampler_init_dry(
            vocab.pointer, s.dry_multiplier, s.dry_base, *lengths, array, len(breakers)
        )


def _choice_stages(s: Sampling, seed: int) -> Iterable[Any]:
    """Yield llama.cpp's samplers that draw a token; none for greedy sampling."""
    if s.temperature <= 0:
        return
    if s.top_k > 0:
        yield L.llama_sampler_init_top_k(s.top_k)
    if s.top_p < 1.0:
        yield L.llama_sampler_init_top_p(s.top_p, _NEUTRAL_MIN_KEEP)
    if s.min_p > 0.0:
        yield L.llama_sampler_init_min_p(s.min_p, _NEUTRAL_MIN_KEEP)
    yield L.llama_sampler_init_temp(s.temperature)
    yield L.llama_sampler_init_dist(seed)
