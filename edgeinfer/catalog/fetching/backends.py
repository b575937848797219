"""Fetch a backend library of llama.cpp, verify it, and put it where the engine looks for it.

A place is a folder or an https address that holds `libggml-NAME.so` and the JSON file which says what
it is. What was fetched of the library is kept when it stops, and continued.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from edgeinfer.catalog.fetching import local
from edgeinfer.catalog.progress.job import FETCHED_IS_KEPT, Job
from edgeinfer.errors import CatalogError, ChecksumError, SourceNotFoundError
from edgeinfer.runtime.backends import files
from edgeinfer.runtime.backends.files import BackendFile, Build, Facts
from edgeinfer.system import paths
from edgeinfer.system.disk import locked, room_errors, sha256_of, sync, write_whole


def is_address(place: str) -> bool:
    """Whether a place is on a web server."""
    return place.startswith(("https:", "http:"))


def add(name: str, place: str, build: Build, job: Job, sha256: str = "") -> BackendFile:
    """Bring the library of a backend here, for a llama.cpp of `build`.

    `sha256` is what its digest must be, besides what its own JSON file says. Raises UsageError for an
    unknown name, CatalogError for a library of another build, DownloadError and its kin, ChecksumError,
    DiskFullError, InterruptedByUser.
    """
    library = files.file_name(name)
    folder = paths.private_dir(files.added_dir())
    work = paths.private_dir(folder / ".partial")
    with locked(folder / ".lock"), room_errors(folder, FETCHED_IS_KEPT):
        facts = _facts(name, place, work, job)
        if not facts.build.fits(build):
            raise CatalogError(
                f"{library} at {place} was built for {facts.build}; this is {build}",
                hint="take it from the release of this version",
            )
        part = _fetched(library, place, work, job, facts)
        _verify(part, facts, sha256, job)
        part.chmod(0o644)
        sync(part)
        os.replace(part, folder / library)
        write_whole(files.facts_path(folder / library), msgspec.json.encode(facts), 0o644)
        shutil.rmtree(work)
    return files.read(name, folder / library, added=True)


def remove(name: str) -> int:
    """Remove a user's own library and return its size in bytes. Raises CatalogError for none."""
    path = files.added_dir() / files.file_name(name)
    if not path.is_file():
        raise CatalogError(f"no {path.name} was added", hint="edgeinfer backend list")
    freed = path.stat().st_size
    path.unlink()
    files.facts_path(path).unlink(missing_ok=True)
    return freed


def _facts(name: str, place: str, work: Path, job: Job) -> Facts:
    """The JSON file at the place. Raises CatalogError when it describes something else."""
    described = files.facts_path(Path(files.file_name(name))).name
    job.begin("resolving", described)
    if is_address(place):
        found = _downloaded(described, place, work, job)
        content = found.read_bytes()
        found.unlink()
    else:
        content = _local(described, place).read_bytes()
    try:
        facts = msgspec.json.decode(content, type=Facts)
    except msgspec.MsgspecError as error:
        raise CatalogError(f"{described} at {place} describes no backend: {error}") from error
    if facts.name != name:
        raise CatalogError(f"{described} at {place} describes the backend {facts.name}")
    return facts


def _fetched(library: str, place: str, work: Path, job: Job, facts: Facts) -> Path:
    """The whole library in the work folder, not verified."""
    if is_address(place):
        return _downloaded(library, place, work, job, facts)
    return local.copied(_local(library, place), work, job)


def _downloaded(name: str, place: str, work: Path, job: Job, facts: Facts | None = None) -> Path:
    from edgeinfer.catalog.fetching import download  # 75–120 ms: httpx2

    url = f"{place.rstrip('/')}/{name}"
    remote = download.Remote(url=url, file_name=name, origin=url)
    if facts:
        remote = msgspec.structs.replace(remote, size_bytes=facts.size_bytes, sha256=facts.sha256)
        job.begin("downloading", name, total=facts.size_bytes)
    return download.fetch(remote, work, job)


def _local(name: str, place: str) -> Path:
    path = Path(place).expanduser().absolute() / name
    if not path.is_file():
        raise SourceNotFoundError(f"{path} is not there", hint="name the folder that holds it: --from")
    return path


def _verify(part: Path, facts: Facts, sha256: str, job: Job) -> None:
    """Compare with every known digest. Raises ChecksumError, and removes what is wrong."""
    job.begin("verifying", part.name, total=facts.size_bytes)
    found = sha256_of(part, job.at)
    for expected, who in ((facts.sha256, "its JSON file says"), (sha256.lower(), "you said")):
        if expected and found != expected:
            part.unlink()
            raise ChecksumError(
                f"{part.name} has SHA-256 {found}, not {expected} as {who}; it was not kept"
            )
