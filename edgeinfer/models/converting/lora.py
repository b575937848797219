"""Convert PEFT's LoRA adapters to GGUF, for one base model.

With the matrices A [rank, in] and B [out, rank], an adapter changes a weight W to

    W + scale * alpha / rank * (B @ A)

The rows of B are reordered like those of the base model's tensor. adapter_config.json is described at
https://huggingface.co/docs/peft/package_reference/lora.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from edgeinfer.errors import ConversionError
from edgeinfer.models.converting.checkpoint import (
    Array,
    Safetensors,
    conversion_errors,
    read_json,
    to_float32,
)
from edgeinfer.models.converting.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from edgeinfer.models.converting.convert import find_transform, tensor_names, text_model_name
from edgeinfer.models.converting.families import FAMILIES, Family, Heads, plus_one
from edgeinfer.models.gguf import GgufHeader
from edgeinfer.runtime.options import MOST_ALPHA

_PAIR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.[\w-]+)?\.weight")
_NO_WAY = "merge the adapter into its base model (PEFT's `merge_and_unload`), and pull the merged model"
_OTHER_BASE = "name the model that the adapter was trained on: `--base MODEL`"
_SAVE_AGAIN = "fetch the adapter again, or save it again with PEFT: `save_pretrained(FOLDER)`"


#: Name of a tensor of the base model → name of the adapter's module, and its matrices "A" and "B".
_Pairs = dict[str, tuple[str, dict[str, Array]]]


def convert_adapter(folder: Path, base: GgufHeader, base_name: str, target: Path) -> None:
    """Convert the adapter in `folder` to the file `target`, for the model `base`.

    `base_name` becomes the base model's name in `target`. Raises ConversionError.
    """
    with conversion_errors(folder):
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
            a, b = _check_pair(name, pair, base)
            # llama.cpp has one alpha per file, so B is multiplied by each module's own scale
            with np.errstate(over="ignore"):
                b = b * np.float32(_scale(config, module, len(a)) * len(a))
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                problem = f"the adapter's {name} contains NaN or infinity"
                raise ConversionError(problem, hint=_SAVE_AGAIN)
            transform = find_transform(family, name)
            if transform is not None and transform is not plus_one:
                b = transform(b, _heads(base))
            writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a))
            writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b))
        with contextlib.closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()


def _refuse_other_kinds(folder: Path, config: dict[str, Any]) -> None:
    if not config:
        problem = f"{folder} has no {ADAPTER_CONFIG}: it is not a PEFT adapter"
        raise ConversionError(problem, hint=_SAVE_AGAIN)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConversionError(f"{folder} has no {ADAPTER_WEIGHTS}", hint=_SAVE_AGAIN)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConversionError(f"unsupported adapter type {kind}: only LoRA is supported", hint=_NO_WAY)
    if config.get("r", 1) == 0:
        problem = "the adapter is of rank 0, which changes nothing"
        raise ConversionError(problem, hint="use the base model without the adapter")
    if config.get("use_dora"):
        raise ConversionError("the adapter is a DoRA, which llama.cpp cannot apply", hint=_NO_WAY)
    if config.get("bias", "none") != "none":
        raise ConversionError("the adapter trains biases, which llama.cpp cannot apply", hint=_NO_WAY)
    if config.get("modules_to_save"):
        modules = ", ".join(map(str, config["modules_to_save"]))
        problem = f"the adapter replaces whole modules ({modules}), which llama.cpp cannot apply"
        raise ConversionError(problem, hint=_NO_WAY)


def _family_of(base: GgufHeader) -> Family:
    for family in FAMILIES:
        if family.arch == base.architecture:
            return family
    supported = ", ".join(dict.fromkeys(family.arch for family in FAMILIES))
    problem = f"adapters of {base.architecture!r} models cannot be converted; supported: {supported}"
    raise ConversionError(problem, hint="use an adapter in GGUF format")


def _heads(base: GgufHeader) -> Heads:
    n_head = base.number(base.arch_key("attention.head_count"), 1)
    n_head_kv = base.number(base.arch_key("attention.head_count_kv"), n_head)
    head_dim = base.number(base.arch_key("attention.key_length"), base.n_embd // n_head)
    return Heads(n_head, n_head_kv, head_dim)


def _read_pairs(file: Safetensors, base: GgufHeader, family: Family) -> _Pairs:
    table = tensor_names(family, base.n_layer)
    pairs: _Pairs = {}
    for key, tensor in file.tensors.items():
        match = _PAIR.fullmatch(key)
        if match is None:
            problem = f"{file.path.name} has {key}, which is not part of a LoRA"
            raise ConversionError(problem, hint=_NO_WAY)
        name = table.get_name(text_model_name(f"{match[1]}.weight"), try_suffixes=(".weight",))
        if name is None:
            problem = f"the adapter changes {match[1]}, which the base ({family.arch}) does not have"
            raise ConversionError(problem, hint=_OTHER_BASE)
        _, pair = pairs.setdefault(name, (match[1], {}))
        pair[match[2]] = to_float32(file.view(key), tensor.dtype)
    if not pairs:
        raise ConversionError(f"{file.path} has no tensors", hint=_SAVE_AGAIN)
    return pairs


def _check_pair(name: str, pair: dict[str, Array], base: GgufHeader) -> tuple[Array, Array]:
    if len(pair) < 2:
        raise ConversionError(f"the adapter has only lora_A or lora_B for {name}", hint=_SAVE_AGAIN)
    a, b = pair["A"], pair["B"]
    tensor = next((candidate for candidate in base.tensors if candidate.name == name), None)
    if tensor is None:
        problem = f"the adapter changes {name}, which the base does not have"
        raise ConversionError(problem, hint=_OTHER_BASE)
    shape = (tensor.shape[0], tensor.shape[1]) if len(tensor.shape) == 2 else ()
    adapter_shape = (a.shape[-1], b.shape[0])
    if adapter_shape != shape or a.shape[0] != b.shape[-1] or not a.shape[0]:
        raise ConversionError(
            f"the tensor {name} is {adapter_shape[1]} by {adapter_shape[0]} in the adapter, "
            f"{list(shape[::-1])} in the base model",
            hint=_OTHER_BASE,
        )
    return a, b


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """Return a module's scale: alpha / rank, for rsLoRA alpha / sqrt(rank)."""
    by_pattern = (config.get("alpha_pattern") or {}).items()
    alphas = (value for pattern, value in by_pattern if re.fullmatch(rf"(.*\.)?({pattern})", module))
    alpha = float(next(alphas, config.get("lora_alpha", 8)))
    if not abs(alpha) <= MOST_ALPHA:  # also refuses NaN
        problem = f"the adapter has an alpha of {alpha:g} for {module}: it is damaged"
        raise ConversionError(problem, hint=_SAVE_AGAIN)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
