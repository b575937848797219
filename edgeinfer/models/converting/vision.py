"""Convert the vision tower of a checkpoint to a projector: the encoder of pictures, a row a family.

llama.cpp's names of tensors come from the table of the gguf package; keys are those that its reader
(`tools/mtmd/clip.cpp`) asks for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec

from edgeinfer.errors import ConversionError
from edgeinfer.models import projectors
from edgeinfer.models.converting.checkpoint import ModelCheckpoint, conversion_errors, read_json
from edgeinfer.models.converting.convert import VISION, Conversion, Planned, add_key
from edgeinfer.models.converting.hyperparameters import Values
from edgeinfer.models.converting.tensor_transforms import Heads, Transform, plus_one
from edgeinfer.models.gguf import file_type
from edgeinfer.models.progress import Job

#: A key under "clip.vision." → the vision configuration's.
_KEYS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
#: The activation → llama.cpp's switch; its GELU is the approximation by tanh.
_ACTIVATIONS = {"gelu_pytorch_tanh": "use_gelu", "gelu": "use_gelu", "silu": "use_silu"}


class Tower(msgspec.Struct, frozen=True):
    """One row. `checkpoints` are values of `architectures`, `kind` is llama.cpp's projector type.

    `defaults` are the makers' for what config.json leaves out. `extra` computes keys under
    "clip.vision." from the whole, the vision's and the preprocessor's configuration.
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
    return {
        "projector.scale_factor": int(config.get("scale_factor", 2)),
        "preproc_image_size": int(longest),
    }


_SIGLIP = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 12}

TOWERS = (
    Tower(
        "gemma3",
        ("Gemma3ForConditionalGeneration",),
        _SIGLIP
        | {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "image_size": 224,
            "patch_size": 16,
        },
        _gemma3,
    ),
    Tower(
        "idefics3",
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        _SIGLIP
        | {
            "hidden_size": 1152,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "image_size": 224,
            "patch_size": 32,
        },
        _idefics3,
    ),
)


#: What newer and older checkpoints put before a name of the gguf package's table.
_RENAMED = (
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.", "vision_tower.vision_model."),
    ("model.multi_modal", "multi_modal"),
)


def has_tower(checkpoint: ModelCheckpoint) -> bool:
    """Tell if a checkpoint has a vision tower that is converted."""
    return _tower(checkpoint) is not None and any(name.startswith(VISION) for name in checkpoint.home)


def _tower(checkpoint: ModelCheckpoint) -> Tower | None:
    first = checkpoint.architectures[:1]
    return next((one for one in TOWERS if first and first[0] in one.checkpoints), None)


def _plain(name: str) -> str:
    """Return a tensor's name in the words of the gguf package's table."""
    for prefix, plain in _RENAMED:
        if name.startswith(prefix):
            name = plain + name.removeprefix(prefix)
    return re.sub(r"_weight$", ".weight", name)


def convert_tower(checkpoint: ModelCheckpoint, target: Path, type_name: str, job: Job) -> None:
    """Write the projector to `target` in F32 or, otherwise, F16.

    Raises ConversionError, InvalidGgufError, DiskFullError, InterruptedByUser; then nothing is left.
    """
    tower = _tower(checkpoint)
    assert tower is not None
    try:
        with conversion_errors(checkpoint.folder):
            _TowerConversion(checkpoint, tower, "F32" if type_name == "F32" else "F16").write(
                target, job
            )
        projectors.check(target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


class _TowerConversion(Conversion):
    arch = "clip"

    def __init__(self, checkpoint: ModelCheckpoint, tower: Tower, type_name: str) -> None:
        self.checkpoint, self.tower = checkpoint, tower
        self.type_name = type_name
        self.vision = tower.defaults | checkpoint.whole_config["vision_config"]
        n_layer = min(int(self.vision["num_hidden_layers"]), 512)
        self.table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, n_layer)
        self.heads, self.made = Heads(1, 1, 1), {}
        self.planned = list(self._plan())

    def _plan(self) -> Iterator[Planned]:
        for source in self.checkpoint.home:
            if (
                not source.startswith(VISION) or ".head." in source
            ):  # SigLIP's, which pools all to one row
                continue
            name = self.table.get_name(_plain(source), try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ConversionError(f"{source} has no place in llama.cpp's {self.tower.kind}")
            shape = self.checkpoint.tensor(source).shape
            exact = len(shape) < 2 or "_embd" in name
            yield Planned(name, shape, source, self._transform(name), exact)

    def _transform(self, name: str) -> Transform | None:
        return plus_one if name == "mm.soft_emb_norm.weight" else None

    def _metadata(self, writer: gguf.GGUFWriter) -> None:
        vision, whole = self.vision, self.checkpoint.whole_config
        pictures = read_json(self.checkpoint.folder / "preprocessor_config.json")
        writer.add_type("mmproj")
        writer.add_file_type(file_type(self.type_name))
        activation = vision["hidden_act"]
        if activation not in _ACTIVATIONS:
            raise ConversionError(f"config.json: a vision tower with the activation {activation!r}")
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
