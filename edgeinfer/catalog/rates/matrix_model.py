"""A small Llama of random numbers in F16, from which the probe makes every type."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

N_EMBD = 1024
N_FF = 2048
N_LAYER = 1
N_VOCAB = 64
_ALIGNMENT = 32
_F32, _F16 = 0, 1
_UINT32 = 4
_FLOAT32 = 6
_STRING = 8


def write(path: Path) -> int:
    """Write the model; the number of its parameters that are multiplied with every token.

    GGUF version 3 as ggml's docs/gguf.md describes it. The vocabulary has no words.
    """
    import numpy as np  # 60 ms, only when the probe runs

    tensors = _shapes()
    rng = np.random.default_rng(1)
    infos, offset = b"", 0
    for name, shape in tensors.items():
        kind = _F16 if len(shape) == 2 else _F32
        dims = b"".join(struct.pack("<Q", n) for n in reversed(shape))
        infos += _text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)
        offset += _padded(int(np.prod(shape)) * (2 if kind == _F16 else 4))
    metadata = _metadata()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(metadata) + infos
    with open(path, "wb") as file:
        file.write(head.ljust(_padded(len(head)), b"\0"))
        for shape in tensors.values():
            values: Any = np.ones(shape, np.float32)
            if len(shape) == 2:
                values = (rng.standard_normal(shape, np.float32) / 32).astype(np.float16)
            raw = values.tobytes()
            file.write(raw.ljust(_padded(len(raw)), b"\0"))
    return sum(a * b for name, (a, b) in _matrices().items() if name != "token_embd.weight")


def _matrices() -> dict[str, tuple[int, int]]:
    found = {"token_embd.weight": (N_VOCAB, N_EMBD), "output.weight": (N_VOCAB, N_EMBD)}
    for layer in range(N_LAYER):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            found[f"blk.{layer}.{name}.weight"] = (N_EMBD, N_EMBD)
        for name in ("ffn_gate", "ffn_up"):
            found[f"blk.{layer}.{name}.weight"] = (N_FF, N_EMBD)
        found[f"blk.{layer}.ffn_down.weight"] = (N_EMBD, N_FF)
    return found


def _shapes() -> dict[str, tuple[int, ...]]:
    norms = [
        f"blk.{layer}.{name}.weight" for layer in range(N_LAYER) for name in ("attn_norm", "ffn_norm")
    ]
    return {**_matrices(), **dict.fromkeys([*norms, "output_norm.weight"], (N_EMBD,))}


def _metadata() -> list[bytes]:
    numbers = {
        "llama.block_count": N_LAYER,
        "llama.context_length": 512,
        "llama.embedding_length": N_EMBD,
        "llama.feed_forward_length": N_FF,
        "llama.attention.head_count": 16,
        "llama.vocab_size": N_VOCAB,
        "general.alignment": _ALIGNMENT,
    }
    return [
        _text("general.architecture") + struct.pack("<I", _STRING) + _text("llama"),
        _text("tokenizer.ggml.model") + struct.pack("<I", _STRING) + _text("none"),
        _text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", _FLOAT32, 1e-5),
        *(_text(key) + struct.pack("<II", _UINT32, value) for key, value in numbers.items()),
    ]


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padded(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
