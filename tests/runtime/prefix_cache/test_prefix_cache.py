"""The prefix cache with real models: restored prefixes are bit-identical to computed ones."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from msgspec.structs import replace

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.events import TokenLogprobs
from edgeinfer.runtime.kv_cache import common_prefix
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.cache import BlockLoad
from edgeinfer.runtime.prefix_cache.kv_block import BLOCK_TOKENS, KvBlock
from edgeinfer.runtime.prefix_cache.retention import forget_conversations, list_blocks, retained_names
from edgeinfer.runtime.scheduler.prefixes import loading_sequences
from edgeinfer.runtime.scheduler.sequence import Sequence

from .conftest import ask, heard, load, store_and_drop, text


@pytest.fixture(params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("kv_type", ["f16", pytest.param("q8_0", marks=pytest.mark.needs("time"))])
def test_fresh_engine_continues_bit_identically(store: BlockStore, model: Path, kv_type: str) -> None:
    """Against an engine that has never stopped: straight on, cut behind a block, and cut within a tail."""
    engine = load(model, store, kv_type=kv_type)
    tokens = tuple(engine.tokenize(text(900)))[:900]
    other = tuple(engine.tokenize(text(40, 500)))
    requests = [ask(tokens), ask(tokens[:512] + other), ask(tokens[:830] + other)]
    _, usage = heard(engine, requests[0])
    assert usage.cached_tokens == 0
    assert engine.flush_blocks()
    engine._core.prefixes.prefix_cache = None  # or the other tails would take the first one's place
    expected = [heard(engine, request)[0] for request in requests]
    engine.close()

    for request, n, answer in zip(requests, (899, 512, 830), expected, strict=True):
        engine = load(model, store, kv_type=kv_type)
        logprobs, usage = heard(engine, request)
        assert (usage.cached_tokens, usage.cached_disk_tokens) == (n, n)
        # llama.cpp's attention over an f16 cache splits a lone token's among threads by the cells that
        # are used, and the engine that has never stopped uses more of them from its second request on
        exact = len(answer) if engine._core._batch_invariance.max_cells is None or n == 899 else 1
        assert logprobs[:exact] == answer[:exact]
        engine.close()


def test_prefix_comes_from_memory_then_from_disk(engine: LlamaEngine, store: BlockStore) -> None:
    tokens = tuple(engine.tokenize(text(700)))
    heard(engine, ask(tokens))
    _, usage = heard(engine, ask(tokens))
    assert (usage.cached_tokens, usage.cached_disk_tokens) == (len(tokens) - 1, 0)
    store_and_drop(engine)
    _, usage = heard(engine, ask(tokens))
    assert (usage.cached_tokens, usage.cached_disk_tokens) == (len(tokens) - 1,) * 2
    metrics = engine.metrics()
    assert metrics.cached_disk_tokens_total == len(tokens) - 1
    assert metrics.block_bytes_written_total > metrics.block_bytes_read_total > 0
    assert metrics.kv_used_tokens == len(engine._core.kv.cached_sequences[0].tokens)


def test_tokens_behind_the_last_whole_block_are_stored(engine: LlamaEngine, store: BlockStore) -> None:
    tokens = tuple(engine.tokenize(text(700)))
    for n in (2 * BLOCK_TOKENS + 2, 2 * BLOCK_TOKENS + 5, 2 * BLOCK_TOKENS + 80):
        heard(engine, ask(tokens[:n], max_tokens=0, logprobs=None))
        store_and_drop(engine)
        _, usage = heard(engine, ask(tokens[:n], max_tokens=1, cache_on_disk=False))
        assert usage.cached_disk_tokens == n - 1
        engine.between_steps(engine._core.kv.drop_idle)
        whole, tails = divmod(len(list_blocks(store.root)), 2)
        assert (whole, tails) == (1, 1)  # the longer one has taken the shorter one's place


def test_disk_patience_scales_with_the_model(smollm2: Path, gemma3: Path) -> None:
    """Before anything was computed, by what its weights weigh; else a cold disk would lose to it."""
    waits = []
    for model in (smollm2, gemma3):
        engine = load(model, None)
        waits.append(engine._core.prefixes._chunk_sizer.s_per_token / model.stat().st_size)
        engine.close()
    assert waits == pytest.approx([1e-11, 1e-11], rel=0.1)


def test_ready_block_is_never_too_slow() -> None:
    ready, missing = Future[KvBlock | None](), Future[KvBlock | None]()
    ready.set_result(None)
    for future, is_too_slow in ((ready, False), (missing, True)):
        block_load = BlockLoad([future], 0, BLOCK_TOKENS, waits_since=time.monotonic() - 1000)
        assert block_load.is_too_slow(1.0) is is_too_slow


def test_new_session_finds_the_shared_prefix(engine: LlamaEngine, store: BlockStore) -> None:
    shared = engine.tokenize(text(600))  # ends in the middle of a block
    people = [engine.tokenize(text(400, start)) for start in (3000, 5000, 7000)]
    sessions = [tuple(shared + said) for said in people]
    for tokens in sessions[:2]:
        heard(engine, ask(tokens, preamble="codex", max_tokens=0, logprobs=None))
    assert engine.flush_blocks()
    assert len(retained_names(store.root)) == len(shared) // BLOCK_TOKENS
    engine.between_steps(engine._core.kv.drop_idle)
    _, usage = heard(engine, ask(sessions[2], preamble="codex"))
    together = max(common_prefix(sessions[2], session) for session in sessions[:2])
    assert together % BLOCK_TOKENS > 32
    assert usage.cached_disk_tokens == usage.cached_tokens == together


def test_begun_with_returns_the_last_session(engine: LlamaEngine, store: BlockStore) -> None:
    shared = engine.tokenize(text(600))
    sessions = [tuple(shared + engine.tokenize(text(400, start))) for start in (3000, 5000)]
    for tokens in sessions:
        heard(engine, ask(tokens, preamble="codex", max_tokens=0, logprobs=None))
    assert engine.flush_blocks()
    whole = -(-len(shared) // BLOCK_TOKENS) * BLOCK_TOKENS
    assert tuple(engine.agent_prefix("codex")) == sessions[1][:whole]
    assert [engine.agent_prefix("aider"), engine.agent_prefix("codex", "another key's")] == [[], []]


class _Running(NamedTuple):
    """What decides whether a sequence's blocks are loaded."""

    is_loading_blocks: bool = False
    is_prefill_only: bool = False
    is_decoding: bool = False
    is_started: bool = True


def test_prefill_only_loads_yield_the_disk() -> None:
    early = _Running(is_loading_blocks=True, is_prefill_only=True)
    awaited = _Running(is_loading_blocks=True)
    for running_too, expected in (
        ([], [early]),
        ([awaited], [awaited]),
        ([_Running()], []),  # it is being computed
        ([_Running(is_decoding=True)], [early]),
        ([_Running(is_started=False)], [early]),  # it waits for these cells
    ):
        running = cast(list[Sequence], [early, *running_too])
        assert loading_sequences(running) == expected


def test_owner_is_recorded_when_blocks_are_written(engine: LlamaEngine, store: BlockStore) -> None:
    """However late the disk is: all of a conversation goes with it, and its beginning was used last."""
    blocks = engine._core.prefixes.prefix_cache
    heard(engine, ask(tuple(engine.tokenize(text(300, 900)))))
    assert engine.flush_blocks()  # this model is proven
    foreign = {block.path for block in list_blocks(store.root)}
    late = threading.Event()
    blocks.folder.put(lambda: late.wait(60) and None)
    heard(engine, ask(tuple(engine.tokenize(text(700))), conversation="talk"))
    engine._loop.stop()  # everything has been handed to the writer
    assert {block.path for block in list_blocks(store.root)} == foreign
    late.set()
    assert engine.flush_blocks()
    written = [block.path.stem for block in list_blocks(store.root) if block.path not in foreign]
    cached_seq = next(r for r in engine._core.kv.cached_sequences if r.conversation == "talk")
    assert written[-1] == blocks.folder.names.chain(cached_seq.tokens, (), "").names[1].hex()
    assert len(written) > 1
    assert forget_conversations(store.root, "talk") > 0
    assert {block.path for block in list_blocks(store.root)} == foreign


def test_prefetched_prompt_is_stored_once_sent(engine: LlamaEngine, store: BlockStore) -> None:
    tokens = tuple(engine.tokenize(text(600)))
    list(engine.submit(ask(tokens, max_tokens=0, cache_on_disk=False)))
    assert engine.flush_blocks()
    assert list_blocks(store.root) == []
    _, usage = heard(engine, ask(tokens))
    assert usage.cached_tokens == len(tokens) - 1
    store_and_drop(engine)
    _, usage = heard(engine, ask(tokens))
    assert usage.cached_disk_tokens == len(tokens) - 1


def test_cache_prompt_false_neither_reads_nor_writes(engine: LlamaEngine, store: BlockStore) -> None:
    tokens = tuple(engine.tokenize(text(600)))
    heard(engine, ask(tokens, cache_prompt=False))
    assert engine.flush_blocks()
    assert list_blocks(store.root) == []
    heard(engine, ask(tokens))
    assert engine.flush_blocks()
    assert list_blocks(store.root) != []
    _, usage = heard(engine, ask(tokens, cache_prompt=False))
    assert usage.cached_tokens == 0


def test_short_prompt_is_not_stored(engine: LlamaEngine, store: BlockStore) -> None:
    heard(engine, ask(tuple(engine.tokenize("A short question."))))
    assert engine.flush_blocks()
    assert list_blocks(store.root) == []


def test_parked_engine_has_no_store_and_no_text(engine: LlamaEngine) -> None:
    heard(engine, ask(tuple(engine.tokenize(text(600)))))
    engine.park()
    assert engine._core.prefixes.prefix_cache is None
    assert engine.metrics().kv_used_tokens == 0


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_long_prefill_evicts_idle_sequences(engine: LlamaEngine, is_prefetched: bool) -> None:
    """Only of what was read ahead, for a request that is yet to come."""
    first = tuple(engine.tokenize(text(1200)))[:1100]
    other = tuple(engine.tokenize(text(600, 4000)))[:600]
    nothing = {"max_tokens": 0, "logprobs": None} if is_prefetched else {}
    heard(engine, ask(first, **nothing))
    assert engine.flush_blocks()
    (expected,), _ = heard(engine, ask(first, max_tokens=1))
    if is_prefetched:
        heard(engine, ask(first, **nothing))
    heard(engine, ask(other))
    (logprobs,), usage = heard(engine, ask(first, max_tokens=1))
    assert (usage.cached_tokens, usage.cached_disk_tokens) == (1099, 0 if is_prefetched else 1099)
    # over an f16 cache a lone token's attention is split among threads by the cells that are used
    chosen = [cast(TokenLogprobs, token).chosen.token_id for token in (logprobs, expected)]
    assert chosen[0] == chosen[1]


def test_busy_process_checks_when_it_pays(store: BlockStore, smollm2: Path) -> None:
    """As `run` does: write, and end."""
    for cached in (0, 499):
        engine = load(smollm2, store)
        _, usage = heard(engine, ask(tuple(engine.tokenize(text(600)))[:500]))
        assert usage.cached_disk_tokens == cached
        engine.close()


def test_a_model_whose_check_fails_keeps_nothing(
    store: BlockStore, engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = engine._core.prefixes.prefix_cache
    monkeypatch.setattr(
        blocks.verdict._check, "step", lambda: "after a restore the next logits differ by 2"
    )
    tokens = tuple(engine.tokenize(text(600)))
    heard(engine, ask(tokens))
    assert engine.flush_blocks()
    assert blocks.verdict.is_refused
    assert list_blocks(store.root) == []
    assert blocks.folder.read_check() == "after a restore the next logits differ by 2"


def test_conversations_with_edits_answer_like_an_oracle_that_forgets(
    store: BlockStore, smollm2: Path, cases: Callable[[int], int]
) -> None:
    """Three engines' lives over one store, and one engine that computes every prompt whole. A q8_0 cache
    gives bit-identical results in any batch, so texts must be equal.
    """
    rng = random.Random(11)
    oracle = load(smollm2, None, kv_type="q8_0", n_ctx=1024)
    pool = [oracle.tokenize(text(120, 200 * i)) for i in range(4)]
    talks: list[list[int]] = []
    reused = 0
    for _ in range(3):
        engine = load(smollm2, store, kv_type="q8_0", n_ctx=1024, n_parallel=2)
        for _ in range(cases(17)):
            talk = _next_talk(rng, talks, pool)
            request = ask(tuple(talk), max_tokens=2, logprobs=1)
            logprobs, usage = heard(engine, request)
            reused += usage.cached_disk_tokens
            expected, _ = heard(oracle, replace(request, cache_prompt=False))
            assert logprobs == expected
        engine.flush_blocks()
        engine.close()
    oracle.close()
    assert reused > 0


def _next_talk(rng: random.Random, talks: list[list[int]], pool: list[list[int]]) -> list[int]:
    """A new conversation, one that goes on, or one that was cut or edited somewhere."""
    talk = list(rng.choice(talks)) if talks and rng.random() < 0.8 else []
    if talk and rng.random() < 0.5:
        del talk[rng.randrange(1, len(talk)) :]
    piece = rng.choice(pool)
    talk += piece[: rng.randrange(20, len(piece))]
    talks.append(talk[:700])
    return talks[-1]
