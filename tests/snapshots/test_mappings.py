"""This process's memory mappings."""

import mmap
import sys

import pytest

from edgeinfer.runtime.llama import mappings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")


def test_a_file_is_found_by_its_path(tmp_path):
    path = tmp_path / "a file"
    path.write_bytes(b"x" * 8192)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ, offset=4096)
    (area,) = [area for area in mappings.areas() if area.path == str(path)]
    assert (area.high - area.low, area.offset, area.permissions) == (4096, 4096, "r--s")
    mapped.close()
