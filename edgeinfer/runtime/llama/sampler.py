"""Sampling with llama.cpp's sampler chains, one per request; plain greedy sampling needs none."""

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


def is_plain_greedy(sampling: Sampling) -> bool:
    """Return whether sampling takes the largest logit: temperature 0, without biases and penalties."""
    return (
        sampling.temperature <= 0
        and not sampling.logit_bias
        and not _penalises(sampling)
        and not sampling.dry_multiplier
    )


def _penalises(s: Sampling) -> bool:
    return s.repeat_last_n != 0 and (
        s.repeat_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
    )


class Sampler:
    """One request's sampler. Owns native memory until `close`. One thread at a time.

    `history` is the number of latest prompt tokens that penalties read.
    """

    def __init__(self, vocab: Vocab, sampling: Sampling, *, seed: int, n_ctx: int) -> None:
        is_greedy = is_plain_greedy(sampling)
        self._chain = None if is_greedy else _chain(vocab, sampling, seed, n_ctx)
        is_read = sampling.penalize_prompt and not is_greedy
        self.history = _history(sampling, n_ctx) if is_read else 0

    def sample(self, context: Any, row: int, logits: npt.NDArray[np.float32]) -> int:
        """Sample from row `row`, which `logits` views, and add the token to the history.

        A negative row counts from the end of the batch's rows with logits.
        """
        if self._chain is None:
            return int(logits.argmax())
        return int(L.llama_sampler_sample(self._chain, context, row))

    def accept(self, tokens: Iterable[int]) -> None:
        """Add tokens that were not sampled here (the prompt's) to the penalties' history."""
        if self._chain is not None:
            for token in tokens:
                L.llama_sampler_accept(self._chain, token)

    def copy(self) -> Sampler:
        """Return a sampler with the same history and random state."""
        twin = object.__new__(Sampler)
        twin._chain = None if self._chain is None else L.llama_sampler_clone(self._chain)
        twin.history = self.history
        return twin

    def close(self) -> None:
        """Free the chain. Idempotent."""
        if self._chain is not None:
            L.llama_sampler_free(self._chain)
            self._chain = None

    def __del__(self) -> None:
        self.close()


def _history(s: Sampling, n_ctx: int) -> int:
    """Return how many latest tokens the penalties read; a negative option means all."""
    lengths = [s.repeat_last_n] if _penalises(s) else []
    if s.dry_multiplier:
        lengths.append(s.dry_penalty_last_n)
    return max((n_ctx if n < 0 else n for n in lengths), default=0)


def _chain(vocab: Vocab, s: Sampling, seed: int, n_ctx: int) -> Any:
    params = L.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = L.llama_sampler_chain_init(params)
    for stage in _stages(vocab, s, seed, n_ctx):
        L.llama_sampler_chain_add(chain, stage)
    return chain


def _stages(vocab: Vocab, s: Sampling, seed: int, n_ctx: int) -> Iterable[Any]:
    """Yield the sampler stages that have an effect, in llama.cpp's order; the last one samples."""
    if s.logit_bias:
        pairs = (L.llama_logit_bias * len(s.logit_bias))(*((t, b) for t, b in s.logit_bias.items()))
        yield L.llama_sampler_init_logit_bias(vocab.n_vocab, len(s.logit_bias), pairs)
    if _penalises(s):
        last_n = n_ctx if s.repeat_last_n < 0 else s.repeat_last_n
        yield L.llama_sampler_init_penalties(
            vocab.n_vocab, last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
        )
    if s.dry_multiplier:
        yield _dry(vocab, s, n_ctx)
    if s.temperature <= 0:
        yield L.llama_sampler_init_greedy()
    else:
        yield from _truncations(s)
        yield L.llama_sampler_init_temp(s.temperature)
        yield L.llama_sampler_init_dist(seed)


def _dry(vocab: Vocab, s: Sampling, n_ctx: int) -> Any:
    breakers = [b.encode() for b in s.dry_sequence_breakers]
    array = (ctypes.c_char_p * len(breakers))(*breakers)
    last_n = n_ctx if s.dry_penalty_last_n < 0 else s.dry_penalty_last_n
    return L.llama_sampler_init_dry(
        vocab.pointer, s.dry_multiplier, s.dry_base, s.dry_allowed_length, last_n, array, len(breakers)
    )


def _truncations(s: Sampling) -> Iterable[Any]:
    if s.top_k > 0:
        yield L.llama_sampler_init_top_k(s.top_k)
    if s.top_p < 1.0:
        yield L.llama_sampler_init_top_p(s.top_p, _NEUTRAL_MIN_KEEP)
    if s.min_p > 0.0:
        yield L.llama_sampler_init_min_p(s.min_p, _NEUTRAL_MIN_KEEP)
