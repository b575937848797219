"""GGUF files made to measure."""

import hashlib
import struct


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = b"".join(struct.pack("<Q", n) for n in shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    entries: list[bytes] | None = None,
    tensors: list[tuple[str, int]] | None = None,
    *,
    version: int = 3,
    seed: int = 0,
) -> bytes:
    """A small valid GGUF. `tensors` are (name, number of 32-bit floats, a multiple of 8)."""
    entries = entries if entries is not None else model_entries()
    tensors = tensors if tensors is not None else [("token_embd.weight", 64), ("output_norm.weight", 8)]
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    offset = 0
    for name, n in tensors:
        head += tensor_info(name, (n,), 0, offset)
        offset += 4 * n
    head += b"\0" * (-len(head) % 32)
    return head + hashlib.shake_128(str(seed).encode()).digest(offset)


def model_entries(n_vocab: int = 80) -> list[bytes]:
    return [
        entry("general.architecture", 8, text("llama")),
        entry("general.name", 8, text("Tiny")),
        entry("llama.block_count", 4, struct.pack("<I", 2)),
        entry("llama.context_length", 4, struct.pack("<I", 512)),
        entry("llama.embedding_length", 4, struct.pack("<I", 64)),
        entry("llama.attention.head_count", 4, struct.pack("<I", 4)),
        entry("llama.attention.head_count_kv", 4, struct.pack("<I", 2)),
        entry(
            "tokenizer.ggml.tokens",
            9,
            struct.pack("<IQ", 8, n_vocab) + b"".join(text(f"t{i}") for i in range(n_vocab)),
        ),
        entry("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 80) + struct.pack("<80f", *range(80))),
    ]
