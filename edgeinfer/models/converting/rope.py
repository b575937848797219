"""Rotary embeddings: the base, what is rotated, and how a longer context is reached.

Formulas: https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting.safetensors import Array

Values = dict[str, Any]
_KNOWN = "default, linear, dynamic, yarn, llama3, longrope"


def parameters(config: Values, layers: str = "full_attention") -> Values:
    """The rope parameters of config.json in its newer form, of the layers of one kind."""
    found: Values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(found.get(layers), dict):
        found = found[layers]
    base = config.get("rope_theta", config.get("rotary_emb_base"))
    return {"rope_theta": base or 10_000.0} | {k: v for k, v in found.items() if v is not None}


def metadata(config: Values, head_dim: int) -> Values:
    """Keys under the architecture's name. Raises ConversionError for a kind llama.cpp lacks."""
    rope = parameters(config)
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    share = share or config.get("rotary_pct") or 1.0
    found: Values = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * share),
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "dynamic", "llama3", "mrope"):
        return found
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if "original_max_position_embeddings" in rope:
            original = int(rope["original_max_position_embeddings"])
            found["rope.scaling.original_context_length"] = original
        return found
    if kind in ("longrope", "su"):
        return found | _long(config, rope)
    raise ConversionError(f"config.json: rope scaling {kind!r} is none of {_KNOWN}")


def _long(config: Values, rope: Values) -> Values:
    original = _original(config, rope)
    scale = int(config["max_position_embeddings"]) / original
    factor = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(rope.get("attention_factor") or factor),
    }


def _original(config: Values, rope: Values) -> int:
    key = "original_max_position_embeddings"
    return int(config.get(key) or rope.get(key) or config["max_position_embeddings"])


def tensors(config: Values, head_dim: int) -> dict[str, Array]:
    """Factors of each frequency that llama.cpp wants as tensors, float32 of half the rotated width."""
    rope = parameters(config)
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3(rope, head_dim)}
    if kind in ("longrope", "su"):
        return {
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32)
            for name in ("long", "short")
        }
    return {}


def _llama3(rope: Values, head_dim: int) -> Array:
    factor = float(rope.get("factor", 8))
    low = float(rope.get("low_freq_factor", 1))
    high = float(rope.get("high_freq_factor", 4))
    original = float(rope.get("original_max_position_embeddings", 8192))
    wavelength = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    factors: Array = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return factors
