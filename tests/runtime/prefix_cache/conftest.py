"""Engines with a prefix cache of their own, and requests to them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.events import Usage
from edgeinfer.runtime.prefix_cache import block_saver, cache
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.runtime.requests import GenerateRequest

from .. import conftest as engines

ROOMY = CacheLimits(max_bytes=4 << 30, margin_bytes=0)
WORDS = "river bread moon clock whale ink bridge tea salt wool map snow stone lamp door".split()


def text(n: int, start: int = 0) -> str:
    """About `n` tokens that do not repeat soon."""
    return " ".join(f"{WORDS[i * i % 15]}{i * 7 % 11}" for i in range(start, start + n // 2))


def load(path: Path, store: BlockStore | None, **options: object) -> LlamaEngine:
    engine = engines.load(path, **{"n_parallel": 4, **options})
    if store is not None:
        engine.open_prefix_cache(store)
    return engine


def ask(prompt: str | tuple[int, ...], **fields: object) -> GenerateRequest:
    return engines.ask(prompt, **{"logprobs": 3, "speculative": "off", **fields})


def heard(engine: LlamaEngine, request: GenerateRequest) -> tuple[list[object], Usage]:
    """Every token with its logprobs, bit for bit, and the usage."""
    reply = engines.answer(engine, request)
    return list(reply.logprobs), reply.finish.usage


def store_and_drop(engine: LlamaEngine) -> None:
    """Write what the engine has in memory to the disk, and forget it."""
    assert engine.flush_blocks()
    engine.between_steps(engine._core.kv.drop_idle)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may read slower than it computes: what is tested here is what comes back."""
    monkeypatch.setattr(cache, "_MIN_WAIT_S", 600.0)


@pytest.fixture
def writes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write to the disk however fast a small model computes."""
    monkeypatch.setattr(block_saver, "_MIN_PREFILL_S", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "blocks", ROOMY)


@pytest.fixture
def engine(store: BlockStore, smollm2: Path) -> Iterator[LlamaEngine]:
    with closing(load(smollm2, store)) as opened:
        yield opened
