"""ggml's matrix products on made weights, beside the same in float64.

A program, because a process has one set of kernels.

usage: matmul_op.py v3|v3-vnni|v4|none: a JSON object, type → Outcome
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "made"))
from matmul_ops import TYPES, Floats, Products, dequantize, random_weights, use_level

#: Width and rows: one chunk of a row, and several; a whole number of vectors, and not.
_SHAPES = ((768, 80), (5376, 49))
_MOST = 70
_ROWS = (1, 2, 3, 5, 8, 9, 12, 16, 17, 33, _MOST)


@dataclass(frozen=True)
class Outcome:
    """The results of a type. Errors are root mean squares, relative to that of the exact product.

    `same`: rows are bit-identical in smaller batches, with other numbers of threads, and among other experts.
    `digest` is of a result's bytes. `is_nan_kept`: only the row whose activations hold NaN gives NaN.
    """

    error: float
    experts_error: float
    same: bool
    digest: str
    is_nan_kept: bool


def _error(got: Floats, exact: np.ndarray) -> float:
    return float(np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()))


def _multiply(kind: str, weights: np.ndarray, x: Floats, n_threads: int) -> Floats:
    products = Products(kind, [weights], len(x))
    products.compute(x, n_threads=n_threads)
    (result,) = products.results()
    products.close()
    return result[:, 0]


def _of_shape(kind: str, width: int, rows: int) -> tuple[float, bool, Floats]:
    weights = random_weights(kind, rows, width, seed=rows)
    x = np.random.default_rng(width).normal(size=(_MOST, width)).astype(np.float32)
    x[3] *= 1e-38  # a row whose blocks have no scale
    x[5] *= 1e20
    all_rows = _multiply(kind, weights, x, 2)
    ways = [(n, n_threads) for n in _ROWS for n_threads in (1, 2, 3)]
    products = ((n, _multiply(kind, weights, x[:n], n_threads)) for n, n_threads in ways)
    same = all(np.array_equal(product, all_rows[:n]) for n, product in products)
    usual = [0, 1, 2, 4, *range(6, _MOST)]
    exact = x[usual].astype(np.float64) @ dequantize(kind, weights).T
    return _error(all_rows[usual], exact), same and bool(np.isfinite(all_rows).all()), all_rows


def _of_experts(kind: str) -> tuple[float, bool]:
    experts, used = 6, 3
    weights = random_weights(kind, experts * 64, 512, seed=3)
    random = np.random.default_rng(4)
    x = random.normal(size=(29, 512)).astype(np.float32)
    ids = np.array([random.permutation(experts)[:used] for _ in x], np.int32)
    results = []
    for tokens in (slice(None), slice(5, 6)):
        products = Products(kind, [weights], len(x[tokens]), experts, used)
        products.compute(x[tokens], ids[tokens])
        results.extend(products.results())
        products.close()
    exact = dequantize(kind, weights).reshape(experts, 64, 512)
    products_exact = np.einsum("nk,nurk->nur", x.astype(np.float64), exact[ids])
    return _error(results[0], products_exact), np.array_equal(results[1][0], results[0][5])


def _keeps_nan(kind: str) -> bool:
    weights = random_weights(kind, 32, 512)
    x = np.ones((3, 512), np.float32)
    x[1, 77] = np.nan
    is_nan = np.isnan(_multiply(kind, weights, x, 1))
    return bool(is_nan[1].all() and not is_nan[[0, 2]].any())


def outcome(kind: str) -> Outcome:
    """Compute a type's products in several shapes, whole and in parts."""
    outcomes = [_of_shape(kind, *shape) for shape in _SHAPES]
    experts_error, is_same = _of_experts(kind)
    return Outcome(
        error=max(error for error, _, _ in outcomes),
        experts_error=experts_error,
        same=is_same and all(same for _, same, _ in outcomes),
        digest=hashlib.sha256(outcomes[0][2].tobytes()).hexdigest(),
        is_nan_kept=_keeps_nan(kind),
    )


def main(level: str) -> None:
    """Print the outcome of every type with the kernels of that level, "none" for llama.cpp's."""
    use_level(level)
    print(json.dumps({kind: asdict(outcome(kind)) for kind in TYPES}))


if __name__ == "__main__":
    main(sys.argv[1])
