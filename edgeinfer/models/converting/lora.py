"""Convert PEFT's LoRA adapters to GGUF, and merge GGUF adapters into a model.

    W' = W + scale * alpha / rank * (B @ A), with A [rank, in] and B [out, rank]

The base decides names and order of a converted adapter: B's rows are in the order of the base's tensor.
Keys of `adapter_config.json`: https://huggingface.co/docs/peft/package_reference/lora. When merging, a
tensor that no adapter names is copied byte for byte; a changed one is written in its own type if numpy
can make that, otherwise in Q8_0.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from edgeinfer.errors import ConversionError
from edgeinfer.models import gguf
from edgeinfer.models.converting.checkpoint import (
    Array,
    Safetensors,
    conversion_errors,
    read_json,
    to_float32,
)
from edgeinfer.models.converting.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from edgeinfer.models.converting.convert import plain_name, transform_of
from edgeinfer.models.converting.families import FAMILIES, Family
from edgeinfer.models.converting.tensor_transforms import Heads, plus_one, transpose
from edgeinfer.models.gguf import TENSOR_TYPES, GgufHeader, TensorInfo
from edgeinfer.models.progress import Job
from edgeinfer.platform.disk import need_room, room_errors

_PAIR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.[\w-]+)?\.weight")
_NO_WAY = "merge it where it was trained (`merge_and_unload`), and convert the result"


class _Pair(msgspec.Struct):
    """A and B of one tensor of the base, float32."""

    a: Array | None = None
    b: Array | None = None


def convert_adapter(folder: Path, base: GgufHeader, base_name: str, target: Path) -> None:
    """Write the adapter in `folder` to `target`, for the model `base` that is called `base_name`.

    Raises ConversionError for what is no plain LoRA, and for one that does not fit the base.
    """
    with conversion_errors(folder):
        _convert_checked(folder, base, base_name, target)


def _convert_checked(folder: Path, base: GgufHeader, base_name: str, target: Path) -> None:
    import gguf  # 80 ms, only for conversions

    config = read_json(folder / ADAPTER_CONFIG)
    _refuse_other_kinds(folder, config)
    family = _family_of(base)
    pairs = _read_pairs(Safetensors(folder / ADAPTER_WEIGHTS), base, family)
    writer = gguf.GGUFWriter(target, base.architecture)
    writer.add_type("adapter")
    writer.add_name(folder.name)
    writer.add_string("general.base_model.0.name", base_name)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    for name, (module, pair) in pairs.items():
        a, b = _fitting(name, pair, base)
        # llama.cpp scales by alpha / rank with one alpha for all: each module's own is in its B
        with np.errstate(over="ignore"):
            b = b * np.float32(_scale(config, module, len(a)) * len(a))
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ConversionError(f"the adapter's {name} holds numbers that are none (NaN, infinity)")
        transform = transform_of(family, name)
        if transform is not None and transform not in (transpose, plus_one):
            b = transform(b, _heads(base))
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a))
        writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _refuse_other_kinds(folder: Path, config: dict[str, Any]) -> None:
    if not config:
        raise ConversionError(f"{folder} has no {ADAPTER_CONFIG}: it is no adapter of PEFT's")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConversionError(
            f"{folder} has no {ADAPTER_WEIGHTS}", hint="save it anew: `save_pretrained(FOLDER)`"
        )
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConversionError(f"the adapter is of the kind {kind}; LoRA alone is known", hint=_NO_WAY)
    if config.get("r", 1) == 0:
        raise ConversionError("the adapter is of rank 0, which changes nothing")
    if config.get("use_dora"):
        raise ConversionError("the adapter is a DoRA, which llama.cpp cannot apply", hint=_NO_WAY)
    if config.get("bias", "none") != "none":
        raise ConversionError("the adapter trains biases, which llama.cpp cannot apply", hint=_NO_WAY)
    if config.get("modules_to_save"):
        modules = ", ".join(map(str, config["modules_to_save"]))
        raise ConversionError(f"the adapter replaces whole modules ({modules})", hint=_NO_WAY)


def _family_of(base: GgufHeader) -> Family:
    for family in FAMILIES:
        if family.arch == base.architecture:
            return family
    known = ", ".join(dict.fromkeys(family.arch for family in FAMILIES))
    raise ConversionError(
        f"adapters of the architecture {base.architecture!r} are not converted; known: {known}"
    )


def _heads(base: GgufHeader) -> Heads:
    n_head = base.number(base.own("attention.head_count"), 1)
    n_head_kv = base.number(base.own("attention.head_count_kv"), n_head)
    head_dim = base.number(base.own("attention.key_length"), base.n_embd // n_head)
    return Heads(n_head, n_head_kv, head_dim)


def _read_pairs(file: Safetensors, base: GgufHeader, family: Family) -> dict[str, tuple[str, _Pair]]:
    import gguf

    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    table = gguf.get_tensor_name_map(arch, base.n_layer)
    pairs: dict[str, tuple[str, _Pair]] = {}
    for key, tensor in file.tensors.items():
        match = _PAIR.fullmatch(key)
        if match is None:
            raise ConversionError(f"{file.path.name} has {key}, which is no plain LoRA", hint=_NO_WAY)
        name = table.get_name(plain_name(f"{match[1]}.weight"), try_suffixes=(".weight",))
        if name is None:
            raise ConversionError(f"{match[1]} is no module of a {family.arch}, as the base is")
        values = to_float32(file.view(key), tensor.dtype)
        _, pair = pairs.setdefault(name, (match[1], _Pair()))
        if match[2] == "A":
            pair.a = values
        else:
            pair.b = values
    if not pairs:
        raise ConversionError(f"{file.path} has no tensors")
    return pairs


def _fitting(name: str, pair: _Pair, base: GgufHeader) -> tuple[Array, Array]:
    if pair.a is None or pair.b is None:
        raise ConversionError(f"{name} has one of lora_A and lora_B alone")
    tensor = next((one for one in base.tensors if one.name == name), None)
    if tensor is None:
        raise ConversionError(f"the base has no tensor {name}, which the adapter changes")
    wanted = (tensor.shape[0], tensor.shape[1]) if len(tensor.shape) == 2 else ()
    given = (pair.a.shape[-1], pair.b.shape[0])
    if given != wanted or pair.a.shape[0] != pair.b.shape[-1] or not pair.a.shape[0]:
        raise ConversionError(
            f"{name} is {given[1]} by {given[0]} in the adapter, {list(wanted[::-1])} in the base",
            hint="name the model that the adapter was trained on: `--base MODEL`",
        )
    return pair.a, pair.b


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) for rsLoRA, with the module's own alpha."""
    alpha = config.get("lora_alpha", 8)
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = own
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


_MADE_HERE = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})
_BLOCK_BYTES = 64 << 20
_NUMBERS = {known.name: number for number, known in TENSOR_TYPES.items()}


class _GgufAdapter:
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
        """The base's tensors that it changes."""
        return {name.removesuffix(".lora_a") for name in self._tensors if name.endswith(".lora_a")}

    def pair(self, name: str) -> tuple[Array, Array]:
        """Return A [rank, in], and B [out, rank] multiplied by the whole scale, float32."""
        a, b = (self._read(self._tensors[f"{name}.lora_{which}"]) for which in "ab")
        factor = self._scale * (self._alpha / len(a) if self._alpha else 1.0)
        return a, b * np.float32(factor)

    def _read(self, tensor: TensorInfo) -> Array:
        return dequantized(self._view[tensor.offset : tensor.offset + tensor.size_bytes], tensor)


def dequantized(raw: Array, tensor: TensorInfo) -> Array:
    """Dequantize whole rows of a tensor to float32 of shape [rows, row length]."""
    import gguf as package  # 80 ms, only for merges

    known = TENSOR_TYPES[_NUMBERS[tensor.type]]
    row_bytes = tensor.shape[0] // known.block * known.bytes
    rows = raw.reshape(-1, row_bytes)
    values: Array
    if tensor.type in ("F32", "F16"):
        values = rows.view(np.float32 if tensor.type == "F32" else np.float16).astype(np.float32)
    else:
        values = package.quants.dequantize(rows, package.GGMLQuantizationType[tensor.type])
    return values


def merge(base: Path, adapters: Sequence[tuple[Path, float]], target: Path, job: Job) -> None:
    """Write the model in `base` with `adapters`, (path, scale) each, added, to `target`.

    Raises ConversionError, DiskFullError, InterruptedByUser; then nothing is left at `target`.
    """
    header = gguf.check(base)
    opened = [_GgufAdapter(path, scale) for path, scale in adapters]
    _refuse_misfits(header, opened)
    types = {tensor.name: _stored_type(tensor, opened) for tensor in header.tensors}
    sizes = {tensor.name: _stored_bytes(tensor, types[tensor.name]) for tensor in header.tensors}
    need_room(target.parent, sum(sizes.values()), target.name)
    job.begin("converting", target.name.removesuffix(".part"), total=sum(sizes.values()))
    try:
        with room_errors(target), open(target, "wb") as out:
            out.write(_header_bytes(base, header, types, sizes))
            _write_tensors(out, base, header, opened, types, job)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _refuse_misfits(header: GgufHeader, adapters: Sequence[_GgufAdapter]) -> None:
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


def _stored_type(tensor: TensorInfo, adapters: Sequence[_GgufAdapter]) -> str:
    changed = any(tensor.name in adapter.names for adapter in adapters)
    return "Q8_0" if changed and tensor.type not in _MADE_HERE else tensor.type


def _stored_bytes(tensor: TensorInfo, kind: str) -> int:
    known = TENSOR_TYPES[_NUMBERS[kind]]
    return tensor.n_elements // known.block * known.bytes


def _header_bytes(
    base: Path, header: GgufHeader, types: dict[str, str], sizes: dict[str, int]
) -> bytes:
    with open(base, "rb") as file:
        begin = file.read(header.infos_offset)
    header_bytes = bytearray(begin)
    at = 0
    for tensor in header.tensors:
        name = tensor.name.encode()
        header_bytes += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.shape))
        header_bytes += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        header_bytes += struct.pack("<IQ", _NUMBERS[types[tensor.name]], at)
        at += -(-sizes[tensor.name] // header.alignment) * header.alignment
    return bytes(header_bytes) + bytes(-len(header_bytes) % header.alignment)


def _write_tensors(
    out: IO[bytes],
    base: Path,
    header: GgufHeader,
    adapters: Sequence[_GgufAdapter],
    types: dict[str, str],
    job: Job,
) -> None:
    begin = out.tell()
    view = np.memmap(base, np.uint8, "r")
    for tensor in header.tensors:
        mine = [adapter for adapter in adapters if tensor.name in adapter.names]
        raw = view[tensor.offset : tensor.offset + tensor.size_bytes]
        blocks = _merge_blocks(raw, tensor, mine, types[tensor.name]) if mine else _copy_blocks(raw)
        for block in blocks:
            block.tofile(out)
            job.at(out.tell() - begin)
        out.write(bytes(-(out.tell() - begin) % header.alignment))


def _copy_blocks(raw: Array) -> Iterator[Array]:
    for at in range(0, len(raw), _BLOCK_BYTES):
        yield raw[at : at + _BLOCK_BYTES]


def _merge_blocks(
    raw: Array, tensor: TensorInfo, adapters: Sequence[_GgufAdapter], kind: str
) -> Iterator[Array]:
    import gguf as package

    pairs = [adapter.pair(tensor.name) for adapter in adapters]
    n_rows = tensor.n_elements // tensor.shape[0]
    row_bytes = len(raw) // n_rows
    step = max(1, _BLOCK_BYTES // (tensor.shape[0] * 4))
    for at in range(0, n_rows, step):
        rows = dequantized(raw[at * row_bytes : min(at + step, n_rows) * row_bytes], tensor)
        for a, b in pairs:
            rows = rows + b[at : at + step] @ a
        block: Array = package.quants.quantize(rows, package.GGMLQuantizationType[kind])
        yield block
