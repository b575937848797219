"""Logarithms of sums of exponentials."""

import math
import tracemalloc

import numpy as np
import pytest

from edgeinfer.runtime.sampling.logprobs import LogSum


def test_log_sums_are_exact_and_take_no_new_memory() -> None:
    rows = np.random.default_rng(1).normal(0, 8, (3, 49_152)).astype(np.float32)
    rows[1, ::2] = -np.inf  # tokens that a constraint forbids
    log_sum = LogSum()
    log_sum(rows[0])
    tracemalloc.start()
    try:
        sums = [log_sum(row) for row in rows]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < rows[0].nbytes / 10
    expected = [math.log(np.exp(row.astype(np.float64)).sum()) for row in rows]
    assert sums == pytest.approx(expected, abs=1e-4)
    assert LogSum()(rows[0][:100]) == log_sum(rows[0][:100])
