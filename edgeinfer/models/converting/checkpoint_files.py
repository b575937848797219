"""Pick a checkpoint's files from a folder or a repository, and make one GGUF of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.errors import ConversionError, InvalidGgufError, SourceNotFoundError, UsageError
from edgeinfer.models.progress import Job
from edgeinfer.models.pull_plan import Fetched

if TYPE_CHECKING:
    from edgeinfer.models.converting.checkpoint import ModelCheckpoint

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
#: What PEFT writes.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: What is written without llama.cpp's quantizer.
DIRECT = ("F32", "F16", "BF16", "Q8_0")
_FOLDER = "checkpoint"
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
#: Beside the weights, what a conversion reads.
_WORDS = (
    CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
)


def weight_files(names: list[str]) -> list[str]:
    """Pick the files with a checkpoint's weights, of a folder or repository, in order; [] for none.

    Raises SourceNotFoundError when shards of a numbered set are missing.
    """
    if WEIGHTS in names:
        return [WEIGHTS]
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if not shards:
        return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    match = _SHARD.fullmatch(shards[0])
    assert match is not None
    wanted = [f"model-{index + 1:05}-of-{match[2]}.safetensors" for index in range(int(match[2]))]
    if missing := [name for name in wanted if name not in shards]:
        raise SourceNotFoundError(
            f"{len(missing)} of {len(wanted)} shards are missing: {', '.join(missing[:4])}",
            hint="a file ending in .part or .incomplete is half of one: fetch it again",
        )
    return wanted


def checkpoint_files(paths: list[str]) -> list[str]:
    """Pick the files of a repository that a conversion needs; [] without checkpoint or adapter."""
    if CONFIG not in paths and {ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= set(paths):
        return [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    weights = weight_files(paths) if CONFIG in paths else []
    return [*(word for word in _WORDS if word in paths), *weights] if weights else []


def convert_fetched(fetched: list[Fetched], type_name: str, work: Path, job: Job) -> list[Fetched]:
    """Convert verified files, or a local folder, to one GGUF in `work`, and a projector if it has one.

    `type_name` is one of DIRECT, or "" for the checkpoint's own. Raises ConversionError,
    DiskFullError, InterruptedByUser; what was fetched is kept.
    """
    from edgeinfer.models.converting.convert import convert  # 150 ms: numpy, gguf

    if any(one.file_name == ADAPTER_CONFIG for one in fetched):
        raise UsageError(
            "the repository holds a LoRA adapter, which is made for one model",
            hint="say which it is here: `edgeinfer pull OWNER/REPO --base MODEL`",
        )
    first = fetched[0]
    folder = first.path if first.path.is_dir() else linked(fetched, work / _FOLDER)
    target = work / f"{first.file_name if first.path.is_dir() else 'model'}.gguf.part"
    checkpoint = convert(folder, target, type_name, job)
    return [Fetched.made_here(target, job), *_projector(checkpoint, type_name, work, job)]


def _projector(checkpoint: ModelCheckpoint, type_name: str, work: Path, job: Job) -> list[Fetched]:
    from edgeinfer.models.converting import vision  # as `convert`

    target = work / "mmproj.gguf.part"
    if not vision.has_tower(checkpoint):
        return []
    try:
        vision.convert_tower(checkpoint, target, type_name, job)
    except (ConversionError, InvalidGgufError) as error:
        job.note(f"without a projector, so no pictures are read: {error.message}")
        return []
    made = Fetched.made_here(target, job)
    made.is_projector = True
    return [made]


def linked(fetched: list[Fetched], folder: Path) -> Path:
    """Link the files in `folder` under their published names, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for one in fetched:
        (folder / one.file_name).symlink_to(one.path.absolute())
    return folder
