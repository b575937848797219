"""A model of random numbers of each family, some hundred kilobytes, with a token a byte.

Tensor names and shapes are those of llama.cpp's loader. What they say means nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from made_checkpoints import byte_symbols

E = 64
FF = 128
HEADS = 2
HEAD = 32
LAYERS = 2
N_CTX = 512
EXPERTS = 4

Shapes = dict[str, tuple[int, ...]]


def add_byte_vocabulary(writer: gguf.GGUFWriter, more: tuple[str, ...] = ()) -> int:
    """Add a token for each byte, two special ones (end, turn) and `more`; return their number."""
    tokens = [*byte_symbols(), "<|end|>", "<|turn|>", *more]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (2 + len(more)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_add_bos_token(False)
    return len(tokens)


@dataclass(frozen=True)
class Family:
    """One family. A name that ends in `+` has a bias too; `raw` are tensors without `.weight`.

    `layers` gives the shapes of layer `n`. Metadata keys are below the architecture's name.
    """

    architecture: str
    whole: Shapes
    layers: Callable[[int], Shapes]
    metadata: dict[str, Any] = field(default_factory=dict)
    raw: Callable[[int], Shapes] = lambda _: {}
    kv_heads: int | list[int] = HEADS
    n_layers: int = LAYERS


_ATTENTION = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (E, E))
_BIASED = {"attn_q+": (E, E), "attn_k+": (E, E), "attn_v+": (E, E), "attn_output": (E, E)}
GATED = {"ffn_gate": (FF, E), "ffn_up": (FF, E), "ffn_down": (E, FF)}
RMS = {"attn_norm": (E,), "ffn_norm": (E,)}
_EXPERTS = {
    "ffn_gate_inp": (EXPERTS, E),
    "ffn_gate_exps": (EXPERTS, FF, E),
    "ffn_up_exps": (EXPERTS, FF, E),
    "ffn_down_exps": (EXPERTS, E, FF),
}
_TWO_OF = {"expert_count": EXPERTS, "expert_used_count": 2}
_GPT2 = {
    "attn_norm+": (E,),
    "attn_qkv+": (3 * E, E),
    "attn_output+": (E, E),
    "ffn_norm+": (E,),
    "ffn_up+": (FF, E),
    "ffn_down+": (E, FF),
}
_PLAIN = {"output_norm": (E,)}
_LAYER_NORM = {"output_norm+": (E,)}

INNER = 2 * E
STATE = 8
STEPS = 4
TAPS = 4
_SSM = {
    "ssm_in": (2 * INNER, E),
    "ssm_conv1d+": (INNER, TAPS),
    "ssm_x": (STEPS + 2 * STATE, INNER),
    "ssm_dt+": (INNER, STEPS),
    "ssm_out": (E, INNER),
}
_SSM_RAW = {"ssm_a": (INNER, STATE), "ssm_d": (INNER,)}
_SSM_KEYS = {
    "ssm.conv_kernel": TAPS,
    "ssm.inner_size": INNER,
    "ssm.state_size": STATE,
    "ssm.time_step_rank": STEPS,
}
_JAMBA_NORMS = {"ssm_dt_norm": (STEPS,), "ssm_b_norm": (STATE,), "ssm_c_norm": (STATE,)}
_MIX = 8
_RWKV6 = {
    "attn_norm+": (E,),
    "attn_norm_2+": (E,),
    "time_mix_w1": (5 * _MIX, E),
    "time_mix_w2": (5, E, _MIX),
    "time_mix_lerp_x": (1, 1, E),
    "time_mix_lerp_fused": (5, 1, 1, E),
    "time_mix_first": (HEADS, HEAD),
    "time_mix_decay": (E,),
    "time_mix_decay_w1": (_MIX, E),
    "time_mix_decay_w2": (E, _MIX),
    **{f"time_mix_{name}": (E, E) for name in ("key", "value", "receptance", "gate")},
    "time_mix_ln+": (E,),
    "time_mix_output": (E, E),  # after the norm: the order decides what is drawn, and so the digests
    "channel_mix_lerp_k": (1, 1, E),
    "channel_mix_lerp_r": (1, 1, E),
    "channel_mix_key": (FF, E),
    "channel_mix_value": (E, FF),
    "channel_mix_receptance": (E, E),
}


def _jamba(n: int) -> Shapes:
    mixed = _ATTENTION if n % 2 else _SSM | _JAMBA_NORMS
    return RMS | mixed | (GATED if n % 2 else _EXPERTS)


FAMILIES: dict[str, Family] = {
    "Llama": Family("llama", _PLAIN, lambda _: RMS | _ATTENTION | GATED),
    "Mixtral (a mixture of experts)": Family(
        "llama", _PLAIN, lambda _: RMS | _ATTENTION | _EXPERTS, _TWO_OF
    ),
    "Qwen2": Family("qwen2", _PLAIN, lambda _: RMS | _BIASED | GATED),
    "Qwen3": Family(
        "qwen3",
        _PLAIN,
        lambda _: RMS | _ATTENTION | GATED | {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)},
    ),
    "Qwen2-VL (M-RoPE)": Family(
        "qwen2vl", _PLAIN, lambda _: RMS | _BIASED | GATED, {"rope.dimension_sections": [4, 6, 6, 0]}
    ),
    "Falcon": Family(
        "falcon",
        _LAYER_NORM,
        lambda _: {
            "attn_norm+": (E,),
            "attn_qkv": (E + 2 * HEAD, E),
            "attn_output": (E, E),
            "ffn_up": (FF, E),
            "ffn_down": (E, FF),
        },
        kv_heads=1,
    ),
    "MPT": Family(
        "mpt",
        _PLAIN,
        lambda _: {name.rstrip("+"): shape for name, shape in _GPT2.items()},
        {"attention.max_alibi_bias": 8.0},
    ),
    "BLOOM": Family("bloom", {"token_embd_norm+": (E,), **_LAYER_NORM}, lambda _: _GPT2),
    "GPT-2": Family("gpt2", {"position_embd": (N_CTX, E), **_LAYER_NORM}, lambda _: _GPT2),
    "StarCoder": Family(
        "starcoder",
        {"position_embd": (N_CTX, E), **_LAYER_NORM},
        lambda _: _GPT2 | {"attn_qkv+": (E + 2 * HEAD, E)},
        kv_heads=1,
    ),
    "StarCoder2": Family(
        "starcoder2",
        _LAYER_NORM,
        lambda _: {
            "attn_norm+": (E,),
            "ffn_norm+": (E,),
            **{f"{name}+": shape for name, shape in _ATTENTION.items()},
            "ffn_up+": (FF, E),
            "ffn_down+": (E, FF),
        },
    ),
    "GPT-NeoX": Family("gptneox", _LAYER_NORM, lambda _: _GPT2, {"use_parallel_residual": True}),
    "Phi-2": Family(
        "phi2",
        {"output_norm+": (E,), "output+": ()},
        lambda _: {name: shape for name, shape in _GPT2.items() if name != "ffn_norm+"},
    ),
    "Mamba": Family(
        "mamba",
        _PLAIN,
        lambda _: {"attn_norm": (E,), **_SSM},
        _SSM_KEYS,
        raw=lambda _: _SSM_RAW,
        kv_heads=0,
    ),
    "Jamba (a hybrid)": Family(
        "jamba",
        _PLAIN,
        _jamba,
        _SSM_KEYS | _TWO_OF,
        raw=lambda n: {} if n % 2 else _SSM_RAW,
        kv_heads=[0, HEADS, 0, HEADS],
        n_layers=4,
    ),
    "RWKV-6": Family(
        "rwkv6",
        {"token_embd_norm+": (E,), **_LAYER_NORM},
        lambda _: _RWKV6,
        {
            "wkv.head_size": HEAD,
            "time_mix_extra_dim": _MIX,
            "time_decay_extra_dim": _MIX,
            "rescale_every_n_layers": 0,
            "token_shift_count": 2,
        },
        kv_heads=0,
    ),
}


_BUCKETS = 8
_T5_ATTENTION = {f"attn_{letter}": (E, E) for letter in "qkvo"}
_CROSS = {f"cross_attn_{letter}": (E, E) for letter in "qkvo"} | {"cross_attn_norm": (E,)}


def _t5(n: int) -> Shapes:
    first = {} if n else {"attn_rel_b": (_BUCKETS, HEADS)}
    return RMS | _T5_ATTENTION | GATED | first


_T5 = Family(
    "t5",
    {"enc.output_norm": (E,), "dec.output_norm": (E,)}
    | {f"enc.blk.{n}.{name}": shape for n in range(LAYERS) for name, shape in _t5(n).items()}
    | {
        f"dec.blk.{n}.{name}": shape for n in range(LAYERS) for name, shape in (_t5(n) | _CROSS).items()
    },
    lambda _: {},
    {"attention.relative_buckets_count": _BUCKETS, "decoder_start_token_id": 256},
)


def make_t5(path: Path) -> Path:
    """Write an encoder-decoder."""
    writer = gguf.GGUFWriter(path, _T5.architecture)
    return write_family(writer, path, _T5, add_byte_vocabulary(writer), N_CTX)


def make_family(path: Path, name: str) -> Path:
    """Write the model of a family of FAMILIES, with a token a byte."""
    writer = gguf.GGUFWriter(path, FAMILIES[name].architecture)
    return write_family(writer, path, FAMILIES[name], add_byte_vocabulary(writer), N_CTX)


def write_family(writer: gguf.GGUFWriter, path: Path, family: Family, n_vocab: int, n_ctx: int) -> Path:
    """Write metadata and tensors of a family next to the vocabulary that `writer` has already."""
    _add_metadata(writer, family, n_ctx)
    rng = np.random.default_rng(3)
    for tensor, shape in _tensors(family, n_vocab):
        writer.add_tensor(tensor, _values(tensor, shape, rng))
    return finish(writer, path)


def read_keys(reader: gguf.GGUFReader, prefix: str = "") -> dict[str, tuple[Any, Any, Any]]:
    """Read the keys of a GGUF file: name → value, type, and type of an array's elements."""
    keys = {}
    for name, key in reader.fields.items():
        if name.startswith(prefix) and not name.startswith("GGUF."):
            kind = key.types[0]
            of = key.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            keys[name] = key.contents(), kind, of
    return keys


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, family: Family, n_ctx: int) -> None:
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(E)
    writer.add_feed_forward_length(FF)
    writer.add_block_count(family.n_layers)
    writer.add_head_count(HEADS if family.kv_heads else 0)
    writer.add_head_count_kv(family.kv_heads)
    writer.add_layer_norm_eps(1e-5)
    writer.add_layer_norm_rms_eps(1e-5)
    rotates = "mpt" not in family.architecture and family.kv_heads
    rotated = {"rope.dimension_count": HEAD} if rotates else {}
    for key, value in (rotated | family.metadata).items():
        full = f"{family.architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        else:
            writer.add_uint32(full, value)


def _tensors(family: Family, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    whole = {"token_embd": (n_vocab, E), "output": (n_vocab, E), **family.whole}
    if "output+" in whole:
        del whole["output"]
        whole["output+"] = (n_vocab, E)
    yield from _prefix_names("", whole)
    for layer in range(family.n_layers):
        yield from _prefix_names(f"blk.{layer}.", family.layers(layer))
        for name, shape in family.raw(layer).items():
            yield f"blk.{layer}.{name}", shape


def _prefix_names(before: str, shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in shapes.items():
        plain = name.removesuffix("+")
        yield f"{before}{plain}.weight", shape
        if plain != name:
            yield f"{before}{plain}.bias", shape[:1]


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if name.endswith("ssm_a"):
        return -np.resize(np.arange(1.0, STATE + 1), shape).astype(np.float32)
    if name.endswith("ssm_dt.bias"):
        return np.full(shape, -3.0, np.float32)
    values = rng.normal(0, 0.02 if name.endswith("bias") else 0.25, shape)
    if ("norm" in name and name.endswith("weight")) or name.endswith(("_ln.weight", "ssm_d")):
        values = 1 + values / 10
    return (values * (4 if name == "token_embd.weight" else 1)).astype(np.float32)
