"""Many at once on the real small model: the same answers as alone, no request starved, nothing left
behind.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from edgeinfer.errors import DecodeError, EngineError, QueueFullError
from edgeinfer.runtime import memory_plan
from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.events import Event, Finished, Progress, TextDelta
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.options import Chosen
from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling
from edgeinfer.runtime.scheduler.batch_invariance import BatchInvariance, batch_invariance
from edgeinfer.runtime.scheduler.executor import Executor
from edgeinfer.runtime.scheduler.sequence import BatchEntry

from ..conftest import GREEDY, answer, answers, ask, collect, load

SUBJECTS = "rivers bread moons clocks whales ink bridges tea salt wool maps snow".split()


@pytest.fixture(scope="module", params=["q8_0", "f16"])
def engine(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[LlamaEngine]:
    with closing(load(smollm2, n_ctx=1024, kv_type=request.param)) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Iterator[LlamaEngine]:
    with closing(load(smollm2, n_ctx=1024, max_queue=4)) as opened:
        yield opened


def request_about(subject: str, **fields: object) -> GenerateRequest:
    usual = {"max_tokens": 16, "cache_prompt": False, "speculative": "off"}
    return ask(**{"prompt": f"A short note about {subject}:", **usual, **fields})  # type: ignore[arg-type]


def assert_nothing_left(engine: LlamaEngine) -> None:
    """No request, no sequence, and once idle prefixes are dropped, no cell: in our books and in
    llama.cpp's.
    """
    metrics = engine.metrics()
    assert (metrics.running, metrics.queued) == (0, 0)
    engine.park()
    assert engine.metrics().kv_used_tokens == 0
    llama = libllama.lib()
    memory, n = engine._loaded.memory, engine._loaded.plan.n_seq_max
    assert [llama.llama_memory_seq_pos_max(memory, s) for s in range(n)] == [-1] * n


_PENALTIES = {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "dry_multiplier": 0.8}
BENT = Sampling(temperature=0.7, logit_bias={100: -5.0}, **_PENALTIES)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9), BENT])
def test_batched_answers_equal_unbatched(engine: LlamaEngine, sampling: Sampling) -> None:
    requests = [
        request_about(s, sampling=msgspec.structs.replace(sampling, seed=i))
        for i, s in enumerate(SUBJECTS[:8])
    ]
    alone = [answer(engine, r).text for r in requests]
    together = [a.text for a in answers(engine, requests)]
    assert together == alone
    assert len(set(alone)) == len(alone)
    assert_nothing_left(engine)


@pytest.mark.needs("time")
def test_batched_answers_equal_unbatched_with_weights_of_many_types(gemma3: Path) -> None:
    """Q4_K, Q5_0, Q6_K and Q8_0, with drafts and without, over a sliding window."""
    if not libllama.build_info().kernels:
        pytest.skip("llama.cpp's kernels are not batch-invariant for these types")
    with closing(load(gemma3, n_parallel=12, n_ctx=4096)) as engine:
        requests = [request_about(s, max_tokens=24) for s in SUBJECTS]
        alone = [answer(engine, r).text for r in requests]
        assert [a.text for a in answers(engine, requests)] == alone
        drafting = [msgspec.structs.replace(r, speculative="auto") for r in requests]
        assert [a.text for a in answers(engine, drafting)] == alone


def test_long_batched_prompts_equal_unbatched(smollm2: Path) -> None:
    """All of them together are too few for cells to be freed while others run: out of order, they are
    summed otherwise.
    """
    with closing(load(smollm2, kv_type="q8_0", n_ctx=2048)) as engine:
        requests = [
            request_about(s, prompt=f"{s} and {SUBJECTS[i - 1]} " * 30, max_tokens=24)
            for i, s in enumerate(SUBJECTS[:5])
        ]
        alone = [answer(engine, r).text for r in requests]
        assert [a.text for a in answers(engine, requests)] == alone


def test_penalties_on_repeats_may_leave_the_prompt_out(plain: LlamaEngine) -> None:
    def next_word(**sampling: object) -> str:
        strong = Sampling(temperature=0, repeat_penalty=3.0, **sampling)  # type: ignore[arg-type]
        request = ask("The sea. The sea. The sea. The sea. The", sampling=strong, max_tokens=1)
        return answer(plain, request).text

    assert next_word(penalize_prompt=False) == " sea"
    assert next_word() != " sea"


def test_attention_in_use_decides_batch_invariance(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, build = engine._loaded, libllama.build_info()
    long = msgspec.structs.replace(loaded.shape, head_lengths=(*loaded.shape.head_lengths, 512))
    latent = replace(loaded, shape=long)
    unbounded = BatchInvariance(max_tokens=loaded.n_batch, max_cells=None)
    is_f16 = loaded.choices["kv_type"].value == "f16"
    bounds = (60, 192) if is_f16 else (loaded.n_batch, None)
    llamas = BatchInvariance(*bounds, sums_in_order=False)
    for attention, model, expected in (
        ("v3", loaded, unbounded),
        ("v3", latent, llamas),
        ("", loaded, llamas),
    ):
        monkeypatch.setattr(
            libllama, "build_info", lambda a=attention: msgspec.structs.replace(build, kernels=a)
        )
        assert batch_invariance(model) == expected


def test_shared_prefix_is_prefilled_once(plain: LlamaEngine) -> None:
    plain.park()
    prefix = "You are a careful clerk who answers in few words. " * 30
    requests = [
        request_about(s, prompt=prefix + f"Now, {s}:", cache_prompt=True, max_tokens=4)
        for s in SUBJECTS[:8]
    ]
    ends = [a.finish for a in answers(plain, requests)]
    computed = [e.usage.prompt_tokens - e.usage.cached_tokens for e in ends]
    assert max(e.usage.prompt_tokens for e in ends) > 300
    assert sum(computed) < 300 + 8 * 12 + 30
    assert sorted(computed)[-2] < 12


def test_conversation_prefills_only_new_tokens(plain: LlamaEngine) -> None:
    turns: list[Message] = [Message(role="system", content="Answer briefly. " * 20)]
    shares = []
    for turn in range(6):
        turns.append(Message(role="user", content=f"Tell me one fact about {SUBJECTS[turn]}."))
        reply = answer(plain, GenerateRequest(messages=tuple(turns), sampling=GREEDY, max_tokens=20))
        usage = reply.finish.usage
        shares.append(usage.cached_tokens / usage.prompt_tokens)
        turns.append(Message(role="assistant", content=reply.text))
    assert min(shares[2:]) > 0.8


def test_the_system_prompt_stays_through_parking(smollm2: Path) -> None:
    with closing(load(smollm2, n_parallel=2)) as engine:
        engine.warm_up()
        pinned = engine.prefill_system("You speak of nothing but cheese.")
        engine.park()
        assert pinned > 5
        assert engine.metrics().kv_used_tokens == pinned
        assert engine._loop._thread is None
        engine.resume(1, b"entropy")
        system = Message(role="system", content="You speak of nothing but cheese.")
        greeting = GenerateRequest(
            messages=(system, Message(role="user", content="Hello")), max_tokens=2, sampling=GREEDY
        )
        assert answer(engine, greeting).finish.usage.cached_tokens == pinned


def test_parking_refuses_while_requests_run(plain: LlamaEngine) -> None:
    generation = iter(plain.submit(request_about("tea", max_tokens=500)))
    next(generation)
    with pytest.raises(EngineError):
        plain.park()
    generation.close()  # type: ignore[attr-defined]


def test_seeds_differ_by_default(plain: LlamaEngine) -> None:
    free = Sampling(temperature=1.5)
    assert len({answer(plain, request_about("wool", sampling=free)).text for _ in range(3)}) == 3


def test_the_queue_is_bounded_and_served_in_order(plain: LlamaEngine) -> None:
    capacity = plain.info.n_parallel + 4
    streams = [plain.submit(request_about(str(i), max_tokens=60)) for i in range(capacity)]
    with pytest.raises(QueueFullError):
        plain.submit(request_about("too many"))
    order: list[int] = []
    lock = threading.Lock()

    def consume(i: int) -> None:
        for event in streams[i]:
            if isinstance(event, Progress) and not event.queued:
                with lock:
                    if i not in order:
                        order.append(i)

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(capacity)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(order[-4:]) == set(range(capacity - 4, capacity))
    assert_nothing_left(plain)


def test_slow_consumer_does_not_block_others(plain: LlamaEngine) -> None:
    slow = plain.submit(request_about("ink", max_tokens=40))
    assert answer(plain, request_about("tea", max_tokens=40)).finish.reason == "length"
    assert collect(slow).finish.usage.completion_tokens == 40


def test_a_deadline_ends_a_running_and_a_waiting_request(plain: LlamaEngine) -> None:
    late = [
        request_about(str(i), max_tokens=900, deadline_s=0.5) for i in range(plain.info.n_parallel + 2)
    ]
    assert {a.finish.reason for a in answers(plain, late)} == {"deadline"}
    assert_nothing_left(plain)


def test_a_long_prompt_does_not_stop_a_running_stream(
    plain: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step that computes a part of the prompt computes the stream's next token too."""
    plain.park()
    steps: list[list[bool]] = []
    run = Executor.run

    def spy(execution: Executor, entries: list[BatchEntry]) -> float | None:
        steps.append([entry.is_prefill for entry in entries])
        return run(execution, entries)

    running = iter(plain.submit(request_about("tea", max_tokens=900)))
    while not isinstance(next(running), TextDelta):
        pass
    monkeypatch.setattr(Executor, "run", spy)
    list(plain.submit(request_about("", prompt="word " * 800, max_tokens=1)))
    running.close()  # type: ignore[attr-defined]
    with_prompt = [kinds for kinds in steps if any(kinds)]
    assert len(with_prompt) >= 3
    assert all(kinds == [False, True] for kinds in with_prompt), steps


@pytest.mark.parametrize("shared", [False, True])
def test_a_full_context_shifts_when_asked(smollm2: Path, shared: bool) -> None:
    with closing(load(smollm2, n_ctx=256, n_parallel=2)) as engine:
        fields = {"prompt": "word " * 200, "overflow": "shift", "cache_prompt": shared}
        if shared:
            long = fields | {"prompt": "word " * 220, "max_tokens": 1}
            list(engine.submit(request_about("", **long)))
        last_event = answer(engine, request_about("", max_tokens=150, **fields)).finish
        assert last_event.reason == "length"
        assert last_event.usage.completion_tokens == 150
        over = request_about("", prompt="word " * 400, max_tokens=5, overflow="shift")
        assert answer(engine, over).finish.usage.completion_tokens == 5
        assert_nothing_left(engine)


def test_a_shifted_conversation_keeps_its_system_prompt(smollm2: Path) -> None:
    with closing(load(smollm2, n_ctx=256, n_parallel=1)) as engine:
        system = Message(role="system", content="Remember the word marmalade.")
        turns = (system, Message(role="user", content="tell me a story " * 20))
        asked = {"max_tokens": 300, "overflow": "shift", "ignore_eos": True}
        request = GenerateRequest(messages=turns, sampling=GREEDY, **asked)
        list(engine.submit(request))
        longest = max((r.tokens for r in engine._core.kv.cached_sequences), key=len)
        assert b"marmalade" in engine.detokenize(longest)


def test_short_cache_preempts_and_finishes_every_request(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "choose_cells", lambda n_ctx, *_: Chosen(512, "a test wants few"))
    with closing(load(smollm2, n_ctx=512, n_parallel=4, kv_type="q8_0")) as engine:
        requests = [request_about(s, max_tokens=120, prompt=f"{s}, " * 25) for s in SUBJECTS[:4]]
        alone = [answer(engine, r).text for r in requests]
        replies = answers(engine, requests)
        assert [a.finish.usage.completion_tokens for a in replies] == [120] * 4
        assert [a.text for a in replies] == alone
        assert_nothing_left(engine)


def test_large_prompt_waiting_for_cells_is_not_overtaken(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "choose_cells", lambda n_ctx, *_: Chosen(512, "a test wants few"))
    with closing(load(smollm2, n_ctx=512, n_parallel=3)) as engine:
        first = engine.submit(request_about("", prompt="word " * 200, max_tokens=40))
        began = time.monotonic()
        large = engine.submit(request_about("", prompt="some " * 400, max_tokens=2))
        small = engine.submit(request_about("tea", max_tokens=2))
        apart_ms = 1000 * (time.monotonic() - began)  # each waits from its own arrival
        ends = [collect(stream).finish for stream in (first, large, small)]
        waited_ms = [last_event.timings.queue_ms for last_event in ends]
        assert waited_ms[0] < waited_ms[1] <= waited_ms[2] + apart_ms


def test_a_failed_decode_ends_its_requests_and_not_the_engine(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(load(smollm2, n_parallel=2)) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(engine._core.executor.batch, "decode", lambda context: -3)
            for generation in [engine.submit(request_about(subject)) for subject in ("tea", "ink")]:
                with pytest.raises(DecodeError):
                    list(generation)
        assert answer(engine, request_about("tea")).finish.reason == "length"
        assert_nothing_left(engine)


class _Chaos:
    """One random interleaving: joins, cancels, deadlines, stops, in a random order, consumed or not."""

    def __init__(self, engine: LlamaEngine, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)
        self.open: list[Iterator[Event]] = []

    def join(self) -> None:
        rng = self.rng
        request = request_about(
            rng.choice(SUBJECTS),
            max_tokens=rng.choice([1, 2, 3, 5, 8]),
            cache_prompt=rng.random() < 0.7,
            stop=("the", ".", "a") if rng.random() < 0.3 else (),
            deadline_s=rng.choice([None, None, 0.001, 0.01, 0.05]),
            sampling=rng.choice([GREEDY, Sampling(seed=rng.randrange(100))]),
            logprobs=rng.choice([None, None, 2]),
            speculative=rng.choice(["auto", "off", "ngram"]),
        )
        try:
            stream = self.engine.submit(request)
        except QueueFullError:
            return
        if rng.random() < 0.2:
            stream.cancel()
        self.open.append(iter(stream))

    def leave(self) -> None:
        if self.open:
            self.open.pop(self.rng.randrange(len(self.open))).close()  # type: ignore[attr-defined]

    def read(self) -> None:
        for stream in self.rng.sample(self.open, min(2, len(self.open))):
            next(stream, None)

    def run(self) -> None:
        for _ in range(self.rng.randrange(3, 9)):
            self.rng.choice([self.join, self.join, self.leave, self.read])()
        for stream in self.open:
            events = list(stream)
            assert not events or isinstance(events[-1], Finished)


@pytest.mark.parametrize("block", range(10))
def test_random_interleavings_free_all_cells(plain: LlamaEngine, block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        _Chaos(plain, seed).run()
    # abandoned requests have ended after this one
    list(plain.submit(request_about("the last one", max_tokens=1)))
    while plain.metrics().running or plain.metrics().queued:
        list(plain.submit(request_about("another", max_tokens=1)))
    assert_nothing_left(plain)
