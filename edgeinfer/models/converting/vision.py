"""Convert a checkpoint's vision encoder to a projector, the GGUF that llama.cpp's mtmd loads.

Tensor names are those of the gguf package, keys those that llama.cpp's `tools/mtmd/clip.cpp` reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import msgspec

from edgeinfer.errors import ConversionError
from edgeinfer.models import projectors
from edgeinfer.models.converting.checkpoint import Array, ModelCheckpoint, conversion_errors, read_json
from edgeinfer.models.converting.convert import VISION, Conversion, PlannedTensor, add_key
from edgeinfer.models.converting.families import Heads, Transform, Values, plus_one
from edgeinfer.models.gguf import file_type
from edgeinfer.models.progress import Job

#: GGUF key under "clip.vision." → key of the vision configuration.
_KEYS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
#: Activation in config.json → GGUF key. For llama.cpp, GELU means the approximation by tanh.
_ACTIVATIONS = {"gelu_pytorch_tanh": "use_gelu", "gelu": "use_gelu", "silu": "use_silu"}


class Tower(msgspec.Struct, frozen=True):
    """A kind of vision encoder that can be converted.

    `checkpoints` are values of `architectures` in config.json, `kind` is llama.cpp's projector type.
    `defaults` apply to keys that config.json leaves out. `extra` computes further keys under
    "clip.vision." from three configurations: the whole one, the vision encoder's and the
    preprocessor's.
    """

    kind: str
    checkpoints: tuple[str, ...]
    defaults: Values
    extra: Callable[[Values, Values, Values], Values]


def _gemma3(config: Values, vision: Values, _pictures: Values) -> Values:
    rows = math.isqrt(int(config.get("mm_tokens_per_image", 256)))
    return {"projector.scale_factor": vision["image_size"] // vision["patch_size"] // rows}


def _idefics3(config: Values, vision: Values, pictures: Values) -> Values:
    longest: Any = (pictures.get("size") or {}).get("longest_edge", vision["image_size"])
    factor = int(config.get("scale_factor", 2))
    return {"projector.scale_factor": factor, "preproc_image_size": int(longest)}


def _qwen2_5(_config: Values, vision: Values, _pictures: Values) -> Values:
    blocks = list(vision["fullatt_block_indexes"])
    step = blocks[0] + 1
    if blocks != list(range(step - 1, step * len(blocks), step)) or vision["window_size"] != 112:
        problem = "llama.cpp needs evenly spaced fullatt_block_indexes and a window_size of 112"
        raise ConversionError(f"config.json: {problem}")
    keys = _qwen3(_config, vision | {"num_position_embeddings": 0}, _pictures)
    return keys | {"n_wa_pattern": step, "image_size": vision["image_size"]}


def _qwen3(_config: Values, vision: Values, _pictures: Values) -> Values:
    if vision["spatial_merge_size"] != 2 or vision["temporal_patch_size"] != 2:
        problem = "llama.cpp needs a spatial_merge_size and a temporal_patch_size of 2"
        raise ConversionError(f"config.json: {problem}")
    side = math.isqrt(int(vision["num_position_embeddings"]))
    return {"image_size": side * vision["patch_size"], "spatial_merge_size": 2}


_SIGLIP = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 12}
_QWEN = {
    "layer_norm_eps": 1e-6,
    "num_attention_heads": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_5 = {"num_hidden_layers": 32, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
_QWEN3 = {"num_hidden_layers": 27, "num_position_embeddings": 2304}
#: Qwen's name of a key in vision_config → the name that other families use.
_QWEN_KEYS = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads"}


def _sizes(width: int, feed_forward: int, image: int, patch: int, **further: Any) -> Values:
    names = ("hidden_size", "intermediate_size", "image_size", "patch_size")
    return dict(zip(names, (width, feed_forward, image, patch), strict=True)) | further


TOWERS = (
    Tower(
        "gemma3",
        ("Gemma3ForConditionalGeneration",),
        _SIGLIP | _sizes(768, 3072, 224, 16, num_attention_heads=12),
        _gemma3,
    ),
    Tower(
        "idefics3",
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        _SIGLIP | _sizes(1152, 3072, 224, 32, num_attention_heads=16),
        _idefics3,
    ),
    Tower(
        "qwen2.5vl_merger",
        ("Qwen2_5_VLForConditionalGeneration",),
        _QWEN | _QWEN2_5 | _sizes(1280, 3420, 560, 14, hidden_act="silu"),
        _qwen2_5,
    ),
    Tower(
        "qwen3vl_merger",
        ("Qwen3VLForConditionalGeneration",),
        _QWEN | _QWEN3 | _sizes(1152, 4304, 768, 16, hidden_act="gelu_pytorch_tanh"),
        _qwen3,
    ),
)


#: Prefix of tensor names in some checkpoints → prefix in the gguf package's map; applied in order.
_RENAMED = (
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal", "multi_modal"),
    ("model.visual.", "visual."),
    ("visual.merger.norm.", "visual.merger.ln_q."),
    ("visual.merger.linear_fc1.", "visual.merger.mlp.0."),
    ("visual.merger.linear_fc2.", "visual.merger.mlp.2."),
)
_DEEPSTACK = re.compile(r"visual\.deepstack_merger_list\.(\d+)\.(norm|linear_fc[12])\.(weight|bias)")


def find_tower(checkpoint: ModelCheckpoint) -> Tower | None:
    """Return the kind of a checkpoint's vision encoder; None if there is none or it is unsupported."""
    if not any(name.startswith(VISION) for name in checkpoint.home):
        return None
    first = checkpoint.architectures[:1]
    return next((tower for tower in TOWERS if first and first[0] in tower.checkpoints), None)


def _plain(name: str) -> str:
    for prefix, plain in _RENAMED:
        if name.startswith(prefix):
            name = plain + name.removeprefix(prefix)
    return re.sub(r"_weight$", ".weight", name)


def _frame_weights(frame: int, values: Array, _heads: Heads) -> Array:
    """Return the patch embedding's weights for one (0 or 1) of the two video frames."""
    selected: Array = values[:, :, frame]
    return selected


def _qkv_rows(third: int, values: Array, _heads: Heads) -> Array:
    """Return the rows of the query (`third` 0), key (1) or value (2) in a joint projection."""
    rows = len(values) // 3
    return values[third * rows : (third + 1) * rows]


def convert_tower(checkpoint: ModelCheckpoint, target: Path, type_name: str, job: Job) -> None:
    """Convert the vision encoder to the file `target`, as F32 if that is `type_name`, otherwise as F16.

    Raises ConversionError, InvalidGgufError, DiskFullError or InterruptedByUser; then `target` is
    removed.
    """
    tower = find_tower(checkpoint)
    assert tower is not None
    try:
        with conversion_errors(checkpoint.folder):
            kind = "F32" if type_name == "F32" else "F16"
            _TowerConversion(checkpoint, tower, kind).write(target, job)
        projectors.check(target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


class _TowerConversion(Conversion):
    arch = "clip"

    def __init__(self, checkpoint: ModelCheckpoint, tower: Tower, type_name: str) -> None:
        self.checkpoint, self.tower = checkpoint, tower
        self.type_name = type_name
        vision_config = checkpoint.whole_config["vision_config"]
        renamed = {_QWEN_KEYS.get(key, key): value for key, value in vision_config.items()}
        self.vision = tower.defaults | renamed
        n_layer = min(int(self.vision["num_hidden_layers"]), 512)
        self.table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, n_layer)
        self.heads, self.computed = Heads(1, 1, 1), {}
        self.planned = list(self._plan())

    def _plan(self) -> Iterator[PlannedTensor]:
        for source in self.checkpoint.home:
            # SigLIP's head reduces a picture to one embedding, which a language model does not use
            if not source.startswith(VISION) or ".head." in source:
                continue
            name = self._name(_plain(source))
            if name is None:
                problem = f"{source}: llama.cpp has no name for this tensor ({self.tower.kind} encoder)"
                raise ConversionError(problem)
            whole = self.checkpoint.tensor(source).shape
            for part, shape, transform in self._parts(name, whole):
                exact = len(shape) < 2 or "_embd" in name
                yield PlannedTensor(part, shape, source, transform, exact)

    def _name(self, plain: str) -> str | None:
        deep = _DEEPSTACK.fullmatch(plain)
        if deep is None:
            gguf_name: str | None = self.table.get_name(plain, try_suffixes=(".weight", ".bias"))
            return gguf_name
        layer = self.vision["deepstack_visual_indexes"][int(deep[1])]
        return f"v.deepstack.{layer}.{deep[2].removeprefix('linear_')}.{deep[3]}"

    def _parts(
        self, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[int, ...], Transform | None]]:
        """Yield (name, shape, transform) of each GGUF tensor that a checkpoint's tensor becomes.

        Qwen's patch embedding becomes one per video frame, Qwen2.5's query-key-value projection three.
        """
        if len(shape) == 5:
            for frame, suffix in enumerate(("", ".1")):
                yield name + suffix, shape[:2] + shape[3:], partial(_frame_weights, frame)
        elif self.tower.kind == "qwen2.5vl_merger" and ".attn_qkv." in name:
            for third, letter in enumerate("qkv"):
                part = name.replace("attn_qkv", f"attn_{letter}")
                yield part, (shape[0] // 3, *shape[1:]), partial(_qkv_rows, third)
        else:
            yield name, shape, plus_one if name == "mm.soft_emb_norm.weight" else None

    def _metadata(self, writer: gguf.GGUFWriter) -> None:
        vision, whole = self.vision, self.checkpoint.whole_config
        pictures = read_json(self.checkpoint.folder / "preprocessor_config.json")
        writer.add_type("mmproj")
        writer.add_file_type(file_type(self.type_name))
        activation = vision["hidden_act"]
        if activation not in _ACTIVATIONS:
            problem = f"the vision encoder's activation {activation!r} is not supported"
            raise ConversionError(f"config.json: {problem}")
        keys: dict[str, Any] = {
            "has_vision_encoder": True,
            "projector_type": self.tower.kind,
            _ACTIVATIONS[activation]: True,
        }
        sizes = {key: int(vision[word]) for key, word in _KEYS.items()}
        sizes["projection_dim"] = int(self.checkpoint.config["hidden_size"])
        for name, value in (sizes | self.tower.extra(whole, vision, pictures)).items():
            keys[f"vision.{name}"] = value
        keys["vision.attention.layer_norm_epsilon"] = float(vision["layer_norm_eps"])
        for name in ("image_mean", "image_std"):
            keys[f"vision.{name}"] = [float(value) for value in pictures.get(name) or [0.5] * 3]
        for key, value in keys.items():
            add_key(writer, f"clip.{key}", value)
