"""Update the one-file program, only on request: fetch, verify, test, replace.

    URL/release.json         `Release` in JSON
    URL/release.json.sig     its Ed25519 signature, 64 bytes, by a key that this program carries
    URL/NAME                 the one-file program for a machine
    DATA/update/.lock        flock of the update in progress
    DATA/update/seen         issue time (Unix time) of the newest manifest that was fetched
    DATA/update/NAME.part    an unfinished download, which the next attempt continues
    DATA/update/trial.toml   configuration for testing a new file: no snapshots, prefix cache, counts
    DATA/update/previous     the previous one-file program, for `back`

Nothing changes before the new file has started here, loaded llama.cpp and answered with a pulled model;
then one rename replaces the old file. The previous version keeps its unpacked application
(`shipping.unpack`) and so its snapshots. Running processes continue with their version.

`edgeinfer/data/release.toml` holds URL and keys. It is empty in a checkout: only the publisher of
releases fills it in.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import httpx2  # slow import (75 to 120 ms)
import msgspec
from msgspec import Meta

from edgeinfer.config.config_file import save
from edgeinfer.errors import (
    ChecksumError,
    DownloadError,
    EdgeInferError,
    ReleaseUntrustedError,
    ShippingError,
)
from edgeinfer.models import store
from edgeinfer.models.fetching import download, http_client
from edgeinfer.models.progress import Job
from edgeinfer.platform import disk, paths
from edgeinfer.platform.ed25519 import is_signed_by
from edgeinfer.runtime.llama.backends import LibraryFacts
from edgeinfer.shipping import payload, shipped, unpack

MANIFEST = "release.json"
SIGNATURE = ".sig"
PREVIOUS = "previous"
SEEN = "seen"
_TRIAL_S = 900
#: How far (s) in the future the date of a release's manifest may lie, because this machine's clock may
#: be slow.
_CLOCK_S = 24 * 3600
#: Maximum size (bytes) of a release's manifest, and of its signature; maximum time (s) to fetch either.
_MANIFEST_BYTES, _MANIFEST_S = 64 << 10, 60.0


class ReleasedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A one-file program that a release's manifest (release.json) lists."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,80}\Z")]
    size_bytes: Annotated[int, Meta(ge=1, le=64 << 30)]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class ReleasedBackend(ReleasedFile, frozen=True, kw_only=True):
    """A GPU backend's library in a release; `facts` say for which build of llama.cpp it is."""

    facts: LibraryFacts


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="edgeinfer-release/1", tag_field="schema"):
    """A release's manifest. `files` has a one-file program for each machine (`uname -m`).

    `issued_s` and `expires_s` are Unix times. `newest` refuses a manifest that was issued before one
    that it has already accepted.
    """

    version: Annotated[str, Meta(pattern=r"\A\d{1,6}\.\d{1,6}\.\d{1,6}\Z")]
    issued_s: Annotated[int, Meta(ge=1)]
    expires_s: int
    files: dict[str, ReleasedFile]
    backends: tuple[ReleasedBackend, ...] = ()


class Channel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """URL of the releases ("" for none), and the public keys (64 hex digits) that may sign them."""

    url: str = ""
    keys: tuple[str, ...] = ()


def channel() -> Channel:
    return msgspec.toml.decode(paths.shipped_file("release.toml").read_bytes(), type=Channel)


def parse_release(raw: bytes, signature: bytes, keys: tuple[str, ...]) -> Release:
    """Check the signature of a manifest, and parse it.

    Raises ReleaseUntrustedError if none of `keys` has signed it, ShippingError if it is not valid.
    """
    if not any(is_signed_by(bytes.fromhex(key), signature, raw) for key in keys):
        raise ReleaseUntrustedError("the release's manifest is not signed by a key of this program")
    try:
        return msgspec.json.decode(raw, type=Release)
    except msgspec.MsgspecError as error:
        problem = f"this program cannot read the release's manifest: {error}"
        raise ShippingError(problem, hint="download and install the newest version by hand") from error


def number(version: str) -> tuple[int, ...]:
    """Return a version as numbers that can be compared: "1.10.2" → (1, 10, 2)."""
    return tuple(map(int, version.split(".")))


def own_program(*, replaces: bool = True) -> Path:
    """Return this process's one-file program.

    Raises ShippingError if there is none, if its file was removed or belongs to a Linux package, and,
    with `replaces`, if its folder cannot be written.
    """
    if not shipped.is_shipped():
        raise ShippingError(
            "this edgeinfer is a Python package: update it with the tool that installed it",
            hint="`pipx upgrade edgeinfer` or `uv tool upgrade edgeinfer`; in a checkout `git pull`",
        )
    program = shipped.program_file()
    if program is None:
        raise ShippingError("the file of this program was removed", hint="install edgeinfer again")
    if program.parent == Path("/usr/bin"):
        manager = "update it with your package manager, e.g. `apt upgrade` or `dnf upgrade`"
        raise ShippingError(f"{program} belongs to an installed Linux package", hint=manager)
    if replaces and not os.access(program.parent, os.W_OK):
        problem = f"{program} cannot be replaced: you may not write to {program.parent}"
        raise ShippingError(problem, hint="run the command as the owner of that folder")
    return program


def refuse_unless_ours(program: Path, app: str) -> None:
    """Raise ShippingError unless this user owns `program` and it contains the application `app`.

    `app` is the name of the running version's folder. If `program` contains another application, the
    file was replaced after this process had started.
    """
    owner = program.stat().st_uid
    if owner != os.geteuid():
        message = f"{program} belongs to user {owner}; the update would change its owner"
        raise ShippingError(message, hint="run the command as that user")
    if payload.open_shipped(program).app != app:
        problem = f"{program} was replaced since this command started"
        raise ShippingError(problem, hint="run the command again")


@contextmanager
def locked() -> Iterator[Path]:
    """Lock updates and backend installations; yield the folder DATA/update.

    Raises ShippingError if another process holds the lock.
    """
    folder = paths.data_dir() / "update"
    paths.make_folder(folder)

    def busy() -> None:
        problem = "another process is updating edgeinfer or installing a GPU backend"
        raise ShippingError(problem, hint="wait until it has ended, then run the command again")

    with disk.locked(folder / ".lock", busy):
        yield folder


def newest(channel: Channel, folder: Path) -> Release:
    """Fetch the newest release's manifest, and record in `folder` when it was issued.

    Raises DownloadError; ShippingError if `channel` has no URL or no keys; ReleaseUntrustedError if the
    signature is wrong, or the manifest has expired, was issued before a recorded one, or in the future.
    """
    if not channel.url or not channel.keys:
        raise ShippingError(
            "this build has no release key, so it cannot verify a release",
            hint="install a published release, or build one (`make binary`, `make cuda`)",
        )
    release = parse_release(_get(channel, MANIFEST), _get(channel, MANIFEST + SIGNATURE), channel.keys)
    last_issued_s = _last_issued_s(folder / SEEN)
    if release.issued_s < last_issued_s:
        dates = f"{_date(release.issued_s)} is before {_date(last_issued_s)}"
        problem = f"the manifest at {channel.url} is older than one seen before: {dates}"
        raise ReleaseUntrustedError(problem)
    if release.issued_s > time.time() + _CLOCK_S:  # recording this time would block later releases
        raise ReleaseUntrustedError(
            f"the release's manifest was issued on {_date(release.issued_s)}, in the future",
            hint="check this machine's clock; if it is right, wait for the next release",
        )
    if release.expires_s < time.time():
        raise ReleaseUntrustedError(
            f"the release's manifest expired on {_date(release.expires_s)}",
            hint="correct this machine's clock, or ask the server's operator for a newer release",
        )
    disk.write_durably(folder / SEEN, str(release.issued_s).encode())
    return release


def _date(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))


def _last_issued_s(file: Path) -> int:
    try:
        return int(disk.read_regular(file))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not contain a number"
        problem = f"{file}, the time of the newest known release, cannot be read: {reason}"
        raise ShippingError(problem, hint="remove that file, then update again") from error


def _get(channel: Channel, name: str) -> bytes:
    url, raw = f"{channel.url}/{name}", b""
    headers = http_client.range_headers(0, "")
    connections: list[Any] = []
    end_s = time.monotonic() + _MANIFEST_S

    def trace(event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            connections.append(info["return_value"])

    # shut the connections down after `_MANIFEST_S`. The HTTP client's own timeout limits only each
    # read, so a server that sends single bytes could send for ever
    timer = threading.Timer(_MANIFEST_S, lambda: [*map(http_client.shut_down, connections)])
    timer.start()
    try:
        with (
            http_client.client(url, _MANIFEST_S) as client,
            client.stream("GET", url, headers=headers, extensions={"trace": trace}) as response,
        ):
            if response.status_code != 200:
                raise http_client.status_error(url, "server", response.status_code)
            for chunk in response.iter_raw():
                raw += chunk
                if len(raw) > _MANIFEST_BYTES:
                    problem = f"{url} has more than {_MANIFEST_BYTES >> 10} KiB, the limit"
                    raise ReleaseUntrustedError(problem)
            if time.monotonic() > end_s:
                raise httpx2.ReadTimeout("")
    except httpx2.HTTPError as error:
        is_late = time.monotonic() > end_s
        late = f"not complete after {_MANIFEST_S:g} s"
        problem = late if is_late else http_client.describe_transport_error(error)
        raise DownloadError(f"{url}: {problem}") from error
    finally:
        timer.cancel()
    return raw


def install(program: Path, release: Release, url: str, folder: Path, job: Job) -> None:
    """Fetch the release's file for this machine, verify and test it, and let it replace `program`.

    `url` is that of the channel; `folder` (DATA/update) gets the download and the previous file. After
    DownloadError, ChecksumError, DiskFullError, ReleaseUntrustedError or ShippingError, `program` is
    unchanged, and the next call continues a download that can be continued.
    """
    machine = platform.machine()
    file = release.files.get(machine)
    if file is None:
        problem = f"the release {release.version} has no program for {machine}"
        raise ShippingError(problem, hint="build one: `make binary`")
    candidate = program.with_name(f".{program.name}-{release.version}")
    try:
        place_verified(file, url, folder, candidate, job, mode=_permissions(program))
        job.begin("checking", f"{release.version} on this machine")
        _try_out(candidate, release.version, folder / "trial.toml")
        _swap(program, candidate, folder)
    finally:
        candidate.unlink(missing_ok=True)
    leftovers = list_files(folder, "*.part*", ".*.new")
    leftovers += list_files(program.parent, f".{program.name}-[0-9]*", f"..{program.name}-[0-9]*.new")
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)


def list_files(folder: Path, *patterns: str) -> list[Path]:
    """List the files in `folder` (not folders) whose names match one of the glob `patterns`."""
    named = (path for path in folder.glob("*") if any(fnmatch(path.name, name) for name in patterns))
    return [path for path in named if path.is_symlink() or not path.is_dir()]


def place_verified(
    file: ReleasedFile, url: str, folder: Path, target: Path, job: Job, *, mode: int = 0o644
) -> None:
    """Download a file of the release at `url` into `folder`, and copy it to `target`, atomically.

    Raises DownloadError, DiskFullError, and ChecksumError if the manifest has another SHA-256.
    """
    source = f"{url}/{file.name}"
    remote = download.Remote(
        url=source, file_name=file.name, origin=source, size_bytes=file.size_bytes, sha256=file.sha256
    )
    n_needed = file.size_bytes  # for the copy; `fetch` itself checks the space for the download
    if os.stat(folder).st_dev == os.stat(target.parent).st_dev:
        n_needed += file.size_bytes - disk.size_or_zero(folder / (file.name + download.PART))
    disk.require_free_space(target.parent, n_needed, f"{file.name}, fetched and then copied,")
    job.begin("downloading", file.name, total=file.size_bytes)
    partial = download.fetch(remote, folder, job)
    with open(disk.open_regular(partial), "rb") as fetched, disk.durable_file(target, mode) as out:
        # hash the bytes that are written: the file may change between a check and the copy
        digest = disk.sha256_of_part(
            fetched.fileno(), 0, file.size_bytes, lambda chunk, _done: out.write(chunk)
        )
        if digest != file.sha256:
            partial.unlink()
            raise ChecksumError(
                f"{source} has SHA-256 {digest}, not {file.sha256}: nothing was changed",
                hint="run the command again; if the digest still differs, do not trust the server",
            )


def _try_out(candidate: Path, version: str, config: Path) -> None:
    """Raise ShippingError unless the candidate has `version`, loads llama.cpp, and answers.

    `config` becomes a copy of the user's configuration with which the test leaves no trace.
    """
    app = payload.open_shipped(candidate).app.rpartition("-")[0]
    if app != version:
        raise ReleaseUntrustedError(f"the file of release {version} contains version {app}")
    generative = (m for m in store.list_pulled() if m.entry_by_header().purpose in ("chat", "base"))
    smallest = min(generative, key=lambda model: model.size_bytes, default=None)
    commands = [["version", "--json"]]
    if smallest is not None:
        commands.append(["run", smallest.name, "Hi", "--max-tokens", "1", "--resume", "never"])
    config.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        shutil.copy(paths.config_file(), config)
    for switch in (("snapshots", "auto-warm"), ("blocks", "enabled"), ("drift", "record")):
        save(switch, False, config)
    for command in commands:
        try:
            code, output = _run([os.fspath(candidate), *command], {"EDGEINFER_CONFIG": str(config)})
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _unfit_error(version, command, str(error)) from error
        if code:
            raise _unfit_error(version, command, output.decode(errors="replace").strip()[-500:])


def _run(command: list[str], settings: dict[str, str]) -> tuple[int, bytes]:
    """Run `command`, then end every process that it started; return its exit status and stderr."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | settings,
        start_new_session=True,
    ) as child:
        try:
            _, output = child.communicate(timeout=_TRIAL_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return child.returncode, output


def _unfit_error(version: str, command: list[str], reason: str) -> EdgeInferError:
    return ShippingError(
        f"{version} does not work on this machine (`{' '.join(command)}`): {reason}",
        hint="keep the installed version until the cause above is removed, then update again",
    )


def back(program: Path, folder: Path) -> str:
    """Exchange `program` and the previous version's file; return the version that `program` now has.

    Raises ShippingError if there is no previous version, or if `program` has it already.
    """
    previous = folder / PREVIOUS
    if not previous.exists():
        raise ShippingError(
            "there is no previous version to return to",
            hint="`edgeinfer update` keeps the version that it replaces",
        )
    app = payload.open_shipped(previous).app
    if app == payload.open_shipped(program).app:
        problem = "there is no other version to return to: the previous one is already installed"
        raise ShippingError(problem, hint="`edgeinfer update` installs the newest version")
    candidate = program.with_name(f".{program.name}-back")
    try:
        _link_or_copy(previous, candidate)
        _swap(program, candidate, folder)
    finally:
        candidate.unlink(missing_ok=True)
    return app.rpartition("-")[0]


def _swap(program: Path, candidate: Path, folder: Path) -> None:
    """Keep `program` as the previous file, and replace it by `candidate` with one rename."""
    previous = folder / PREVIOUS
    with unpack.locked():  # so that no unpacked version is removed meanwhile
        _link_or_copy(program, folder / ".previous")
        _name_source(candidate)  # after a crash, each unpacked version still has its one-file program
        os.replace(folder / ".previous", previous)
        _name_source(previous)
        os.replace(candidate, program)
        disk.sync(program.parent)
        _name_source(program)


def _name_source(file: Path) -> None:
    app = unpack.app_root() / payload.open_shipped(file).app
    if app.is_dir():
        disk.write_durably(app / unpack.SOURCE, os.fsencode(file))


def _link_or_copy(file: Path, target: Path) -> None:
    """Make `target` a hard link to `file`; a copy if that fails, e.g. on another disk."""
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:
        with file.open("rb") as source, disk.durable_file(target, _permissions(file)) as out:
            shutil.copyfileobj(source, out)


def _permissions(file: Path) -> int:
    return file.stat().st_mode & 0o777
