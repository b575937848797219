"""The KV cache's accounting, against a memory that counts cells by itself."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cache_histories import CountingMemory, Histories
from made_decoders import make_lfm2

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.kv_cache import CachedSequence, KvCache, common_prefix
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.recurrent_checkpoints import Checkpoints, tokens_to_next_checkpoint
from edgeinfer.runtime.scheduler.divergence import LongestMatch, find_longest_match

from .conftest import ask, heard, load, text


class NoStates:
    """A recurrent model whose state cannot be read."""

    def save_checkpoint(self, seq_id: int) -> None:
        return None

    def restore_checkpoint(self, seq_id: int, state: memoryview) -> bool:
        return False


def make(
    n_cells: int = 64, n_seq_max: int = 4, *, supports_truncation: bool = True
) -> tuple[KvCache, CountingMemory]:
    memory = CountingMemory(supports_truncation=supports_truncation)
    checkpoints = None if supports_truncation else Checkpoints(NoStates())
    return KvCache(memory, n_cells=n_cells, n_seq_max=n_seq_max, checkpoints=checkpoints), memory


def fill(kv: KvCache, memory: CountingMemory, cached_seq: CachedSequence, tokens: list[int]) -> None:
    new = tokens[len(cached_seq.tokens) :]
    memory.store(cached_seq.seq_id, len(cached_seq.tokens), len(new))
    kv.record_computed(cached_seq, new)


def claim(
    kv: KvCache, memory: CountingMemory, tokens: list[int], adapters: tuple[tuple[str, float], ...] = ()
) -> CachedSequence:
    cached_seq = kv.allocate(PromptTokens(tokens), adapters)
    kv.truncate(cached_seq, common_prefix(cached_seq.tokens, tokens[:-1]))
    fill(kv, memory, cached_seq, tokens)
    return cached_seq


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 200])
def test_common_prefix(n: int) -> None:
    a = list(range(200))
    b = a[:n] + [-1] * 5
    assert common_prefix(a, b) == n
    assert common_prefix(b, a, n // 2) == n


def test_next_turn_continues_in_place() -> None:
    kv, memory = make()
    first = claim(kv, memory, [1, 2, 3])
    kv.release(first, keep=True)
    again = kv.allocate(PromptTokens([1, 2, 3, 4, 5]), ())
    assert again is first
    assert again.tokens == [1, 2, 3]
    assert kv.used_cells == memory.cells == 3


@pytest.mark.parametrize(("n_running", "n_left"), [(2, 9), (3, 6)])
def test_short_idle_sequences_are_limited_beside_many(n_running: int, n_left: int) -> None:
    kv, memory = make(n_cells=20_000, n_seq_max=32)
    running = [claim(kv, memory, [base]) for base in range(n_running)]
    long = claim(kv, memory, list(range(5000, 5300)))
    kv.release(long, keep=True)
    finished = []
    for base in range(1000, 1900, 100):
        finished.append(claim(kv, memory, list(range(base, base + 60))))
        kv.release(finished[-1], keep=True)
    nexts = [(seq, PromptTokens([*seq.tokens, 1])) for seq in finished]
    reusable = [seq for seq, prompt in nexts if kv.match(prompt, ())[0] is seq]
    assert reusable == finished[-n_left:]
    assert kv.match(PromptTokens([*long.tokens, 1]), ())[0] is long
    for cached_seq in running:
        kv.release(cached_seq, keep=True)


def test_other_adapters_share_nothing() -> None:
    kv, memory = make()
    kv.release(claim(kv, memory, [1, 2, 3, 4]), keep=True)
    assert kv.match(PromptTokens([1, 2, 3, 4, 5]), (("a", 1.0),)) == (None, 0)
    other = kv.allocate(PromptTokens([1, 2, 3, 4, 5]), (("a", 1.0),))
    assert other.tokens == []


def test_eviction_is_lru_with_pinned_last() -> None:
    kv, memory = make(n_cells=30, n_seq_max=8)
    pinned, old, new = (claim(kv, memory, [base + i for i in range(10)]) for base in (100, 200, 300))
    for cached_seq in (pinned, old, new):
        kv.release(cached_seq, keep=True)
    pinned.pinned = True
    assert kv.make_room(10)
    assert kv.cached_sequences == [pinned, new]
    assert kv.make_room(20)
    assert kv.cached_sequences == [pinned]
    assert kv.make_room(30)
    assert kv.cached_sequences == []
    assert memory.cells == kv.used_cells == 0


def test_sequence_without_truncation_is_reused_whole_or_not() -> None:
    kv, memory = make(supports_truncation=False)
    kv.release(claim(kv, memory, [1, 2, 3]), keep=True)
    assert kv.match(PromptTokens([1, 2, 9, 9]), ()) == (None, 0)
    source, n = kv.match(PromptTokens([1, 2, 3, 4]), ())
    assert n == 3
    source.in_use = True
    assert not kv.truncate(source, 2)
    assert source.tokens == []
    assert kv.used_cells == memory.cells == 0


@pytest.mark.parametrize("kind", ["text", "pictures", "M-RoPE"])
@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_accounting_and_pictures_whole(seed: int, kind: str) -> None:
    histories = Histories(seed, kind, *make(n_cells=400, n_seq_max=6))
    for _ in range(200):
        histories.act()
        histories.check()
    for seq in histories.active:
        histories.kv.release(seq, keep=False)
    histories.kv.drop_idle(include_pinned=True)
    assert histories.kv.used_cells == histories.memory.cells == 0
    assert histories.kv.cached_sequences == []


def test_a_private_sequence_is_neither_shared_nor_shown() -> None:
    kv, memory = make()
    private = kv.allocate(PromptTokens([1, 2, 3]), (), reuse=False)
    private.is_private = True
    fill(kv, memory, private, [1, 2, 3])
    assert kv.match(PromptTokens([1, 2, 3, 4]), ()) == (None, 0)
    assert find_longest_match(kv.cached_sequences, [1, 2, 9], (), "") == LongestMatch()
    kv.release(private, keep=False)
    assert find_longest_match(kv.cached_sequences, [1, 2, 9], (), "") == LongestMatch()


def test_the_text_of_a_pinned_prompt_is_shared_but_not_shown() -> None:
    kv, memory = make()
    pinned = claim(kv, memory, [1, 2, 3])
    kv.release(pinned, keep=True)
    pinned.pinned = True
    assert kv.match(PromptTokens([1, 2, 9, 9]), (), "a key's") == (pinned, 2)
    assert find_longest_match(kv.cached_sequences, [1, 2, 9], (), "a key's") == LongestMatch(2, ())
    pinned.pinned = False
    assert find_longest_match(kv.cached_sequences, [1, 2, 9], (), "") == LongestMatch(2, (3,))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    return make_lfm2(tmp_path_factory.mktemp("hybrid") / "lfm2.gguf", smollm2)


@pytest.fixture
def engine(hybrid: Path) -> Iterator[LlamaEngine]:
    with closing(load(hybrid, None, kv_type="q8_0", n_ctx=4096)) as opened:
        yield opened


def test_checkpoints_are_saved_during_a_long_prefill(engine: LlamaEngine) -> None:
    tokens = tuple(engine.tokenize(text(2600)))
    assert len(tokens) > 2300
    heard(engine, ask(tokens, max_tokens=1))
    edited = tokens[:2200] + tuple(engine.tokenize("something else"))
    _, usage = heard(engine, ask(edited))
    assert usage.cached_tokens == 2048


def test_running_conversation_shares_its_checkpoints(engine: LlamaEngine) -> None:
    tokens = tuple(engine.tokenize(text(500)))
    heard(engine, ask(tokens))
    streams = [engine.submit(ask(tokens, max_tokens=30)) for _ in range(3)]
    answers = [[e for e in stream if hasattr(e, "text")] for stream in streams]
    assert answers[0] == answers[1] == answers[2]


class _States:
    def save_checkpoint(self, seq_id: int) -> memoryview:
        return memoryview(bytes(10))

    def restore_checkpoint(self, seq_id: int, state: memoryview) -> bool:
        return True


def test_checkpoints_are_bounded_and_the_oldest_evicted() -> None:
    checkpoints = Checkpoints(_States(), most_bytes=25)
    first, second = [], []  # type: ignore[var-annotated]
    checkpoints.save(first, 0, 5)
    checkpoints.save(first, 0, 5)
    checkpoints.save(first, 0, 9)
    checkpoints.save(second, 1, 7)
    assert [p.n_tokens for p in first] == [9]
    assert [p.n_tokens for p in second] == [7]
    assert checkpoints.latest_before(first, 8) is None
    checkpoints.drop_after(first)
    checkpoints.save(second, 1, 8)
    assert [p.n_tokens for p in second] == [7, 8]


@pytest.mark.parametrize(
    ("n_past", "n_tokens", "expected"),
    [(0, 10, 10), (0, 100, 99), (99, 100, 1), (0, 5000, 2048), (2000, 5000, 48), (90, 100, 10)],
)
def test_steps_end_at_checkpoints(n_past: int, n_tokens: int, expected: int) -> None:
    assert tokens_to_next_checkpoint(n_past, n_tokens) == expected
