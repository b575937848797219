"""Models of random weights, some megabytes each, for shapes that the two real models lack.

The vocabulary is SmolLM2's; what they say means nothing.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

_EMBEDDING = 64
_FEED_FORWARD = 128
_HEADS = 2
_HEAD_LENGTH = 32
_LAYERS = 2


def make_qwen2vl(path: Path, vocabulary_of: Path) -> Path:
    """Write a model with M-RoPE (three positions a token), whose cache llama.cpp cannot shift."""
    rng = np.random.default_rng(5)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    writer = gguf.GGUFWriter(path, "qwen2vl")
    n_vocab = _copy_vocabulary(writer, vocabulary_of)
    writer.add_context_length(1024)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_sections([4, 6, 6, 0])
    writer.add_file_type(0)
    writer.add_tensor("token_embd.weight", matrix(n_vocab, _EMBEDDING))
    writer.add_tensor("output_norm.weight", np.ones(_EMBEDDING, np.float32))
    width = _HEADS * _HEAD_LENGTH
    for layer in range(_LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(_EMBEDDING, np.float32))
        for name, rows, columns in (
            ("attn_q", width, _EMBEDDING),
            ("attn_k", width, _EMBEDDING),
            ("attn_v", width, _EMBEDDING),
            ("attn_output", _EMBEDDING, width),
            ("ffn_gate", _FEED_FORWARD, _EMBEDDING),
            ("ffn_up", _FEED_FORWARD, _EMBEDDING),
            ("ffn_down", _EMBEDDING, _FEED_FORWARD),
        ):
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrix(rows, columns))
        for name in ("attn_q", "attn_k", "attn_v"):
            writer.add_tensor(f"blk.{layer}.{name}.bias", np.zeros(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _copy_vocabulary(writer: gguf.GGUFWriter, source: Path) -> int:
    """Copy the tokenizer of a model, but for its chat template; how many tokens it has."""
    n_vocab = 0
    for name, field in gguf.GGUFReader(source).fields.items():
        if not name.startswith("tokenizer.") or "chat_template" in name:
            continue
        value, kind = field.contents(), field.types[0]
        if name == "tokenizer.ggml.tokens":
            n_vocab = len(value)
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=sub_type)
    return n_vocab
