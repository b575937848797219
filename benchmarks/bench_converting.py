"""What converting a large checkpoint costs: time beside copying it, and the peak of memory.

`make bench-converting` writes a sharded Llama-shaped checkpoint in BF16 (`--layers`, default 26: 3B; 32 with
`--width 4096`: 7B), converts it as `edgeinfer pull FOLDER` does, in a process of its own, and removes it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import ROOT, add_out, drop, write_figure

sys.path.insert(0, str(ROOT / "tests/made"))
from made_checkpoints import byte_symbols

N_VOCAB = 128_256
_CONVERT = """
import resource, sys, time
from pathlib import Path
from edgeinfer.models.converting.convert import convert
from edgeinfer.models.progress import Job
began = time.monotonic()
convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Job())
print(time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def shapes(layers: int, width: int) -> dict[str, tuple[int, int]]:
    """The matrices of a Llama of this size."""
    found = {"model.embed_tokens.weight": (N_VOCAB, width), "lm_head.weight": (N_VOCAB, width)}
    wide = 8 * width // 3 // 256 * 256
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            found[f"{at}.self_attn.{name}_proj.weight"] = (width, width)
        found[f"{at}.mlp.gate_proj.weight"] = (wide, width)
        found[f"{at}.mlp.up_proj.weight"] = (wide, width)
        found[f"{at}.mlp.down_proj.weight"] = (width, wide)
    return found


def make(folder: Path, layers: int, width: int) -> int:
    """Write the checkpoint in shards of some 4 GB and return its size in bytes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": 8 * width // 3 // 256 * 256,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 128,
        "num_key_value_heads": width // 128,
        "vocab_size": N_VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocab = {token: index for index, token in enumerate([*byte_symbols(), "th"])}
    steps = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [["t", "h"]]}
    tokenizer = {"pre_tokenizer": steps, "decoder": steps, "model": model, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    noise = np.random.default_rng(1).standard_normal(1 << 22).astype(np.float32)
    block = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    groups: list[dict[str, tuple[int, int]]] = [{}]
    size = 0
    for name, shape in shapes(layers, width).items():
        if size > 4 << 30:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += 2 * shape[0] * shape[1]
    index = {}
    for number, group in enumerate(groups):
        file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        _write(folder / file, group, block)
        index |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(path.stat().st_size for path in folder.iterdir())


def _write(path: Path, tensors: dict[str, tuple[int, int]], block: bytes) -> None:
    header = {}
    at = 0
    for name, (rows, columns) in tensors.items():
        end = at + 2 * rows * columns
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while at:
            at -= file.write(block[: min(at, len(block))])


def copied_s(folder: Path, target: Path) -> float:
    """Seconds to copy the checkpoint from the disk to the disk."""
    drop(list(folder.iterdir()))
    began = time.monotonic()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, 16 << 20)
            copy.flush()
            os.fsync(copy.fileno())
    took = time.monotonic() - began
    target.unlink()
    return took


def converted(folder: Path, target: Path, kind: str) -> tuple[float, float]:
    """Seconds, and the peak of resident memory in bytes, mapped pages included."""
    drop(list(folder.iterdir()))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(folder), str(target), kind],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    took = time.monotonic() - began
    target.unlink()
    return took, float(done.stdout.split()[1])


def main() -> None:
    """Write OUT/converting.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--types", default="BF16,F16,Q8_0")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"))  # noqa: S108
    add_out(parser)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name) / "checkpoint"
        folder.mkdir()
        size = make(folder, options.layers, options.width)
        largest = max(
            2 * rows * columns for rows, columns in shapes(options.layers, options.width).values()
        )
        target = Path(name) / "out.gguf"
        copies = [copied_s(folder, target) for _ in range(options.rounds)]
        rows = [f"| a copy, shard by shard | {statistics.median(copies):.1f} s | |"]
        for kind in options.types.split(","):
            found = [converted(folder, target, kind) for _ in range(options.rounds)]
            took = statistics.median(one for one, _ in found)
            peak = max(one for _, one in found)
            rows.append(f"| to {kind} | {took:.1f} s | {peak / 1e6:.0f} MB |")
    title = f"a Llama-shaped checkpoint of {size / 1e9:.1f} GB in BF16, its largest tensor {largest / 1e6:.0f} MB"
    table = (
        "\n".join([f"| {title} | time, to the disk | peak memory |", "| --- | --- | --- |", *rows])
        + "\n"
    )
    print(write_figure(options.out, "converting", table))


if __name__ == "__main__":
    main()
