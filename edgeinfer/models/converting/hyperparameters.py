"""Map config.json to GGUF metadata: names of keys, attention's shape, rotary embeddings.

Formulas of rope: https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting.checkpoint import Array
from edgeinfer.models.converting.tensor_transforms import Heads

if TYPE_CHECKING:
    from edgeinfer.models.converting.families import Family


Values = dict[str, Any]


#: A GGUF's key under the architecture's name → its kind, and config.json's key. One that config.json
#: lacks, or has as null, is left out.
KEYS: dict[str, tuple[type, str]] = {
    "vocab_size": (int, "vocab_size"),
    "context_length": (int, "max_position_embeddings"),
    "embedding_length": (int, "hidden_size"),
    "block_count": (int, "num_hidden_layers"),
    "feed_forward_length": (int, "intermediate_size"),
    "attention.head_count": (int, "num_attention_heads"),
    "attention.layer_norm_rms_epsilon": (float, "rms_norm_eps"),
    "attn_logit_softcapping": (float, "attn_logit_softcapping"),
    "final_logit_softcapping": (float, "final_logit_softcapping"),
}


def needed(config: Values, key: str, most: int = 1 << 31) -> int:
    """Return the count at a GGUF's key. Raises ConversionError for a missing or invalid one."""
    word = KEYS[key][1]
    value = config.get(word)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConversionError(f"config.json has no {word} between 1 and {most}: {value!r}")
    return value


def count_heads(config: Values) -> Heads:
    """Return the shape of attention. Raises ConversionError if config.json lacks it."""
    n_head = needed(config, "attention.head_count")
    width = needed(config, "embedding_length")
    head_dim = config.get("head_dim")
    head_dim = width // n_head if head_dim is None else int(head_dim)
    given = config.get("num_key_value_heads")
    n_head_kv = n_head if given is None else int(given)
    if not 1 <= n_head_kv <= n_head or head_dim < 1:
        raise ConversionError(
            f"config.json: {n_head} heads, {n_head_kv} of them for keys and values, of {head_dim} each"
        )
    return Heads(n_head, n_head_kv, head_dim)


def metadata(family: Family, config: Values) -> dict[str, Any]:
    """Return the architecture's keys and values, without its prefix. Raises ConversionError."""
    heads = count_heads(config)
    needed(config, "context_length")
    keys: dict[str, Any] = {}
    for key, (kind, word) in KEYS.items():
        value = config.get(word)
        if value is not None and value is not False:
            keys[key] = kind(value)
    keys.setdefault("feed_forward_length", 4 * keys["embedding_length"])
    keys["attention.head_count_kv"] = heads.n_head_kv
    keys["attention.key_length"] = keys["attention.value_length"] = heads.head_dim
    keys |= _rope_metadata(config, heads.head_dim)
    if family.extra:
        keys |= family.extra(config)
    return keys


_KNOWN = "default, linear, dynamic, yarn, llama3, longrope"


def rope_parameters(config: Values, layers: str = "full_attention") -> Values:
    """Return config.json's rope parameters in their newer form, for layers of one kind."""
    rope: Values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope.get(layers), dict):
        rope = rope[layers]
    return {"rope_theta": config.get("rope_theta") or 10_000.0} | {
        k: v for k, v in rope.items() if v is not None
    }


def _rope_metadata(config: Values, head_dim: int) -> Values:
    """Return the keys of rope. Raises ConversionError for a kind llama.cpp lacks."""
    rope = rope_parameters(config)
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    keys: Values = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * share),
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "dynamic", "llama3", "mrope"):
        return keys
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if "original_max_position_embeddings" in rope:
            original = int(rope["original_max_position_embeddings"])
            keys["rope.scaling.original_context_length"] = original
        return keys
    if kind in ("longrope", "su"):
        key = "original_max_position_embeddings"
        original = int(config.get(key) or rope.get(key) or config["max_position_embeddings"])
        scale = int(config["max_position_embeddings"]) / original
        factor = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or factor)
        return keys
    raise ConversionError(f"config.json: rope scaling {kind!r} is none of {_KNOWN}")


def rope_tensors(config: Values, head_dim: int) -> dict[str, Array]:
    """Return the frequency factors llama.cpp reads as tensors, float32 of half the rotated width."""
    rope = rope_parameters(config)
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
