"""Fetched files of a checkpoint become one GGUF file."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgeinfer.catalog.converting.files import ADAPTER_CONFIG
from edgeinfer.catalog.fetching.fetched import Fetched
from edgeinfer.catalog.progress.job import Job
from edgeinfer.errors import UsageError
from edgeinfer.system.disk import sha256_of

#: What is written without llama.cpp's quantizer.
DIRECT = ("F32", "F16", "BF16", "Q8_0")
_FOLDER = "checkpoint"


def convert_fetched(fetched: list[Fetched], type_name: str, work: Path, job: Job) -> Fetched:
    """Convert verified files, or the folder a person named, to one GGUF in `work`.

    `type_name` is one of DIRECT, or "" for the checkpoint's own. Raises ConversionError,
    DiskFullError, InterruptedByUser; what was fetched is kept.
    """
    from edgeinfer.catalog.converting.convert import convert  # 150 ms: numpy, gguf

    if any(one.file_name == ADAPTER_CONFIG for one in fetched):
        raise UsageError(
            "the repository holds a LoRA adapter, which is made for one model",
            hint="say which it is here: `edgeinfer pull OWNER/REPO --base MODEL`",
        )
    first = fetched[0]
    folder = first.path if first.path.is_dir() else linked(fetched, work / _FOLDER)
    name = f"{first.file_name if first.path.is_dir() else 'model'}.gguf"
    target = work / (name + ".part")
    convert(folder, target, type_name, job)
    job.begin("verifying", name, total=target.stat().st_size)
    return Fetched(path=target, file_name=name, pinned=False, found_sha256=sha256_of(target, job.at))


def linked(fetched: list[Fetched], folder: Path) -> Path:
    """A folder that has the files under the names they are published by."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for one in fetched:
        (folder / one.file_name).symlink_to(one.path.absolute())
    return folder
