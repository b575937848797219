"""Small GGUF files of random numbers: encoders, rerankers and LoRA adapters, made by tests."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from made_families import add_byte_vocabulary, finish

N_EMBD = 64
N_FF = 128
N_LAYER = 2
N_CTX = 128
WORDS = ["red", "blue", "cat", "dog", "runs", "sleeps", "on", "mat", "the", "a"]
MEAN = 1
CLS = 2
RANK = 4
#: Width and height of SmolLM2 135M's matrices, its layers, and the rank of adapters for it.
LORA_SHAPES = {
    "attn_output": (576, 576),
    "attn_k": (576, 192),
    "ffn_up": (576, 1536),
    "ffn_down": (1536, 576),
}
LORA_LAYERS = 30
LORA_RANK = 4


ATTENTION = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (N_EMBD, N_EMBD))


def _start(path: Path, architecture: str, n_ctx: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(N_LAYER)
    writer.add_head_count(4)
    return writer


def make_bert(path: Path, pooling: int, *, head: bool = False) -> Path:
    """Write a BERT with random weights, with a reranking head or without."""
    rng = np.random.default_rng(7)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"\u2581{word}" for word in WORDS)]
    writer = _start(path, "bert", N_CTX)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 5 + [1] * len(WORDS))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(0)
    if head:
        writer.add_classifier_output_labels(["relevance"])

    layer = ATTENTION | {"ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
    layer |= dict.fromkeys(("attn_output_norm", "layer_output_norm"), (N_EMBD,))
    shapes = {"token_embd": (len(tokens), N_EMBD), "token_types": (2, N_EMBD)}
    shapes |= {"position_embd": (N_CTX, N_EMBD), "token_embd_norm": (N_EMBD,)}
    shapes |= {f"blk.{n}.{name}": shape for n in range(N_LAYER) for name, shape in layer.items()}
    if head:
        shapes |= {"cls": (N_EMBD, N_EMBD), "cls.output": (1, N_EMBD)}

    def add(name: str, shape: tuple[int, ...], scale: float = 0.3, offset: float = 0.0) -> None:
        writer.add_tensor(name, (offset + rng.normal(0, scale, shape)).astype(np.float32))

    for name, shape in shapes.items():
        is_norm = name.endswith("_norm")
        add(f"{name}.weight", shape, *((0.01, 1.0) if is_norm else ()))
        if name not in ("token_embd", "token_types", "position_embd"):
            add(f"{name}.bias", shape[:1], 0.01)
    return finish(writer, path)


def make_adapter(
    path: Path,
    seed: int,
    strength: float = 0.05,
    rank: int = LORA_RANK,
    *,
    modules: Sequence[str] = ("attn_output",),
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    alpha: float = 1.0,
) -> str:
    """Write a LoRA adapter for modules of SmolLM2 that changes its answers. `alpha` is in ranks."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha * rank)
    for layer in range(LORA_LAYERS):
        for module in modules:
            n_in, n_out = LORA_SHAPES[module]
            for factor, shape, size in (("a", (rank, n_in), strength), ("b", (n_out, rank), 0.5)):
                values = gguf.quants.quantize(rng.normal(0, size, shape).astype(np.float32), kind)
                writer.add_tensor(f"blk.{layer}.{module}.weight.lora_{factor}", values, raw_dtype=kind)
    return str(finish(writer, path))


#: Key of a GGUF file → the token that marks a part around the text to fill in.
FIM = {
    "fim_pre": "<|fim_prefix|>",
    "fim_suf": "<|fim_suffix|>",
    "fim_mid": "<|fim_middle|>",
    "fim_rep": "<|repo_name|>",
    "fim_sep": "<|file_sep|>",
}


def make_llama(path: Path, n_ctx: int = 256, *, fim: tuple[str, ...] = (), pooling: int = 0) -> Path:
    """Write a Llama with random weights and a token per byte: it decodes thousands of tokens a second.

    `fim` are keys of `FIM`: the tokens for filling gaps that it has. `pooling` 0 is not named.
    """
    rng = np.random.default_rng(11)
    writer = _start(path, "llama", n_ctx)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // 4)
    n_vocab = add_byte_vocabulary(writer, tuple(FIM[key] for key in fim))
    for index, key in enumerate(fim):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", 258 + index)
    if pooling:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_chat_template(
        "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
    )

    layer = {"attn_norm": (N_EMBD,), "ffn_norm": (N_EMBD,), **ATTENTION}
    layer |= {"ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
    shapes = {"token_embd": (n_vocab, N_EMBD), "output_norm": (N_EMBD,), "output": (n_vocab, N_EMBD)}
    shapes |= {f"blk.{n}.{name}": shape for n in range(N_LAYER) for name, shape in layer.items()}
    for name, shape in shapes.items():
        values = float(name.endswith("_norm")) + rng.normal(0, 0.3, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    return finish(writer, path)
