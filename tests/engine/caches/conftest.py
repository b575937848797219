"""Engines with a prefix cache of their own, and requests to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import Event, Finished, TextDelta, Usage
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache import lookup
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.runtime.prefix_cache.store import BlockStore
from edgeinfer.runtime.requests import GenerateRequest, Sampling

ROOMY = CacheLimits(max_bytes=4 << 30, margin_bytes=0)
WORDS = "river bread moon clock whale ink bridge tea salt wool map snow stone lamp door".split()


def text(n: int, start: int = 0) -> str:
    """About `n` tokens that do not repeat soon."""
    return " ".join(f"{WORDS[i * i % 15]}{i * 7 % 11}" for i in range(start, start + n // 2))


def load(path: Path, store: BlockStore | None, **options: object) -> LlamaEngine:
    wanted: dict[str, object] = {"n_ctx": 2048, "n_parallel": 4, **options}
    files = ModelFiles(name=path.stem, paths=(str(path),))
    engine = load_engine(files, LoadOptions(**wanted))  # type: ignore[arg-type]
    if store is not None:
        engine.use_blocks(store)
    return engine


def ask(prompt: str | tuple[int, ...], **fields: object) -> GenerateRequest:
    wanted: dict[str, object] = {
        "prompt": prompt,
        "sampling": Sampling(temperature=0),
        "max_tokens": 8,
        "ignore_eos": True,
        "logprobs": 3,
        "speculative": "off",
        **fields,
    }
    return GenerateRequest(**wanted)  # type: ignore[arg-type]


def heard(engine: LlamaEngine, request: GenerateRequest) -> tuple[list[object], Usage]:
    """Every token with its logprobs, bit for bit, and the usage."""
    events: list[Event] = list(engine.submit(request))
    assert isinstance(events[-1], Finished)
    tokens = [token for event in events if isinstance(event, TextDelta) for token in event.logprobs]
    return list(tokens), events[-1].usage


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may read slower than it computes: what is tested here is what comes back."""
    monkeypatch.setattr(lookup, "_PATIENCE_S", 600.0)


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "blocks", ROOMY)


@pytest.fixture
def engine(store: BlockStore, smollm2: Path) -> Iterator[LlamaEngine]:
    opened = load(smollm2, store)
    yield opened
    opened.close()
