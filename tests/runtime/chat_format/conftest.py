"""The real models' vocabularies, and texts drawn from constraints."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as L
from numpy.typing import NDArray

from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.requests import Constraint
from edgeinfer.runtime.sampling.grammar import Constraints, Lark, TokenMatcher


def _vocab(path: Path) -> Iterator[Vocab]:
    libllama.lib()
    params = L.llama_model_default_params()
    params.vocab_only = True
    model = L.llama_model_load_from_file(str(path).encode(), params)
    yield Vocab(model)
    L.llama_model_free(model)


@pytest.fixture(scope="session")
def vocab(smollm2: Path) -> Iterator[Vocab]:
    """SmolLM2's 49,152 tokens."""
    yield from _vocab(smollm2)


@pytest.fixture(scope="session")
def big_vocab(gemma3: Path) -> Iterator[Vocab]:
    """Gemma 3's 262,144 tokens, of a SentencePiece vocabulary with byte tokens."""
    yield from _vocab(gemma3)


@pytest.fixture(scope="session")
def constraints(vocab: Vocab) -> Constraints:
    compiler = Constraints()
    compiler.token_table(vocab)
    return compiler


def allowed_tokens(matcher: TokenMatcher, vocab: Vocab) -> list[int]:
    return [int(token) for token in _allowed_ids(matcher, vocab)]


def _allowed_ids(matcher: TokenMatcher, vocab: Vocab) -> NDArray[np.intp]:
    logits = np.zeros(vocab.n_vocab, np.float32)
    matcher.mask_into(logits)
    return np.flatnonzero(logits == 0)


def draw_text(
    constraints: Constraints, vocab: Vocab, constraint: Constraint | Lark, seed: int, limit: int = 600
) -> str | None:
    """A text drawn at random from what the masks allow; None when it takes more than `limit` steps."""
    rng = np.random.default_rng(seed)
    matcher = constraints.compile(constraint, vocab).copy()
    text = b""
    for _ in range(limit):
        forced = list(matcher.forced_tokens())
        if not forced:
            forced = [int(rng.choice(_allowed_ids(matcher, vocab)))]  # a list of it takes 10 ms
        for token in forced:
            if token in vocab.eos_tokens:
                return text.decode()
            assert matcher.accept(token)
            text += vocab.piece(token, special=True)
        if matcher.is_done:
            return text.decode()
    return None
