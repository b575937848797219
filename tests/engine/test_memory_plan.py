"""Every automatic choice, on machines that are only described."""

from __future__ import annotations

import pytest

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.runtime.memory_plan.plan import (
    choose_cells,
    choose_context,
    choose_parallel,
    choose_threads,
    invariant_rows,
)

from .conftest import machine

GIB = 1 << 30


def test_threads_follow_cores_quota_and_what_is_asked() -> None:
    assert choose_threads(0, machine(GIB, 8)).value == 8
    assert choose_threads(0, machine(GIB, 8, quota=2.5)).value == 2
    assert choose_threads(0, machine(GIB, 8, quota=0.5)).value == 1
    assert "control group" in choose_threads(0, machine(GIB, 8, quota=2.5)).reason
    assert choose_threads(3, machine(GIB, 8)).value == 3


@pytest.mark.parametrize(("threads", "expected"), [(1, 4), (2, 8), (4, 16), (32, 16)])
def test_sequences_follow_threads(threads: int, expected: int) -> None:
    assert choose_parallel(0, threads, 1024, 16 * GIB).value == expected


def test_sequences_fit_memory() -> None:
    chosen = choose_parallel(0, 4, 1 << 20, 8 * GIB)
    assert chosen.value == 4
    assert "MiB" in chosen.reason
    assert choose_parallel(11, 4, 1 << 20, 8 * GIB).value == 11


@pytest.mark.parametrize(
    ("n_ctx_train", "per_token", "free", "expected", "word"),
    [
        (8192, 23 << 10, 16 * GIB, 8192, "trained"),
        (131_072, 16 << 10, 64 * GIB, 131_072, "trained"),
        (1 << 20, 16 << 10, 64 * GIB, 131_072, "enough"),
        (131_072, 128 << 10, 16 * GIB, 65_536, "half"),
        (131_072, 128 << 10, GIB, 4096, "half"),
        (131_072, 1 << 20, 64 * GIB, 32_768, "half"),
        (1000, 1 << 10, 64 * GIB, 1000, "trained"),
    ],
)
def test_context_has_a_value_and_its_reason(
    n_ctx_train: int, per_token: int, free: int, expected: int, word: str
) -> None:
    chosen = choose_context(0, n_ctx_train, per_token, free)
    assert chosen.value == expected
    assert word in chosen.reason


def test_context_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfMemoryError, match="131072 tokens needs 16384 MiB"):
        choose_context(131_072, 131_072, 128 << 10, 8 * GIB)
    with pytest.raises(OutOfMemoryError, match="no room"):
        choose_context(0, 8192, 128 << 10, 1 << 20)
    with pytest.raises(OutOfMemoryError):
        choose_context(0, 8192, 128 << 10, -GIB)


def test_cells_hold_one_context_or_all_sequences() -> None:
    assert choose_cells(8192, 8, 1024, 16 * GIB).value == 8192
    assert choose_cells(2048, 16, 1024, 16 * GIB).value == 16_384
    assert choose_cells(2048, 16, 1 << 18, GIB).value == 2048
    assert choose_cells(2048, 16, 1 << 17, 16 * GIB).value == 16_384
    assert choose_cells(2048, 16, 1 << 17, 2 * GIB).value == 8192
    assert choose_cells(1000, 1, 1 << 20, GIB).value == 1024


def test_how_many_tokens_keep_their_bits_depends_on_the_weights_kernels() -> None:
    q4_1, q4_k_m = 3, 15
    assert invariant_rows(512, q4_1) == 512
    assert invariant_rows(512, q4_k_m) == 3
