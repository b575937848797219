"""Files of this machine: copied, sharing blocks where the filesystem can, or pointed at."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edgeinfer.errors import InvalidGgufError, SourceNotFoundError, UsageError
from edgeinfer.models import gguf, names
from edgeinfer.models.converting.files import ADAPTER_CONFIG, CONFIG
from edgeinfer.models.plan import Fetched
from edgeinfer.models.progress import Job
from edgeinfer.system.disk import CHUNK_BYTES, need_room, room_errors, share_blocks


def fetch(path: Path, work: Path, job: Job, *, in_place: bool) -> list[Fetched]:
    """The file at `path`, or all parts of a split one, copied into `work` unless `in_place`.

    A folder is not copied. Raises SourceNotFoundError, UsageError, DiskFullError, InterruptedByUser.
    """
    if path.is_dir():
        return [_checkpoint(path)]
    if path.suffix == ".safetensors":
        raise UsageError(
            f"{path.name} is weights alone, without the configuration and tokenizer beside them",
            hint=f"pull the folder it is in: `edgeinfer pull {path.parent}`",
        )
    parts = names.split_parts(path)
    for part in parts:
        if not part.is_file():
            raise SourceNotFoundError(f"there is no file {part}", hint="check the path")
        _refuse_no_model(part)
    found = []
    for index, part in enumerate(parts):
        ours = part if in_place else copied(part, work, job, index, len(parts))
        found.append(
            Fetched(
                path=ours,
                file_name=names.tamed_file_name(part.name),
                ours=not in_place,
                pinned=False,
                index=index,
                n_files=len(parts),
            )
        )
    return found


def _refuse_no_model(path: Path) -> None:
    try:
        gguf.check(path, vocabulary=False)
    except InvalidGgufError as error:
        hint = (
            error.hint or "name a GGUF file, or a folder of config.json, tokenizer.json and safetensors"
        )
        raise InvalidGgufError(error.message, hint=hint) from error


def writable_by_others(path: Path) -> bool:
    """Whether another user than root may change or replace the file at `path`."""
    folder = path.parent.stat()
    return _others_write(path.stat()) or (not folder.st_mode & stat.S_ISVTX and _others_write(folder))


def _others_write(info: os.stat_result) -> bool:
    shared = info.st_mode & stat.S_IWGRP and info.st_gid not in (0, os.getgid())
    return bool(shared or info.st_mode & stat.S_IWOTH) or info.st_uid not in (0, os.getuid())


def _checkpoint(folder: Path) -> Fetched:
    if not any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        raise SourceNotFoundError(
            f"{folder} has no config.json: it is no checkpoint",
            hint="name a GGUF file, or a folder of config.json, tokenizer.json and safetensors",
        )
    name = names.tamed_file_name(folder.name)
    return Fetched(path=folder, file_name=name, ours=False, pinned=False, checkpoint=True)


def copied(source: Path, work: Path, job: Job, index: int = 0, n_files: int = 1) -> Path:
    """A copy of `source` in `work`, which costs nothing where the filesystem can share blocks.

    Raises DiskFullError, InterruptedByUser.
    """
    target = work / (names.tamed_file_name(source.name) + ".part")
    size = source.stat().st_size
    job.begin("copying", source.name, total=size, index=index, n_files=n_files)
    with (
        open(source, "rb", buffering=0) as old,
        room_errors(target),
        open(target, "wb", buffering=0) as new,
    ):
        if share_blocks(old.fileno(), new.fileno()):
            return target
        need_room(work, size, source.name)
        done = 0
        while sent := os.sendfile(new.fileno(), old.fileno(), done, CHUNK_BYTES):
            done += sent
            job.at(done)
    return target
