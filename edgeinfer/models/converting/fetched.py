"""Convert fetched files to GGUF. This module imports numpy and gguf, which takes 150 ms."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgeinfer.errors import ConversionError, InvalidGgufError, UsageError
from edgeinfer.models.converting import vision
from edgeinfer.models.converting.checkpoint import ModelCheckpoint
from edgeinfer.models.converting.checkpoint_files import ADAPTER_CONFIG
from edgeinfer.models.converting.convert import convert
from edgeinfer.models.progress import Job
from edgeinfer.models.pull_plan import FetchedFile


def convert_fetched(
    fetched: list[FetchedFile], type_name: str, work: Path, job: Job
) -> list[FetchedFile]:
    """Convert a checkpoint to one GGUF in `work`, and its vision encoder, if any, to a projector.

    Returns the new files; the fetched ones stay, also after an error. `type_name` is one of `DIRECT`,
    or "" for the checkpoint's own type. Raises UsageError if the files are those of an adapter,
    ConversionError, DiskFullError, InterruptedByUser.
    """
    if any(file.file_name == ADAPTER_CONFIG for file in fetched):
        problem = "the repository holds a LoRA adapter, not a model"
        hint = "name the adapter's base model: `edgeinfer pull OWNER/REPO --base MODEL`"
        raise UsageError(problem, hint=hint)
    first = fetched[0]
    folder = first.path if first.path.is_dir() else link_files(fetched, work / "checkpoint")
    target = work / f"{first.file_name if first.path.is_dir() else 'model'}.gguf.part"
    checkpoint = convert(folder, target, type_name, job)
    return [FetchedFile.hash_result(target, job), *_projector(checkpoint, type_name, work, job)]


def _projector(checkpoint: ModelCheckpoint, type_name: str, work: Path, job: Job) -> list[FetchedFile]:
    target = work / "mmproj.gguf.part"
    if not vision.find_tower(checkpoint):
        return []
    try:
        vision.convert_tower(checkpoint, target, type_name, job)
    except (ConversionError, InvalidGgufError) as error:
        job.note(f"converted without a projector, so the model accepts no pictures: {error.message}")
        return []
    projector = FetchedFile.hash_result(target, job)
    projector.is_projector = True
    return [projector]


def link_files(fetched: list[FetchedFile], folder: Path) -> Path:
    """Make symbolic links to the files in `folder`, with their original names; return the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for file in fetched:
        (folder / file.file_name).symlink_to(file.path.absolute())
    return folder
