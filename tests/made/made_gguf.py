"""GGUF files made to measure."""

import hashlib
import struct
from collections.abc import Mapping, Sequence


class U16(int):
    """A number of 16 bits, as llama.cpp writes the numbers of a split model."""


Value = bool | int | str | Sequence[str] | Sequence[float]


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def raw_entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(key: str, value: Value) -> bytes:
    """Encode a key and its value, with the GGUF type for the Python type."""
    match value:
        case bool():
            return raw_entry(key, 7, bytes([value]))
        case U16():
            return raw_entry(key, 2, struct.pack("<H", value))
        case int():
            return raw_entry(key, 4, struct.pack("<I", value))
        case str():
            return raw_entry(key, 8, text(value))
        case [str(), *_]:
            return raw_entry(key, 9, struct.pack("<IQ", 8, len(value)) + b"".join(map(text, value)))
    return raw_entry(key, 9, struct.pack(f"<IQ{len(value)}f", 6, len(value), *value))


def tensor_info(
    name: str = "a",
    shape: tuple[int, ...] = (32,),
    kind: int = 0,
    offset: int = 0,
    *,
    n_dims: int | None = None,
) -> bytes:
    dims = b"".join(struct.pack("<Q", n) for n in shape)
    count = struct.pack("<I", len(shape) if n_dims is None else n_dims)
    return text(name) + count + dims + struct.pack("<IQ", kind, offset)


def gguf_file(
    entries: list[bytes],
    tensors: list[bytes],
    data: bytes = bytes(4096),
    *,
    n_tensors: int | None = None,
    n_entries: int | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    """Join the parts of a file; `n_tensors` and `n_entries` may be wrong counts for its header."""
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    n_entries = len(entries) if n_entries is None else n_entries
    head = magic + struct.pack("<IQQ", version, n_tensors, n_entries) + b"".join([*entries, *tensors])
    return head + b"\0" * (-len(head) % 32) + data


def tokens(n: int) -> list[str]:
    return [f"t{i}" for i in range(n)]


MODEL_KEYS: dict[str, Value] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": tokens(80),
    "tokenizer.ggml.scores": range(80),
}


def split_keys(index: int, count: int) -> dict[str, Value]:
    """Return the keys of the part `index` (from 0) of a split model."""
    return {"split.no": U16(index), "split.count": U16(count)}


def gguf_bytes(
    keys: Mapping[str, Value] = {},
    tensors: Sequence[tuple[str, int]] = (("token_embd.weight", 64), ("output_norm.weight", 8)),
    *,
    seed: int = 0,
) -> bytes:
    """Return a small valid GGUF file with MODEL_KEYS and `keys`.

    `tensors` are (name, number of 32-bit floats, a multiple of 8).
    """
    infos, offset = [], 0
    for name, n in tensors:
        infos.append(tensor_info(name, (n,), 0, offset))
        offset += 4 * n
    entries = [entry(key, value) for key, value in (MODEL_KEYS | keys).items()]
    return gguf_file(entries, infos, hashlib.shake_128(str(seed).encode()).digest(offset))
