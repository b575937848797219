"""Download one file over HTTP into a partial file, FILE.part; a later attempt can continue it.

FILE.part.json records which file the bytes belong to. A download is continued only if the server still
has that file: its response has the same validator (a strong ETag, or Last-Modified), or the SHA-256 is
known and will be compared. If-Range is not enough, because not every server with ranges obeys it (RFC
9110, 15.3.7).
"""

from __future__ import annotations

from pathlib import Path

import httpx2  # slow import (75 to 120 ms): only a pull imports this module
import msgspec

from edgeinfer.errors import ChecksumError, DownloadError
from edgeinfer.models.fetching import http_client
from edgeinfer.models.fetching.http_client import RetryableError
from edgeinfer.models.progress import FETCHED_IS_KEPT, Job
from edgeinfer.platform.disk import (
    disk_full_errors,
    read_regular,
    require_free_space,
    size_or_zero,
    write_durably,
)
from edgeinfer.units import format_bytes

PART = ".part"


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """A file on a server. `origin` is its name in errors. A size of 0 and the SHA-256 "" are unknown.

    `headers` are not sent to another host after a redirect. `login` is the hint if access is refused;
    None stands for a general one.
    """

    url: str
    file_name: str
    origin: str
    size_bytes: int = 0
    sha256: str = ""
    headers: dict[str, str] = {}
    login: str | None = None
    is_projector: bool = False


class _PartialState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FILE.part.json: the file that the partial bytes belong to, and its validator ("" for none)."""

    origin: str
    sha256: str
    validator: str = ""


def fetch(remote: Remote, folder: Path, job: Job) -> Path:
    """Download `remote` into `folder`; return the path of the complete partial file, not verified.

    Raises DownloadError and its subclasses, ChecksumError if the length is wrong, DiskFullError,
    InterruptedByUser. After an error, the next call continues the partial file, unless the file on the
    server has changed.
    """
    partial_file = folder / (remote.file_name + PART)
    retry_policy = job.retry_policy
    failures = 0
    timeout = httpx2.Timeout(retry_policy.silence_s, connect=retry_policy.connect_s)
    with http_client.client(remote.origin, timeout) as client:
        while True:
            had = size_or_zero(partial_file)
            try:
                _try_once(client, remote, partial_file, job)
                return partial_file
            except RetryableError as again:
                job.check()  # raises InterruptedByUser if a cancellation ended the connection
                n_kept = size_or_zero(partial_file)
                failures = 0 if n_kept > had else failures + 1
                if failures >= retry_policy.attempts:
                    outcome = f"gave up after {failures} attempts; {format_bytes(n_kept)} are kept"
                    raise DownloadError(f"{remote.origin}: {again}; {outcome}") from again
                pause = retry_policy.pause(failures, again.wait_s)
                job.note(f"{again}; trying again in {pause:.0f} s")
                job.wait(pause)


def _try_once(client: httpx2.Client, remote: Remote, partial_file: Path, job: Job) -> None:
    state = _resumable_state(remote, partial_file)
    start = size_or_zero(partial_file)
    headers = remote.headers | http_client.range_headers(start, state.validator)
    try:
        with client.stream("GET", remote.url, headers=headers) as response:
            if response.status_code == 416 and start:
                _after_416(remote, response, partial_file, start)
                return
            http_client.refuse_status(remote.origin, response, remote.login)
            _receive(remote, response, partial_file, state, job)
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        if http_client.is_untrusted(error):
            hint = "behind a company's proxy, set SSL_CERT_FILE to the proxy's certificate file"
            problem = http_client.describe_transport_error(error)
            raise DownloadError(f"{remote.origin}: {problem}", hint=hint) from error
        if isinstance(error, httpx2.ConnectError) and http_client.is_loopback(error.request.url.host):
            problem = f"{remote.origin}: the server refuses connections ({error})"
            raise DownloadError(problem, hint="start that server, or correct the address") from error
        raise RetryableError(http_client.describe_transport_error(error)) from error
    except httpx2.TooManyRedirects as error:
        problem = f"{remote.origin}: too many redirects"
        raise DownloadError(problem, hint=http_client.OTHER_SOURCE) from error


def _state_path(partial_file: Path) -> Path:
    return partial_file.with_name(partial_file.name + ".json")


def _resumable_state(remote: Remote, partial_file: Path) -> _PartialState:
    """Return the partial file's record; remove that file if it is part of another remote file."""
    try:
        state = msgspec.json.decode(read_regular(_state_path(partial_file)), type=_PartialState)
    except (OSError, msgspec.MsgspecError):  # there is no record, or an older version wrote it
        state = _PartialState(origin="", sha256="")
    same = (state.origin, state.sha256) == (remote.origin, remote.sha256)
    if not same or not (remote.sha256 or state.validator):
        partial_file.unlink(missing_ok=True)
    return state


def _receive(
    remote: Remote, response: httpx2.Response, partial_file: Path, state: _PartialState, job: Job
) -> None:
    offset, total = http_client.parse_range(response, size_or_zero(partial_file))
    if remote.size_bytes and total is not None and total != remote.size_bytes:
        raise ChecksumError(
            f"{remote.origin} has {total} bytes, not the expected {remote.size_bytes}; "
            "nothing was fetched"
        )
    n_missing = (total or remote.size_bytes) - size_or_zero(partial_file)
    require_free_space(partial_file.parent, n_missing, remote.file_name)
    validator = http_client.validator(response)
    if offset and not remote.sha256 and validator != state.validator:
        partial_file.unlink()
        raise RetryableError("the file on the server may have changed; starting over")
    if offset == 0 and state.validator not in ("", validator):
        partial_file.unlink(missing_ok=True)  # the server has a new version of the file
    new_state = _PartialState(origin=remote.origin, sha256=remote.sha256, validator=validator)
    write_durably(_state_path(partial_file), msgspec.json.encode(new_state))
    job.report(offset, total)
    with (
        job.call_on_cancel(lambda: http_client.hang_up(response)),
        disk_full_errors(partial_file, FETCHED_IS_KEPT),
        open(partial_file, "r+b" if partial_file.exists() else "w+b", buffering=0) as file,
    ):
        file.seek(offset)
        for chunk in response.iter_raw():
            if 0 < remote.size_bytes < offset + len(chunk):
                partial_file.unlink()
                raise ChecksumError(
                    f"{remote.origin} has more than the expected {remote.size_bytes} bytes; "
                    "the downloaded data was removed",
                    hint="pull again; if the file is still too long, do not trust the source",
                )
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]
            offset += len(chunk)
            job.report(offset)
        file.truncate()  # an earlier version of the file may have been longer
    if total is not None and offset != total:
        raise RetryableError(f"the server sent {offset} of {total} bytes")


def _after_416(remote: Remote, response: httpx2.Response, partial_file: Path, start: int) -> None:
    """Handle status 416: the partial file is complete, or longer than the server's file."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    expected = int(total) if total.isdecimal() else remote.size_bytes
    if expected != start:
        partial_file.unlink()
        raise RetryableError("the file on the server is shorter than the partial file; starting over")
