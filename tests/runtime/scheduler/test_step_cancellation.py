"""Requests that arrive during a long prefill are served soon, and the long one's answer is unchanged."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_decoders import make_mamba

from edgeinfer.errors import DecodeError
from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import Event, Finished, Progress, TextDelta
from edgeinfer.runtime.kv_cache import CachedSequence
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.row_adapters import MISSED_ADAPTER
from edgeinfer.runtime.scheduler.executor import StepCancellation

from ..prefix_cache.conftest import ask, heard, load, text


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[LlamaEngine]:
    with closing(load(smollm2, None, kv_type="q8_0", n_ctx=4096)) as opened:
        yield opened


def rest_after(stream: EventStream, tokens: int) -> Iterator[Event]:
    """The rest of the stream, once so many tokens of its prompt are computed."""
    events = iter(stream)
    for event in events:
        if isinstance(event, Progress) and event.done_tokens >= tokens:
            break
    return events


def test_short_prompts_overtake_a_long_one_bit_identically(engine: LlamaEngine) -> None:
    long = tuple(engine.tokenize(text(1500)))
    alone, _ = heard(engine, ask(long, cache_prompt=False))
    stream = engine.submit(ask(long, cache_prompt=False))
    events = rest_after(stream, 128)
    for n in range(3):
        answer = list(engine.submit(ask(f"Newcomer {n} asks", max_tokens=1 + 4 * n, logprobs=None)))
        assert isinstance(answer[-1], Finished)
    assert not stream.has_ended
    logprobs = [t for e in events if isinstance(e, TextDelta) for t in e.logprobs]
    assert logprobs == alone


def test_prefill_only_request_is_preempted_and_keeps_its_prefix(engine: LlamaEngine) -> None:
    tokens = tuple(engine.tokenize(text(1500, 3000)))
    early = engine.submit(ask(tokens, max_tokens=0))
    events = rest_after(early, 128)
    answer = list(engine.submit(ask("A client asks", max_tokens=2)))
    assert isinstance(answer[-1], Finished)
    assert not early.has_ended
    early.cancel()
    assert list(events)[-1].reason == "cancelled"
    _, usage = heard(engine, ask(tokens, max_tokens=1))
    assert usage.cached_tokens >= 128


def test_background_prefill_yields_to_other_processes(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice: list[int] = []

    def decode(batch: Batch, context: LlamaContext) -> int:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return decode_itself(batch, context)

    decode_itself = Batch.decode
    monkeypatch.setattr(Batch, "decode", decode)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with closing(load(smollm2, None)) as engine:
        tokens = tuple(engine.tokenize(text(40)))
        list(engine.submit(ask(tokens, max_tokens=0, background=True, logprobs=None)))
        assert nice == [10]
        logprobs, usage = heard(engine, ask(tokens, max_tokens=2, background=True))
        assert usage.cached_tokens == len(tokens) - 1
        assert set(nice[1:]) == {usual}  # a client waits for this one
        expected, _ = heard(engine, ask(tokens, max_tokens=2, cache_prompt=False))
        assert logprobs[0] == expected[0]
        engine.park()
        names = [thread.name for thread in threading.enumerate()]
        assert not any(name.startswith("edgeinfer-low-priority") for name in names)
        list(engine.submit(ask(tokens, max_tokens=0, background=True, logprobs=None)))


@pytest.mark.parametrize("codes", [(1, 2), (1, MISSED_ADAPTER), (1, 1), (2, 1, 2)])
def test_a_step_that_is_tried_again_for_lack_of_cells_may_end_as_any_other(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...]
) -> None:
    with closing(load(smollm2, None)) as engine:
        request = ask(tuple(engine.tokenize(text(40))), max_tokens=4, cache_prompt=False)
        expected, _ = heard(engine, request)
        batch = engine._core.executor.batch
        decode, codes_left = batch.decode, list(codes)
        monkeypatch.setattr(
            batch, "decode", lambda context: codes_left.pop(0) if codes_left else decode(context)
        )
        if codes == (1, 1):  # there is no room even so
            with pytest.raises(DecodeError):
                heard(engine, request)
        else:
            assert heard(engine, request)[0] == expected
        assert codes_left == []
        assert heard(engine, request)[0] == expected


def test_prefill_only_requests_yield_their_places(smollm2: Path) -> None:
    with closing(load(smollm2, None, n_parallel=1)) as engine:
        early = engine.submit(ask(tuple(engine.tokenize(text(1200))), max_tokens=0))
        events = rest_after(early, 128)
        assert isinstance(list(engine.submit(ask("A client asks", max_tokens=2)))[-1], Finished)
        assert not early.has_ended
        assert list(events)[-1].reason == "length"


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_close_aborts_the_running_step(smollm2: Path, tmp_path: Path, kind: str) -> None:
    path = smollm2 if kind == "attention" else make_mamba(tmp_path / "m.gguf", smollm2)
    engine = load(path, None)
    core, is_computing = engine._core, threading.Event()
    decode, release = core.executor.batch.decode, core.kv.release
    codes: list[int] = []
    released: list[bool] = []

    def decode_during_close(context: LlamaContext) -> int:
        if core.queue.running[0].n_generated == 2:
            is_computing.set()
            while not engine._loop._closed or not core.executor._abort._is_final:
                time.sleep(0.001)
        codes.append(decode(context))
        return codes[-1]

    def record_release(cached_seq: CachedSequence, *, keep: bool) -> None:
        released.append(keep)
        release(cached_seq, keep=keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.executor.batch, "decode", decode_during_close)
        patch.setattr(core.kv, "release", record_release)
        stream = engine.submit(ask("Answer at length", max_tokens=50, speculative="off"))
        assert is_computing.wait(60)
        engine.close()
        assert codes[-1] == 2
        assert set(codes[:-1]) == {0}
        assert list(stream)[-1].reason == "cancelled"
        assert released == [kind == "attention"], "states of an aborted step are not kept"


def test_step_cancellation_loses_little_work() -> None:
    asked = threading.Event()
    cancellation = StepCancellation(asked.set)
    sequences: Any = [SimpleNamespace(is_prefill_only=False, cancelled=False) for _ in range(2)]
    cancellation.abort_for_incoming_request(10)
    assert not asked.is_set()
    cancellation.begin(sequences, 600.0)
    cancellation.abort_for_incoming_request(5000)
    assert not asked.is_set()
    cancellation.abort_for_incoming_request(10)
    assert asked.is_set()
    cancellation.end(lost=True)
    asked.clear()
    cancellation._allowed_loss_s = 0.0
    cancellation.begin(sequences, 600.0)
    cancellation.abort_for_incoming_request(10)
    assert not asked.is_set()
    cancellation._allowed_loss_s = 600.0
    cancellation.end(lost=False)
    for expected_s in (0.0, 0.1):
        cancellation.begin(sequences, expected_s)
        cancellation._began = time.monotonic() - 0.6 * expected_s
        cancellation.abort_for_incoming_request(10)
        assert not asked.is_set()
    for seq in sequences:
        cancellation.abort_if_all_cancelled()
        assert not asked.is_set()
        seq.cancelled = True
    cancellation.abort_if_all_cancelled()
    assert asked.is_set()
