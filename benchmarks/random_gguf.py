"""A model of any size with random weights: what a start-up benchmark needs, where nothing may be
downloaded.

`random_gguf.py TOKENIZER.gguf OUT.gguf --layers 32 --width 4096 --type q4_0` writes a Llama of that shape,
with the tokenizer of an existing model. Its answers are noise; its loading, page faults and decode
steps cost what a real one's do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from numpy.typing import NDArray

_HEADS = 32

#: By type: the offset of each half-precision scale in a block (ggml-common.h), and its value for weights
#: whose deviation is about 1 where all other bytes of the block are random.
SCALES: dict[Q, dict[int, float]] = {
    Q.Q4_0: {0: 0.2},
    Q.Q4_1: {0: 0.2, 2: -1.5},
    Q.Q8_0: {0: 0.0125},
    Q.Q4_K: {0: 0.2 / 31, 2: 1.5 / 31},
    Q.Q6_K: {208: 0.0007},
}
#: A file's types by name: of most tensors, and of those that llama.cpp's mixtures store finer.
TYPES = {
    "q4_0": (Q.Q4_0, Q.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (Q.Q4_1, Q.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q8_0": (Q.Q8_0, Q.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_k_m": (Q.Q4_K, Q.Q6_K, gguf.LlamaFileType.MOSTLY_Q4_K_M),
    "f16": (Q.F16, Q.F16, gguf.LlamaFileType.MOSTLY_F16),
}


def random_rows(kind: Q, rows: int, width: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random rows of a type, uint8 of (rows, bytes); scales keep activations sane."""
    if kind is Q.F16:
        weights = rng.standard_normal((rows, width), dtype=np.float32) / np.sqrt(width)
        return weights.astype(np.float16).view(np.uint8)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, size=(rows, width // values, size), dtype=np.uint8)
    for offset, scale in SCALES[kind].items():
        half = np.array([scale / np.sqrt(width)], dtype=np.float16)
        data[:, :, offset : offset + 2] = half.view(np.uint8)
    return data.reshape(rows, width // values * size)


def copy_tokenizer(writer: gguf.GGUFWriter, source: Path) -> int:
    """Everything under `tokenizer.`; returns the vocabulary's size."""
    reader = gguf.GGUFReader(source)
    size = 0
    for name, field in reader.fields.items():
        if not name.startswith("tokenizer."):
            continue
        value = field.contents()
        if name == "tokenizer.ggml.tokens":
            size = len(value)
        kind = field.types[0]
        writer.add_key_value(
            name, value, kind, sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    return size


def write(
    tokenizer: Path,
    out: Path,
    *,
    layers: int,
    width: int,
    feed_forward: int,
    key_value_heads: int,
    head_size: int,
    n_ctx: int,
    kind: str = "q4_0",
) -> None:
    """Write the model. The tensors repeat one random block of rows: incompressible enough for a page
    cache, and quick.
    """
    writer = gguf.GGUFWriter(out, "llama")
    vocabulary = copy_tokenizer(writer, tokenizer)
    writer.add_name(f"random {layers}x{width}")
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(vocabulary)
    most, finer, file_type = TYPES[kind]
    writer.add_file_type(file_type)
    rng = np.random.default_rng(1)
    heads_wide = _HEADS * head_size
    widths = {width, feed_forward, heads_wide}
    n_rows = max(vocabulary, feed_forward, heads_wide)
    wide = {(t, w): random_rows(t, n_rows, w, rng) for t in {most, finer} for w in widths}
    ones = np.ones(width, dtype=np.float32)

    def add(name: str, rows: int, columns: int, kind: Q = most) -> None:
        writer.add_tensor(name, wide[kind, columns][:rows], raw_dtype=kind)

    add("token_embd.weight", vocabulary, width)
    add("output.weight", vocabulary, width, finer)
    writer.add_tensor("output_norm.weight", ones)
    for n in range(layers):
        better = finer if n < layers // 8 or n >= 7 * layers // 8 or n % 3 == 2 else most
        add(f"blk.{n}.attn_q.weight", heads_wide, width)
        add(f"blk.{n}.attn_k.weight", key_value_heads * head_size, width)
        add(f"blk.{n}.attn_v.weight", key_value_heads * head_size, width, better)
        add(f"blk.{n}.attn_output.weight", width, heads_wide)
        add(f"blk.{n}.ffn_gate.weight", feed_forward, width)
        add(f"blk.{n}.ffn_up.weight", feed_forward, width)
        add(f"blk.{n}.ffn_down.weight", width, feed_forward, better)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{n}.{norm}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--feed-forward", type=int, default=11008)
    parser.add_argument("--key-value-heads", type=int, default=_HEADS)
    parser.add_argument("--head-size", type=int, help="left out: the width by 32 heads")
    parser.add_argument("--context", type=int, default=4096, help="tokens it says it was trained on")
    parser.add_argument("--type", choices=list(TYPES), default="q4_0")
    options = parser.parse_args()
    write(
        options.tokenizer,
        options.out,
        layers=options.layers,
        width=options.width,
        feed_forward=options.feed_forward,
        key_value_heads=options.key_value_heads,
        head_size=options.head_size or options.width // _HEADS,
        n_ctx=options.context,
        kind=options.type,
    )
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
