"""Checkpoints whose weights follow from their tensors' names, so that only shapes and results are kept.

`scripts/make_checkpoints.py` writes the same weights, runs transformers over them, and keeps its logits.
"""

import hashlib
import json
import math
import struct
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[1] / "models/converting/golden"
N_VOCAB = 128
N_TOKENS = 64
#: The positions whose logits are kept.
KEPT = tuple(range(3, N_TOKENS, 4))


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return values that BF16 represents exactly, float32: norms around 1, matrices that keep a signal's size."""
    count = math.prod(shape)
    raw = np.frombuffer(hashlib.shake_128(name.encode()).digest(count), np.int8).reshape(shape)
    if "norm" in name:
        return (1 + (raw >> 2) / 64).astype(np.float32)
    if len(shape) < 2:
        return (raw / 512).astype(np.float32)
    scale = 1.0 if "embed" in name else 2.0 ** round(-math.log2(shape[-1]) / 2)
    return (raw / 128 * 2 * scale).astype(np.float32)


def picture(side: int) -> np.ndarray:
    """Return the picture that is encoded: 8-bit RGB, `side` rows and columns."""
    raw = hashlib.shake_128(b"picture").digest(side * side * 3)
    return np.frombuffer(raw, np.uint8).reshape(side, side, 3)


def token_ids() -> list[int]:
    """Return the tokens of the prompt."""
    return [3 + byte % (N_VOCAB - 3) for byte in hashlib.shake_128(b"tokens").digest(N_TOKENS)]


def safetensors(tensors: dict[str, np.ndarray], *, bf16: bool = False) -> bytes:
    header = {}
    body = b""
    for name, values in tensors.items():
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes() if bf16 else values.tobytes()
        header[name] = {"dtype": "BF16" if bf16 else "F32", "shape": list(values.shape)}
        header[name]["data_offsets"] = [len(body), len(body) + len(raw)]
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def golden(name: str) -> dict:
    """Return what is kept of a family's checkpoint: its config.json, and its tensors' shapes."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def make_checkpoint(name: str, folder: Path, *, shards: int = 1, bf16: bool = False) -> Path:
    """Write the checkpoint of a family into `folder`."""
    recorded = golden(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    (folder / "tokenizer.json").write_text(json.dumps(tiny_byte_level()))
    tensors = {tensor: weights(tensor, tuple(shape)) for tensor, shape in recorded["tensors"].items()}
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(tensors, bf16=bf16))
        return folder
    names = list(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = {tensor: tensors[tensor] for tensor in names[number::shards]}
        (folder / file).write_bytes(safetensors(mine, bf16=bf16))
    return folder


def byte_symbols() -> list[str]:
    """Return the symbol of each byte in a byte-level tokenizer: GPT-2's, only printable characters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    free_codes = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(free_codes)) for byte in range(256)]


def tiny_byte_level() -> dict:
    """Return a byte-level tokenizer.json of only ASCII, with the special tokens 0 to 2."""
    special = ["<pad>", "<s>", "</s>"]
    tokens = [*special, *byte_symbols()[: N_VOCAB - len(special) - 1], "th"]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": word, "special": True} for index, word in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [["t", "h"]],
        },
    }
