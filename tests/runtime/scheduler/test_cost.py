"""What an answer costs: its time, and what cached tokens saved."""

import pytest
from made_models import make_llama

from edgeinfer.runtime.events import Timings
from edgeinfer.units import format_cost

from ..conftest import answer, ask, load


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = load(make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", 2048))
    yield engine
    engine.close()


def test_cached_tokens_save_what_the_measured_prefill_costs(engine):
    prompt = tuple(range(10, 200)) * 2
    first, second = (answer(engine, ask(prompt)).finish for _ in range(2))
    assert (first.usage.cached_tokens, first.timings.saved_ms) == (0, 0.0)
    measured_s = engine._core.executor.chunk_sizer.estimate_prefill_s(second.usage.cached_tokens)
    assert second.timings.saved_ms == measured_s * 1000 > 0
    assert second.timings.total_ms >= second.timings.ttft_ms


def test_resumed_engine_knows_what_its_first_prompt_saves(engine):
    engine.warm_up()
    cost = engine._core.executor.chunk_sizer.estimate_prefill_s(1000)
    assert cost > 0.0


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        ((3.2, 12_300, 250.0), "3.2 s; 12,300 cached tokens saved about 4 min 10 s"),
        ((0.25, 12, 0.4), "250 ms; 12 cached tokens saved about 400 ms"),
        ((0.25, 12, 0.0), "250 ms"),
        ((0.25, 0, 1.0), "250 ms"),
    ],
)
def test_cost_in_words(cost, text):
    assert format_cost(*cost) == text


def test_total_is_that_of_a_prefill_alone_without_a_token():
    assert Timings(queue_ms=1, prefill_ms=2).total_ms == 3
    assert Timings(queue_ms=1, prefill_ms=2, ttft_ms=4, decode_ms=5).total_ms == 9
