"""Read a checkpoint, as Hugging Face's transformers saves it: config.json and safetensors files.

Every size and offset is checked before it is used. Tensors are views of the mapped files; values are
copied only when a computation needs them. Format of safetensors: 8 bytes of header length, a JSON
header, the data (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting.checkpoint_files import CONFIG, weight_files
from edgeinfer.platform import paths
from edgeinfer.platform.disk import open_regular, path_errors

Array = npt.NDArray[Any]

#: Largest header (bytes) of a safetensors file; the safetensors library has the same limit.
MAX_HEADER_BYTES = 100_000_000
#: Types of tensors in safetensors files, each with numpy's type. numpy has neither BF16 nor F8, so the
#: bits of these are read as integers.
_NUMPY = """
    F64 <f8  F32 <f4  F16 <f2  BF16 <u2  I64 <i8  I32 <i4  I16 <i2  I8 i1  U8 u1  BOOL ?
    F8_E4M3 u1  F8_E5M2 u1
""".split()
DTYPES: dict[str, np.dtype[Any]] = dict(zip(_NUMPY[::2], map(np.dtype, _NUMPY[1::2]), strict=True))
#: Types of weights that can be converted.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Tensor(msgspec.Struct, frozen=True):
    """A tensor in a file. `dtype` is safetensors' type; `shape` begins with the slowest dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class Safetensors:
    """An open safetensors file. Opening raises ConversionError for an invalid one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with _read_errors(path), open(open_regular(path), "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            self._refuse("the file is empty")
        self.tensors = {tensor.name: tensor for tensor in self._read()}

    def _refuse(self, problem: str) -> NoReturn:
        hint = "fetch it again: it is incomplete, or not a safetensors file"
        raise ConversionError(f"{self.path} is not a valid safetensors file: {problem}", hint=hint)

    def _read(self) -> list[Tensor]:
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little") if size >= 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            self._refuse(f"the header is {length} bytes long, but the file has {size}")
        try:
            header = msgspec.json.decode(self._map[8 : 8 + length], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except (RecursionError, msgspec.MsgspecError) as error:
            self._refuse(f"its header: {error}")
        tensors = [self._tensor(name, entry, 8 + length, size) for name, entry in entries.items()]
        stored = [tensor for tensor in tensors if tensor.n_bytes]
        for tensor, following in pairwise(sorted(stored, key=lambda tensor: tensor.offset)):
            if tensor.offset + tensor.n_bytes > following.offset:
                self._refuse(f"{tensor.name} and {following.name} overlap")
        return tensors

    def _tensor(self, name: str, entry: _Entry, data: int, size: int) -> Tensor:
        if entry.dtype not in DTYPES:
            self._refuse(f"{name} has the unknown type {entry.dtype}")
        begin, stop = entry.data_offsets
        n_bytes = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if min(entry.shape, default=0) < 0 or not 0 <= begin <= stop or stop - begin != n_bytes:
            self._refuse(f"{name} of shape {list(entry.shape)} does not fit bytes {begin} to {stop}")
        if data + stop > size:
            self._refuse(f"{name} ends {data + stop - size} bytes past the end of the file")
        return Tensor(name, entry.dtype, entry.shape, data + begin, n_bytes)

    def view(self, name: str) -> Array:
        """Return a view of a tensor's values, in its shape; BF16 as 16-bit integers."""
        tensor = self.tensors[name]
        count = math.prod(tensor.shape)
        flat: Array = np.frombuffer(self._map, DTYPES[tensor.dtype], count, tensor.offset)
        return flat.reshape(tensor.shape)

    def release(self, name: str) -> None:
        """Give the tensor's pages back to the kernel; the next access reads the file again."""
        tensor = self.tensors[name]
        begin = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.offset + tensor.n_bytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, begin, length)


def to_float32(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Return values as float32; `dtype` is safetensors' name of their type."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


Config = dict[str, Any]
_read_errors = partial(path_errors, hint=paths.DENIED_HINT, kind=ConversionError)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} without a file. Raises ConversionError if it is invalid."""
    try:
        with _read_errors(path), suppress(FileNotFoundError), open(open_regular(path), "rb") as file:
            return msgspec.json.decode(file.read(), type=dict[str, Any])
        return {}
    except (RecursionError, msgspec.MsgspecError) as error:
        hint = "fetch the file again: it is damaged or incomplete"
        raise ConversionError(f"{path} is not a valid JSON object: {error}", hint=hint) from error


@contextmanager
def conversion_errors(folder: Path) -> Iterator[None]:
    """Raise ConversionError, which names `folder`, if the block fails because of a value in a file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        problem = f"a value in its files is missing or invalid: {error!r}"
        if isinstance(error, KeyError):
            problem = f"its files lack {error}"
        raise ConversionError(f"{folder} cannot be converted: {problem}") from error


class ModelCheckpoint:
    """An open checkpoint. `home` maps the name of each tensor to the file that has it.

    `whole_config` is config.json; `config` is the same, with the text model's values at the top level.
    Opening raises SourceNotFoundError if a shard is missing, ConversionError if a file is invalid.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole_config = read_json(folder / CONFIG)
        if not self.whole_config:
            raise ConversionError(f"{folder} has no {CONFIG}, which describes the model")
        _refuse_packed(self.whole_config)
        text = self.whole_config.get("text_config")
        self.config: Config = self.whole_config | (text if isinstance(text, dict) else {})
        self.home: dict[str, Safetensors] = {}
        for file in self._open():
            for name in file.tensors:
                if name in self.home:
                    both = f"{self.home[name].path} and {file.path}"
                    raise ConversionError(f"the tensor {name} is in two files: {both}")
                self.home[name] = file

    def _open(self) -> list[Safetensors]:
        with _read_errors(self.folder):
            file_names = [child.name for child in self.folder.iterdir() if child.is_file()]
        files = weight_files(file_names)
        if not files:
            raise _no_weights(self.folder, file_names)
        return [Safetensors(self.folder / name) for name in files]

    @property
    def architectures(self) -> list[str]:
        """Names of model classes in config.json; the first one decides the family."""
        names = self.whole_config.get("architectures") or []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def tensor(self, name: str) -> Tensor:
        """Return a tensor's type, shape and offset. Raises ConversionError if not floating-point."""
        tensor = self.home[name].tensors[name]
        if tensor.dtype not in FLOATS:
            raise ConversionError(
                f"the tensor {name} is of type {tensor.dtype}: quantized weights cannot be converted",
                hint="use the original repository in BF16 or F16, or one with GGUF files",
            )
        return tensor

    @property
    def native_type(self) -> str:
        """GGUF type unless the user chooses one: BF16 if most weights are BF16, otherwise F16."""
        bytes_of: Counter[str] = Counter()
        for file in set(self.home.values()):
            for tensor in file.tensors.values():
                bytes_of[tensor.dtype] += tensor.n_bytes
        return "BF16" if bytes_of.most_common(1)[0][0] == "BF16" else "F16"


def _refuse_packed(config: Config) -> None:
    packed = config.get("quantization_config")
    if isinstance(packed, dict):
        method = str(packed.get("quant_method", "an unknown method"))
        command = "`edgeinfer pull OWNER/REPO --quantize Q4_K_M`"
        hint = f"pull the original repository ({command}), or one with GGUF files"
        problem = f"the checkpoint is quantized with {method}, which is not supported"
        raise ConversionError(problem, hint=hint)


def _no_weights(folder: Path, file_names: list[str]) -> ConversionError:
    pickles = [name for name in file_names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        problem = "loading a Python pickle can run any program, so it is refused"
        code = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
        hint = f"use a revision with .safetensors, or convert it: {code}"
        return ConversionError(f"{folder} has its weights in {pickles[0]}: {problem}", hint=hint)
    return ConversionError(f"{folder} has no .safetensors file with weights")
