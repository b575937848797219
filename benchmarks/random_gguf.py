"""A model of any size with random weights, for start-up benchmarks where nothing may be downloaded.

`random_gguf.py TOKENIZER.gguf OUT.gguf --layers 32 --width 4096 --type q4_0` writes a Llama of that
shape, with the tokenizer of an existing model. Its answers are noise; its loading, page faults and
decode steps cost as much as a real model's. `--different` writes a Qwen3 in which no two layers are
alike, and with `--experts 64` a mixture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
from gguf import GGMLQuantizationType as Q
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/made"))
from made_families import finish, read_keys

_HEADS = 32
#: Number of topics of a mixture (token n belongs to topic n % TOPICS), and of experts that a token uses.
TOPICS, _USED = 16, 8
#: Parts of an embedding that are common to all tokens, and to those of a topic; and a factor for its
#: size relative to what layers add. So consecutive tokens of a topic share a third of their experts, and
#: the top eighth of a layer's experts has 25 to 58 % of all uses.
_COMMON, _TOPIC = 0.06, 0.1
_SCALE = 4.0

#: Type → the offset of each half-precision scale in a block (ggml-common.h), and its value for weights
#: with a deviation of about 1 if all other bytes of the block are random.
SCALES: dict[Q, dict[int, float]] = {
    Q.Q4_0: {0: 0.2},
    Q.Q4_1: {0: 0.2, 2: -1.5},
    Q.Q8_0: {0: 0.0125},
    Q.Q4_K: {0: 0.2 / 31, 2: 1.5 / 31},
    Q.Q6_K: {208: 0.0007},
}
#: Name → a file's types: of most tensors, and of those that llama.cpp's mixtures store more precisely.
TYPES = {
    "q4_0": (Q.Q4_0, Q.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (Q.Q4_1, Q.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q8_0": (Q.Q8_0, Q.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q6_k": (Q.Q6_K, Q.Q6_K, gguf.LlamaFileType.MOSTLY_Q6_K),
    "q4_k_m": (Q.Q4_K, Q.Q6_K, gguf.LlamaFileType.MOSTLY_Q4_K_M),
    "f16": (Q.F16, Q.F16, gguf.LlamaFileType.MOSTLY_F16),
}


def random_rows(kind: Q, rows: int, width: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return random rows of a type, uint8 of (rows, bytes), whose scales keep activations finite."""
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
    """Copy everything under `tokenizer.`; return the vocabulary's size."""
    keys = read_keys(gguf.GGUFReader(source), "tokenizer.")
    for name, (value, kind, of) in keys.items():
        writer.add_key_value(name, value, kind, sub_type=of)
    return len(keys["tokenizer.ggml.tokens"][0])


def add_shape(
    writer: gguf.GGUFWriter,
    n_ctx: int,
    width: int,
    layers: int,
    feed_forward: int,
    key_value_heads: int,
    head_size: int,
) -> None:
    """Add the numbers that all architectures here have."""
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)


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
    """Write the model. The tensors repeat one random block of rows, which is incompressible enough for
    a page cache, and fast.
    """
    writer = gguf.GGUFWriter(out, "llama")
    vocabulary = copy_tokenizer(writer, tokenizer)
    writer.add_name(f"random {layers}x{width}")
    add_shape(writer, n_ctx, width, layers, feed_forward, key_value_heads, head_size)
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
    finish(writer, out)


def write_different(
    tokenizer: Path, out: Path, *, layers: int, width: int, feed_forward: int, experts: int = 0
) -> None:
    """Write a Qwen3 in Q4_K_M whose weights all differ: equal answers show that no weight was mistaken
    for another. With `experts` it is a mixture whose routing is skewed, and sticky within a topic.
    """
    writer = gguf.GGUFWriter(out, "qwen3moe" if experts else "qwen3")
    vocabulary = copy_tokenizer(writer, tokenizer)
    head_size, key_value_heads = 128, 4 if experts else 8
    writer.add_name(f"different {layers}x{width}")
    add_shape(writer, 16_384, width, layers, feed_forward, key_value_heads, head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(_USED)
        writer.add_expert_feed_forward_length(feed_forward)
    rng = np.random.default_rng(13)
    make: list[Callable[[], NDArray[np.generic]]] = []

    def add(name: str, rows: int, columns: int, kind: Q = Q.Q4_K, n: int = 1) -> None:
        values, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*[n] * (n > 1), rows, columns // values * size)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=kind)
        make.append(lambda: random_rows(kind, n * rows, columns, rng).reshape(shape))

    def add_floats(name: str, values: NDArray[np.float32]) -> None:
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        make.append(lambda: values)

    def add_experts(layer: str) -> None:
        router = rng.standard_normal((experts, width), dtype=np.float32) * 1.5 / np.sqrt(width)
        add_floats(f"{layer}.ffn_gate_inp.weight", router.astype(np.float32))
        add(f"{layer}.ffn_gate_exps.weight", feed_forward, width, n=experts)
        add(f"{layer}.ffn_up_exps.weight", feed_forward, width, n=experts)
        add(f"{layer}.ffn_down_exps.weight", width, feed_forward, n=experts)

    if experts:
        kind, size = Q.Q8_0, vocabulary * width // 32 * 34
        shape = (vocabulary, width // 32 * 34)
        writer.add_tensor_info("token_embd.weight", shape, np.dtype(np.uint8), size, raw_dtype=kind)
        make.append(lambda: _embeddings(vocabulary, width, rng))
    else:
        add("token_embd.weight", vocabulary, width)
    add("output.weight", vocabulary, width, Q.Q6_K)
    add_floats("output_norm.weight", np.ones(width, np.float32))
    for n in range(layers):
        layer = f"blk.{n}"
        is_finer = not experts and (n < layers // 8 or n >= 7 * layers // 8 or n % 3 == 2)
        finer = Q.Q6_K if is_finer else Q.Q4_K
        add(f"{layer}.attn_q.weight", _HEADS * head_size, width)
        add(f"{layer}.attn_k.weight", key_value_heads * head_size, width)
        add(f"{layer}.attn_v.weight", key_value_heads * head_size, width, finer)
        add(f"{layer}.attn_output.weight", width, _HEADS * head_size)
        if experts:
            add_experts(layer)
        else:
            add(f"{layer}.ffn_gate.weight", feed_forward, width)
            add(f"{layer}.ffn_up.weight", feed_forward, width)
            add(f"{layer}.ffn_down.weight", width, feed_forward, finer)
        norms = {"attn": width, "ffn": width, "attn_q": head_size, "attn_k": head_size}
        for norm, size in norms.items():
            add_floats(f"{layer}.{norm}_norm.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make_tensor in make:
        writer.write_tensor_data(make_tensor())
    writer.close()


def _embeddings(vocabulary: int, width: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return a mixture's token table in Q8_0."""
    common, topics = rng.standard_normal(width), rng.standard_normal((TOPICS, width))
    rows = np.sqrt(_COMMON) * common + np.sqrt(_TOPIC) * topics[np.arange(vocabulary) % TOPICS]
    rows += np.sqrt(1 - _COMMON - _TOPIC) * rng.standard_normal((vocabulary, width))
    return gguf.quants.quantize((_SCALE * rows).astype(np.float32), Q.Q8_0)


def widen(small: Path, out: Path, feed_forward: int) -> None:
    """Write `small`, a Llama, with a wider feed-forward that adds zero: its answers stay the same, and
    a token costs as much as a large model's.

    The new rows of `ffn_gate` and `ffn_up` are random, the new columns of `ffn_down` zeros.
    """
    reader = gguf.GGUFReader(small)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_feed_forward_length(feed_forward)
    for name, (value, kind, of) in read_keys(reader).items():
        if name not in ("general.architecture", "llama.feed_forward_length"):
            writer.add_key_value(name, value, kind, sub_type=of)
    rng = np.random.default_rng(1)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        columns, rows = (int(size) for size in (*tensor.shape, 1)[:2])
        if "ffn_gate" in tensor.name or "ffn_up" in tensor.name:
            data = np.concatenate([data, random_rows(kind, feed_forward - rows, columns, rng)])
        elif "ffn_down" in tensor.name:
            more = np.zeros_like(random_rows(kind, rows, feed_forward - columns, rng))
            data = np.concatenate([data, more], axis=1)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    finish(writer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--feed-forward", type=int, default=11008)
    parser.add_argument("--key-value-heads", type=int, default=_HEADS)
    parser.add_argument("--head-size", type=int, help="default: the width by 32 heads")
    parser.add_argument("--context", type=int, default=4096, help="training context in tokens")
    parser.add_argument("--type", choices=list(TYPES), default="q4_0")
    parser.add_argument("--different", action="store_true", help="a Qwen3 whose layers all differ")
    parser.add_argument("--experts", type=int, default=0, help="with --different: a mixture")
    options = parser.parse_args()
    if options.different:
        sizes = {"layers": options.layers, "width": options.width, "experts": options.experts}
        write_different(options.tokenizer, options.out, feed_forward=options.feed_forward, **sizes)
        return
    sizes = {
        name: getattr(options, name) for name in ("layers", "width", "feed_forward", "key_value_heads")
    }
    sizes |= {"head_size": options.head_size or options.width // _HEADS, "n_ctx": options.context}
    write(options.tokenizer, options.out, kind=options.type, **sizes)
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
