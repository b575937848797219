"""Hostile and truncated headers raise InvalidGgufError and never reach llama.cpp."""

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_gguf import entry, gguf_bytes, gguf_file, raw_entry
from made_gguf import tensor_info as tensor
from made_gguf import text as name
from other_processes import run_python

from edgeinfer.errors import EdgeInferError, InvalidGgufError
from edgeinfer.models.gguf import GgufHeader, parse, read_model_header

SEED = 538_630
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
HUGE = (2**63, 2**64 - 1, 2**62, 2**40, 2**33)

BASE = [entry("general.architecture", "llama"), entry("llama.block_count", 2)]
Case = tuple[str, bytes]


def truncations(rng: random.Random) -> Iterator[Case]:
    whole = gguf_file(
        [*BASE, entry("k", "v" * 40)], [tensor("a"), tensor("b", (64,), 0, 128)], bytes(128 + 256)
    )
    for length in sorted(rng.sample(range(1, len(whole)), 60)):
        yield f"cut at {length} of {len(whole)}", whole[:length]


def preambles(rng: random.Random) -> Iterator[Case]:
    for magic in (*b"GGML gguf FUGG <htm GGJT GGLA".split(), b"GGU\0", b"\x7fELF", b"PK\3\4", bytes(4)):
        yield f"magic {magic!r}", gguf_file(BASE, [tensor()], magic=magic)
    versions = (0, 1, 4, 5, 255, 0x03000000, 0x02000000, 2**31, 2**32 - 1)
    for version in (*versions, *rng.sample(range(4, 2**32), 10)):
        yield f"version {version}", gguf_file(BASE, [tensor()], version=version)
    for count in (*HUGE, *rng.sample(range(500, 2**40), 10)):
        yield f"{count} tensors", gguf_file(BASE, [tensor()], n_tensors=count)
        yield f"{count} entries", gguf_file(BASE, [tensor()], n_entries=count)


def with_key(kind: int, value: bytes) -> bytes:
    return gguf_file([*BASE, raw_entry("k", kind, value)], [tensor()])


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return with_key(9, U32.pack(kind) + U64.pack(count) + content)


def metadata(rng: random.Random) -> Iterator[Case]:
    for length in (*HUGE, *rng.sample(range(10_000, 2**50), 8)):
        yield f"key of {length}", gguf_file([U64.pack(length) + b"k" * 20, *BASE], [tensor()])
        yield f"value of {length}", with_key(8, U64.pack(length) + b"v")
        yield f"array of {length} strings", array(8, length)
        yield f"array of {length} floats", array(6, length)
        strings = name("x") * 50 + U64.pack(length) + name("x") * 49
        yield f"a string of {length} in an array", array(8, 100, strings)
    for kind in (13, 14, 99, 2**31, 2**32 - 1, *rng.sample(range(13, 2**32), 5)):
        yield f"value type {kind}", with_key(kind, b"\0" * 64)
        yield f"element type {kind}", array(kind, 4, b"\0" * 64)
    yield "array of arrays", array(9, 1, b"\0" * 64)
    for epsilon in (float("nan"), float("inf"), -1e-5):
        key = name("llama.attention.layer_norm_rms_epsilon") + U32.pack(6)
        yield f"epsilon {epsilon}", gguf_file([*BASE, key + struct.pack("<f", epsilon)], [tensor()])
    for count in (2, 100):
        tokens = b"".join(name(f"t{i}") for i in range(count - 1)) + name("t0")
        key = raw_entry("tokenizer.ggml.tokens", 9, b"") + U32.pack(8) + U64.pack(count)
        yield f"two equal tokens of {count}", gguf_file([*BASE, key + tokens], [tensor()])
    yield "empty key", gguf_file([*BASE, name("") + U32.pack(4) + U32.pack(1)], [tensor()])
    yield "same key twice", gguf_file([*BASE, *BASE], [tensor()])
    for alignment in (0, 1, 2, 4, 8, 16, 3, 31, 33, 2**31, 2**32 - 1, 2**21):
        entries = [*BASE, entry("general.alignment", alignment)]
        yield f"alignment {alignment}", gguf_file(entries, [tensor()])
    entries = [*BASE, entry("general.alignment", "32")]
    yield "alignment that is a word", gguf_file(entries, [tensor()])


def tensors(rng: random.Random) -> Iterator[Case]:
    for n_dims in (5, 6, 255, 2**31, 2**32 - 1):
        yield f"{n_dims} dimensions", gguf_file(BASE, [tensor(n_dims=n_dims)])
    for n in (*HUGE, 2**31, *rng.sample(range(2**20, 2**60), 10)):
        yield f"{n} elements", gguf_file(BASE, [tensor(shape=(n // 32 * 32,))])
        yield f"{n} × {n} elements", gguf_file(BASE, [tensor(shape=(n // 32 * 32, n))])
    yield "dimensions that multiply to 0 in 64 bits", gguf_file(BASE, [tensor(shape=(2**32, 2**32))])
    yield (
        "dimensions that wrap to little in 64 bits",
        gguf_file(BASE, [tensor(shape=(2**33, 2**31 + 1))]),
    )
    for kind in (4, 5, 31, 32, 33, 36, 37, 38, 43, 99, 2**31, 2**32 - 1):
        yield f"tensor type {kind}", gguf_file(BASE, [tensor(kind=kind)])
    for kind, row in ((2, 31), (8, 33), (10, 255), (12, 32), (14, 128), (40, 32), (41, 64)):
        yield f"a row of {row} in type {kind}", gguf_file(BASE, [tensor(shape=(row,), kind=kind)])
    for offset in (1, 32, 128, 4096, *HUGE):
        yield f"first tensor at {offset}", gguf_file(BASE, [tensor(offset=offset)])
    for offset in (0, 64, 127, 160, 2**40):
        yield f"second tensor at {offset}", gguf_file(BASE, [tensor("a"), tensor("b", offset=offset)])
    for length in (64, 65, 1000, *HUGE):
        yield f"tensor name of {length}", gguf_file(BASE, [U64.pack(length) + b"n" * 64 + tensor()])
    yield "two tensors of one name", gguf_file(BASE, [tensor("a"), tensor("a", offset=128)])
    yield "no tensors", gguf_file(BASE, [])
    yield "no architecture", gguf_file([entry("x", 1)], [tensor()])
    yield "architecture that is a number", gguf_file([entry("general.architecture", 1)], [tensor()])
    for layers in (0, 513, 1_000_000, 2**32 - 1):
        entries = [BASE[0], entry("llama.block_count", layers)]
        yield f"{layers} layers", gguf_file(entries, [tensor()])
    yield "layers in words", gguf_file([BASE[0], entry("llama.block_count", "two")], [tensor()])
    entries = [*BASE, entry("split.no", 5), entry("split.count", 3)]
    yield "part 5 of 3", gguf_file(entries, [tensor()])


def all_cases() -> list[Case]:
    rng = random.Random(SEED)
    return [case for group in (truncations, preambles, metadata, tensors) for case in group(rng)]


def test_file_they_are_made_from_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(gguf_file(BASE, [tensor("a"), tensor("b", offset=128)]))
    assert read_model_header(path).n_params == 64


def test_empty_tokens_may_be_equal(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    key = raw_entry("tokenizer.ggml.tokens", 9, b"") + U32.pack(8) + U64.pack(3)
    path.write_bytes(gguf_file([*BASE, key + name("") * 3], [tensor()]))
    assert read_model_header(path).n_vocab == 3


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_only_a_regular_file_is_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(InvalidGgufError, match="not a regular file"):
        read_model_header(path)


@pytest.mark.parametrize(("fault", "content"), all_cases(), ids=[fault for fault, _ in all_cases()])
def test_malformed_header_is_our_error(fault: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidGgufError) as caught:
        read_model_header(path)
    assert str(path) in caught.value.message


def mutants(whole: bytes, header_bytes: int, n: int) -> Iterator[bytes]:
    """Yield `n` copies of `whole` with one to four bytes of the header changed."""
    rng = random.Random(SEED)
    for _ in range(n):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(header_bytes)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        yield bytes(changed)


@pytest.fixture
def survivors() -> list[bytes]:
    """Mutants that our reader accepts."""
    whole = gguf_bytes()
    header_bytes = parse(whole).data_offset
    reads = []
    for mutant in mutants(whole, header_bytes, 3000):
        try:
            header = parse(mutant)
        except EdgeInferError:
            continue
        assert isinstance(header, GgufHeader)
        assert header.tensors[-1].offset + header.tensors[-1].size_bytes <= len(mutant)
        reads.append(mutant)
    return reads


_ORACLE = """
import ctypes, pathlib, sys
import llama_cpp
base = ctypes.CDLL(str(pathlib.Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so.0"))
class Params(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]
base.gguf_init_from_file.argtypes = [ctypes.c_char_p, Params]
base.gguf_init_from_file.restype = ctypes.c_void_p
refused = [p for p in sys.argv[1:] if not base.gguf_init_from_file(p.encode(), Params(True, None))]
print(len(refused), *refused)
"""


def test_ggml_accepts_what_the_reader_accepts(survivors: list[bytes], tmp_path: Path) -> None:
    """Let ggml's reader, in a process of its own, read every mutant that ours accepts."""
    assert len(survivors) > 300
    paths = []
    for i, content in enumerate(survivors):
        paths.append(tmp_path / f"{i}.gguf")
        paths[-1].write_bytes(content)
    assert run_python(_ORACLE, *paths).split() == ["0"]
