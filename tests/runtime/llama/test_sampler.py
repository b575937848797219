"""Samplers change the logits of few tokens, for the time of one choice."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.llama import sampler as module
from edgeinfer.runtime.llama.sampler import Sampler
from edgeinfer.runtime.requests import Sampling

from ..conftest import load

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[LlamaEngine]:
    with closing(load(smollm2, n_ctx=512)) as opened:
        yield opened


def _of_vocabulary(logits: Logits) -> npt.NDArray[np.void]:
    candidates = np.zeros(len(logits), module._CANDIDATE)
    candidates["id"] = np.arange(len(logits))
    candidates["logit"] = logits
    return candidates


def penalized(sampler: Sampler, logits: Logits) -> Logits:
    """Apply llama.cpp's stages to the whole vocabulary."""
    candidates = _of_vocabulary(logits)
    module._apply(sampler._penalties, candidates)
    return candidates["logit"].copy()


@pytest.mark.parametrize("seed", range(12))
def test_penalties_and_biases_are_those_of_the_whole_vocabulary(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice, rng = random.Random(seed), np.random.default_rng(seed)
    sampling = Sampling(
        temperature=dice.choice([0, 0.8]),
        repeat_penalty=dice.choice([1.0, 1.1, 1.5]),
        presence_penalty=dice.choice([0.0, 0.3]),
        frequency_penalty=dice.choice([0.1, 0.2]),
        repeat_last_n=dice.choice([-1, 8, 64]),
        dry_multiplier=dice.choice([0.0, 0.8]),
        dry_penalty_last_n=dice.choice([-1, 64]),
        dry_sequence_breakers=(),
        logit_bias=dice.choice([{}, {3: 2.0, 40: -np.inf}]),
    )
    seen: list[Logits] = []

    def choose(sampler: Sampler, context: Any, row: int, logits: Logits) -> int:
        seen.append(logits.copy())
        return int(logits.argmax())

    monkeypatch.setattr(Sampler, "_choose", choose)
    with closing(Sampler(engine._input_processor.vocab, sampling, seed=1, n_ctx=512)) as sampler:
        sampler.accept(dice.randrange(60) for _ in range(20))
        for _ in range(80):
            logits = rng.standard_normal(engine.info.n_vocab).astype(np.float32)
            logits[:60] += 6
            before, biased = logits.copy(), logits.copy()
            for token, bias in sampling.logit_bias.items():
                biased[token] += np.float32(bias)
            expected = penalized(sampler, biased)
            sampler.sample(None, 0, logits)
            assert (seen.pop() == expected).all()
            assert (logits == before).all()


@pytest.mark.parametrize("seed", range(12))
def test_choices_among_the_best_are_those_of_the_whole_vocabulary(
    engine: LlamaEngine, seed: int
) -> None:
    """With rows of other shapes in turn: flat, steep, with few tokens that a constraint leaves."""
    dice, rng = random.Random(seed), np.random.default_rng(seed)
    sampling = Sampling(
        temperature=dice.choice([0.3, 0.8, 2.0]),
        top_k=dice.choice([1, 5, 40, 256]),
        top_p=dice.choice([0.5, 0.95, 1.0]),
        min_p=dice.choice([0.0, 0.05]),
    )
    samplers = [
        Sampler(engine._input_processor.vocab, sampling, seed=seed, n_ctx=512) for _ in range(2)
    ]
    with closing(samplers[0]) as sampler, closing(samplers[1]) as other:
        for _ in range(60):
            logits = rng.standard_normal(dice.choice([100, 20_000])).astype(np.float32)
            logits *= dice.choice([0.1, 3, 40])
            if dice.random() < 0.3:
                logits[dice.choice([1, 30]) :] = -np.inf
            candidates = _of_vocabulary(logits)
            chosen = module._apply(other._choice, candidates)
            assert sampler.sample(None, 0, logits) == candidates["id"][chosen]
            if dice.random() < 0.1:
                sampler = sampler.copy()


def test_equal_logits_are_ordered_by_token(engine: LlamaEngine) -> None:
    sampling = Sampling(temperature=1, top_k=2, top_p=1, min_p=0)
    logits = np.zeros(500, np.float32)
    logits[[7, 300, 400]] = 1
    with closing(Sampler(engine._input_processor.vocab, sampling, seed=1, n_ctx=512)) as sampler:
        assert {sampler.sample(None, 0, logits) for _ in range(40)} == {7, 300}


def test_a_vocabulary_that_is_smaller_than_the_history_s_is_sampled(engine: LlamaEngine) -> None:
    """As a draft model's may be."""
    sampling = Sampling(temperature=0, repeat_penalty=9.0, logit_bias={engine.info.n_vocab - 1: 50.0})
    with closing(Sampler(engine._input_processor.vocab, sampling, seed=1, n_ctx=512)) as sampler:
        sampler.accept([7, engine.info.n_vocab - 2])
        logits = np.zeros(100, np.float32)
        logits[7], logits[9] = 3, 2
        assert sampler.sample(None, 0, logits) == 9
        assert logits[7] == 3
