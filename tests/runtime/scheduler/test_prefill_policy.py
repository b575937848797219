"""How many tokens of prompts a step takes."""

import pytest

from edgeinfer.runtime.scheduler.batch_invariance import BatchInvariance, max_invariant_tokens
from edgeinfer.runtime.scheduler.prefill_policy import ChunkSizer, decode_budget_s


def chunks(rows: int = 60, ms_per_token: float = 1.0) -> ChunkSizer:
    sizer = ChunkSizer(BatchInvariance(max_tokens=rows, max_cells=None))
    for _ in range(50):
        sizer.record(100, 100 * ms_per_token / 1000, is_long=True)
    return sizer


def test_short_prompts_fill_an_idle_batch_and_long_ones_are_chunked() -> None:
    assert chunks().token_budget(512, 0, [61, 5]) == 512
    assert chunks().token_budget(512, 0, [256, 256]) == 512
    for ms_per_token in (0.1, 1.0, 60.0):
        assert chunks(ms_per_token=ms_per_token).token_budget(512, 0, [2000]) == 128
    on_device = chunks()
    on_device.idle_chunk_tokens = 512
    assert on_device.token_budget(512, 0, [2000]) == 512


def test_short_prompts_stay_bit_identical() -> None:
    assert chunks().token_budget(512, 0, [20] * 8) == 60
    assert chunks().token_budget(512, 7, [20] * 8) == 53
    assert chunks(rows=512).token_budget(512, 0, [20] * 8) == 512


def test_budget_is_never_zero() -> None:
    for rows in (3, 60):
        for decoding in (0, 1, 3, 60, 100):
            assert chunks(rows).token_budget(512, decoding, [1]) >= 1
            assert chunks(rows).token_budget(512, decoding, [59, 2]) >= 1


@pytest.mark.parametrize(
    ("ms_per_token", "expected"), [(0.1, 512), (0.5, 200), (1.25, 80), (3.0, 33), (60.0, 32)]
)
def test_chunk_beside_streams_takes_a_tenth_of_a_second(ms_per_token: float, expected: int) -> None:
    budget = chunks(ms_per_token=ms_per_token).token_budget(512, 2, [2000])
    assert budget == pytest.approx(expected, abs=2)


def test_chunk_beside_streams_follows_the_cost_of_long_prompts() -> None:
    sizer = chunks(ms_per_token=1.25)
    for _ in range(50):
        sizer.record(100, 0.01, is_long=False)
    assert sizer.token_budget(512, 2, [2000]) == pytest.approx(80, abs=2)


def test_cost_ignores_short_chunks() -> None:
    sizer = chunks(ms_per_token=1.25)
    sizer.record(3, 10.0, is_long=True)
    assert sizer.token_budget(512, 2, [2000]) == pytest.approx(80, abs=2)


def test_decode_budget_is_a_tenth_and_a_second_ahead() -> None:
    assert decode_budget_s(0.0, 4.0) == pytest.approx(0.4)
    assert decode_budget_s(0.0, 600.0) == pytest.approx(1.0)
    assert decode_budget_s(500.0, 100.0) == pytest.approx(51.0)
    assert decode_budget_s(30.0, 0.0) == pytest.approx(3.0)


def test_how_many_tokens_keep_their_bits_depends_on_the_weights_kernels() -> None:
    q4_1, q4_k_m = 3, 15
    assert max_invariant_tokens(512, q4_1) == 512
    assert max_invariant_tokens(512, q4_k_m) == 3
