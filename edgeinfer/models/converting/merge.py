"""Merge adapters into a model: a new GGUF, tensor by tensor, in which they need not be applied again.

    W' = W + scale * alpha / rank * (B @ A), in float32

A tensor that no adapter names is copied as its bytes are, so nothing of it is lost a second time. One
that is changed is written in the type it had where numpy can make that, else in Q8_0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from edgeinfer.errors import ConversionError
from edgeinfer.models import gguf
from edgeinfer.models.converting.safetensors import Array
from edgeinfer.models.ggml_types import TENSOR_TYPES
from edgeinfer.models.gguf import GgufHeader, TensorInfo
from edgeinfer.models.progress import Job
from edgeinfer.system.disk import need_room, room_errors

_MADE_HERE = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})
_BLOCK_BYTES = 64 << 20
_NUMBERS = {known.name: number for number, known in TENSOR_TYPES.items()}


class Adapter:
    """An open GGUF adapter. Raises ConversionError when it is none."""

    def __init__(self, path: Path, scale: float) -> None:
        self.header = gguf.read_header(path)
        if self.header.text("adapter.type") != "lora":
            raise ConversionError(f"{path} is no LoRA adapter")
        alpha = self.header.metadata.get("adapter.lora.alpha", 0.0)
        self._alpha = float(alpha) if isinstance(alpha, int | float) else 0.0
        self._scale = scale
        self._view = np.memmap(path, np.uint8, "r")
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}

    @property
    def names(self) -> set[str]:
        """The tensors of the base that it changes."""
        return {name.removesuffix(".lora_a") for name in self._tensors if name.endswith(".lora_a")}

    def pair(self, name: str) -> tuple[Array, Array]:
        """A [rank, in], and B [out, rank] with the whole scale in it, float32."""
        a, b = (self._read(self._tensors[f"{name}.lora_{which}"]) for which in "ab")
        factor = self._scale * (self._alpha / len(a) if self._alpha else 1.0)
        return a, b * np.float32(factor)

    def _read(self, tensor: TensorInfo) -> Array:
        return dequantized(self._view[tensor.offset : tensor.offset + tensor.size_bytes], tensor)


def dequantized(raw: Array, tensor: TensorInfo) -> Array:
    """A tensor's bytes, or those of some of its rows, as float32 of shape [rows, row length]."""
    import gguf as package  # 80 ms, only for who merges

    known = TENSOR_TYPES[_NUMBERS[tensor.type]]
    row_bytes = tensor.shape[0] // known.block * known.bytes
    rows = raw.reshape(-1, row_bytes)
    kind = package.GGMLQuantizationType[tensor.type]
    if tensor.type in ("F32", "F16"):
        found: Array = rows.view(np.float32 if tensor.type == "F32" else np.float16).astype(np.float32)
        return found
    plain: Array = package.quants.dequantize(rows, kind)
    return plain


def merge(base: Path, adapters: Sequence[tuple[Path, float]], target: Path, job: Job) -> None:
    """Write the model in `base` with `adapters`, (path, scale) each, added, to `target`.

    Raises ConversionError, DiskFullError, InterruptedByUser; then nothing is left at `target`.
    """
    header = gguf.check(base)
    opened = [Adapter(path, scale) for path, scale in adapters]
    _refuse_misfits(header, opened)
    types = {tensor.name: _type_of(tensor, opened) for tensor in header.tensors}
    sizes = {tensor.name: _size(tensor, types[tensor.name]) for tensor in header.tensors}
    need_room(target.parent, sum(sizes.values()), target.name)
    job.begin("converting", target.name.removesuffix(".part"), total=sum(sizes.values()))
    try:
        with room_errors(target), open(target, "wb") as out:
            out.write(_head(base, header, types, sizes))
            _write(out, base, header, opened, types, job)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _refuse_misfits(header: GgufHeader, adapters: Sequence[Adapter]) -> None:
    if header.split[1] > 1:
        raise ConversionError("a model of several files is not merged; make one file of it first")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for adapter in adapters:
        if adapter.header.architecture != header.architecture:
            raise ConversionError(
                f"the adapter is for the architecture {adapter.header.architecture}, "
                f"the model has {header.architecture}"
            )
        for name in sorted(adapter.names):
            a, b = adapter.pair(name)
            if shapes.get(name) != (a.shape[1], b.shape[0]):
                raise ConversionError(f"the adapter does not fit the model: {name} has another shape")


def _type_of(tensor: TensorInfo, adapters: Sequence[Adapter]) -> str:
    changed = any(tensor.name in adapter.names for adapter in adapters)
    return "Q8_0" if changed and tensor.type not in _MADE_HERE else tensor.type


def _size(tensor: TensorInfo, kind: str) -> int:
    known = TENSOR_TYPES[_NUMBERS[kind]]
    return tensor.n_elements // known.block * known.bytes


def _head(base: Path, header: GgufHeader, types: dict[str, str], sizes: dict[str, int]) -> bytes:
    with open(base, "rb") as file:
        begin = file.read(header.infos_offset)
    found = bytearray(begin)
    at = 0
    for tensor in header.tensors:
        name = tensor.name.encode()
        found += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.shape))
        found += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        found += struct.pack("<IQ", _NUMBERS[types[tensor.name]], at)
        at += -(-sizes[tensor.name] // header.alignment) * header.alignment
    return bytes(found) + bytes(-len(found) % header.alignment)


def _write(
    out: IO[bytes],
    base: Path,
    header: GgufHeader,
    adapters: Sequence[Adapter],
    types: dict[str, str],
    job: Job,
) -> None:
    begin = out.tell()
    view = np.memmap(base, np.uint8, "r")
    for tensor in header.tensors:
        mine = [adapter for adapter in adapters if tensor.name in adapter.names]
        raw = view[tensor.offset : tensor.offset + tensor.size_bytes]
        blocks = _merged(raw, tensor, mine, types[tensor.name]) if mine else _copied(raw)
        for block in blocks:
            block.tofile(out)
            job.at(out.tell() - begin)
        out.write(bytes(-(out.tell() - begin) % header.alignment))


def _copied(raw: Array) -> Iterator[Array]:
    for at in range(0, len(raw), _BLOCK_BYTES):
        yield raw[at : at + _BLOCK_BYTES]


def _merged(raw: Array, tensor: TensorInfo, adapters: Sequence[Adapter], kind: str) -> Iterator[Array]:
    import gguf as package

    pairs = [adapter.pair(tensor.name) for adapter in adapters]
    n_rows = tensor.n_elements // tensor.shape[0]
    row_bytes = len(raw) // n_rows
    step = max(1, _BLOCK_BYTES // (tensor.shape[0] * 4))
    for at in range(0, n_rows, step):
        rows = dequantized(raw[at * row_bytes : min(at + step, n_rows) * row_bytes], tensor)
        for a, b in pairs:
            rows = rows + b[at : at + step] @ a
        found: Array = package.quants.quantize(rows, package.GGMLQuantizationType[kind])
        yield found
