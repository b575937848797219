"""The matrix kernels of our own (native/matmul.cpp), called through ggml."""

import json
from pathlib import Path
from typing import Any

import pytest
from matmul_ops import TYPES

from .test_attention import LEVELS, can_run, level_here, run

#: What the order of a float sum costs: ours goes along a row, llama.cpp's F32 has 64 sums.
_FLOAT_ERROR = 1e-6
Outcomes = dict[str, dict[str, Any]]


def _outcomes(level: str) -> Outcomes:
    """The `Outcome` of each type with the kernels of a level, "none" for llama.cpp's."""
    outcomes: Outcomes = json.loads(run(Path(__file__).with_name("matmul_op.py"), level))
    return outcomes


@pytest.fixture(scope="module")
def llamas() -> Outcomes:
    return _outcomes("none")


@pytest.fixture(
    scope="module",
    params=[
        level if level == level_here() else pytest.param(level, marks=pytest.mark.needs("levels"))
        for level in LEVELS
    ],
)
def ours(request: pytest.FixtureRequest) -> Outcomes:
    if not can_run(request.param):
        pytest.skip(f"this processor has not the instructions of {request.param}")
    return _outcomes(request.param)


@pytest.mark.parametrize("kind", TYPES)
def test_products_are_as_exact_as_those_of_llama_cpp(
    kind: str, ours: Outcomes, llamas: Outcomes
) -> None:
    assert ours[kind]["digest"] != llamas[kind]["digest"], "this is llama.cpp's own"
    for error in ("error", "experts_error"):
        assert ours[kind][error] < max(1.02 * llamas[kind][error], _FLOAT_ERROR)
    assert ours[kind]["is_nan_kept"]


@pytest.mark.parametrize("kind", TYPES)
def test_product_bits_do_not_depend_on_the_batch(kind: str, ours: Outcomes) -> None:
    assert ours[kind]["same"], "a row's bits depend on its company, or on the threads"
