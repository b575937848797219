"""What an answer costs: its share of the machine's energy, and what cached tokens saved."""

import itertools

import pytest
from made_models import make_llama

from edgeinfer.platform import energy
from edgeinfer.runtime.events import Finished, TextDelta, Timings
from edgeinfer.units import format_cost

from ..conftest import answer, ask, load


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = load(make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", 2048))
    yield engine
    engine.close()


@pytest.fixture
def counter(engine, tmp_path, monkeypatch):
    """A RAPL counter that the test moves on, and the engine finds behind an answer."""
    zone = tmp_path / "class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0")
    (zone / "energy_uj").write_text("0")
    monkeypatch.setattr(energy, "_SYS", tmp_path)
    answer(engine, ask())
    engine.between_steps(lambda: None)  # the answer has left
    return zone / "energy_uj"


def test_energy_is_shared_evenly_by_the_requests_that_run(engine, counter):
    def started():
        stream = iter(engine.submit(ask(max_tokens=1500)))
        return itertools.dropwhile(lambda event: not isinstance(event, TextDelta), stream)

    first = started()
    next(first)
    engine.between_steps(lambda: counter.write_text("2000000"))
    second = started()
    next(second)
    engine.between_steps(lambda: counter.write_text("8000000"))
    ends = [next(one for one in stream if isinstance(one, Finished)) for stream in (first, second)]
    assert [end.timings.joules for end in ends] == pytest.approx([5.0, 3.0])


def test_energy_that_is_not_readable_or_no_longer_so_is_none(engine, counter, tmp_path, monkeypatch):
    stream = iter(engine.submit(ask(max_tokens=1500)))
    next(event for event in stream if isinstance(event, TextDelta))
    engine.between_steps(counter.unlink)
    assert list(stream)[-1].timings.joules is None
    assert answer(engine, ask()).finished.timings.joules is None


def test_cached_tokens_save_what_the_measured_prefill_costs(engine):
    prompt = tuple(range(10, 200)) * 2
    first, second = (answer(engine, ask(prompt)).finished for _ in range(2))
    assert (first.usage.cached_tokens, first.timings.saved_ms) == (0, 0.0)
    measured_s = engine._scheduler.executor.chunks.measured_s(second.usage.cached_tokens)
    assert second.timings.saved_ms == measured_s * 1000 > 0
    assert second.timings.total_ms >= second.timings.ttft_ms


def test_resumed_engine_knows_what_its_first_prompt_saves(engine):
    engine.warm_up()
    cost = engine._scheduler.executor.chunks.measured_s(1000)
    assert cost > 0.0


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ((3.2, 141.4, 12_300, 250.0), "3.2 s, 141 J; 12,300 cached tokens saved about 4 min 10 s"),
        ((0.25, None, 12, 0.4), "250 ms; 12 cached tokens saved about 400 ms"),
        ((0.25, 0.5, 12, 0.0), "250 ms, 0.5 J"),
        ((0.25, 0.0, 0, 1.0), "250 ms, 0 J"),
    ],
)
def test_cost_in_words(cost, words):
    assert format_cost(*cost) == words


def test_total_is_that_of_a_prefill_alone_without_a_token():
    assert Timings(queue_ms=1, prefill_ms=2).total_ms == 3
    assert Timings(queue_ms=1, prefill_ms=2, ttft_ms=4, decode_ms=5).total_ms == 9
