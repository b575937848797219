"""Safetensors files, read without trusting a byte of them: a header in JSON, then the tensors' bytes.

A tensor is a view of the mapped file; nothing is copied until somebody computes with it. The format
(https://huggingface.co/docs/safetensors) is eight bytes of header length, the header, the data.
"""

from __future__ import annotations

import math
import mmap
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from edgeinfer.errors import ConversionError
from edgeinfer.system.disk import open_regular

Array = npt.NDArray[Any]

#: The largest header that the format's own reader takes.
MAX_HEADER_BYTES = 100_000_000
#: BF16 has no dtype in numpy: its bits as integers.
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
}
#: What can be a weight.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Tensor(msgspec.Struct, frozen=True):
    """Where a tensor lies. `dtype` is the format's word; `shape` has the slowest dimension first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class Safetensors:
    """An open file. Raises ConversionError naming the file and what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(open_regular(path), "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConversionError(f"{path} cannot be read: {error}") from error
        self.tensors = {tensor.name: tensor for tensor in self._read()}

    def _bad(self, what: str) -> NoReturn:
        raise ConversionError(
            f"{self.path} is not a valid safetensors file: {what}",
            hint="fetch it again: it is cut off, or something else by that name",
        )

    def _read(self) -> list[Tensor]:
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little") if size >= 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            self._bad(f"its header would be {length} bytes long, in a file of {size}")
        try:
            header = msgspec.json.decode(self._map[8 : 8 + length], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except (RecursionError, msgspec.MsgspecError) as error:
            self._bad(f"its header: {error}")
        found = [self._tensor(name, entry, 8 + length, size) for name, entry in entries.items()]
        by_place = sorted((one for one in found if one.n_bytes), key=lambda one: one.offset)
        for one, after in pairwise(by_place):
            if one.offset + one.n_bytes > after.offset:
                self._bad(f"{one.name} and {after.name} overlap")
        return found

    def _tensor(self, name: str, entry: _Entry, data: int, size: int) -> Tensor:
        if entry.dtype not in DTYPES:
            self._bad(f"{name} has the unknown type {entry.dtype}")
        begin, end = entry.data_offsets
        wanted = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if min(entry.shape, default=0) < 0 or not 0 <= begin <= end or end - begin != wanted:
            self._bad(f"{name} of shape {list(entry.shape)} does not take bytes {begin} to {end}")
        if data + end > size:
            self._bad(f"{name} ends {data + end - size} bytes past the end of the file")
        return Tensor(name, entry.dtype, entry.shape, data + begin, wanted)

    def view(self, name: str) -> Array:
        """The tensor's values as they are stored, of its shape; BF16 as 16-bit integers."""
        tensor = self.tensors[name]
        count = math.prod(tensor.shape)
        flat: Array = np.frombuffer(self._map, DTYPES[tensor.dtype], count, tensor.offset)
        return flat.reshape(tensor.shape)

    def release(self, name: str) -> None:
        """Let the kernel take the tensor's pages back; they are read again when they are used again."""
        tensor = self.tensors[name]
        begin = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.offset + tensor.n_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, begin, length)


def to_float32(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Convert stored values of the format's `dtype` to float32."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
