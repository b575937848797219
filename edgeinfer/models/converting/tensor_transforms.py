"""Reorder tensors that llama.cpp keeps in another order than their makers do.

A transform takes the stored values of one tensor (slowest dimension first) and the model's heads, and
returns values of the same type, except `plus_one`, which is given float32.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from edgeinfer.models.converting.checkpoint import Array


class Heads(msgspec.Struct, frozen=True):
    """Counts of query heads and of key and value heads, and a head's width."""

    n_head: int
    n_head_kv: int
    head_dim: int


Transform = Callable[[Array, Heads], Array]


def _interleaved(values: Array, n_head: int) -> Array:
    """Reorder each head's rows from halves (rotate_half) to pairs (ggml's rope of type "norm")."""
    shape = values.shape
    halves = values.reshape(n_head, 2, shape[0] // n_head // 2, *shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(shape)


def pair_queries(values: Array, heads: Heads) -> Array:
    """Order a query projection, [n_head * head_dim, …], for rope over neighbouring values."""
    return _interleaved(values, heads.n_head)


def pair_keys(values: Array, heads: Heads) -> Array:
    """Order a key projection, [n_head_kv * head_dim, …], for rope over neighbouring values."""
    return _interleaved(values, heads.n_head_kv)


def plus_one(values: Array, _heads: Heads) -> Array:
    """Add one to norms that are stored as the difference from one, float32."""
    return values + np.float32(1)
