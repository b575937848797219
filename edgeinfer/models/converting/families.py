"""The families that are converted, a row each.

The first name in `architectures` of config.json decides the row. A row says what llama.cpp calls the
architecture, which activation its graph has, and what is peculiar: tensors in another order, keys of
its own, and what cannot be expressed, which is refused instead of converted wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting.hyperparameters import Values, rope_parameters
from edgeinfer.models.converting.tensor_transforms import Transform, pair_keys, pair_queries, plus_one

_NORM_PAIRS: dict[str, Transform] = {"attn_q": pair_queries, "attn_k": pair_keys}
_PLUS_ONE: dict[str, Transform] = {"norm.weight": plus_one}
_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")


class Family(msgspec.Struct, frozen=True):
    """One row. `checkpoints` are values of `architectures`, `arch` is llama.cpp's.

    `transforms` go by the GGUF name's end; `needs` are values without which it is refused. `extra`
    computes keys under the architecture's name.
    """

    title: str
    arch: str
    checkpoints: tuple[str, ...]
    activations: tuple[str, ...]
    transforms: dict[str, Transform] = {}
    extra: Callable[[Values], Values] | None = None
    needs: dict[str, tuple[Any, ...]] = {}
    defaults: Values = {}


def _gemma2(config: Values) -> Values:
    """Set the window for architectures that have one: a key elsewhere would change memory estimates."""
    window = config.get("sliding_window")
    return {"attention.sliding_window": int(window)} if window else {}


def _gemma3(config: Values) -> Values:
    local = rope_parameters(config, "sliding_attention")["rope_theta"]
    base = float(config.get("rope_local_base_freq") or local)
    return _gemma2(config) | {"rope.freq_base_swa": base}


def _mrope(config: Values) -> Values:
    """Set how many pairs of a head turn with time, height and width."""
    sections = [int(count) for count in rope_parameters(config)["mrope_section"]]
    deep = (config.get("vision_config") or {}).get("deepstack_visual_indexes")
    return {"rope.dimension_sections": [*sections, 0]} | (
        {"n_deepstack_layers": len(deep)} if deep is not None else {}
    )


_SMOLVLM = ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration")
_LLAMA = ("LlamaForCausalLM", "MistralForCausalLM", "LLaMAForCausalLM", *_SMOLVLM)
_GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}

FAMILIES = (
    Family(
        "Llama 1 to 3.3, Mistral, SmolLM 1 and 2, SmolVLM, Idefics3, and models of their shape",
        "llama",
        _LLAMA,
        _SILU,
        transforms=_NORM_PAIRS,
    ),
    Family(
        "SmolLM3",
        "smollm3",
        ("SmolLM3ForCausalLM",),
        _SILU,
        transforms=_NORM_PAIRS,
        needs=_NO_WINDOW | {"no_rope_layer_interval": (4,)},
    ),
    Family("Qwen2 and 2.5", "qwen2", ("Qwen2ForCausalLM",), _SILU, needs=_NO_WINDOW),
    Family("Qwen3", "qwen3", ("Qwen3ForCausalLM",), _SILU, needs=_NO_WINDOW),
    Family(
        "Qwen2.5-VL (pictures)",
        "qwen2vl",
        ("Qwen2_5_VLForConditionalGeneration",),
        _SILU,
        extra=_mrope,
        needs=_NO_WINDOW,
    ),
    Family(
        "Qwen3-VL (pictures)",
        "qwen3vl",
        ("Qwen3VLForConditionalGeneration",),
        _SILU,
        extra=_mrope,
        needs=_NO_WINDOW,
    ),
    Family("OLMo 2", "olmo2", ("Olmo2ForCausalLM",), _SILU),
    Family("Gemma", "gemma", ("GemmaForCausalLM",), _GELU_TANH, transforms=_PLUS_ONE),
    Family(
        "Gemma 2", "gemma2", ("Gemma2ForCausalLM",), _GELU_TANH, transforms=_PLUS_ONE, extra=_gemma2
    ),
    Family(
        "Gemma 3 (text, pictures)",
        "gemma3",
        _GEMMA3,
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
    Family("Phi-3, 3.5 and Phi-4", "phi3", ("Phi3ForCausalLM",), _SILU),
)


def find_family(architectures: list[str]) -> Family:
    """Return the row of a checkpoint. Raises ConversionError with the known ones."""
    for word in architectures[:1]:
        for family in FAMILIES:
            if word in family.checkpoints:
                return family
    named = architectures[0] if architectures else "none"
    known = ", ".join(dict.fromkeys(word for family in FAMILIES for word in family.checkpoints))
    raise ConversionError(
        f"config.json names the architecture {named}, which is not converted; known: {known}",
        hint="`architectures` in config.json decides; a repository with its GGUF files may do",
    )


def check(family: Family, config: Values) -> None:
    """Refuse what the family's graph in llama.cpp does not do. Raises ConversionError."""
    spellings = ("hidden_act", "hidden_activation", "activation_function", "activation")
    activations = [config[word] for word in spellings if config.get(word)]
    if activations and activations[-1] not in family.activations:
        raise ConversionError(
            f"config.json: a {family.arch} with the activation {activations[-1]!r}; llama.cpp computes "
            f"{family.activations[0]}"
        )
    for key, allowed in family.needs.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            raise ConversionError(
                f"config.json: {key} is {value!r}; llama.cpp's {family.arch} has {allowed[0]!r}"
            )
