"""The block saver's blocks and their cost: real accounting and a real folder, states of zeros."""

from pathlib import Path

import pytest

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.runtime.kv_cache import CachedSequence, KvCache
from edgeinfer.runtime.prefix_cache.block_folder import BlockFolder, BlockStore
from edgeinfer.runtime.prefix_cache.block_saver import BlockSaver, RoundtripVerdict
from edgeinfer.runtime.prefix_cache.kv_block import BlockNames, unpack_tokens
from edgeinfer.runtime.prefix_cache.retention import CacheLimits, forget_conversations, list_blocks
from edgeinfer.runtime.prompt_tokens import PromptTokens
from edgeinfer.runtime.sequence_state import State, as_state

from .test_kvcache import CountingMemory, claim, fill, make

SIZE = 256
LONG_S = 1.0


class _States:
    def save(self, seq_id: int, start: int, stop: int, shift: int, position: object) -> State:
        assert shift == 0
        return as_state(memoryview(bytes(stop - start)))


class _Check:
    n_tokens = 96

    def step(self) -> str:
        return "exact"


class Side:
    """The parts between accounting and store."""

    def __init__(self, folder: Path) -> None:
        self.store = BlockStore(folder, CacheLimits(max_bytes=1 << 30, margin_bytes=0))
        self.blocks: BlockFolder = self.store.open_folder("sha", {})
        self.kv: KvCache
        self.memory: CountingMemory
        self.kv, self.memory = make(n_cells=1 << 16)
        self.writing = BlockSaver(
            folder=self.blocks,
            states=_States(),  # type: ignore[arg-type]
            kv=self.kv,
            verdict=RoundtripVerdict(self.blocks, _Check()),  # type: ignore[arg-type]
        )

    def end(self, cached_seq: CachedSequence) -> None:
        """End a request, whose sequence is to be stored."""
        self.kv.release(cached_seq, keep=True)
        self.writing.add(cached_seq, LONG_S)

    def write_all(self) -> None:
        while self.writing.has_work:
            self.writing.step(is_idle=True)
        assert self.blocks.flush(60)

    def there(self, tokens: list[int]) -> int:
        """Tokens of a text that the store has, in whole blocks."""
        chain = self.blocks.names.chain(PromptTokens(tokens), (), "").names[1:]
        return SIZE * sum(self.blocks.has(name) for name in chain)


class _FailingCheck:
    n_tokens = 96

    def step(self) -> str:
        raise OutOfMemoryError("no memory for a small context")


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path / "blocks")


def test_check_that_cannot_compute_ends_and_is_tried_by_a_later_process(side: Side) -> None:
    side.writing.verdict = RoundtripVerdict(side.blocks, _FailingCheck())  # type: ignore[arg-type]
    side.end(claim(side.kv, side.memory, list(range(2 * SIZE))))
    side.write_all()
    assert side.writing.verdict.is_refused
    assert not side.blocks.read_check()


def test_saver_names_and_looks_up_each_block_once(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing n blocks takes n hashes, or a long conversation would spend its time with its names."""
    counts = {"full": 0, "has": 0}
    full, has = BlockNames.full, BlockFolder.has

    def counted_full(names: BlockNames, parent: bytes, tokens: list[int]) -> bytes:
        counts["full"] += 1
        return full(names, parent, tokens)

    def counted_has(blocks: BlockFolder, name: bytes) -> bool:
        counts["has"] += 1
        return has(blocks, name)

    monkeypatch.setattr(BlockNames, "full", counted_full)
    monkeypatch.setattr(BlockFolder, "has", counted_has)
    n_blocks = 100
    cached_seq = claim(side.kv, side.memory, list(range(n_blocks * SIZE + 40)))
    side.end(cached_seq)
    side.write_all()
    assert counts == {"full": n_blocks, "has": n_blocks}
    assert len(list_blocks(side.store.root)) == n_blocks + 1


def test_blocks_written_beside_streams_are_checked_once_idle(side: Side) -> None:
    """Otherwise a later process would not trust them, and prefill short prompts again."""
    side.end(claim(side.kv, side.memory, list(range(2 * SIZE))))
    side.writing.step(is_idle=False)
    while side.writing._pending:
        side.writing._paused_until = 0.0
        side.writing.step(is_idle=False)
    assert side.blocks.read_check() == ""
    side.write_all()
    assert side.blocks.read_check() == "exact"
    assert not side.writing.has_work


def test_saver_notices_a_truncation(side: Side) -> None:
    first = list(range(10 * SIZE))
    cached_seq = claim(side.kv, side.memory, first)
    side.end(cached_seq)
    for _ in range(8):  # the check's step, and seven blocks
        side.writing.step(is_idle=True)
    cached_seq.in_use = True
    assert side.kv.truncate(cached_seq, 3 * SIZE + 10)
    other = first[: 3 * SIZE + 10] + list(range(50_000, 50_000 + 5 * SIZE))
    fill(side.kv, side.memory, cached_seq, other)
    side.end(cached_seq)
    side.write_all()
    assert side.there(first) == 7 * SIZE
    assert side.there(other) == 8 * SIZE
    assert all(side.blocks.read(name) is not None for name in _names(side))


def test_saver_stops_at_a_context_shift(side: Side) -> None:
    """Keys that were turned are not what was computed."""
    cached_seq = claim(side.kv, side.memory, list(range(10 * SIZE)))
    side.end(cached_seq)
    side.writing.step(is_idle=True)
    cached_seq.in_use = True
    assert side.kv.shift(cached_seq, SIZE, 4 * SIZE)
    side.write_all()
    assert side.there(cached_seq.tokens) <= SIZE


def test_conversations_sharing_a_sequence_both_own_it(side: Side) -> None:
    cached_seq = claim(side.kv, side.memory, list(range(4 * SIZE)))
    for conversation in ("one", "two"):
        cached_seq.conversation = conversation
        cached_seq.in_use = True
        side.end(cached_seq)
    side.write_all()
    assert len(list((side.store.root / "owners").iterdir())) == 2


def test_prefetched_tokens_are_stored_once_sent(side: Side) -> None:
    """Typed behind a conversation that is still on its way to the store."""
    said = list(range(3 * SIZE + 100))
    typed = said + list(range(50_000, 50_000 + 2 * SIZE))
    cached_seq = claim(side.kv, side.memory, said)
    side.end(cached_seq)
    cached_seq.in_use = True
    side.kv.exclude_from_disk(cached_seq)
    fill(side.kv, side.memory, cached_seq, typed)
    side.kv.release(cached_seq, keep=True)
    side.write_all()
    assert side.there(typed) == 3 * SIZE
    tail = next(b for b in map(side.blocks.header, _names(side)) if b is not None and b.kind == "tail")
    assert unpack_tokens(tail.tokens) == said[3 * SIZE :]

    cached_seq.memory_only_from = None
    side.writing.add(cached_seq, LONG_S)
    side.write_all()
    assert side.there(typed) == 5 * SIZE


def test_sequence_sharing_prefetched_tokens_stays_in_memory(side: Side) -> None:
    early = side.kv.allocate(PromptTokens(list(range(50))), ())
    side.kv.exclude_from_disk(early)
    fill(side.kv, side.memory, early, list(range(50)))
    later = side.kv.allocate(PromptTokens([*range(40), 99]), ())
    assert (len(later.tokens), later.memory_only_from) == (40, 0)
    fill(side.kv, side.memory, later, list(range(60)))
    later.memory_only_from = 55
    assert side.kv.truncate(later, 30)
    assert later.memory_only_from == 30


def _names(side: Side) -> list[bytes]:
    return [bytes.fromhex(block.path.stem) for block in list_blocks(side.store.root)]


def test_killed_process_leaves_no_block_without_owner(side: Side) -> None:
    said = list(range(4 * SIZE))
    cached_seq = claim(side.kv, side.memory, said)
    cached_seq.conversation = "talk"
    side.end(cached_seq)
    while not list_blocks(side.store.root):
        side.writing.step(is_idle=True)
        assert side.blocks.flush(60)
    assert side.writing.has_work  # killed here
    assert forget_conversations(side.store.root, "talk") > 0
    assert list_blocks(side.store.root) == []


def test_continued_conversation_can_be_forgotten_again(side: Side) -> None:
    cached_seq = claim(side.kv, side.memory, list(range(2 * SIZE)))
    for n in (2, 3):
        said = list(range(n * SIZE))
        cached_seq.in_use, cached_seq.conversation = True, "talk"
        fill(side.kv, side.memory, cached_seq, said)
        side.end(cached_seq)
        side.write_all()
        assert side.there(said) == n * SIZE
        assert forget_conversations(side.store.root, "talk") > 0
        assert list_blocks(side.store.root) == []
