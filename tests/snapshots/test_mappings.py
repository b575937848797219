"""What is known of this process's memory, and what is asked of the kernel for it."""

import contextlib
import ctypes
import mmap
import sys

import pytest

from edgeinfer.runtime.llama import mappings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")
MIB = 1 << 20


def test_a_file_is_found_by_its_path(tmp_path):
    path = tmp_path / "a file"
    path.write_bytes(b"x" * 8192)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ, offset=4096)
    (area,) = [area for area in mappings.areas() if area.path == str(path)]
    assert (area.high - area.low, area.offset, area.permissions) == (4096, 4096, "r--s")
    mapped.close()


def test_memory_is_untouched_until_it_is_and_again_when_given_back():
    area = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anchor = ctypes.c_char.from_buffer(area)
    at = ctypes.addressof(anchor)
    untouched = mappings.Untouched()
    assert untouched.holds(at, at + 8 * MIB)
    area[5 * MIB] = 1
    assert not untouched.holds(at, at + 8 * MIB)
    assert untouched.holds(at, at + 4 * MIB)
    mappings.advise([mappings.Range(at, at + 8 * MIB)], mappings.DONTNEED)
    assert untouched.holds(at, at + 8 * MIB)
    untouched.close()
    assert not untouched.holds(at, at + 4 * MIB)  # it is not known any more
    del anchor


def test_a_file_s_pages_that_are_not_there_yet_are_not_untouched(tmp_path):
    """They do not read as zeros."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * MIB)
    with path.open("r+b") as file:
        area = mmap.mmap(file.fileno(), MIB, access=mmap.ACCESS_COPY)
    anchor = ctypes.c_char.from_buffer(area)
    at = ctypes.addressof(anchor)
    with contextlib.closing(mappings.Untouched()) as untouched:
        assert not untouched.holds(at, at + MIB)
    del anchor
