"""An idle engine returns its cells' memory, and restores its prefixes from disk."""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from made_decoders import make_lfm2

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.llama.cells import Buffer, cell_memory
from edgeinfer.runtime.llama.mappings import Range
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.scheduler import idle_cells

from .conftest import ROOMY, ask, heard, load, text

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_cells, "_IDLE_S", 0.0)


@pytest.fixture
def engine(smollm2: Path, tmp_path: Path) -> Iterator[LlamaEngine]:
    """With a cache large enough for its pages to be worth giving back: 90 MiB."""
    with closing(load(smollm2, None, kv_type="q8_0", n_ctx=7680)) as opened:
        yield opened


def count_touched(engine: LlamaEngine, size: int) -> int:
    """Pieces of `size` bytes of the cells' memory that take pages."""
    pieces = (
        (address, min(address + size, high))
        for low, high in engine._loaded.cells.pages()
        for address in range(low, high, size)
    )
    return sum(is_touched(*piece) for piece in pieces)


def is_touched(low: int, high: int) -> bool:
    """Return whether a page of these addresses is present or swapped."""
    first, stop = low // mmap.PAGESIZE, -(-high // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        entries = os.pread(file.fileno(), 8 * (stop - first), 8 * first)
    return any(entry >> 62 for entry in memoryview(entries).cast("Q"))


def rest(engine: LlamaEngine) -> None:
    """Run the engine's idle work."""
    assert engine.flush_blocks()
    engine.between_steps(lambda: None)
    engine._loop.stop()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_populated_pages_are_those_of_the_cells(smollm2: Path, kv_type: str) -> None:
    """Of 30 layers with K and V each; computing into those cells touches no page besides."""
    engine = load(smollm2, None, kv_type=kv_type, n_ctx=7680)
    cells = engine._loaded.cells
    assert len(cells.rows) == 60
    before = count_touched(engine, mmap.PAGESIZE)
    cells.populate(0, 512)
    populated = count_touched(engine, mmap.PAGESIZE)
    assert populated - before >= 512 * sum(cells.rows) // mmap.PAGESIZE
    _, usage = heard(engine, ask(tuple(engine.tokenize(text(500)))[:500]))
    assert usage.cached_tokens == 0
    assert count_touched(engine, mmap.PAGESIZE) == populated
    engine.close()


def test_cells_of_unknown_layout_are_left_alone() -> None:
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    cells = cell_memory([Buffer(0, Range(address, address + (1 << 20)))], [100, 100], 1024)
    assert cells.rows == ()
    cells.populate(0, 1024)
    assert not is_touched(address, address + (1 << 20))


def test_idle_memory_is_returned_and_the_conversation_restored(
    engine: LlamaEngine, tmp_path: Path
) -> None:
    assert engine._loaded.cells
    engine.open_prefix_cache(BlockStore(tmp_path / "blocks", ROOMY))
    tokens = tuple(engine.tokenize(text(600)))
    expected, _ = heard(engine, ask(tokens))
    rest(engine)
    assert engine.metrics().kv_used_tokens == 0
    assert count_touched(engine, MIB) == 0
    logprobs, usage = heard(engine, ask(tokens))
    assert usage.cached_disk_tokens == len(tokens) - 1
    assert [t.chosen.token_id for t in logprobs] == [t.chosen.token_id for t in expected]  # type: ignore[attr-defined]


def test_unrestorable_sequence_stays(engine: LlamaEngine, tmp_path: Path) -> None:
    """Without a store, and what was only read ahead."""
    tokens = tuple(engine.tokenize(text(700)))
    heard(engine, ask(tokens, max_tokens=1))
    rest(engine)
    assert engine.metrics().kv_used_tokens == len(tokens)
    engine.open_prefix_cache(BlockStore(tmp_path / "blocks", ROOMY))
    early = tokens + tuple(engine.tokenize("what stands in the composer"))
    list(engine.submit(ask(early, max_tokens=0, cache_on_disk=False)))
    rest(engine)
    assert engine.metrics().kv_used_tokens == len(early)


def map_from_file(ranges: Iterable[Range], path: Path) -> None:
    """Map private copies of these ranges over them, as a restore maps the snapshot's memory."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED
    with path.open("wb") as file, path.open("rb") as mapped:
        for low, high in ranges:
            offset = file.tell()
            file.write(ctypes.string_at(low, high - low))
            file.flush()
            where = (ctypes.c_void_p(low), ctypes.c_size_t(high - low))
            fd = mapped.fileno()
            protection, start = mmap.PROT_READ | mmap.PROT_WRITE, ctypes.c_long(offset)
            assert libc.mmap(*where, protection, flags, fd, start) == low


@pytest.mark.parametrize("resumed", [False, True])
def test_pinned_prompt_is_written_back(engine: LlamaEngine, tmp_path: Path, resumed: bool) -> None:
    """In a resumed process the cells are mapped from the snapshot's file, whose content comes back."""
    n_pinned = engine.prefill_system("You are a poet. " * 20)
    assert n_pinned > 60
    if resumed:
        engine.park()
        map_from_file(engine._loaded.cells.pages(), tmp_path / "memory.img")
    engine.open_prefix_cache(BlockStore(tmp_path / "blocks", ROOMY))
    pinned = tuple(engine._core.kv.cached_sequences[0].tokens)
    asked = ask(pinned + tuple(engine.tokenize(text(700))))
    expected, usage = heard(engine, asked)
    assert usage.cached_tokens == n_pinned
    rest(engine)
    assert engine.metrics().kv_used_tokens == n_pinned
    assert 0 < count_touched(engine, MIB) < 70 or resumed
    other = ask(pinned + tuple(engine.tokenize(text(100, 5000))))
    logprobs, usage = heard(engine, other)
    assert (usage.cached_tokens, usage.cached_disk_tokens) == (n_pinned, 0)
    alone, _ = heard(engine, ask(other.prompt, cache_prompt=False))  # type: ignore[arg-type]
    assert logprobs == alone
    again, _ = heard(engine, asked)
    assert again == expected


def test_pinned_prompt_of_a_recurrent_model_is_written_back(smollm2: Path, tmp_path: Path) -> None:
    with closing(load(make_lfm2(tmp_path / "lfm2.gguf", smollm2), None, kv_type="q8_0")) as engine:
        pinned = tuple(engine.tokenize(text(200)))
        engine._loop.call(lambda: engine._core.pin(list(pinned)))
        alone, _ = heard(engine, ask(pinned + pinned[:9], cache_prompt=False))
        engine._loop.call(engine._core._idle_cells.release_some)
        logprobs, usage = heard(engine, ask(pinned + pinned[:9]))
        assert usage.cached_tokens == len(pinned)
        assert [t.chosen.token_id for t in logprobs] == [t.chosen.token_id for t in alone]  # type: ignore[attr-defined]
