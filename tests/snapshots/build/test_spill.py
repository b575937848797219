"""Moving buffers into a file and mapping it in their place: nothing of them changes, and zeros cost
nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import resource
import signal
from pathlib import Path

import pytest

from edgeinfer.runtime.llama import mappings
from edgeinfer.snapshots import linux
from edgeinfer.snapshots.build.spill import BLOCK_BYTES, HUGE_PAGE_BYTES, STRETCH_BYTES, digest, spill

PAGE = mmap.PAGESIZE
SIZE = 3 * STRETCH_BYTES + 5 * PAGE


@pytest.fixture
def buffer():
    """Anonymous memory that begins nowhere round: a page, then content, a gap of zeros, content;
    address and mapping.
    """
    area = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[:] = os.urandom(SIZE)
    area[STRETCH_BYTES : 2 * STRETCH_BYTES] = bytes(STRETCH_BYTES)
    anchor = ctypes.c_char.from_buffer(area)
    yield ctypes.addressof(anchor), area
    del anchor


def _present_pages(low: int, high: int) -> int:
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        entries = memoryview(os.pread(file.fileno(), (high - low) // PAGE * 8, low // PAGE * 8)).cast(
            "Q"
        )
        return sum(entry >> 63 for entry in entries)


def test_spilled_content_is_mapped_from_the_file(buffer, tmp_path):
    at, area = buffer
    before = bytes(area)
    low = at + PAGE
    high = at + SIZE
    path = tmp_path / "buffers.img"
    told: list[float] = []
    spilled = spill([(low, high)], str(path), told.append)
    assert bytes(area) == before
    content = path.read_bytes()
    assert (spilled.size, spilled.digest) == (len(content), digest(path))
    assert SIZE - 2 * STRETCH_BYTES < spilled.written <= SIZE - PAGE - STRETCH_BYTES + 2 * BLOCK_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert told == sorted(told)
    assert told[-1] == 1.0
    mapped = [a for a in mappings.areas() if a.path == str(path)]
    assert sum(a.high - a.low for a in mapped) == spilled.written
    assert all(a.low % HUGE_PAGE_BYTES == a.offset % HUGE_PAGE_BYTES for a in mapped)


def test_zero_pages_are_released(buffer, tmp_path):
    at, area = buffer
    low = -(-(at + STRETCH_BYTES) // BLOCK_BYTES) * BLOCK_BYTES
    high = low + STRETCH_BYTES - 2 * BLOCK_BYTES
    assert _present_pages(low, high) == (high - low) // PAGE
    spill([(at + PAGE, at + SIZE)], str(tmp_path / "buffers.img"), lambda _: None)
    assert _present_pages(low, high) == 0
    assert area[STRETCH_BYTES : 2 * STRETCH_BYTES] == bytes(STRETCH_BYTES)


@pytest.fixture
def sparse():
    """Anonymous memory of which a part is never touched, and a page of the next is only read."""
    area = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[:STRETCH_BYTES] = b"x" * STRETCH_BYTES
    assert area[2 * STRETCH_BYTES] == 0
    area[-PAGE:] = b"y" * PAGE
    anchor = ctypes.c_char.from_buffer(area)
    yield ctypes.addressof(anchor), area
    del anchor


@pytest.mark.parametrize("kernel_says", [True, False])
def test_untouched_memory_is_not_read(sparse, tmp_path, monkeypatch, kernel_says):
    """Where the kernel does not say what was touched the result is the same, and all is compared."""
    at, area = sparse
    before = bytes(area[:STRETCH_BYTES]) + bytes(area[-PAGE:])
    compared: list[int] = []
    equal = linux.equal

    def noted(at, zeros, n):
        compared.append(n)
        return equal(at, zeros, n)

    monkeypatch.setattr(linux, "equal", noted)
    if not kernel_says:
        monkeypatch.setattr(mappings.Untouched, "holds", lambda self, low, high: False)
    path = tmp_path / "buffers.img"
    spilled = spill([(at, at + SIZE)], str(path), lambda _: None)
    assert bytes(area[:STRETCH_BYTES]) + bytes(area[-PAGE:]) == before
    assert bytes(area[STRETCH_BYTES:-PAGE]) == bytes(SIZE - STRETCH_BYTES - PAGE)
    assert spilled.written == expected_bytes(at)
    least, most = (0, STRETCH_BYTES + 4 * BLOCK_BYTES) if kernel_says else (SIZE, SIZE)
    assert least <= sum(compared) <= most


def expected_bytes(at: int) -> int:
    """Return the bytes written of `sparse`: whole blocks that are not zeros."""
    blocks = {a // BLOCK_BYTES for a in range(at, at + STRETCH_BYTES, PAGE)}
    blocks.add((at + SIZE - PAGE) // BLOCK_BYTES)
    low, high = at, at + SIZE
    return sum(min(high, (block + 1) * BLOCK_BYTES) - max(low, block * BLOCK_BYTES) for block in blocks)


def test_later_writes_stay_private(buffer, tmp_path):
    at, area = buffer
    path: Path = tmp_path / "buffers.img"
    spill([(at + PAGE, at + SIZE)], str(path), lambda _: None)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    area[2 * PAGE : 3 * PAGE] = b"x" * PAGE
    assert area[2 * PAGE : 3 * PAGE] == b"x" * PAGE
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_nothing_to_spill_makes_no_file(tmp_path):
    assert spill([], str(tmp_path / "buffers.img"), lambda _: None) == (0, 0, "")
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_an_error_and_the_memory_is_whole(buffer, tmp_path):
    at, area = buffer
    before = bytes(area)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (STRETCH_BYTES + PAGE, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            spill([(at + PAGE, at + SIZE)], str(tmp_path / "buffers.img"), lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert bytes(area) == before


def test_a_file_that_is_there_is_not_written_over(buffer, tmp_path):
    at, _ = buffer
    (tmp_path / "buffers.img").write_text("mine")
    with pytest.raises(FileExistsError):
        spill([(at + PAGE, at + SIZE)], str(tmp_path / "buffers.img"), lambda _: None)
