"""Models of random weights, some megabytes each, for shapes that the two real models lack.

The vocabulary is SmolLM2's; what they say means nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

_EMBEDDING = 64
_FEED_FORWARD = 128
_HEADS = 2
_HEAD_LENGTH = 32
_FEED_FORWARD_SHAPES = {
    "ffn_gate": (_FEED_FORWARD, _EMBEDDING),
    "ffn_up": (_FEED_FORWARD, _EMBEDDING),
    "ffn_down": (_EMBEDDING, _FEED_FORWARD),
}


class _Decoder:
    """A file that is being written: the vocabulary and what every shape has are there."""

    def __init__(
        self, path: Path, architecture: str, vocabulary_of: Path, *, layers: int, n_ctx: int = 4096
    ) -> None:
        self.path = path
        self._rng = np.random.default_rng(5)
        self.writer = writer = gguf.GGUFWriter(path, architecture)
        self.n_vocab = _copy_vocabulary(writer, vocabulary_of)
        writer.add_context_length(n_ctx)
        writer.add_embedding_length(_EMBEDDING)
        writer.add_block_count(layers)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(self.n_vocab)
        writer.add_file_type(0)
        self.matrix("token_embd", self.n_vocab, _EMBEDDING, scale=8.0)
        self.matrix("output", self.n_vocab, _EMBEDDING)

    def matrix(self, name: str, *shape: int, scale: float = 1.0) -> None:
        """Random weights, float32 of this shape: rows that sum to about `scale`."""
        values = self._rng.standard_normal(shape) * (scale / np.sqrt(shape[-1]))
        self.tensor(f"{name}.weight", values)

    def norm(self, name: str, length: int = _EMBEDDING) -> None:
        """The weights of a norm: ones."""
        self.tensor(f"{name}.weight", np.ones(length))

    def tensor(self, name: str, values: npt.NDArray[np.float64]) -> None:
        """Any tensor, as float32."""
        self.writer.add_tensor(name, values.astype(np.float32))

    def layer(
        self, number: int, shapes: Mapping[str, tuple[int, ...]], norms: Mapping[str, int]
    ) -> None:
        """A layer's matrices and norms."""
        for name, shape in shapes.items():
            self.matrix(f"blk.{number}.{name}", *shape)
        for name, length in norms.items():
            self.norm(f"blk.{number}.{name}", length)

    def finish(self) -> Path:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


def _add_plain_layers(made: _Decoder) -> None:
    """Two layers as Llama's, with their sizes."""
    made.writer.add_feed_forward_length(_FEED_FORWARD)
    made.writer.add_head_count(_HEADS)
    made.writer.add_head_count_kv(_HEADS)
    made.writer.add_rope_freq_base(1e4)
    made.norm("output_norm")
    width = _HEADS * _HEAD_LENGTH
    shapes = _FEED_FORWARD_SHAPES | {
        "attn_q": (width, _EMBEDDING),
        "attn_k": (width, _EMBEDDING),
        "attn_v": (width, _EMBEDDING),
        "attn_output": (_EMBEDDING, width),
    }
    for number in range(2):
        made.layer(number, shapes, {"attn_norm": _EMBEDDING, "ffn_norm": _EMBEDDING})


def make_qwen2vl(path: Path, vocabulary_of: Path) -> Path:
    """Write a model with M-RoPE (three positions a token), whose cache llama.cpp cannot shift."""
    made = _Decoder(path, "qwen2vl", vocabulary_of, layers=2)
    made.writer.add_rope_dimension_sections([4, 6, 6, 0])
    _add_plain_layers(made)
    for number in range(2):
        for name in ("attn_q", "attn_k", "attn_v"):
            made.tensor(f"blk.{number}.{name}.bias", np.zeros(_HEADS * _HEAD_LENGTH))
    return made.finish()


def make_reader(path: Path, vocabulary_of: Path, n_ctx: int) -> Path:
    """Write a model that reads thousands of tokens a second, as SmolLM2 tokenizes and templates them."""
    made = _Decoder(path, "llama", vocabulary_of, layers=2, n_ctx=n_ctx)
    template = gguf.GGUFReader(vocabulary_of).fields["tokenizer.chat_template"]
    made.writer.add_chat_template(template.contents())
    _add_plain_layers(made)
    return made.finish()


def make_deepseek2(path: Path, vocabulary_of: Path) -> Path:
    """Write a model with multi-head latent attention: one latent vector a token in its cache."""
    latent = 32
    rotated = 32
    plain = 16
    made = _Decoder(path, "deepseek2", vocabulary_of, layers=2)
    made.writer.add_feed_forward_length(_FEED_FORWARD)
    made.writer.add_head_count(_HEADS)
    made.writer.add_head_count_kv(1)
    made.writer.add_rope_freq_base(1e4)
    made.writer.add_rope_dimension_count(rotated)
    made.writer.add_leading_dense_block_count(2)
    made.writer.add_expert_feed_forward_length(_FEED_FORWARD)
    made.writer.add_expert_count(0)
    made.writer.add_expert_used_count(0)
    made.writer.add_expert_shared_count(0)
    made.writer.add_expert_weights_scale(1.0)
    made.writer.add_q_lora_rank(latent)
    made.writer.add_kv_lora_rank(latent)
    made.writer.add_key_length(latent + rotated)
    made.writer.add_value_length(latent)
    made.writer.add_key_length_mla(plain + rotated)
    made.writer.add_value_length_mla(_HEAD_LENGTH)
    made.norm("output_norm")
    shapes = _FEED_FORWARD_SHAPES | {
        "attn_q_a": (latent, _EMBEDDING),
        "attn_q_b": (_HEADS * (plain + rotated), latent),
        "attn_kv_a_mqa": (latent + rotated, _EMBEDDING),
        "attn_k_b": (_HEADS, latent, plain),
        "attn_v_b": (_HEADS, _HEAD_LENGTH, latent),
        "attn_output": (_EMBEDDING, _HEADS * _HEAD_LENGTH),
    }
    norms = {"attn_norm": _EMBEDDING, "ffn_norm": _EMBEDDING, "attn_q_a_norm": latent}
    for number in range(2):
        made.layer(number, shapes, norms | {"attn_kv_a_norm": latent})
    return made.finish()


def make_mamba(path: Path, vocabulary_of: Path) -> Path:
    """Write a recurrent model: no attention, one state for all that was read."""
    inner = 2 * _EMBEDDING
    state = 8
    steps = 4
    taps = 4
    made = _Decoder(path, "mamba", vocabulary_of, layers=2)
    made.writer.add_feed_forward_length(0)
    made.writer.add_head_count(0)
    made.writer.add_ssm_conv_kernel(taps)
    made.writer.add_ssm_inner_size(inner)
    made.writer.add_ssm_state_size(state)
    made.writer.add_ssm_time_step_rank(steps)
    made.norm("output_norm")
    shapes = {
        "ssm_in": (2 * inner, _EMBEDDING),
        "ssm_conv1d": (inner, taps),
        "ssm_x": (steps + 2 * state, inner),
        "ssm_dt": (inner, steps),
        "ssm_out": (_EMBEDDING, inner),
    }
    for number in range(2):
        made.layer(number, shapes, {"attn_norm": _EMBEDDING})
        made.tensor(f"blk.{number}.ssm_conv1d.bias", np.zeros(inner))
        made.tensor(f"blk.{number}.ssm_dt.bias", np.full(inner, -3.0))  # a long memory
        made.tensor(f"blk.{number}.ssm_a", -np.tile(np.arange(1.0, state + 1), (inner, 1)))
        made.tensor(f"blk.{number}.ssm_d", np.ones(inner))
    return made.finish()


def make_lfm2(path: Path, vocabulary_of: Path, layers: int = 4) -> Path:
    """Write a hybrid model: short convolutions, and attention in between."""
    attention = range(1, layers, 2)
    made = _Decoder(path, "lfm2", vocabulary_of, layers=layers)
    made.writer.add_feed_forward_length(_FEED_FORWARD)
    made.writer.add_head_count(_HEADS)
    made.writer.add_head_count_kv([int(number in attention) for number in range(layers)])
    made.writer.add_rope_freq_base(1e4)
    made.writer.add_shortconv_l_cache(3)
    made.norm("token_embd_norm")
    for number in range(layers):
        norms = {"attn_norm": _EMBEDDING, "ffn_norm": _EMBEDDING}
        if number in attention:
            width = _HEADS * _HEAD_LENGTH
            shapes = {"attn_q": (width, _EMBEDDING), "attn_output": (_EMBEDDING, width)}
            shapes |= {"attn_k": (_HEAD_LENGTH, _EMBEDDING), "attn_v": (_HEAD_LENGTH, _EMBEDDING)}
            norms |= {"attn_q_norm": _HEAD_LENGTH, "attn_k_norm": _HEAD_LENGTH}
        else:
            shapes = {"shortconv.conv": (_EMBEDDING, 3)}
            shapes |= {"shortconv.in_proj": (3 * _EMBEDDING, _EMBEDDING)}
            shapes |= {"shortconv.out_proj": (_EMBEDDING, _EMBEDDING)}
        made.layer(number, _FEED_FORWARD_SHAPES | shapes, norms)
    return made.finish()


def _copy_vocabulary(writer: gguf.GGUFWriter, source: Path) -> int:
    """Copy the tokenizer of a model, but for its chat template; how many tokens it has."""
    n_vocab = 0
    for name, value, kind, sub_type in _vocabulary(source):
        if name == "tokenizer.ggml.tokens":
            n_vocab = len(value)
        writer.add_key_value(name, value, kind, sub_type=sub_type)
    return n_vocab


@functools.cache
def _vocabulary(source: Path) -> list[tuple[str, Any, Any, Any]]:
    """Read the tokenizer's keys of a model's file, which takes a second."""
    found = []
    for name, field in gguf.GGUFReader(source).fields.items():
        if name.startswith("tokenizer.") and "chat_template" not in name:
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            found.append((name, field.contents(), kind, sub_type))
    return found
