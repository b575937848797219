"""A fake hub, GGUF files made to measure, and the command line in a process of its own."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import Fault, FaultServer, sha

from edgeinfer.catalog.progress import Patience

#: Waits of microseconds instead of seconds, and a short belief in silence.
HASTY = Patience(attempts=3, pause_s=0.001, connect_s=5.0, silence_s=0.5)


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


def model_entries() -> list[bytes]:
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
            struct.pack("<IQ", 8, 80) + b"".join(text(f"t{i}") for i in range(80)),
        ),
        entry("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 80) + struct.pack("<80f", *range(80))),
    ]


@pytest.fixture
def make_gguf() -> Callable[..., bytes]:
    return gguf_bytes


@pytest.fixture
def hasty() -> Patience:
    return HASTY


@pytest.fixture
def server() -> Iterator[FaultServer]:
    made = FaultServer()
    thread = threading.Thread(target=made.httpd.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.release.set()
    made.httpd.shutdown()
    made.httpd.server_close()
    thread.join()


@pytest.fixture
def fault() -> type[Fault]:
    return Fault


@pytest.fixture
def sha256() -> Callable[[bytes], str]:
    return sha


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_cli() -> Iterator[Start]:
    """Start the command line in a process of its own; whatever is left of it is killed at the end of
    the test.
    """
    running: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, before: str = "", prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        program = f"import sys\n{before}\nfrom edgeinfer.cli import main\nsys.exit(main(sys.argv[1:]))"
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", program, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def user_models() -> Callable[[str], None]:
    """Write the user's models.toml."""

    def write(content: str) -> None:
        from edgeinfer.catalog.models import user_path

        user_path().parent.mkdir(parents=True, exist_ok=True)
        user_path().write_text(content)

    return write
