"""The model families that can be converted: `FAMILIES` has a row for each.

The first name in `architectures` of config.json selects the row. It gives llama.cpp's name of the
architecture, how tensors are reordered, and which settings llama.cpp supports; a checkpoint with other
settings is refused, because its conversion would compute wrong results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting.checkpoint import Array


class Heads(msgspec.Struct, frozen=True):
    """Number of attention heads, number of key-value heads, and width of a head."""

    n_head: int
    n_head_kv: int
    head_dim: int


#: Function that converts the values of a checkpoint's tensor to those that llama.cpp expects. The array
#: has the slowest dimension first; the result has the same type. Only `plus_one` needs float32.
Transform = Callable[[Array, Heads], Array]


def _interleave(values: Array, n_head: int) -> Array:
    """Reorder each head's rows from halves (transformers' rotate_half) to pairs (ggml's NORM rope)."""
    shape = values.shape
    halves = values.reshape(n_head, 2, shape[0] // n_head // 2, *shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(shape)


def plus_one(values: Array, _heads: Heads) -> Array:
    """Add 1 to the float32 weights of a norm, because Gemma's checkpoints store the weights minus 1."""
    return values + np.float32(1)


Values = dict[str, Any]


#: GGUF key (without the architecture's prefix) → its type, and the key in config.json. A key that
#: config.json lacks is left out.
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


def required_number(config: Values, gguf_key: str, most: int = 1 << 31) -> int:
    """Return the integer (1 to `most`) that config.json has for a GGUF key. Raises ConversionError."""
    config_key = KEYS[gguf_key][1]
    value = config.get(config_key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConversionError(f"config.json: {config_key} must be between 1 and {most}, not {value!r}")
    return value


def attention_heads(config: Values) -> Heads:
    """Return the numbers of heads and of key-value heads, and their width. Raises ConversionError."""
    n_head = required_number(config, "attention.head_count")
    width = required_number(config, "embedding_length")
    head_dim = config.get("head_dim")
    head_dim = width // n_head if head_dim is None else int(head_dim)
    n_kv = config.get("num_key_value_heads")
    n_head_kv = n_head if n_kv is None else int(n_kv)
    if not 1 <= n_head_kv <= n_head or head_dim < 1:
        raise ConversionError(
            f"config.json: num_key_value_heads is {n_head_kv} (allowed: 1 to {n_head}), "
            f"head_dim is {head_dim} (allowed: 1 or more)"
        )
    return Heads(n_head, n_head_kv, head_dim)


def metadata(family: Family, config: Values) -> dict[str, Any]:
    """Return GGUF metadata made from config.json, by key; the keys lack the architecture's prefix.

    Raises ConversionError.
    """
    heads = attention_heads(config)
    required_number(config, "context_length")
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
    """Return config.json's rope parameters; older files have them in `rope_scaling` and `rope_theta`.

    `layers` is the kind of layers, such as "sliding_attention", in models with several kinds.
    """
    rope: Values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope.get(layers), dict):
        rope = rope[layers]
    stated = {key: value for key, value in rope.items() if value is not None}
    return {"rope_theta": config.get("rope_theta") or 10_000.0} | stated


def _rope_metadata(config: Values, head_dim: int) -> Values:
    """Return the GGUF keys of rope. Raises ConversionError for a rope_type that llama.cpp lacks.

    https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py
    """
    rope = rope_parameters(config)
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    base = float(rope["rope_theta"])
    keys: Values = {"rope.freq_base": base, "rope.dimension_count": int(head_dim * share)}
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
    raise ConversionError(f"config.json: rope scaling {kind!r} is not supported, only {_KNOWN}")


def rope_tensors(config: Values, head_dim: int) -> dict[str, Array]:
    """Return tensor name → rope's frequency factors (float32[head_dim / 2]); {} if rope has none."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3(rope, head_dim)}
    if kind in ("longrope", "su"):
        factors = {name: np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")}
        return {f"rope_factors_{name}.weight": values for name, values in factors.items()}
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


#: Reordering of the query and key projections for ggml's NORM rope, which rotates adjacent values.
_NORM_PAIRS: dict[str, Transform] = {
    "attn_q": lambda values, heads: _interleave(values, heads.n_head),
    "attn_k": lambda values, heads: _interleave(values, heads.n_head_kv),
}
_PLUS_ONE: dict[str, Transform] = {"norm.weight": plus_one}
_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")


class Family(msgspec.Struct, frozen=True):
    """A family of models that can be converted.

    `arch` is llama.cpp's name, `checkpoints` are values of `architectures` in config.json.
    `activations` are those that llama.cpp supports for the family. A transform changes the values of
    GGUF tensors whose names end in its key. `needs` maps a key of config.json to the values that
    llama.cpp supports. `extra` computes more GGUF keys. `defaults` are used for keys that are missing
    in config.json.
    """

    title: str
    arch: str
    checkpoints: tuple[str, ...]
    activations: tuple[str, ...] = _SILU
    transforms: dict[str, Transform] = {}
    extra: Callable[[Values], Values] | None = None
    needs: dict[str, tuple[Any, ...]] = {}
    defaults: Values = {}


def _gemma2(config: Values) -> Values:
    """Return the GGUF key of the sliding window, on which memory estimates depend; {} without one."""
    window = config.get("sliding_window")
    return {"attention.sliding_window": int(window)} if window else {}


def _gemma3(config: Values) -> Values:
    local = rope_parameters(config, "sliding_attention")["rope_theta"]
    base = float(config.get("rope_local_base_freq") or local)
    return _gemma2(config) | {"rope.freq_base_swa": base}


def _mrope(config: Values) -> Values:
    """Return the GGUF keys of M-RoPE: how many pairs of a head rotate by time, height and width."""
    sections = [int(count) for count in rope_parameters(config)["mrope_section"]]
    deep = (config.get("vision_config") or {}).get("deepstack_visual_indexes")
    keys: Values = {} if deep is None else {"n_deepstack_layers": len(deep)}
    return keys | {"rope.dimension_sections": [*sections, 0]}


_SMOLVLM = ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration")
_LLAMA = ("LlamaForCausalLM", "MistralForCausalLM", "LLaMAForCausalLM", *_SMOLVLM)
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}

FAMILIES = (
    Family(
        "Llama 1 to 3.3, Mistral, SmolLM 1 and 2, SmolVLM, Idefics3, and models of their shape",
        "llama",
        _LLAMA,
        transforms=_NORM_PAIRS,
    ),
    Family(
        "SmolLM3",
        "smollm3",
        ("SmolLM3ForCausalLM",),
        transforms=_NORM_PAIRS,
        needs=_NO_WINDOW | {"no_rope_layer_interval": (4,)},
    ),
    Family("Qwen2 and 2.5", "qwen2", ("Qwen2ForCausalLM",), needs=_NO_WINDOW),
    Family("Qwen3", "qwen3", ("Qwen3ForCausalLM",), needs=_NO_WINDOW),
    Family(
        "Qwen2.5-VL (pictures)",
        "qwen2vl",
        ("Qwen2_5_VLForConditionalGeneration",),
        extra=_mrope,
        needs=_NO_WINDOW,
    ),
    Family(
        "Qwen3-VL (pictures)",
        "qwen3vl",
        ("Qwen3VLForConditionalGeneration",),
        extra=_mrope,
        needs=_NO_WINDOW,
    ),
    Family("OLMo 2", "olmo2", ("Olmo2ForCausalLM",)),
    Family("Gemma", "gemma", ("GemmaForCausalLM",), _GELU_TANH, transforms=_PLUS_ONE),
    Family(
        "Gemma 2", "gemma2", ("Gemma2ForCausalLM",), _GELU_TANH, transforms=_PLUS_ONE, extra=_gemma2
    ),
    Family(
        "Gemma 3 (text, pictures)",
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        _GELU_TANH,
        transforms=_PLUS_ONE,
        extra=_gemma3,
        needs={"use_bidirectional_attention": (False,)},
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": 262_208,
        },
    ),
    Family("Phi-3, 3.5 and Phi-4", "phi3", ("Phi3ForCausalLM",)),
)


def find_family(architectures: list[str]) -> Family:
    """Return the family of a checkpoint. Raises ConversionError with the supported names."""
    named = architectures[0] if architectures else "none"
    for family in FAMILIES:
        if named in family.checkpoints:
            return family
    supported = ", ".join(dict.fromkeys(word for family in FAMILIES for word in family.checkpoints))
    raise ConversionError(
        f"config.json names the architecture {named}, which is not supported; supported: {supported}",
        hint="look for a repository with GGUF files of this model",
    )


def refuse_unsupported(family: Family, config: Values) -> None:
    """Raise ConversionError for settings that llama.cpp lacks for this family."""
    spellings = ("hidden_act", "hidden_activation", "activation_function", "activation")
    activations = [config[word] for word in spellings if config.get(word)]
    if activations and activations[-1] not in family.activations:
        raise ConversionError(
            f"config.json: the activation is {activations[-1]!r}; "
            f"for {family.arch}, llama.cpp supports only {family.activations[0]!r}"
        )
    for key, allowed in family.needs.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            expected = f"for {family.arch}, llama.cpp supports only {' or '.join(map(repr, allowed))}"
            raise ConversionError(f"config.json: {key} is {value!r}; {expected}")
