"""The store on real folders: blocks are read as written, and nothing else is."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash

from edgeinfer.errors import BlockDamagedError, SnapshotUnsafeError
from edgeinfer.runtime.prefix_cache import retention
from edgeinfer.runtime.prefix_cache.block_folder import BlockFolder, BlockStore
from edgeinfer.runtime.prefix_cache.kv_block import (
    Header,
    KvBlock,
    decode,
    encode,
    owner_name,
    pack_tokens,
)
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.runtime.sequence_state import ANYWHERE, State, as_state

TOKENS = list(range(256))
ROOMY = CacheLimits(max_bytes=1 << 30, margin_bytes=0)
#: What a process of its own begins with.
_IMPORTS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_store import *
"""


def make_block(
    blocks: BlockFolder, tokens: list[int], parent: bytes | None = None, *, n_bytes: int = 5000
) -> KvBlock:
    parent = blocks.names.root() if parent is None else parent
    name = blocks.names.full(parent, tokens)
    payload = (bytes(tokens[:1]) or b"x") * n_bytes
    header = Header("full", name, parent, blocks.names.identity, pack_tokens(tokens), ())
    return KvBlock(header, (as_state(memoryview(payload)), as_state(memoryview(b"end"))))


def put(blocks: BlockFolder, block: KvBlock) -> bytes:
    assert blocks.write(block)
    assert blocks.flush(30)
    return block.header.name


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "blocks", ROOMY)


@pytest.fixture
def blocks(store: BlockStore) -> BlockFolder:
    return store.open_folder("sha", {"kv": "f16"})


def test_block_round_trip(blocks: BlockFolder) -> None:
    block = make_block(blocks, TOKENS)
    name = put(blocks, block)
    back = blocks.read(name)
    assert [bytes(state.join_pieces()) for state in back.states] == [b"\0" * 5000, b"end"]
    assert back.tokens == TOKENS
    assert blocks.traffic.bytes_written > blocks.traffic.bytes_read == 5003


def test_piece_lies_at_its_place_in_a_page(blocks: BlockFolder) -> None:
    contents = [b"head", b"c" * 9000, b"", b"d" * 5000, b"end"]
    page_offsets = (ANYWHERE, 64, ANYWHERE, 4095, ANYWHERE)
    state = State(tuple(memoryview(piece) for piece in contents), page_offsets)
    header = make_block(blocks, TOKENS).header
    data = memoryview(b"".join(encode(KvBlock(header, (state, as_state(memoryview(b"point")))))))
    back, point = decode(data).states
    assert [bytes(piece) for piece in back.pieces] == contents
    assert bytes(data).index(b"ccc") % 4096 == 64
    assert bytes(data).index(b"ddd") % 4096 == 4095
    assert (back.page_offsets, back.file) == (page_offsets, None)
    assert bytes(back.join_pieces()) == b"".join(contents)
    assert bytes(point.join_pieces()) == b"point"


def test_block_is_found_by_another_process_without_an_index(
    store: BlockStore, blocks: BlockFolder
) -> None:
    name = put(blocks, make_block(blocks, TOKENS))
    other = BlockStore(store.root, ROOMY).open_folder("sha", {"kv": "f16"})
    assert other.names.full(other.names.root(), TOKENS) == name
    assert other.readers.submit(other.read, name).result() is not None


@pytest.mark.parametrize(
    ("model", "identity"), [("other", {"kv": "f16"}), ("sha", {"kv": "q8_0"}), ("sha", {})]
)
def test_another_identity_finds_nothing(
    store: BlockStore, blocks: BlockFolder, model: str, identity: dict[str, str]
) -> None:
    name = put(blocks, make_block(blocks, TOKENS))
    other = store.open_folder(model, identity)
    assert other.names.full(other.names.root(), TOKENS) != name
    os.link(blocks.path(name), other.path(name))
    assert other.read(name) is None
    assert not other.has(name)


def test_salt_adapters_parent_and_secret_decide_names(tmp_path: Path, blocks: BlockFolder) -> None:
    names = blocks.names
    stranger = BlockStore(tmp_path / "stranger", ROOMY).open_folder("sha", {"kv": "f16"}).names
    roots = {names.root(), names.root(salt="key"), stranger.root()}
    roots |= {names.root((("a", scale),)) for scale in (1.0, 2.0)}
    assert len(roots) == 5
    assert len({names.full(root, TOKENS) for root in roots}) == 5
    assert names.tail(roots.pop(), TOKENS) != names.tail(roots.pop(), TOKENS)


@pytest.mark.parametrize("offset", [0, 5, 9, 13, 17, 30, 200, 5000, -1])
def test_flipped_bit_is_detected_and_the_file_deleted(blocks: BlockFolder, offset: int) -> None:
    name = put(blocks, make_block(blocks, TOKENS))
    path = blocks.path(name)
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)
    assert blocks.read(name) is None
    assert not blocks.has(name)
    assert blocks.traffic.damaged == 1


@pytest.mark.parametrize("size", [0, 1, 23, 24, 100, 5000])
def test_truncated_file_is_detected(blocks: BlockFolder, size: int) -> None:
    name = put(blocks, make_block(blocks, TOKENS))
    os.truncate(blocks.path(name), size)
    assert blocks.header(name) is None or size >= 1000
    assert blocks.read(name) is None
    assert not blocks.has(name)


def test_swapped_blocks_are_detected(blocks: BlockFolder) -> None:
    first, second = (put(blocks, make_block(blocks, [n] * 256)) for n in (1, 2))
    spare = blocks.path(first).with_name("spare")
    blocks.path(first).rename(spare)
    blocks.path(second).rename(blocks.path(first))
    spare.rename(blocks.path(second))
    assert blocks.read(first) is None
    assert blocks.read(second) is None


def test_wrong_sizes_are_refused(blocks: BlockFolder) -> None:
    data = b"".join(encode(make_block(blocks, TOKENS)))
    size, lie = (msgspec.msgpack.encode(n) for n in (5000, 65_000))
    assert data.count(size) == 1
    assert len(size) == len(lie)
    data = data.replace(size, lie)
    checksum = xxhash.xxh3_64_intdigest(data[16:]).to_bytes(8, "little")
    with pytest.raises(BlockDamagedError, match="exceed the file"):
        decode(memoryview(data[:8] + checksum + data[16:]))


def test_folders_and_files_are_the_user_s_alone(store: BlockStore, blocks: BlockFolder) -> None:
    name = put(blocks, make_block(blocks, TOKENS))
    blocks.add_owner("talk", [name])
    assert blocks.flush(30)
    for folder, subfolders, files in os.walk(store.root):
        assert all(os.stat(Path(folder, f)).st_mode & 0o777 == 0o700 for f in subfolders)
        assert all(os.stat(Path(folder, f)).st_mode & 0o777 == 0o600 for f in files)
    blocks.path(name).chmod(0o644)
    assert blocks.read(name) is None


def test_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(SnapshotUnsafeError):
            BlockStore(tmp_path / name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_owner_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "blocks"
    root.mkdir(mode=0o700)
    os.chown(root, 12345, 12345)
    with pytest.raises(SnapshotUnsafeError):
        BlockStore(root)


def test_a_symlink_in_a_file_s_place_is_not_followed(tmp_path: Path, blocks: BlockFolder) -> None:
    name = put(blocks, make_block(blocks, TOKENS))
    blocks.path(name).rename(tmp_path / "elsewhere")
    blocks.path(name).symlink_to(tmp_path / "elsewhere")
    assert blocks.read(name) is None


def test_eviction_is_lru_and_children_before_parents(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "blocks", CacheLimits(max_bytes=100_000, margin_bytes=0))
    blocks = store.open_folder("sha", {})
    chain = [put(blocks, make_block(blocks, [n] * 256, n_bytes=16_000)) for n in range(5)]
    blocks.touch(chain[:3])
    put(blocks, make_block(blocks, [8] * 256, n_bytes=16_000))
    put(blocks, make_block(blocks, [9] * 256, n_bytes=16_000))
    present = [blocks.has(name) for name in chain]
    assert present == [True, True, True, False, False]
    blocks.touch(chain[:3])
    for n in range(20, 24):
        put(blocks, make_block(blocks, [n] * 256, n_bytes=16_000))
    present = [blocks.has(name) for name in chain[:3]]
    assert present == sorted(present, reverse=True)
    assert blocks.traffic.pruned > 2


def test_future_timestamps_do_not_prevent_eviction(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "blocks", CacheLimits(max_bytes=100_000, margin_bytes=0))
    blocks = store.open_folder("sha", {})
    name = put(blocks, make_block(blocks, TOKENS, n_bytes=40_000))
    future_s = time.time() + 1e8
    os.utime(blocks.path(name), (future_s, future_s))
    for n in range(4):
        put(blocks, make_block(blocks, [n] * 256, n_bytes=40_000))
        assert sum(b.n_bytes for b in retention.list_blocks(store.root)) <= 100_000
    assert not blocks.has(name)


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Path]:
    """The folders or files that a function of `retention` was called for."""
    seen: list[Path] = []
    function = getattr(retention, name)

    def note(path: Path, *arguments: object) -> object:
        seen.append(path)
        return function(path, *arguments)

    monkeypatch.setattr(retention, name, note)
    return seen


def test_first_write_of_a_process_lists_no_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = count_calls(monkeypatch, "list_blocks")
    for n in range(5):
        blocks = BlockStore(tmp_path / "blocks", ROOMY).open_folder("sha", {})
        put(blocks, make_block(blocks, [n] * 256))
        assert len(listed) == 1, "by the very first one alone"


def test_blocks_are_counted_again_after_a_part_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = CacheLimits(max_bytes=64 << 20, margin_bytes=0)
    listed = count_calls(monkeypatch, "list_blocks")
    for n in range(40):
        blocks = BlockStore(tmp_path / "blocks", limits).open_folder("sha", {})
        put(blocks, make_block(blocks, [n] * 256, n_bytes=200_000))
    assert len(listed) == 1 + 40 * 200_000 // (2 << 20)


@pytest.mark.parametrize("damage", [b"", b"x", b"\0" * 7, None])
def test_sum_that_is_damaged_or_gone_is_made_again(tmp_path: Path, damage: bytes | None) -> None:
    root = tmp_path / "blocks"
    small = CacheLimits(max_bytes=400_000, margin_bytes=0)
    for n in range(30):
        blocks = BlockStore(root, small).open_folder("sha", {})
        put(blocks, make_block(blocks, [n] * 256, n_bytes=40_000))
        assert sum(block.n_bytes for block in retention.list_blocks(root)) <= 400_000
        if n % 3 == 0 and damage is None:
            (root / "used").unlink()
        elif n % 3 == 0:
            (root / "used").write_bytes(damage or b"")


def test_processes_that_write_at_once_keep_the_limit(tmp_path: Path) -> None:
    root, limit = tmp_path / "blocks", 8 << 20
    code = f"""
{_IMPORTS}
store = BlockStore(Path({str(root)!r}), CacheLimits(max_bytes={limit}, margin_bytes=0))
blocks = store.open_folder(sys.argv[1], {{}})
for n in range(100):
    put(blocks, make_block(blocks, [n] * 256, n_bytes=100_000))
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [process.wait(120) for process in writers] == [0, 0, 0]
    used = sum(block.n_bytes for block in retention.list_blocks(root))
    # each may have a block under way that another's count has not seen
    assert limit // 2 < used <= limit + 3 * 110_000


def test_forgetting_many_conversations_is_one_walk(
    store: BlockStore, blocks: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, private = (put(blocks, make_block(blocks, [n] * 256)) for n in range(2))
    names = [put(blocks, make_block(blocks, [n] * 256)) for n in range(2, 22)]
    for n, name in enumerate(names):
        blocks.add_owner(f"chat-{n}", [shared, name])
    blocks.add_owner("other", [private])
    assert blocks.flush(30)
    listed = count_calls(monkeypatch, "list_blocks")
    owners = count_calls(monkeypatch, "owned_names")
    assert retention.forget_conversations(store.root, *(f"chat-{n}" for n in range(20))) > 0
    assert listed == []
    assert len(owners) == len(set(owners)) == 21
    assert [blocks.has(name) for name in (shared, private, *names)] == [False, True] + [False] * 20


def test_names_in_a_list_lead_to_no_other_file(store: BlockStore, blocks: BlockFolder) -> None:
    name = put(blocks, make_block(blocks, TOKENS))
    path = blocks.path(name)
    outside = store.root.parent / "outside.block"
    path.rename(outside)
    store.add_owner("talk", [])
    store._owner_list("talk").write_text("../../../outside\n")
    retention.forget_conversations(store.root, "talk")
    assert outside.exists()


def test_no_room_stops_writing_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    store = BlockStore(tmp_path / "blocks", CacheLimits(max_bytes=4096, margin_bytes=0), said.append)
    blocks = store.open_folder("sha", {})
    for n in range(3):
        put(blocks, make_block(blocks, [n] * 256))
    assert retention.list_blocks(store.root) == []
    assert len(said) == 1
    assert "again" in said[0]


def test_a_file_size_limit_in_the_middle_of_a_block_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import resource, signal
{_IMPORTS}
said = []
store = BlockStore(Path({str(tmp_path / "blocks")!r}), ROOMY, said.append)
blocks = store.open_folder("sha", {{}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for n in range(3):
    put(blocks, make_block(blocks, [n] * 256, n_bytes=50_000))
assert len(said) == 1, said
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": "."})
    leftovers = [f for _, _, files in os.walk(tmp_path / "blocks") for f in files]
    assert sorted(leftovers) == ["secret", "used"]


def writing(root: Path, rounds: int) -> subprocess.Popen[bytes]:
    code = f"""
{_IMPORTS}
blocks = BlockStore(Path({str(root)!r}), ROOMY).open_folder("sha", {{}})
for round in range({rounds}):
    for n in range(40):
        put(blocks, make_block(blocks, [n] * 256, n_bytes=200_000))
        if not round and n == 10:
            print("going", flush=True)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def whole_and_unfinished(root: Path) -> tuple[int, int]:
    blocks = BlockStore(root, ROOMY).open_folder("sha", {})
    files = [block.path.name for block in retention.list_blocks(root)]
    names = [bytes.fromhex(name.removesuffix(retention.SUFFIX)) for name in files]
    assert all(blocks.read(name) is not None for name in names)
    return len(names), sum(f.endswith(".new") for _, _, files in os.walk(root) for f in files)


def test_a_killed_writer_leaves_whole_blocks_only(tmp_path: Path) -> None:
    root = tmp_path / "blocks"
    process = writing(root, 1000)
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    n_whole, n_unfinished = whole_and_unfinished(root)
    assert n_whole >= 10
    assert n_unfinished <= 1
    long_ago = time.time() - 1e5
    for folder, _, files in os.walk(root):
        for name in files:
            os.utime(Path(folder, name), (long_ago, long_ago))
    retention.list_blocks(root)
    assert whole_and_unfinished(root) == (n_whole, 0)


def test_writer_survives_any_failure(blocks: BlockFolder) -> None:
    def fail() -> None:
        raise ValueError("not foreseen")

    assert blocks.put(fail, 1)
    assert blocks.flush(30)
    assert blocks.has(put(blocks, make_block(blocks, TOKENS)))


def test_two_processes_that_write_the_same_do_no_harm(tmp_path: Path) -> None:
    processes = [writing(tmp_path / "blocks", 3) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    for process in processes:
        process.stdout.close()
    assert whole_and_unfinished(tmp_path / "blocks") == (40, 0)


def test_forget_conversation_keeps_shared_blocks(store: BlockStore, blocks: BlockFolder) -> None:
    shared, mine, foreign = (put(blocks, make_block(blocks, [n] * 256)) for n in range(3))
    blocks.add_owner("mine", [shared, mine])
    blocks.add_owner("theirs", [shared, foreign])
    assert blocks.flush(30)
    assert retention.forget_conversations(store.root, "mine") > 0
    assert [blocks.has(name) for name in (shared, mine, foreign)] == [True, False, True]
    assert retention.forget_conversations(store.root, "theirs") > 0
    assert retention.list_blocks(store.root) == []


@pytest.mark.parametrize("path", ["secret", "owners/talk"])
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, path: str) -> None:
    store = BlockStore(tmp_path / "blocks", ROOMY)
    store.add_owner("talk", [b"name"])
    fifo = store.root / path
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo, 0o600)
    if path == "secret":
        with pytest.raises(PermissionError, match="not a regular file"):
            BlockStore(store.root, ROOMY)
    else:
        assert retention.forget_conversations(store.root, "talk") == 0


def test_lists_of_conversations_go_with_their_last_block(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "blocks", CacheLimits(max_bytes=100_000, margin_bytes=0))
    blocks = store.open_folder("sha", {})
    gone, kept_block, new = (make_block(blocks, [n] * 256, n_bytes=40_000) for n in range(3))
    for conversation, block in (("gone", gone), ("kept", kept_block)):
        blocks.add_owner(conversation, [put(blocks, block)])
    blocks.add_owner("new", [new.header.name])
    assert blocks.flush(30)
    for conversation in ("gone", "kept"):
        os.utime(store.root / "owners" / owner_name(store.secret, conversation), (0, 0))
    put(blocks, new)
    assert not blocks.has(gone.header.name)
    assert [store.has_owner(name) for name in ("gone", "kept", "new")] == [False, True, True]


def test_forget_a_model_and_all(store: BlockStore, blocks: BlockFolder) -> None:
    name = put(blocks, make_block(blocks, TOKENS))
    other = store.open_folder("other", {})
    foreign = put(other, make_block(other, TOKENS))
    assert retention.forget_model(store.root, "sha") > 0
    assert (blocks.has(name), other.has(foreign)) == (False, True)
    assert retention.forget_all(store.root) > 0
    assert [path.name for path in store.root.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    "delete", [retention.forget_all, lambda root: retention.forget_model(root, "sha"), shutil.rmtree]
)
def test_process_recreates_a_deleted_folder(tmp_path: Path, delete: Callable[[Path], object]) -> None:
    """Forgotten under it, and so its next block, its owner and what is known of the model are there."""
    said: list[str] = []
    store = BlockStore(tmp_path / "blocks", ROOMY, said.append)
    blocks = store.open_folder("sha", {"kv": "f16"})
    blocks.save_check("exact")
    first = put(blocks, make_block(blocks, TOKENS))
    blocks.add_owner("talk", [first])
    assert blocks.flush(30)
    delete(store.root)
    assert not blocks.has(first)

    second = put(blocks, make_block(blocks, [2] * 256))
    blocks.add_owner("talk", [second])
    assert blocks.flush(30)
    another = BlockStore(store.root, ROOMY).open_folder("sha", {"kv": "f16"})
    assert another.read(second) is not None
    assert another.names.root() == blocks.names.root()
    assert another.read_check() == "exact"
    assert store.open_folder("sha", {"kv": "q8_0"}).read_check() == ""
    assert said == []
    assert retention.forget_conversations(store.root, "talk") > 0
    assert not blocks.has(second)


def test_process_writes_nothing_under_another_secret(tmp_path: Path) -> None:
    """No process would find its names, not even `forget`."""
    said: list[str] = []
    store = BlockStore(tmp_path / "blocks", ROOMY, said.append)
    blocks = store.open_folder("sha", {})
    shutil.rmtree(store.root)
    BlockStore(store.root, ROOMY)
    put(blocks, make_block(blocks, TOKENS))
    assert retention.list_blocks(store.root) == []
    assert "another process" in said[0]


def test_the_writer_is_bounded_and_can_be_used_again(blocks: BlockFolder) -> None:
    name = put(blocks, make_block(blocks, TOKENS))
    assert blocks.close()
    blocks.remove(name)
    put(blocks, make_block(blocks, TOKENS))
    assert blocks.has(name)
    blocks.writer._bytes = 1 << 30
    assert not blocks.write(make_block(blocks, TOKENS))
    blocks.writer._bytes = 0
