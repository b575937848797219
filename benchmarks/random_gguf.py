"""A model of any size with random weights: what a start-up benchmark needs, where nothing may be
downloaded.

`random_gguf.py TOKENIZER.gguf OUT.gguf --layers 32 --width 4096` writes a Llama of that shape in Q4_0,
with the tokenizer of an existing model. Its answers are noise; its loading, repacking, page faults and
decode steps cost what a real one's do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

BLOCK_VALUES, BLOCK_BYTES = 32, 18
_HEADS = 32


def q4_0_rows(rows: int, width: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random Q4_0 rows: per 32 values a half-precision scale that keeps activations sane, and 16 bytes
    of nibbles.
    """
    blocks = width // BLOCK_VALUES
    data = rng.integers(0, 256, size=(rows, blocks, BLOCK_BYTES), dtype=np.uint8)
    scale = np.array([0.2 / np.sqrt(width)], dtype=np.float16).view(np.uint8)
    data[:, :, :2] = scale
    return data.reshape(rows, blocks * BLOCK_BYTES)


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
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    rng = np.random.default_rng(1)
    heads_wide = _HEADS * head_size
    widths = {width, feed_forward, heads_wide}
    wide = {w: q4_0_rows(max(vocabulary, feed_forward, heads_wide), w, rng) for w in widths}
    ones = np.ones(width, dtype=np.float32)

    def add(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, wide[columns][:rows], raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    add("token_embd.weight", vocabulary, width)
    add("output.weight", vocabulary, width)
    writer.add_tensor("output_norm.weight", ones)
    for n in range(layers):
        add(f"blk.{n}.attn_q.weight", heads_wide, width)
        add(f"blk.{n}.attn_k.weight", key_value_heads * head_size, width)
        add(f"blk.{n}.attn_v.weight", key_value_heads * head_size, width)
        add(f"blk.{n}.attn_output.weight", width, heads_wide)
        add(f"blk.{n}.ffn_gate.weight", feed_forward, width)
        add(f"blk.{n}.ffn_up.weight", feed_forward, width)
        add(f"blk.{n}.ffn_down.weight", width, feed_forward)
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
    )
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
