"""LoRA adapters that come and go while the model runs, on the real small model."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_models import make_adapter

from edgeinfer.errors import InvalidRequestError, ModelLoadError
from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.events import Finished, TextDelta
from edgeinfer.runtime.options import Adapter
from edgeinfer.runtime.prefix_cache import lookup
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.runtime.prefix_cache.store import BlockStore
from edgeinfer.runtime.requests import GenerateRequest, Sampling

from .conftest import load

PROMPT = "A short note about rivers, their springs, their mouths, and the towns that lie between them:"


@pytest.fixture
def engine(smollm2: Path) -> Iterator[LlamaEngine]:
    opened = load(smollm2, n_ctx=1024, n_parallel=2, kv_type="f16")
    yield opened
    opened.close()


@pytest.fixture
def red(tmp_path: Path) -> Adapter:
    return Adapter("red", make_adapter(tmp_path / "red.gguf", 1, strength=0.5))


def ask(
    engine: LlamaEngine,
    lora: tuple[tuple[str, float], ...] | None = None,
    prompt: str = PROMPT,
    *,
    cached: bool = True,
) -> tuple[list[TextDelta], Finished]:
    """A greedy answer with the log-probabilities of its tokens, and how it ended."""
    sampling = Sampling(temperature=0)
    request = GenerateRequest(
        prompt=prompt,
        sampling=sampling,
        max_tokens=16,
        ignore_eos=True,
        lora=lora,
        logprobs=0,
        cache_prompt=cached,
    )
    *said, end = engine.submit(request)
    assert isinstance(end, Finished)
    return [e for e in said if isinstance(e, TextDelta)], end


def text_of(said: list[TextDelta]) -> str:
    return "".join(e.text for e in said)


def test_unloaded_adapter_leaves_no_cache(engine: LlamaEngine, red: Adapter) -> None:
    """Neither in what is said, nor in the cache, nor in memory; also where another has its name."""
    plain, _ = ask(engine)
    used = engine.metrics().kv_used_tokens
    assert engine.use_adapters([red]) == engine.info.lora == (red,)
    coloured, first = ask(engine)
    assert coloured != plain
    assert first.usage.cached_tokens == 0
    assert engine.use_adapters([]) == engine.info.lora == ()
    assert engine.metrics().kv_used_tokens == used
    with pytest.raises(InvalidRequestError, match="loaded: none"):
        ask(engine, (("red", 1.0),))
    after, last = ask(engine)
    assert after == plain
    assert last.usage.cached_tokens > 0  # of the model's own

    blue = make_adapter(Path(red.path).with_name("blue.gguf"), 2, strength=0.5)
    engine.use_adapters([Adapter("red", blue)])
    other, found = ask(engine)
    assert other not in (plain, coloured)
    assert found.usage.cached_tokens == 0
    make_adapter(Path(blue), 1, strength=0.5)  # the file is another one now
    engine.use_adapters([Adapter("red", blue)])
    assert ask(engine)[0] == coloured
    for _ in range(3):
        engine.use_adapters([])
        engine.use_adapters([red])
    assert ask(engine)[0] == coloured
    engine.use_adapters([])
    assert ask(engine)[0] == plain


def test_memory_comes_back(engine: LlamaEngine, tmp_path: Path) -> None:
    large = Adapter("large", make_adapter(tmp_path / "large.gguf", 1, rank=1024))

    def private() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    engine.use_adapters([large])
    ask(engine)
    engine.use_adapters([])
    before, half = private(), os.path.getsize(large.path) // 2
    for _ in range(3):
        engine.use_adapters([large])
        assert private() > before + half
        engine.use_adapters([])
    assert private() < before + half


def test_blocks_of_an_adapter_are_never_the_models_own(
    engine: LlamaEngine, red: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV blocks on disk are found with the same adapter alone."""
    monkeypatch.setattr(lookup, "_PATIENCE_S", 600.0)
    engine.use_blocks(BlockStore(tmp_path / "blocks", CacheLimits(max_bytes=1 << 30, margin_bytes=0)))
    engine.use_adapters([red])
    coloured, first = ask(engine, prompt=PROMPT * 20)
    engine.use_adapters([])  # what was computed is written before it is forgotten
    assert engine.flush_blocks()
    assert ask(engine, prompt=PROMPT * 20)[1].usage.cached_tokens == 0
    engine.use_adapters([red])
    again, end = ask(engine, prompt=PROMPT * 20)
    assert text_of(again) == text_of(coloured)
    assert end.usage.cached_disk_tokens == first.usage.prompt_tokens - 1


def test_adapter_is_unloaded_after_its_last_request(engine: LlamaEngine, red: Adapter) -> None:
    engine.use_adapters([red])
    request = GenerateRequest(
        prompt=PROMPT, sampling=Sampling(temperature=0), max_tokens=200, ignore_eos=True
    )
    running = engine.submit(request)
    events = iter(running)
    while not isinstance(next(events), TextDelta):
        continue
    going = threading.Thread(target=lambda: engine.use_adapters([]))
    going.start()
    while engine.info.lora:
        continue
    with pytest.raises(InvalidRequestError):
        ask(engine, (("red", 1.0),))
    assert isinstance(list(events)[-1], Finished)
    going.join(60)
    assert not going.is_alive()


def test_refused_adapter_change_has_no_effect(engine: LlamaEngine, red: Adapter, gemma3: Path) -> None:
    engine.use_adapters([red])
    coloured, _ = ask(engine, cached=False)
    missing = Adapter("none", red.path + ".none")
    for wanted, error in (
        ([red, missing], ModelLoadError),
        ([Adapter("model", str(gemma3))], ModelLoadError),
        ([red, Adapter("twin", red.path)], InvalidRequestError),
        ([Adapter("red", red.path, 1000.0)], InvalidRequestError),
    ):
        with pytest.raises(error):
            engine.use_adapters(wanted)
    assert engine.info.lora == (red,)
    assert ask(engine, cached=False)[0] == coloured
