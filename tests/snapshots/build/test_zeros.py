"""Giving zeros back before the dump: nothing of the memory changes, and untouched memory is not read."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from edgeinfer.runtime.llama import mappings
from edgeinfer.snapshots import linux
from edgeinfer.snapshots.build import park

PAGE = mmap.PAGESIZE
BLOCK = park._BLOCK_BYTES


@pytest.mark.parametrize("kernel_says", [True, False])
def test_zeros_are_given_back_and_untouched_memory_is_not_read(monkeypatch, kernel_says):
    """Where the kernel does not say what was touched the result is the same, and all is compared."""
    area = mmap.mmap(-1, 40 * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[: 10 * BLOCK] = os.urandom(10 * BLOCK)
    area[10 * BLOCK : 20 * BLOCK] = bytes(10 * BLOCK)
    area[-PAGE:] = b"y" * PAGE
    anchor = ctypes.c_char.from_buffer(area)
    at = ctypes.addressof(anchor)
    before = bytes(area[: 20 * BLOCK]) + bytes(area[-PAGE:])
    compared: list[int] = []
    equal = linux.equal

    def noted(at, zeros, n):
        compared.append(n)
        return equal(at, zeros, n)

    monkeypatch.setattr(linux, "equal", noted)
    if not kernel_says:
        monkeypatch.setattr(mappings.Untouched, "holds", lambda self, low, high: False)
    park.give_back_zeros([mappings.Range(at + PAGE, at + 40 * BLOCK)])
    assert 9 * BLOCK <= 20 * BLOCK - _present_bytes(at, at + 20 * BLOCK) <= 10 * BLOCK
    assert bytes(area[: 20 * BLOCK]) + bytes(area[-PAGE:]) == before
    least, most = (20 * BLOCK, 23 * BLOCK) if kernel_says else (40 * BLOCK - PAGE, 40 * BLOCK - PAGE)
    assert least <= sum(compared) <= most
    del anchor


def _present_bytes(low: int, high: int) -> int:
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        raw = os.pread(file.fileno(), (high - low) // PAGE * 8, low // PAGE * 8)
        return PAGE * sum(entry >> 63 for entry in memoryview(raw).cast("Q"))
