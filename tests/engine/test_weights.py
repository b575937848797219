"""A model's file in the page cache is mapped first and touched then; another is read."""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

import pytest
from other_processes import wait_until

from edgeinfer.platform.page_cache import is_cold
from edgeinfer.runtime.llama import weights
from edgeinfer.runtime.llama.mappings import mapped_weights
from edgeinfer.runtime.llama.weights import free_model, open_model


def touched_part(path: Path) -> float:
    """Return the part of a mapped file's pages that this process has touched."""
    touched = pages = 0
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for area in mapped_weights():
            if area.path == str(path):
                first, end = area.low // mmap.PAGESIZE, area.high // mmap.PAGESIZE
                entries = memoryview(os.pread(file.fileno(), 8 * (end - first), 8 * first)).cast("Q")
                touched += sum(entry >> 63 for entry in entries)
                pages += end - first
    return touched / pages


def test_cached_file_is_touched_after_it_was_mapped_and_another_is_read(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(smollm2, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert is_cold(path)
    model = open_model((str(path),))
    assert touched_part(path) > 0.9
    free_model(model)
    assert not is_cold(path)
    model = open_model((str(path),))
    wait_until(lambda: touched_part(path) > 0.9, "the thread to touch every page")
    free_model(model)
    monkeypatch.setattr(weights, "_populate", lambda paths: None)
    model = open_model((str(path),))
    assert touched_part(path) < 0.1
    free_model(model)


def test_llama_cpp_populates_if_its_table_is_not_known(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_find", lambda: None)
    model = open_model((str(smollm2),))
    assert touched_part(smollm2.resolve()) > 0.9
    free_model(model)
