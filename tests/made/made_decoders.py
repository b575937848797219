"""Models of random weights, some megabytes each, with shapes that the two real models lack.

The vocabulary is SmolLM2's; what they say means nothing.
"""

import functools
from pathlib import Path
from typing import Any

import gguf
from made_families import (
    FAMILIES,
    FF,
    GATED,
    HEAD,
    HEADS,
    RMS,
    E,
    Family,
    Shapes,
    read_keys,
    write_family,
)

_N_CTX = 4096
_LATENT = 32
_ROTATED = 32
_PLAIN = 16
_DEEPSEEK2 = Family(
    "deepseek2",
    {"output_norm": (E,)},
    lambda _: {
        **RMS,
        **GATED,
        "attn_q_a": (_LATENT, E),
        "attn_q_a_norm": (_LATENT,),
        "attn_q_b": (HEADS * (_PLAIN + _ROTATED), _LATENT),
        "attn_kv_a_mqa": (_LATENT + _ROTATED, E),
        "attn_kv_a_norm": (_LATENT,),
        "attn_k_b": (HEADS, _LATENT, _PLAIN),
        "attn_v_b": (HEADS, HEAD, _LATENT),
        "attn_output": (E, HEADS * HEAD),
    },
    {
        "rope.dimension_count": _ROTATED,
        "leading_dense_block_count": 2,
        "expert_feed_forward_length": FF,
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_shared_count": 0,
        "expert_weights_scale": 1.0,
        "attention.q_lora_rank": _LATENT,
        "attention.kv_lora_rank": _LATENT,
        "attention.key_length": _LATENT + _ROTATED,
        "attention.value_length": _LATENT,
        "attention.key_length_mla": _PLAIN + _ROTATED,
        "attention.value_length_mla": HEAD,
    },
    kv_heads=1,
)


def make_qwen2vl(path: Path, vocabulary_of: Path) -> Path:
    """Write a model with M-RoPE (three positions a token), whose cache llama.cpp cannot shift."""
    return _make(path, FAMILIES["Qwen2-VL (M-RoPE)"], vocabulary_of)


def make_reader(path: Path, vocabulary_of: Path, n_ctx: int) -> Path:
    """Write a model that reads thousands of tokens a second, as SmolLM2 tokenizes and templates them."""
    return _make(path, FAMILIES["Llama"], vocabulary_of, n_ctx, template=True)


def make_deepseek2(path: Path, vocabulary_of: Path) -> Path:
    """Write a model with multi-head latent attention: one latent vector a token in its cache."""
    return _make(path, _DEEPSEEK2, vocabulary_of)


def make_mamba(path: Path, vocabulary_of: Path) -> Path:
    """Write a recurrent model: no attention, one state for all that was read."""
    return _make(path, FAMILIES["Mamba"], vocabulary_of)


def _lfm2_layer(number: int) -> Shapes:
    if number % 2:
        heads = {"attn_q": (E, E), "attn_k": (HEAD, E), "attn_v": (HEAD, E), "attn_output": (E, E)}
        return RMS | GATED | heads | {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)}
    taps = {"shortconv.conv": (E, 3)}
    return RMS | GATED | taps | {"shortconv.in_proj": (3 * E, E), "shortconv.out_proj": (E, E)}


def make_lfm2(path: Path, vocabulary_of: Path, layers: int = 4) -> Path:
    """Write a hybrid model: short convolutions, and attention in between."""
    whole, keys = {"token_embd_norm": (E,)}, {"shortconv.l_cache": 3}
    kv_heads = [number % 2 for number in range(layers)]
    family = Family("lfm2", whole, _lfm2_layer, keys, kv_heads=kv_heads, n_layers=layers)
    return _make(path, family, vocabulary_of)


def _qwen35_layer(number: int) -> Shapes:
    norms = {"attn_norm": (E,), "post_attention_norm": (E,)}
    if number % 2:
        heads = {"attn_q": (2 * E, E), "attn_k": (E, E), "attn_v": (E, E), "attn_output": (E, E)}
        return norms | GATED | heads | {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)}
    linear = {"attn_qkv": (3 * E, E), "attn_gate": (E, E), "ssm_conv1d": (3 * E, 4), "ssm_out": (E, E)}
    scalars = {"ssm_beta": (HEADS, E), "ssm_alpha": (HEADS, E), "ssm_norm": (HEAD,)}
    return norms | GATED | linear | scalars


def make_qwen35(path: Path, vocabulary_of: Path) -> Path:
    """Write a hybrid model with M-RoPE: gated delta nets, and attention in between."""
    family = Family(
        "qwen35",
        {"output_norm": (E,)},
        _qwen35_layer,
        {
            "rope.dimension_sections": [4, 6, 6, 0],
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "full_attention_interval": 2,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": E,
            "ssm.state_size": HEAD,
            "ssm.time_step_rank": HEADS,
            "ssm.group_count": HEADS,
        },
        lambda number: {} if number % 2 else {"ssm_a": (HEADS,), "ssm_dt.bias": (HEADS,)},
        n_layers=4,
    )
    return _make(path, family, vocabulary_of)


def _make(
    path: Path, family: Family, vocabulary_of: Path, n_ctx: int = _N_CTX, *, template: bool = False
) -> Path:
    """Write a family's model with the tokenizer of another, with its chat template or without."""
    writer = gguf.GGUFWriter(path, family.architecture)
    keys = _vocabulary(vocabulary_of)
    n_vocab = len(keys["tokenizer.ggml.tokens"][0])
    for name, (value, kind, sub_type) in keys.items():
        if template or "chat_template" not in name:
            writer.add_key_value(name, value, kind, sub_type=sub_type)
    writer.add_vocab_size(n_vocab)
    writer.add_file_type(0)
    return write_family(writer, path, family, n_vocab, n_ctx)


@functools.cache
def _vocabulary(source: Path) -> dict[str, tuple[Any, Any, Any]]:
    """Read the tokenizer's keys of a model's file, which takes a second."""
    return read_keys(gguf.GGUFReader(source), "tokenizer.")
