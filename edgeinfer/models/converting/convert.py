"""Convert a checkpoint to one GGUF file, a block of rows at a time.

Tensors are mapped, and their pages are given back to the kernel once converted. So memory holds at most
one block of the result, and one whole tensor if that must be reordered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf  # slow import (80 ms): only a conversion imports this module
import msgspec
import numpy as np

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting import families, tokenizer
from edgeinfer.models.converting.checkpoint import (
    Array,
    ModelCheckpoint,
    conversion_errors,
    read_json,
    to_float32,
)
from edgeinfer.models.converting.families import Family, Transform, Values, required_number
from edgeinfer.models.gguf import MAX_LAYERS, file_type
from edgeinfer.models.progress import Job
from edgeinfer.platform.disk import disk_full_errors, require_free_space

#: Prefixes of the vision encoder's tensors, which `vision` converts to a separate file.
VISION = (
    *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal"),
    *("model.vision_model.", "model.connector.", "visual.", "model.visual."),
)


class PlannedTensor(msgspec.Struct, frozen=True):
    """A tensor of the GGUF, computed from the checkpoint's tensor `source`.

    `transform` changes its values; None leaves them as they are. `exact` tensors are stored as float32
    in every file type. `shape` begins with the slowest dimension.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    transform: Transform | None
    exact: bool


def _plan(checkpoint: ModelCheckpoint, family: Family, config: Values) -> list[PlannedTensor]:
    """List the tensors of the GGUF. Raises ConversionError for one that llama.cpp does not know."""
    table = tensor_names(family, required_number(config, "block_count", MAX_LAYERS))
    planned = []
    for source in checkpoint.home:
        if source.startswith(VISION) or source.endswith("rotary_emb.inv_freq"):
            continue
        if config.get("tie_word_embeddings") and source.endswith("lm_head.weight"):
            continue
        name = table.get_name(text_model_name(source), try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ConversionError(
                f"{source}: llama.cpp has no name for this tensor in models of the type {family.arch}"
            )
        shape = checkpoint.tensor(source).shape
        exact = len(shape) < 2 or name.endswith("_norm.weight")
        planned.append(PlannedTensor(name, shape, source, find_transform(family, name), exact))
    return sorted(planned, key=lambda tensor: _order(tensor.name))


def tensor_names(family: Family, n_layer: int) -> gguf.TensorNameMap:
    """Return the gguf package's map from a checkpoint's tensor names to llama.cpp's."""
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    return gguf.get_tensor_name_map(arch, n_layer)


def text_model_name(name: str) -> str:
    """Return the tensor's name in a model without vision: `language_model.model.x` → `model.x`."""
    for prefix, plain in (
        ("model.language_model.", "model."),
        ("model.text_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def find_transform(family: Family, name: str) -> Transform | None:
    """Return the function that changes the values of the GGUF tensor `name`; None if they stay."""
    transforms = family.transforms.items()
    return next((transform for suffix, transform in transforms if _has_suffix(name, suffix)), None)


def _has_suffix(name: str, suffix: str) -> bool:
    """Return whether a name ends with `suffix`, followed by .weight or .bias if `suffix` lacks that."""
    if suffix.endswith((".weight", ".bias")):
        return name.endswith(suffix)
    return re.search(rf"\.{suffix}\.(weight|bias)$", name) is not None


def _order(name: str) -> tuple[int, int, str]:
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer:
        return 1, int(layer[1]), name
    return (2 if name.startswith("output") else 0), 0, name


_BLOCK_BYTES = 64 << 20
#: Largest vocabulary (tokens) that is converted: each token takes memory. Known models have up to a
#: quarter million tokens.
_MOST_TOKENS = 1 << 22


def convert(folder: Path, target: Path, type_name: str, job: Job) -> ModelCheckpoint:
    """Convert the checkpoint in `folder` to the file `target`; return the checkpoint.

    `type_name` is one of `DIRECT`, or "" for the checkpoint's own type. Raises ConversionError,
    DiskFullError or InterruptedByUser; then there is no `target`.
    """
    try:
        with conversion_errors(folder):
            checkpoint = ModelCheckpoint(folder)
            family = families.find_family(checkpoint.architectures)
            checkpoint.config = family.defaults | checkpoint.config
            families.refuse_unsupported(family, checkpoint.config)
            type_name = type_name or checkpoint.native_type
            Conversion(checkpoint, family, type_name).write(target, job)
            return checkpoint
    except BaseException:
        target.unlink(missing_ok=True)
        raise


class Conversion:
    def __init__(self, checkpoint: ModelCheckpoint, family: families.Family, type_name: str) -> None:
        self.checkpoint = checkpoint
        self.arch = family.arch
        self.family = family
        self.type_name = type_name
        self.heads = families.attention_heads(checkpoint.config)
        self.planned = _plan(checkpoint, family, checkpoint.config)
        self.computed = families.rope_tensors(checkpoint.config, self.heads.head_dim)

    def write(self, target: Path, job: Job) -> None:
        """Write the GGUF to `target`. Raises ConversionError, DiskFullError, InterruptedByUser."""
        writer = gguf.GGUFWriter(target, self.arch)
        self._metadata(writer)
        for name, values in self.computed.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        total = sum(values.nbytes for values in self.computed.values())
        for tensor in self.planned:
            kind = self._type(tensor)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            size = math.prod(tensor.shape) // block * block_bytes
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
            total += size
        require_free_space(target.parent, total, target.name)
        job.begin("converting", target.name.removesuffix(".part"), total=total)
        with disk_full_errors(target), closing(writer):
            writer.write_header_to_file(target)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            self._data(writer, job)

    def _type(self, tensor: PlannedTensor) -> gguf.GGMLQuantizationType:
        """Return the type in which a tensor is stored: F16 if its rows do not fit Q8_0's blocks."""
        name = "F32" if tensor.exact else self.type_name
        if name == "Q8_0" and tensor.shape[-1] % 32:
            name = "F16"
        return gguf.GGMLQuantizationType[name]

    def _metadata(self, writer: gguf.GGUFWriter) -> None:
        config = self.checkpoint.config
        name = read_json(self.checkpoint.folder / "config.json").get("_name_or_path")
        folder_name = self.checkpoint.folder.name
        writer.add_type("model")
        writer.add_name(str(name or folder_name).rstrip("/").rsplit("/", 1)[-1] or folder_name)
        writer.add_file_type(file_type(self.type_name))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in families.metadata(self.family, config).items():
            add_key(writer, f"{self.family.arch}.{key}", value)
        for key, value in tokenizer.metadata(self.checkpoint.folder, self._n_vocab()).items():
            add_key(writer, f"tokenizer.{key}", value)

    def _n_vocab(self) -> int:
        n_tokens = required_number(self.checkpoint.config, "vocab_size", _MOST_TOKENS)
        shapes = {tensor.name: tensor.shape for tensor in self.planned}
        rows = shapes.get("token_embd.weight", (0,))[0]
        if n_tokens != rows:
            problem = f"config.json says {n_tokens} tokens, but the embedding has {rows} rows"
            hint = "set `vocab_size` in config.json to the number of rows, if the model was resized"
            raise ConversionError(problem, hint=hint)
        return n_tokens

    def _data(self, writer: gguf.GGUFWriter, job: Job) -> None:
        assert writer.fout is not None
        out = writer.fout[0]
        writer.write_padding(out, out.tell())
        begin = out.tell()
        for values in self.computed.values():
            values.tofile(out)
            writer.write_padding(out, out.tell() - begin)
        for tensor in self.planned:
            kind = self._type(tensor)
            for block in self._blocks(tensor, kind):
                block.tofile(out)
                job.report(out.tell() - begin)
            writer.write_padding(out, out.tell() - begin)

    def _blocks(self, tensor: PlannedTensor, kind: gguf.GGMLQuantizationType) -> Iterator[Array]:
        stored = self.checkpoint.tensor(tensor.source).dtype
        file = self.checkpoint.home[tensor.source]
        values = file.view(tensor.source)
        if tensor.transform is not None:
            if tensor.exact:
                values, stored = to_float32(values, stored), "F32"
            values = tensor.transform(values, self.heads)
        rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
        step = max(1, _BLOCK_BYTES // max(1, rows.shape[1] * 4))
        for row in range(0, len(rows), step):
            yield self._encode(rows[row : row + step], stored, kind)
        del values, rows
        file.release(tensor.source)

    def _encode(self, rows: Array, stored: str, kind: gguf.GGMLQuantizationType) -> Array:
        if stored == kind.name:
            return np.ascontiguousarray(rows)
        return np.ascontiguousarray(gguf.quants.quantize(to_float32(rows, stored), kind))


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key to the GGUF, typed by its value: an int as u32, a float as f32."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)
