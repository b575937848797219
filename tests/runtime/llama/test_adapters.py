"""LoRA adapters, loaded with the model and while it runs, on the real small model; the adapters are
random numbers.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from made_models import make_adapter
from msgspec.structs import replace
from other_processes import run_python

from edgeinfer.errors import InvalidRequestError, ModelLoadError
from edgeinfer.platform.disk import sha256_of
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import Finished, TextDelta, TokenLogprobs, Usage
from edgeinfer.runtime.llama import lora
from edgeinfer.runtime.options import Adapter, LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache import cache
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.runtime.requests import GenerateRequest

from .. import conftest as engines
from ..conftest import answer, load

Lora = tuple[tuple[str, float], ...]
PROMPT = "A short note about rivers, their springs, their mouths, and the towns that lie between them:"
OPTIONS = LoadOptions(n_ctx=1024, n_parallel=4, kv_type="q8_0")


def with_lora(*paths: str) -> LoadOptions:
    return replace(OPTIONS, lora=",".join(paths))


@pytest.fixture(scope="module")
def engine(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaEngine]:
    folder = tmp_path_factory.mktemp("lora")
    names = enumerate(["red", "blue"])
    adapters = [make_adapter(folder / f"{name}.gguf", seed) for seed, name in names]
    files = ModelFiles(name="smol", paths=(str(smollm2),))
    with closing(load_engine(files, with_lora(*adapters))) as opened:
        yield opened


def ask(lora: Lora | None = (), **fields: object) -> GenerateRequest:
    usual = {"prompt": "A short note about rivers:", "max_tokens": 16}
    return engines.ask(**{**usual, "lora": lora, **fields})  # type: ignore[arg-type]


def text_of(engine: LlamaEngine, lora: Lora | None) -> str:
    return answer(engine, ask(lora, cache_prompt=False)).text


def score(
    engine: LlamaEngine, lora: Lora | None = None, prompt: str = PROMPT, *, cached: bool = True
) -> tuple[list[TokenLogprobs], Usage]:
    """The tokens of a greedy answer with their log-probabilities, and its usage."""
    found = answer(engine, ask(lora, prompt=prompt, logprobs=0, cache_prompt=cached))
    return found.logprobs, found.finish.usage


def test_request_without_adapters_gets_all_at_scale_1(engine: LlamaEngine) -> None:
    both = text_of(engine, (("red", 1.0), ("blue", 1.0)))
    assert text_of(engine, None) == both != text_of(engine, ())
    assert text_of(engine, (("red", 0.0),)) == text_of(engine, ())


def test_an_adapter_is_loaded_with_a_scale_of_its_own(
    engine: LlamaEngine, smollm2: Path, tmp_path: Path
) -> None:
    """As a model's own adapter is by default."""
    red = make_adapter(tmp_path / "red.gguf", 0)
    files = ModelFiles(name="smol", paths=(str(smollm2),), lora=f"{red}:0.5")
    with closing(load_engine(files, OPTIONS)) as opened:
        assert text_of(opened, None) == text_of(engine, (("red", 0.5),))


def test_cached_prefix_is_separate_per_adapter(engine: LlamaEngine) -> None:
    long = {"prompt": "one two three four five six seven eight nine ten eleven twelve", "max_tokens": 1}

    def count_cached(lora: Lora) -> int:
        return answer(engine, ask(lora, **long)).finish.usage.cached_tokens

    assert count_cached((("red", 0.7),)) == 0
    assert count_cached((("red", 0.7),)) > 8
    assert count_cached((("blue", 0.7),)) == 0


@pytest.mark.parametrize(
    "lora",
    [(("green", 1.0),), (("red", 1.0), ("red", 1.0)), (("red", float("nan")),), (("red", 1000.0),)],
)
def test_invalid_adapters_are_refused(engine: LlamaEngine, lora: Lora) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        engine.submit(ask(lora))
    assert refused.value.param == "lora"


def test_a_file_that_is_no_adapter_is_refused_at_load(
    smollm2: Path, gemma3: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match="there is no"):
        load_engine(ModelFiles(name="x", paths=(str(smollm2),)), with_lora(str(tmp_path / "none.gguf")))
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"junk" * 100)
    for path in (gemma3, junk):
        with pytest.raises(ModelLoadError, match=f"{path} is not an adapter in GGUF form"):
            load_engine(ModelFiles(name="x", paths=(str(smollm2),)), with_lora(str(path)))


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -float("inf"), 3e38, -1e6])
def test_an_adapter_with_an_absurd_alpha_is_refused(
    bare: LlamaEngine, tmp_path: Path, alpha: float
) -> None:
    before = text_of(bare, ())
    made = Adapter("odd", make_adapter(tmp_path / "odd.gguf", 1, rank=1, alpha=alpha))
    with pytest.raises(ModelLoadError, match=r'"odd" has an alpha of (nan|-?inf|3e\+38|-1e\+06)'):
        bare.use_adapters([made])
    assert text_of(bare, ()) == before


@pytest.fixture
def bare(smollm2: Path) -> Iterator[LlamaEngine]:
    with closing(load(smollm2, n_ctx=1024, n_parallel=2, kv_type="f16")) as opened:
        yield opened


@pytest.fixture
def red(tmp_path: Path) -> Adapter:
    path = make_adapter(tmp_path / "red.gguf", 1, strength=0.5)
    return Adapter("red", path, sha256=sha256_of(Path(path)))


def test_unloaded_adapter_leaves_no_cache(bare: LlamaEngine, red: Adapter) -> None:
    """Neither in what is said, nor in the cache, nor in memory; also where another has its name."""
    plain, _ = score(bare)
    used = bare.metrics().kv_used_tokens
    assert bare.use_adapters([red]) == bare.info.lora == (red,)
    coloured, usage = score(bare)
    assert coloured != plain
    assert usage.cached_tokens == 0
    assert bare.use_adapters([]) == bare.info.lora == ()
    assert bare.metrics().kv_used_tokens == used
    with pytest.raises(InvalidRequestError, match="loaded: none"):
        score(bare, (("red", 1.0),))
    after, usage = score(bare)
    assert after == plain
    assert usage.cached_tokens > 0  # of the model's own

    blue = make_adapter(Path(red.path).with_name("blue.gguf"), 2, strength=0.5)
    bare.use_adapters([Adapter("red", blue)])
    other, usage = score(bare)
    assert other not in (plain, coloured)
    assert usage.cached_tokens == 0
    make_adapter(Path(blue), 1, strength=0.5)  # the file is another one now
    bare.use_adapters([Adapter("red", blue)])
    assert score(bare)[0] == coloured
    for _ in range(3):
        bare.use_adapters([])
        bare.use_adapters([red])
    assert score(bare)[0] == coloured
    bare.use_adapters([])
    assert score(bare)[0] == plain


def test_memory_comes_back(bare: LlamaEngine, tmp_path: Path) -> None:
    large = Adapter("large", make_adapter(tmp_path / "large.gguf", 1, rank=1024))

    def private() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    bare.use_adapters([large])
    score(bare)
    bare.use_adapters([])
    before, half = private(), os.path.getsize(large.path) // 2
    for _ in range(3):
        bare.use_adapters([large])
        assert private() > before + half
        bare.use_adapters([])
    assert private() < before + half


def test_blocks_of_an_adapter_are_never_the_models_own(
    bare: LlamaEngine, red: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV blocks on disk are found with the same adapter alone."""
    monkeypatch.setattr(cache, "_MIN_WAIT_S", 600.0)
    limits = CacheLimits(max_bytes=1 << 30, margin_bytes=0)
    bare.open_prefix_cache(BlockStore(tmp_path / "blocks", limits))
    bare.use_adapters([red])
    coloured, first = score(bare, prompt=PROMPT * 20)
    bare.use_adapters([])  # what was computed is written before it is forgotten
    assert bare.flush_blocks()
    assert score(bare, prompt=PROMPT * 20)[1].cached_tokens == 0
    bare.use_adapters([red])
    again, usage = score(bare, prompt=PROMPT * 20)
    assert [one.chosen.piece for one in again] == [one.chosen.piece for one in coloured]
    assert usage.cached_disk_tokens == first.prompt_tokens - 1


def test_adapter_is_unloaded_after_its_last_request(bare: LlamaEngine, red: Adapter) -> None:
    bare.use_adapters([red])
    events = iter(bare.submit(ask(None, prompt=PROMPT, max_tokens=200)))
    while not isinstance(next(events), TextDelta):
        continue
    going = threading.Thread(target=lambda: bare.use_adapters([]))
    going.start()
    while bare.info.lora:
        continue
    with pytest.raises(InvalidRequestError):
        score(bare, (("red", 1.0),))
    assert isinstance(list(events)[-1], Finished)
    going.join(60)
    assert not going.is_alive()


def test_refused_adapter_change_has_no_effect(bare: LlamaEngine, red: Adapter, gemma3: Path) -> None:
    bare.use_adapters([red])
    coloured, _ = score(bare, cached=False)
    missing = Adapter("none", red.path + ".none")
    for wanted, error in (
        ([red, missing], ModelLoadError),
        ([Adapter("model", str(gemma3))], ModelLoadError),
        ([red, Adapter("twin", red.path)], InvalidRequestError),
        ([Adapter("red", red.path, 1000.0)], InvalidRequestError),
    ):
        with pytest.raises(error):
            bare.use_adapters(wanted)
    assert bare.info.lora == (red,)
    assert score(bare, cached=False)[0] == coloured


def test_record_has_the_digest_of_the_adapter_as_it_was_loaded(bare: LlamaEngine, red: Adapter) -> None:
    """Also where its file, or the adapter of its name, is another one by then."""
    bare.use_adapters([red])
    make_adapter(Path(red.path), 2, strength=0.5)
    running = bare.submit(ask((("red", 0.5),), record_tokens=True))
    end = list(running)[-1]
    bare.use_adapters([Adapter("red", make_adapter(Path(red.path).with_name("blue.gguf"), 2))])
    assert isinstance(end, Finished)
    assert end.record is not None
    assert end.record.adapters == (replace(red, scale=0.5),)
    assert bare.info.lora[0].sha256 != red.sha256


def test_an_adapter_that_changes_during_its_load_is_refused(
    bare: LlamaEngine, red: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(path: Path) -> str:
        make_adapter(path, 2, strength=0.5)
        return sha256_of(path)

    monkeypatch.setattr(lora, "sha256_of", digest)
    with pytest.raises(ModelLoadError, match="was changed"):
        bare.use_adapters([red])
    assert bare.info.lora == ()


_GUARDED = """
import sys
from edgeinfer.runtime.llama import libllama
libllama.guard_calls()
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles
model, adapter = sys.argv[1:]
files = ModelFiles(name="smol", paths=(model,))
engine = load_engine(files, LoadOptions(n_ctx=256, lora=adapter))
print("loaded")
engine.close()
"""


def test_adapter_is_loaded_where_calls_survive_a_lost_device(smollm2: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "red.gguf", 0)
    assert run_python(_GUARDED, smollm2, adapter) == "loaded\n"
