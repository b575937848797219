"""The matrix kernels of our own (native/matmul.cpp), called through ggml."""

from typing import Any

import pytest
from matmul_ops import TYPES

from .test_attention import llamas as llamas
from .test_attention import ours as ours

PROGRAM = "matmul_op.py"

#: What the order of a float sum costs: ours goes along a row, llama.cpp's F32 has 64 sums.
_FLOAT_ERROR = 1e-6


@pytest.mark.parametrize("kind", TYPES)
def test_products_are_as_exact_as_those_of_llama_cpp(
    kind: str, ours: dict[str, Any], llamas: dict[str, Any]
) -> None:
    assert ours[kind]["digest"] != llamas[kind]["digest"], "this is llama.cpp's own"
    for error in ("error", "experts_error"):
        assert ours[kind][error] < max(1.02 * llamas[kind][error], _FLOAT_ERROR)
    assert ours[kind]["is_nan_kept"]


@pytest.mark.parametrize("kind", TYPES)
def test_product_bits_do_not_depend_on_the_batch(kind: str, ours: dict[str, Any]) -> None:
    assert ours[kind]["same"], "a row's bits depend on its company, or on the threads"
