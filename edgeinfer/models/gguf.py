"""Read GGUF headers as untrusted input.

The reader walks once through the header of a mapped file. Every count, length, type, dimension and
offset is checked before it is used, so a hostile or truncated file raises InvalidGgufError here and
never reaches llama.cpp. Lists of tokens are skipped: 262,144 of them take tens of milliseconds.

`read_header` checks only the format (versions 2 and 3, little endian), `read_model_header` also what
llama.cpp needs to load a model.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from edgeinfer.errors import InvalidGgufError, UsageError
from edgeinfer.platform.disk import open_regular
from edgeinfer.safe_text import without_controls


class TensorType(msgspec.Struct, frozen=True):
    """A tensor type: each `block` elements take `bytes` bytes."""

    name: str
    block: int
    bytes: int


#: Types without quantization. Quantizing a file of any other type loses quality twice.
FULL_PRECISION = frozenset({"F32", "F16", "BF16"})

#: Tensor types: number (ggml_type), name, elements and bytes per block. Missing numbers are out of use.
_TENSOR_TYPES = """
    0 F32 1 4          1 F16 1 2          2 Q4_0 32 18       3 Q4_1 32 20       6 Q5_0 32 22
    7 Q5_1 32 24       8 Q8_0 32 34       9 Q8_1 32 36       10 Q2_K 256 84     11 Q3_K 256 110
    12 Q4_K 256 144    13 Q5_K 256 176    14 Q6_K 256 210    15 Q8_K 256 292    16 IQ2_XXS 256 66
    17 IQ2_XS 256 74   18 IQ3_XXS 256 98  19 IQ1_S 256 50    20 IQ4_NL 32 18    21 IQ3_S 256 110
    22 IQ2_S 256 82    23 IQ4_XS 256 136  24 I8 1 1          25 I16 1 2         26 I32 1 4
    27 I64 1 8         28 F64 1 8         29 IQ1_M 256 56    30 BF16 1 2        34 TQ1_0 256 54
    35 TQ2_0 256 66    39 MXFP4 32 17     40 NVFP4 64 36     41 Q1_0 128 18     42 Q2_0 64 18
""".split()
#: Number (ggml_type) → tensor type.
TENSOR_TYPES: dict[int, TensorType] = {
    int(number): TensorType(name, int(block), int(size))
    for number, name, block, size in zip(*(_TENSOR_TYPES[i::4] for i in range(4)), strict=True)
}

_FROM_7 = """
    Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS Q2_K_S
    IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16
"""
#: File types to which llama.cpp can quantize: number (llama_ftype) → name.
FILE_TYPES: dict[int, str] = {
    **dict(enumerate("F32 F16 Q4_0 Q4_1".split())),
    **dict(enumerate(_FROM_7.split(), 7)),
    **dict(enumerate("TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0".split(), 36)),
}


def file_type(name: str) -> int | None:
    """Return llama.cpp's number (llama_ftype) of a type such as "q4_k_m" or "Q8_0"; None if unknown."""
    upper = name.upper()
    return next((number for number, type_name in FILE_TYPES.items() if type_name == upper), None)


def parse_file_type(name: str, context: str = "") -> int:
    """Return the llama_ftype of `name`. Raises UsageError, which quotes `context`, the typed text."""
    number = file_type(name)
    if number is None:
        where = f" in {context!r}" if context else ""
        hint = "`edgeinfer quantize --help` lists them"
        raise UsageError(f"{name!r}{where} is not a quantization of llama.cpp", hint=hint)
    return number


MAGIC = b"GGUF"
TOKENS = "tokenizer.ggml.tokens"
VERSIONS = (2, 3)
_GGML = (
    "a GGML file (older than GGUF, August 2023), which llama.cpp no longer reads",
    "pull the same model as GGUF or safetensors: `edgeinfer pull OWNER/REPO`",
)
_PICKLE = (
    "a PyTorch pickle file, which can run any program when it is loaded",
    "pull its repository as safetensors or GGUF: `edgeinfer pull OWNER/REPO`",
)
#: First four bytes of a file in another format → description of the format, and hint.
OTHERS = {b"lmgg": _GGML, b"fmgg": _GGML, b"tjgg": _GGML, b"algg": _GGML, b"PK\x03\x04": _PICKLE}
_OTHER_FILE = "name a GGUF file that has a model's weights"
DEFAULT_ALIGNMENT = 32
_ALIGNMENTS = [1 << power for power in range(21)]
#: Limits of ggml's own reader (gguf.cpp, ggml.h), which refuses larger values.
MAX_DIMS = 4
MAX_TENSOR_NAME_BYTES = 63
MAX_ELEMENTS = 2**63 - 1
#: Maximum number of layers of a model: llama.cpp aborts with more, or with none (LLAMA_MAX_LAYERS).
MAX_LAYERS = 512
#: Limits far above any known model, so that a number in the file cannot cause a long loop.
MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 20
MAX_KEY_BYTES = 1 << 16
#: Longest arrays of numbers and of strings in the metadata that are stored in memory; a longer array is
#: replaced by an `ArrayInfo`.
KEPT_ELEMENTS = 4096
KEPT_STRINGS = 64

_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class ArrayInfo(msgspec.Struct, frozen=True):
    """An array that was too long to keep: GGUF's number of its element type, and its length."""

    type: int
    count: int


Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...] | ArrayInfo


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor in a GGUF. `offset` is from the file's start; `shape[0]` is the fastest dimension."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class GgufHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a GGUF file. All tensors in it lie within the file."""

    path: str
    version: int
    file_bytes: int
    alignment: int
    data_offset: int
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]

    def text(self, key: str) -> str:
        """Return the string at `key`; "" if there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def label(self, key: str) -> str:
        """Return the string at `key` as a line of at most 60 characters, without control characters."""
        line = " ".join(without_controls(self.text(key)).split())
        return line if len(line) <= 60 else f"{line[:59]}…"

    def number(self, key: str, default: int = 0) -> int:
        """Return the non-negative integer at `key`; `default` if there is none."""
        value = self.metadata.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            return default
        return value if value >= 0 else default

    def arch_key(self, key: str) -> str:
        """Return `key` with the architecture's prefix: `block_count` → `llama.block_count`."""
        return f"{self.architecture}.{key}"

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def n_params(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def n_layer(self) -> int:
        return self.number(self.arch_key("block_count"))

    @property
    def n_ctx_train(self) -> int:
        return self.number(self.arch_key("context_length"))

    @property
    def n_embd(self) -> int:
        return self.number(self.arch_key("embedding_length"))

    @property
    def n_vocab(self) -> int:
        tokens = self.metadata.get(TOKENS)
        if isinstance(tokens, ArrayInfo):
            return tokens.count
        return len(tokens) if isinstance(tokens, tuple) else 0

    @property
    def chat_template(self) -> str:
        return self.text("tokenizer.chat_template")

    @property
    def purpose(self) -> Literal["chat", "base", "embedding"]:
        if self.metadata.get(self.arch_key("attention.causal")) is False:
            return "embedding"
        return "chat" if self.chat_template else "base"

    @property
    def quantization(self) -> str:
        """Quantization in `general.file_type`; without this key, the tensor type with most bytes."""
        if named := FILE_TYPES.get(self.number("general.file_type", -1)):
            return named
        bytes_of: Counter[str] = Counter()
        for tensor in self.tensors:
            bytes_of[tensor.type] += tensor.size_bytes
        return max(bytes_of, key=bytes_of.__getitem__, default="")

    @property
    def split(self) -> tuple[int, int]:
        """Index of this file among the parts of a split model (from 0), and their number."""
        count = self.number("split.count", 1)
        return self.number("split.no"), max(1, count)


def read_header(path: str | os.PathLike[str], *, vocabulary: bool = False) -> GgufHeader:
    """Return the header of the GGUF at `path`. Raises InvalidGgufError.

    With `vocabulary`, two equal tokens are an error, too; this check takes 0.2 s for 262,144 tokens.
    """
    gguf_path = Path(path)
    try:
        with open(open_regular(gguf_path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise InvalidGgufError(f"{gguf_path} is empty, not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return parse(view, str(gguf_path), vocabulary=vocabulary)
    except OSError as error:
        problem = f"{gguf_path} cannot be read: {error.strerror or error}"
        raise InvalidGgufError(problem, hint="check the path, and who may read it") from error


def parse(view: bytes | mmap.mmap, name: str = "buffer", *, vocabulary: bool = False) -> GgufHeader:
    """Return the header in `view`, the whole content of the file `name`. Raises InvalidGgufError."""
    return _Walker(view, name, vocabulary).header()


def read_model_header(path: str | os.PathLike[str], *, vocabulary: bool = True) -> GgufHeader:
    """Return the header of a model that llama.cpp can load. Raises InvalidGgufError.

    With `vocabulary`, two equal tokens are an error, too, because llama.cpp aborts at them.
    """
    header = read_header(path, vocabulary=vocabulary)
    if header.alignment < DEFAULT_ALIGNMENT:
        raise InvalidGgufError(
            f"{header.path} aligns its tensors to {header.alignment} bytes; "
            f"llama.cpp needs at least {DEFAULT_ALIGNMENT}"
        )
    for key, value in header.metadata.items():
        if isinstance(value, float) and key.startswith(f"{header.architecture}."):
            least = 0.0 if key.endswith("epsilon") else -math.inf
            if not least <= value < math.inf:
                raise InvalidGgufError(f"{header.path}: {key} is {value}, so llama.cpp would abort")
    index, count = header.split
    if index >= count:
        raise InvalidGgufError(f"{header.path} says that it is part {index + 1} of only {count}")
    if index == 0 and not header.architecture:
        problem = f"{header.path} has no general.architecture: it is not a model"
        raise InvalidGgufError(problem, hint=_OTHER_FILE)
    if header.text("general.type") == "adapter":
        hint = f"load it with its base model: `edgeinfer run MODEL --lora {header.path}`"
        raise InvalidGgufError(f"{header.path} is a LoRA adapter, not a model", hint=hint)
    if count == 1 and not header.tensors:
        raise InvalidGgufError(f"{header.path} has no tensors: it is not a model", hint=_OTHER_FILE)
    layers = header.metadata.get(header.arch_key("block_count"), 1)
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise InvalidGgufError(f"{header.path} claims {layers!r} layers (allowed: 1 to {MAX_LAYERS})")
    return header


def check_part(header: GgufHeader, name: str, index: int, count: int) -> None:
    """Raise InvalidGgufError if the split file `name` is not the part `index` (from 0) of `count`."""
    i, n = header.split
    if n > 1 and header.split != (index, count):
        problem = f"{name}: part {i + 1} of {n} in its header, {index + 1} of {count} in its name"
        raise InvalidGgufError(problem)


class _Walker:
    """Reads a header from start to end. `offset` is the position, which never passes `size`."""

    def __init__(self, view: bytes | mmap.mmap, name: str, vocabulary: bool) -> None:
        self.view = view
        self.name = name
        self.vocabulary = vocabulary
        self.offset = 0
        self.size = len(view)

    def header(self) -> GgufHeader:
        version, n_tensors, n_metadata = self._preamble()
        metadata = dict(self._metadata(n_metadata))
        alignment = self._alignment(metadata)
        tensors = [self._tensor(index) for index in range(n_tensors)]
        data_offset = _pad(self.offset, alignment)
        return GgufHeader(
            path=self.name,
            version=version,
            file_bytes=self.size,
            alignment=alignment,
            data_offset=data_offset,
            metadata=metadata,
            tensors=tuple(self._place_tensors(tensors, data_offset, alignment)),
        )

    def bad(self, problem: str) -> NoReturn:
        defect = f"{problem} (at byte {self.offset})"
        raise InvalidGgufError(f"{self.name} is not a valid GGUF file: {defect}")

    def _skip(self, n_bytes: int, field: str) -> int:
        """Step over `n_bytes` and return where they begin. Raises InvalidGgufError past the end."""
        start = self.offset
        if n_bytes > self.size - start:
            self.bad(f"{field} needs {n_bytes} bytes, but only {self.size - start} are left")
        self.offset = start + n_bytes
        return start

    def _u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self.view, self._skip(4, field))[0]
        return value

    def _u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.view, self._skip(8, field))[0]
        return value

    def _string(self, field: str, limit: int) -> str:
        length = self._u64(f"the length of {field}")
        if length > limit:
            self.bad(f"{field} is {length} bytes long, more than {limit}")
        start = self._skip(length, field)
        return self.view[start : start + length].decode("utf-8", errors="replace")

    def _preamble(self) -> tuple[int, int, int]:
        start = self._skip(4, "the magic")
        magic = self.view[start : start + 4]
        if magic in OTHERS:
            raise InvalidGgufError(f"{self.name} is {OTHERS[magic][0]}", hint=OTHERS[magic][1])
        if magic != MAGIC:
            self.bad(f"it begins with {magic!r}, not {MAGIC!r}")
        version = self._u32("the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            other = f"version {version} is not one of 2 and 3"
            self.bad("it is big-endian" if swapped in VERSIONS else other)
        n_tensors, n_metadata = self._u64("the tensor count"), self._u64("the metadata count")
        if n_tensors > min(MAX_TENSORS, self.size // 24):  # an entry takes at least 24 bytes
            self.bad(f"it claims {n_tensors} tensors, which is too many")
        if n_metadata > min(MAX_METADATA, self.size // 13):  # an entry takes at least 13 bytes
            self.bad(f"it claims {n_metadata} metadata entries, which is too many")
        return version, n_tensors, n_metadata

    def _metadata(self, count: int) -> Iterator[tuple[str, Value]]:
        seen = set()
        for index in range(count):
            key = self._string(f"metadata key {index}", MAX_KEY_BYTES)
            if not key or key in seen:
                self.bad(f"metadata key {index} is {'a second ' + key if key else 'empty'}")
            seen.add(key)
            yield key, self._value(self._u32(f"the type of {key}"), key)

    def _value(self, kind: int, key: str) -> Value:
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._string(key, self.size)
        scalar = _SCALARS.get(kind) or self.bad(f"{key} has the unknown type {kind}")
        value: Scalar = scalar.unpack_from(self.view, self._skip(scalar.size, key))[0]
        return value

    def _array(self, key: str) -> Value:
        kind, count = self._u32(f"the element type of {key}"), self._u64(f"the length of {key}")
        if kind == _STRING:
            return self._strings(key, count)
        scalar = _SCALARS.get(kind) or self.bad(f"{key} has elements of the unknown type {kind}")
        start = self._skip(count * scalar.size, f"{key} with {count} elements")
        if count > KEPT_ELEMENTS:
            return ArrayInfo(kind, count)
        return struct.unpack_from(f"<{count}{scalar.format[1:]}", self.view, start)

    def _strings(self, key: str, count: int) -> Value:
        if count > (self.size - self.offset) // 8:
            self.bad(f"{key} claims {count} strings, more than fit into the file")
        if self.vocabulary and key == TOKENS:
            self._refuse_equal_tokens(count)
        if count <= KEPT_STRINGS:
            return tuple(self._string(f"an element of {key}", self.size) for _ in range(count))
        self._step_over_strings(key, count)
        return ArrayInfo(_STRING, count)

    def _refuse_equal_tokens(self, count: int) -> None:
        """Refuse two equal tokens: llama.cpp aborts at them. It renames empty tokens, so those pass."""
        start = self.offset
        seen = set()
        for _ in range(count):
            length = self._u64("the length of a token")
            offset = self._skip(length, "a token")
            token = self.view[offset : offset + length]
            if token and token in seen:
                self.bad(f"there are two tokens {token!r}")
            seen.add(token)
        self.offset = start

    def _step_over_strings(self, key: str, count: int) -> None:
        """Step over `count` strings. `unpack_from` raises an error for an offset past the end."""
        unpack = _U64.unpack_from
        view = self.view
        position = self.offset
        try:
            for _ in range(count):
                position += 8 + unpack(view, position)[0]
        except (struct.error, OverflowError):
            self.bad(f"a string of {key} reaches past the end")
        if position > self.size:
            self.bad(f"the last string of {key} reaches past the end")
        self.offset = position

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment not in _ALIGNMENTS:
            self.bad(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _tensor(self, index: int) -> TensorInfo:
        name = self._string(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        n_dims = self._u32(f"the dimensions of {name}")
        if n_dims > MAX_DIMS:
            self.bad(f"tensor {name} has {n_dims} dimensions, more than {MAX_DIMS}")
        shape = tuple(self._u64(f"a dimension of {name}") for _ in range(n_dims))
        tensor_type = TENSOR_TYPES.get(kind := self._u32(f"the type of {name}"))
        if tensor_type is None:
            self.bad(f"tensor {name} has the unknown type {kind}")
        elements = math.prod(shape)
        if elements > MAX_ELEMENTS or any(n > MAX_ELEMENTS for n in shape):
            self.bad(f"tensor {name} claims {elements} elements, which is too many")
        if (shape[0] if shape else 1) % tensor_type.block:
            block = f"{tensor_type.name}'s {tensor_type.block}"
            self.bad(f"tensor {name} has rows of {shape[:1]} elements, not a multiple of {block}")
        size = elements // tensor_type.block * tensor_type.bytes
        return TensorInfo(name, tensor_type.name, shape, self._u64(f"the offset of {name}"), size)

    def _place_tensors(
        self, tensors: list[TensorInfo], data_offset: int, alignment: int
    ) -> Iterator[TensorInfo]:
        """Yield the tensors with offsets from the file's start; refuse gaps and a truncated file."""
        expected = 0
        names = set()
        for tensor in tensors:
            if tensor.name in names:
                self.bad(f"there are two tensors {tensor.name}")
            names.add(tensor.name)
            if tensor.offset != expected:
                self.bad(f"tensor {tensor.name} is at byte {tensor.offset} of the data, not {expected}")
            expected = _pad(tensor.offset + tensor.size_bytes, alignment)
            missing = data_offset + tensor.offset + tensor.size_bytes - self.size
            if missing > 0:
                where = f"{missing} bytes past the end of the file"
                self.bad(f"tensor {tensor.name} ends {where}: it is cut off")
            yield msgspec.structs.replace(tensor, offset=data_offset + tensor.offset)


def _pad(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment
