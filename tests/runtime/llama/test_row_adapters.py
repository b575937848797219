"""LoRA adapters of single rows (native/adapters.cpp): rows with different adapters share a step and are
bit-identical to those computed alone; what the kernels cannot add, llama.cpp computes in steps of its own.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from made_models import make_adapter

from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import TokenLogprobs
from edgeinfer.runtime.llama import libllama, row_adapters
from edgeinfer.runtime.options import Adapter, LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest

from .. import conftest as engines
from ..conftest import collect

Lora = tuple[tuple[str, float], ...]
ALL = ("attn_output", "attn_k", "ffn_up", "ffn_down")
N_TOKENS = 12
#: Sets of adapters, of several ranks, types and scales.
SETS: tuple[Lora, ...] = (
    (),
    (("a", 1.0),),
    (("b", 1.0),),
    (("c", -0.5),),
    (("d", 2.0),),
    (("a", 0.3), ("c", 1.0)),
    (),
    (("a", 1.0),),
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Adapter, ...]:
    folder = tmp_path_factory.mktemp("lora")
    paths = {
        "a": make_adapter(folder / "a.gguf", 0, 0.05, 16, modules=ALL),
        "b": make_adapter(folder / "b.gguf", 1, 0.05, 4, modules=ALL, kind=Kind.F16, alpha=2),
        "c": make_adapter(folder / "c.gguf", 2, 0.05, 3, modules=ALL[2:], kind=Kind.BF16),
        "d": make_adapter(folder / "d.gguf", 3, 0.05, 8),
    }
    return tuple(Adapter(name, path, 0.0) for name, path in paths.items())


def open_engine(smollm2: Path, adapters: tuple[Adapter, ...], **options: Any) -> LlamaEngine:
    lora = ",".join(f"{adapter.path}:{adapter.scale}" for adapter in adapters)
    load = LoadOptions(n_ctx=1024, n_parallel=len(SETS), lora=lora, **options)
    return load_engine(ModelFiles(name="smol", paths=(str(smollm2),)), load)


@pytest.fixture(scope="module", params=[1, 2])
def engine(
    request: pytest.FixtureRequest, smollm2: Path, adapters: tuple[Adapter, ...]
) -> Iterator[LlamaEngine]:
    if not libllama.build_info().kernels:
        pytest.skip("no kernels for this processor")
    with closing(open_engine(smollm2, adapters, n_threads=request.param)) as engine:
        yield engine


def ask(i: int, lora: Lora, **fields: Any) -> GenerateRequest:
    usual = {"max_tokens": N_TOKENS, "cache_prompt": False, "logprobs": 3, "speculative": "off"}
    prompt = "The towns, " * (1 + 7 * i) + "and the rivers: the towns,"
    return engines.ask(prompt, **{**usual, "lora": lora, **fields})


def answers(engine: LlamaEngine, requests: list[GenerateRequest]) -> list[list[TokenLogprobs]]:
    """The tokens of all answers, computed at once, with the log-probabilities of the likeliest."""
    return [reply.logprobs for reply in engines.answers(engine, requests)]


def alone(engine: LlamaEngine, requests: list[GenerateRequest]) -> list[list[TokenLogprobs]]:
    return [answers(engine, [request])[0] for request in requests]


def test_rows_of_any_adapters_share_steps_and_are_bit_identical_to_unbatched_ones(
    engine: LlamaEngine,
) -> None:
    requests = [ask(i, lora) for i, lora in enumerate(SETS)]
    unbatched = alone(engine, requests)
    before = engine.metrics().steps_total
    assert answers(engine, requests) == unbatched
    assert engine.metrics().steps_total - before < 2 * N_TOKENS
    same_prompt = alone(engine, [ask(0, lora) for lora in SETS[:6]])
    assert len({str(answer) for answer in same_prompt}) == 6


def test_draft_tokens_of_a_row_with_an_adapter_are_bit_identical(engine: LlamaEngine) -> None:
    unbatched = alone(engine, [ask(i, lora) for i, lora in enumerate(SETS)])
    drafted = [ask(i, lora, speculative="ngram") for i, lora in enumerate(SETS)]
    assert alone(engine, drafted) == unbatched
    assert engine.metrics().draft_tokens_total > 0


def test_adapters_that_come_and_go_leave_other_rows_as_they_are(
    engine: LlamaEngine, adapters: tuple[Adapter, ...]
) -> None:
    requests = [ask(i, lora, max_tokens=60) for i, lora in enumerate(SETS[:3])]
    unbatched = alone(engine, requests)
    running = [engine.submit(request) for request in requests]
    engine.use_adapters(adapters[:2])
    engine.use_adapters(adapters)
    assert [collect(generation).logprobs for generation in running] == unbatched
    told, asked = ([(a.name, a.path, a.scale) for a in of] for of in (engine.info.lora, adapters))
    assert told == asked


def prompt_scores(engine: LlamaEngine, lora: Lora) -> np.ndarray:
    """Log-probabilities of the tokens of one prompt."""
    prompt = engines.answer(engine, ask(3, lora, max_tokens=1, prompt_logprobs=0)).prompt
    return np.array([token.chosen.logprob for token in prompt.tokens])


def test_kernels_add_what_llama_cpp_computes(
    engine: LlamaEngine, smollm2: Path, adapters: tuple[Adapter, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_scores = [prompt_scores(engine, lora) for lora in SETS]
    monkeypatch.setattr(row_adapters, "_GET_TENSOR", "no such function")
    with closing(open_engine(smollm2, adapters)) as llamas:
        llama_scores = [prompt_scores(llamas, lora) for lora in SETS]
    for lora, kernel_score, llama_score in zip(SETS, kernel_scores, llama_scores, strict=True):
        changed = abs(kernel_score - kernel_scores[0]).mean()
        assert abs(kernel_score - llama_score).mean() <= changed / 5
        assert changed > 0.1 or not lora


def test_adapters_of_other_types_take_turns(
    smollm2: Path, adapters: tuple[Adapter, ...], tmp_path: Path
) -> None:
    """Products with a quantized A or B are llama.cpp's, in steps of their own."""
    modules = ("ffn_up", "ffn_down")
    path = make_adapter(tmp_path / "q.gguf", 5, 0.01, 32, modules=modules, kind=Kind.Q8_0)
    with closing(open_engine(smollm2, (*adapters, Adapter("q", path, 0.0)))) as engine:
        sets: list[Lora] = [(), (("a", 1.0),), (("q", 1.0),), (("a", 1.0), ("q", 1.0))]
        requests = [ask(i, lora) for i, lora in enumerate(sets)]
        unbatched = alone(engine, requests)
        before = engine.metrics().steps_total
        assert answers(engine, requests) == unbatched
        assert engine.metrics().steps_total - before >= 2 * N_TOKENS
        assert len({str(answer) for answer in alone(engine, [ask(0, lora) for lora in sets])}) == 4


def test_llama_cpp_computes_adapters_that_the_kernels_missed(
    smollm2: Path, adapters: tuple[Adapter, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ask(i, lora) for i, lora in enumerate(SETS[:4])]
    with monkeypatch.context() as patch:
        patch.setattr(row_adapters, "_GET_TENSOR", "no such function")
        with closing(open_engine(smollm2, adapters)) as llamas:
            unbatched = alone(llamas, requests)
    kernels = row_adapters._kernels()
    end_adapters = kernels.edgeinfer_adapters_end
    monkeypatch.setattr(kernels, "edgeinfer_adapters_end", lambda step: end_adapters(step) and False)
    with closing(open_engine(smollm2, adapters)) as engine:
        assert alone(engine, requests) == unbatched
        assert len(answers(engine, requests)) == len(requests)
