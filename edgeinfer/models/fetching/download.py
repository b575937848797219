"""Download one file over HTTP, resumable, into a partial file that others verify and rename.

Beside `FILE.part` lies `FILE.part.json`: what the bytes are of. They are continued only when the server
still means the same file by its own validator (a strong ETag, or Last-Modified), or when the SHA-256 is
known and will be checked. A large file of a server that gives ranges comes over several connections
(`ranges`); one that ignores Range is written over from the start without cutting what is there. Nothing
here decides that a file is right.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2  # 75–120 ms, which is why nothing but a pull imports this module
import msgspec

from edgeinfer.errors import ChecksumError, DownloadError
from edgeinfer.models.fetching import http_client, ranges, spans
from edgeinfer.models.fetching.http_client import AgainError, WholeOnlyError
from edgeinfer.models.progress import FETCHED_IS_KEPT, Job
from edgeinfer.system.disk import need_room, room_errors, write_whole
from edgeinfer.units import format_bytes

PART = ".part"


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """A file on a server; 0 and "" mean unknown. The first host alone gets `headers`."""

    url: str
    file_name: str
    origin: str
    size_bytes: int = 0
    sha256: str = ""
    headers: dict[str, str] = {}


class _Partial(msgspec.Struct, frozen=True, kw_only=True):
    """What the partial file's bytes are of. `validator` "": the server gave none to trust."""

    origin: str
    sha256: str
    validator: str = ""


def fetch(remote: Remote, folder: Path, job: Job) -> Path:
    """Download `remote` into `folder` and return the partial file, complete but not verified.

    Raises DownloadError and its kin, ChecksumError when the server's length is not the promised one,
    DiskFullError, InterruptedByUser. Whatever was fetched stays for the next time, except when it turns
    out to be of another file.
    """
    part = folder / (remote.file_name + PART)
    patience = job.patience
    failures = 0
    alone = patience.connections < 2
    timeout = httpx2.Timeout(patience.silence_s, connect=patience.connect_s)
    with http_client.client(remote.origin, timeout) as client:
        while True:
            had = spans.fetched_bytes(part)
            try:
                _attempt(client, remote, part, job, alone=alone)
                return part
            except AgainError as again:
                job.check()  # a connection that was shut down because somebody asked to stop
                alone |= isinstance(again, WholeOnlyError)
                failures = 0 if spans.fetched_bytes(part) > had else failures + 1
                if failures >= patience.attempts:
                    raise DownloadError(
                        f"{remote.origin}: {again}; gave up after {failures} attempts, "
                        f"{format_bytes(spans.fetched_bytes(part))} are kept"
                    ) from again
                pause = patience.pause(failures, again.wait_s)
                job.note(f"{again}; trying again in {pause:.0f} s")
                job.wait(pause)


def _attempt(client: httpx2.Client, remote: Remote, part: Path, job: Job, *, alone: bool) -> None:
    known = _read_partial(part)
    start = _resume_at(known, remote, part)

    @contextmanager
    def opened(start: int, end: int | None, validator: str) -> Iterator[httpx2.Response]:
        headers = remote.headers | http_client.range_headers(start, end, validator)
        with client.stream("GET", remote.url, headers=headers) as response:
            yield response

    try:
        with opened(start, None, known.validator) as response:
            if response.status_code == 416 and start:
                _after_416(remote, response, part, start)
                return
            http_client.refuse_status(remote.origin, response)
            _receive(remote, response, part, start, job, None if alone else opened)
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        if http_client.is_untrusted(error):
            raise DownloadError(
                f"{remote.origin}: {http_client.describe_trouble(error)}",
                hint="SSL_CERT_FILE=FILE names the certificates to trust, as a company's proxy needs",
            ) from error
        if isinstance(error, httpx2.ConnectError) and http_client.is_loopback(error.request.url.host):
            raise DownloadError(f"{remote.origin}: nothing listens there ({error})") from error
        raise AgainError(http_client.describe_trouble(error)) from error
    except httpx2.TooManyRedirects as error:
        raise DownloadError(f"{remote.origin}: the server redirects for ever") from error


def _read_partial(part: Path) -> _Partial:
    try:
        return msgspec.json.decode(part.with_name(part.name + ".json").read_bytes(), type=_Partial)
    except (FileNotFoundError, msgspec.MsgspecError):
        return _Partial(origin="", sha256="")


def _resume_at(known: _Partial, remote: Remote, part: Path) -> int:
    """The first byte that is missing; the file is removed when its bytes are of another one."""
    same = known.origin == remote.origin and known.sha256 == remote.sha256
    if not same or not (remote.sha256 or known.validator):
        spans.drop(part)
    there = spans.read(part, checked=bool(remote.sha256))
    return there[0][1] if there and there[0][0] == 0 else 0


def _receive(
    remote: Remote,
    response: httpx2.Response,
    part: Path,
    start: int,
    job: Job,
    opened: ranges.Opened | None,
) -> None:
    offset, total = http_client.placement(response, start)
    if remote.size_bytes and total is not None and total != remote.size_bytes:
        raise ChecksumError(
            f"{remote.origin} has {total} bytes, not the promised {remote.size_bytes}; nothing was "
            f"fetched"
        )
    if total is not None:
        need_room(part.parent, total - spans.fetched_bytes(part), remote.file_name)
    validator = http_client.validator(response)
    if offset == 0 and _read_partial(part).validator not in ("", validator):
        spans.drop(part)  # the server has another file now
    state = _Partial(origin=remote.origin, sha256=remote.sha256, validator=validator)
    write_whole(part.with_name(part.name + ".json"), msgspec.json.encode(state))
    if (
        opened
        and total is not None
        and offset == start
        and _in_ranges(remote, response, total, part, job)
    ):
        whole = ranges.Whole(remote.origin, total, validator, bool(remote.sha256))
        ranges.receive(whole, response, offset, part, job, opened)
        return
    spans.only_beginning(part, checked=bool(remote.sha256))
    _receive_whole(response, offset, total, part, job)


def _in_ranges(remote: Remote, response: httpx2.Response, total: int, part: Path, job: Job) -> bool:
    """Whether several connections are of use: much is missing, and no two files can be mixed."""
    missing = total - spans.fetched_bytes(part)
    many = missing >= job.patience.parallel_bytes
    known = bool(remote.sha256 or http_client.validator(response))
    begun = spans.place(part).exists()
    return (many or begun) and known and http_client.has_ranges(response)


def _receive_whole(
    response: httpx2.Response, offset: int, total: int | None, part: Path, job: Job
) -> None:
    job.at(offset, total)
    existing = "r+b" if part.exists() else "w+b"
    with (
        job.waking(lambda: http_client.hang_up(response)),
        room_errors(part, FETCHED_IS_KEPT),
        open(part, existing, buffering=0) as file,
    ):
        file.seek(offset)
        for chunk in response.iter_raw():
            _write(file.fileno(), chunk)
            offset += len(chunk)
            job.at(offset)
        file.truncate(offset)  # a longer tail of an earlier file ends here
    if total is not None and offset != total:
        raise AgainError(f"the server sent {offset} of {total} bytes")


def _write(descriptor: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]


def _after_416(remote: Remote, response: httpx2.Response, part: Path, start: int) -> None:
    """ "Range not satisfiable": the partial file is complete, or longer than the file is now."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    expected = int(total) if total.isdecimal() else remote.size_bytes
    if expected != start:
        spans.drop(part)
        raise AgainError("the file on the server is shorter than what is here; starting over")
    spans.only_beginning(part, checked=bool(remote.sha256))
