"""A small Llama of random numbers in F16, from which the probe makes every type."""

from __future__ import annotations

from math import prod
from pathlib import Path

N_EMBD = 1024
N_FF = 2048
N_LAYER = 1
N_VOCAB = 64
_ARCHITECTURE = "llama"


def write(path: Path) -> int:
    """Write the model; the number of its parameters that are multiplied with every token.

    The vocabulary has no words.
    """
    import gguf  # 80 ms with numpy, only when the probe runs
    import numpy as np

    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    writer.add_tokenizer_model("none")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_block_count(N_LAYER)
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(16)
    writer.add_vocab_size(N_VOCAB)
    matrices = _matrices()
    for name, shape in matrices.items():
        writer.add_tensor(name, (rng.standard_normal(shape, np.float32) / 32).astype(np.float16))
    for name in _norms():
        writer.add_tensor(name, np.ones(N_EMBD, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sum(prod(shape) for name, shape in matrices.items() if name != "token_embd.weight")


def _matrices() -> dict[str, tuple[int, int]]:
    found = {"token_embd.weight": (N_VOCAB, N_EMBD), "output.weight": (N_VOCAB, N_EMBD)}
    for layer in range(N_LAYER):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            found[f"blk.{layer}.{name}.weight"] = (N_EMBD, N_EMBD)
        for name in ("ffn_gate", "ffn_up"):
            found[f"blk.{layer}.{name}.weight"] = (N_FF, N_EMBD)
        found[f"blk.{layer}.ffn_down.weight"] = (N_EMBD, N_FF)
    return found


def _norms() -> list[str]:
    own = [
        f"blk.{layer}.{name}.weight" for layer in range(N_LAYER) for name in ("attn_norm", "ffn_norm")
    ]
    return [*own, "output_norm.weight"]
