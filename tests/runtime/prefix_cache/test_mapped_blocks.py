"""Pages of blocks' files become cells: bit-identical to copied ones, without a visible effect."""

import contextlib
import hashlib
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.runtime.engine import LlamaEngine
from edgeinfer.runtime.llama import cells
from edgeinfer.runtime.llama import model as llama_model
from edgeinfer.runtime.llama.mappings import areas
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.retention import forget_all, list_blocks

from .conftest import ROOMY, ask, heard, load, text

N_TOKENS = 900
N_BLOCKS = N_TOKENS // 256
N_TENSORS = 60
#: A prompt whose blocks are in the store, and the answer to it.
Read = tuple[tuple[int, ...], list[object]]


@pytest.fixture(scope="module")
def stored_prompt(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Read]:
    """The folder of a store with the blocks of a prompt."""
    store = BlockStore(tmp_path_factory.mktemp("stored") / "blocks", ROOMY)
    with closing(load(smollm2, store)) as engine:
        tokens = tuple(engine.tokenize(text(N_TOKENS)))[:N_TOKENS]
        answer, _ = heard(engine, ask(tokens))
        assert engine.flush_blocks()
    return store.root, (tokens, answer)


@pytest.fixture
def read(stored_prompt: tuple[Path, Read], tmp_path: Path) -> Read:
    # links, because smaps counts pages of a file that was just copied as dirty
    shutil.copytree(stored_prompt[0], tmp_path / "blocks", copy_function=os.link)
    return stored_prompt[1]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockStore:
    if "read" in request.fixturenames:
        request.getfixturevalue("read")
    return BlockStore(tmp_path / "blocks", ROOMY)


def count_mappings(engine: LlamaEngine) -> int:
    """Mappings of blocks' files among the cells."""
    (buffer,) = engine._loaded.cells.buffers
    return sum(
        buffer.memory.low <= area.low < buffer.memory.high
        for area in areas()
        if area.path.removesuffix(" (deleted)").endswith(".block")
    )


def digests(store: BlockStore) -> dict[Path, str]:
    files = [block.path for block in list_blocks(store.root)]
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def private_bytes(engine: LlamaEngine) -> int:
    """Bytes of the cells that are this process's own."""
    (buffer,) = engine._loaded.cells.buffers
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8", "surrogateescape").splitlines():
        key, _, value = line.partition(":")
        if "-" in key.split()[0]:
            low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
            is_inside = buffer.memory.low <= low and high <= buffer.memory.high
        elif is_inside and key == "Private_Dirty":
            total += int(value.split()[0]) * 1024
    return total


def test_cells_become_pages_of_the_files(engine: LlamaEngine, store: BlockStore, read: Read) -> None:
    tokens, answer = read
    before = digests(store)
    logprobs, usage = heard(engine, ask(tokens))
    assert (logprobs, usage.cached_disk_tokens) == (answer, N_TOKENS - 1)
    assert count_mappings(engine) >= N_BLOCKS * N_TENSORS
    row = sum(engine._loaded.cells.rows)
    # of each tensor, pages where blocks meet and those that were computed into
    assert private_bytes(engine) < N_TENSORS * mmap.PAGESIZE * (N_BLOCKS + 4) < N_TOKENS * row / 2
    assert engine.flush_blocks()
    assert {path: digests(store)[path] for path in before} == before


def test_cells_behind_a_pinned_prompt_become_pages_too(store: BlockStore, smollm2: Path) -> None:
    """It keeps the first cells, and what has it in front comes back behind them."""
    answers = []
    for _ in range(2):
        engine = load(smollm2, store)
        n_pinned = engine.prefill_system("You are a poet.")
        assert n_pinned % 32 != 0
        pinned = tuple(engine._core.kv.cached_sequences[0].tokens)
        answers.append(heard(engine, ask(pinned + tuple(engine.tokenize(text(N_TOKENS))))))
        n_mapped = count_mappings(engine)
        assert engine.flush_blocks()
        engine.close()
    (answer, fresh), (again, usage) = answers
    assert again == answer
    assert fresh.cached_tokens == n_pinned
    assert usage.cached_tokens == n_pinned + usage.cached_disk_tokens == usage.prompt_tokens - 1
    assert n_mapped >= N_BLOCKS * N_TENSORS


def test_writes_to_mapped_cells_stay_out_of_the_files(
    engine: LlamaEngine, store: BlockStore, read: Read
) -> None:
    """Cut in the middle of a block, and go on: the next to ask for the old text finds it unchanged."""
    tokens, answer = read
    other = tokens[:300] + tuple(engine.tokenize(text(500, 3000)))
    heard(engine, ask(tokens))
    before = digests(store)
    logprobs, usage = heard(engine, ask(other, cache_on_disk=False))
    assert usage.cached_tokens == 300
    alone, _ = heard(engine, ask(other, cache_prompt=False))
    assert logprobs == alone
    assert {path: digests(store)[path] for path in before} == before
    engine.between_steps(lambda: engine._core.kv.drop_idle())
    logprobs, usage = heard(engine, ask(tokens))
    assert (logprobs, usage.cached_disk_tokens) == (answer, N_TOKENS - 1)


def test_files_may_go_while_their_pages_are_cells(
    engine: LlamaEngine, store: BlockStore, read: Read
) -> None:
    tokens, answer = read
    heard(engine, ask(tokens))
    forget_all(store.root)
    assert not list_blocks(store.root)
    logprobs, usage = heard(engine, ask(tokens))
    assert (logprobs, usage.cached_tokens, usage.cached_disk_tokens) == (answer, N_TOKENS - 1, 0)


def test_returned_memory_releases_the_files(engine: LlamaEngine, read: Read) -> None:
    tokens, answer = read
    heard(engine, ask(tokens))
    assert engine.flush_blocks()

    def empty() -> None:
        engine._core.kv.drop_idle()
        engine._context.cells.release_pages()

    engine.between_steps(empty)
    assert count_mappings(engine) == 0
    logprobs, usage = heard(engine, ask(tokens))
    assert (logprobs, usage.cached_disk_tokens) == (answer, N_TOKENS - 1)


@pytest.mark.parametrize("without", ["the library", "mappings", "room in a page"])
def test_unmappable_pieces_are_copied(
    store: BlockStore, smollm2: Path, read: Read, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """The library is missing; the kernel allows no more mappings; the cells lie otherwise than before."""
    tokens, answer = read
    if without == "the library":
        monkeypatch.setattr(cells, "find_copies", lambda: None)
    if without == "mappings":
        monkeypatch.setattr(cells, "_most_mappings", lambda: 0)
        copies = cells.find_copies()
        monkeypatch.setattr(copies, "_n_free", 0)
        monkeypatch.setattr(copies, "_counted_at", float("-inf"))
    engine = load(smollm2, store)
    if without == "room in a page":
        heard(engine, ask(tuple(engine.tokenize("One, two, three.")), max_tokens=1))
        assert engine._core.kv.used_cells % 32 != 0
    logprobs, usage = heard(engine, ask(tokens))
    assert usage.cached_disk_tokens == N_TOKENS - 1
    assert [t.chosen.token_id for t in logprobs] == [t.chosen.token_id for t in answer]  # type: ignore[attr-defined]
    assert logprobs == answer or without == "room in a page"
    assert count_mappings(engine) == 0
    engine.close()


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.usefixtures("writes_all")
def test_cells_that_lie_on_a_device_come_back_with_the_others(
    store: BlockStore, model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with half of the layers on a device: llama.cpp's log names its buffer, its copies go unseen."""
    path: Path = request.getfixturevalue(model)
    make, out = llama_model.make_context, cells.CellCopies.record

    def with_a_device(model: object, params: object) -> tuple[object, list[str], list[cells.Buffer]]:
        context, lines, buffers = make(model, params)
        return context, [*lines, "llama_kv_cache: Vulkan0 KV buffer size =    11.25 MiB"], buffers

    @contextlib.contextmanager
    def half(*arguments: Any) -> Iterator[list[cells.Copied]]:
        with out(*arguments) as copied:
            yield copied
        tensors = sorted({copy.tensor for copy in copied})
        copied[:] = [copy for copy in copied if copy.tensor in tensors[: len(tensors) // 2]]

    monkeypatch.setattr(llama_model, "make_context", with_a_device)
    monkeypatch.setattr(cells.CellCopies, "record", half)
    outcomes = []
    for _ in range(2):
        with closing(load(path, store)) as engine:
            tokens = tuple(engine.tokenize(text(N_TOKENS)))[:N_TOKENS]
            outcomes.append(heard(engine, ask(tokens)))
            heard(engine, ask("Another.", max_tokens=40))
            assert engine.flush_blocks()
            (checked,) = store.root.glob("*/*/checked")
            assert checked.read_text() == "exact"
    (first, _), (again, usage) = outcomes
    assert (again, usage.cached_disk_tokens) == (first, N_TOKENS - 1)


def test_state_moves_between_mapping_and_copying_contexts(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces out of one, and into one that knows of none: as after `attach`."""
    engine_copy = load(smollm2, None)
    tokens = tuple(engine_copy.tokenize(text(300)))
    heard(engine_copy, ask(tokens))
    states = engine_copy._core._idle_cells._states
    cached_seq = engine_copy._core.kv.cached_sequences[0]
    state = states.save(cached_seq.seq_id, 0, 256)
    assert len(state.pieces) == 2 * N_TENSORS + 1
    row = sum(engine_copy._loaded.cells.rows)
    assert sum(piece.nbytes for piece in state.pieces[1::2]) == 256 * row
    monkeypatch.setattr(cells, "find_copies", lambda: None)
    other = load(smollm2, None)
    states = other._core._idle_cells._states
    assert states.restore(0, state)
    again = states.save(0, 0, 256)
    assert bytes(again.join_pieces()) == bytes(state.join_pieces())
    assert len(again.pieces) == 1
    other.close()
    engine_copy.close()
