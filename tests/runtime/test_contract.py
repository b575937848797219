"""What every engine promises: the scripted one, the same in a worker, and the real one."""

import asyncio
import math
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from fake_engine import Delay, FakeEngine

from edgeinfer.errors import EngineClosedError, InvalidRequestError, UsageError
from edgeinfer.host import ProcessStart
from edgeinfer.runtime.events import Event, Finished, Progress, TextDelta
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling, Tool
from edgeinfer.workers.remote_engine import RemoteEngine, serve_engine

from .conftest import GREEDY, collect, load

QUESTION = (Message(role="user", content="Count from one to twenty."),)


def _open(kind: str, smollm2: Path) -> Engine:
    if kind == "real":
        return load(smollm2, n_ctx=1024, n_parallel=4)
    fake = FakeEngine([[item for i in range(900) for item in (f"word{i} ", Delay(0.002))]])
    if kind == "fake":
        return fake
    live_server, worker_end = socket.socketpair()
    serving = (worker_end, lambda progress: (fake, ProcessStart()))
    threading.Thread(target=serve_engine, args=serving, daemon=True).start()
    return RemoteEngine(live_server)


@pytest.fixture(scope="module", params=["fake", "remote", "real"])
def engine(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[Engine]:
    opened = _open(request.param, smollm2)
    yield opened
    opened.close()


def ask(engine: Engine, **fields: object) -> list[Event]:
    request_fields = {"messages": QUESTION, "sampling": GREEDY, "max_tokens": 12, **fields}
    return list(engine.submit(GenerateRequest(**request_fields)))  # type: ignore[arg-type]


def end(events: Iterable[Event]) -> Finished:
    return collect(events).finish


def test_ends_with_one_finished_and_counts_its_tokens(engine: Engine) -> None:
    events = ask(engine)
    ends = [e for e in events if isinstance(e, Finished)]
    assert len(ends) == 1
    assert events[-1] is ends[0]
    assert ends[0].reason == "length"
    assert ends[0].usage.completion_tokens == 12
    assert ends[0].usage.prompt_tokens > 0
    assert 0 < ends[0].timings.ttft_ms < 60_000
    assert ends[0].timings.decode_tokens_per_s(12) > 0


def test_progress_comes_before_text(engine: Engine) -> None:
    kinds = [type(e) for e in ask(engine) if isinstance(e, Progress | TextDelta)]
    assert kinds[0] is Progress
    assert kinds == sorted(kinds, key=lambda k: k is TextDelta)


def test_cancel_ends_it_and_is_idempotent(engine: Engine) -> None:
    generation = engine.submit(GenerateRequest(messages=QUESTION, max_tokens=900, ignore_eos=True))
    events = []
    for event in generation:
        events.append(event)
        if isinstance(event, TextDelta):
            generation.cancel()
            generation.cancel()
    assert end(events).reason == "cancelled"


def test_leaving_the_iteration_cancels(engine: Engine) -> None:
    before = engine.metrics().cancelled_total
    for event in engine.submit(GenerateRequest(messages=QUESTION, max_tokens=900, ignore_eos=True)):
        if isinstance(event, TextDelta):
            break
    ask(engine)  # a later request ends after the step that saw the cancellation
    assert engine.metrics().cancelled_total == before + 1


def test_is_iterated_once(engine: Engine) -> None:
    generation = engine.submit(GenerateRequest(messages=QUESTION, max_tokens=2))
    list(generation)
    with pytest.raises(UsageError):
        list(generation)


async def test_async_iteration_sees_the_same(engine: Engine) -> None:
    request = GenerateRequest(messages=QUESTION, sampling=GREEDY, max_tokens=12)
    events = [event async for event in engine.submit(request)]
    assert isinstance(events[-1], Finished)
    assert collect(events).text == collect(ask(engine)).text


async def test_many_async_consumers_at_once(engine: Engine) -> None:
    async def one(n: int) -> int:
        request = GenerateRequest(messages=QUESTION, sampling=GREEDY, max_tokens=n, ignore_eos=True)
        return len([e async for e in engine.submit(request) if isinstance(e, Finished)])

    assert await asyncio.gather(*(one(n) for n in range(1, 9))) == [1] * 8


def test_consumed_from_another_thread_than_submitted(engine: Engine) -> None:
    generation = engine.submit(GenerateRequest(messages=QUESTION, sampling=GREEDY, max_tokens=4))
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.extend(generation))
    thread.start()
    thread.join()
    assert isinstance(seen[-1], Finished)


def test_deadline(engine: Engine) -> None:
    assert end(ask(engine, deadline_s=1e-6)).reason == "deadline"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": Sampling(temperature=-1)}, "temperature"),
        ({"sampling": Sampling(temperature=math.nan)}, "temperature"),
        ({"sampling": Sampling(top_p=1.5)}, "top_p"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
        ({"sampling": Sampling(repeat_penalty=0)}, "repeat_penalty"),
        ({"sampling": Sampling(seed=1 << 32)}, "seed"),
        ({"sampling": Sampling(logit_bias={10**9: 1.0})}, "logit_bias"),
        ({"sampling": Sampling(logit_bias={1: math.nan})}, "logit_bias"),
        ({"sampling": Sampling(dry_sequence_breakers=("",))}, "dry_sequence_breakers"),
        ({"sampling": Sampling(dry_sequence_breakers=("a\0",))}, "dry_sequence_breakers"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"messages": ()}, "messages"),
        ({"prompt": "both"}, "messages"),
        ({"messages": (), "prompt": (10**9,)}, "prompt"),
        ({"messages": (), "prompt": (-1,)}, "prompt"),
        ({"messages": (), "prompt": "x", "tools": (Tool(name="t"),)}, "tools"),
    ],
)
def test_out_of_range_is_refused_by_name(engine: Engine, fields: dict[str, object], param: str) -> None:
    before = engine.metrics().requests_total
    with pytest.raises(InvalidRequestError) as refused:
        ask(engine, **fields)
    assert refused.value.param == param
    assert engine.metrics().requests_total == before


def test_tokens_round_trip(engine: Engine) -> None:
    text = "Grüße, 世界 🌍 <b>&amp;</b>\n\tdef f(x): return x"
    tokens = engine.tokenize(text)
    assert tokens
    assert engine.detokenize(tokens).decode() == text
    with pytest.raises(InvalidRequestError):
        engine.detokenize([10**9])


def test_embeddings_are_unit_vectors_and_tell_texts_apart(engine: Engine) -> None:
    a, b, again = engine.embed(["a cat sat", "interest rates rose", "a cat sat"])
    assert len(a) == engine.info.n_embd
    assert math.isclose(sum(x * x for x in a), 1.0, abs_tol=1e-5)
    assert a == pytest.approx(again, abs=1e-5)
    assert a != pytest.approx(b, abs=1e-3)


def test_template_is_applied(engine: Engine) -> None:
    request = GenerateRequest(messages=QUESTION)
    assert b"Count from one to twenty." in engine.detokenize(engine.tokenize_chat(request))


def test_metrics_only_grow(engine: Engine) -> None:
    before = engine.metrics()
    ask(engine)
    after = engine.metrics()
    assert after.requests_total == before.requests_total + 1
    assert after.completion_tokens_total >= before.completion_tokens_total + 12
    assert after.running == 0


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_close_cancels_running_and_refuses_new_requests(kind: str, smollm2: Path) -> None:
    engine = _open(kind, smollm2)
    generation = engine.submit(GenerateRequest(messages=QUESTION, max_tokens=900, ignore_eos=True))
    engine.close()
    engine.close()
    assert end(generation).reason == "cancelled"
    with pytest.raises(EngineClosedError):
        engine.submit(GenerateRequest(messages=QUESTION))
