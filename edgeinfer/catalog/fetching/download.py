"""Download one file over HTTP, resumable, into a partial file that others verify and rename.

Beside `FILE.part` lies `FILE.part.json`: what the bytes are of. They are continued only when the server
still means the same file by its own validator (a strong ETag, or Last-Modified), or when the SHA-256 is
known and will be checked. A server that ignores Range is written over from the start without cutting
what is there. Nothing here decides that a file is right.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2  # 75–120 ms, which is why nothing but a pull imports this module
import msgspec

from edgeinfer.catalog.progress import FETCHED_IS_KEPT, Job, Patience
from edgeinfer.disk import need_room, room_errors, size_or_zero, write_whole
from edgeinfer.errors import AuthenticationError, ChecksumError, DownloadError, SourceNotFoundError
from edgeinfer.units import format_bytes

PART = ".part"
_AGAIN = {408, 425, 429, 500, 502, 503, 504}


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


class _AgainError(Exception):
    """This attempt failed in a way another may not. `wait_s` is what the server asked for."""

    def __init__(self, what: str, wait_s: float = 0.0) -> None:
        super().__init__(what)
        self.wait_s = wait_s


def fetch(remote: Remote, folder: Path, job: Job) -> Path:
    """Download `remote` into `folder` and return the partial file, complete but not verified.

    Raises DownloadError and its kin, ChecksumError when the server's length is not the promised one,
    DiskFullError, InterruptedByUser. Whatever was fetched stays for the next time, except when it turns
    out to be of another file.
    """
    part = folder / (remote.file_name + PART)
    patience = job.patience
    failures = 0
    with _client(patience) as client:
        while True:
            had = size_or_zero(part)
            try:
                _attempt(client, remote, part, job)
                return part
            except _AgainError as again:
                job.check()  # a connection that was shut down because somebody asked to stop
                failures = 0 if size_or_zero(part) > had else failures + 1
                if failures >= patience.attempts:
                    raise DownloadError(
                        f"{remote.origin}: {again}; gave up after {failures} attempts, "
                        f"{format_bytes(size_or_zero(part))} are kept"
                    ) from again
                pause = min(30.0, max(again.wait_s, patience.pause_s * 2**failures))
                job.note(f"{again}; trying again in {pause:.0f} s")
                job.wait(pause)


@contextmanager
def _client(patience: Patience) -> Iterator[httpx2.Client]:
    timeout = httpx2.Timeout(patience.silence_s, connect=patience.connect_s)
    with httpx2.Client(timeout=timeout, follow_redirects=True) as client:
        yield client


def _attempt(client: httpx2.Client, remote: Remote, part: Path, job: Job) -> None:
    known = _read_partial(part)
    start = _resume_at(known, remote, part)
    headers = remote.headers | {"Accept-Encoding": "identity", "User-Agent": "edgeinfer"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if known.validator:
            headers["If-Range"] = known.validator
    try:
        with client.stream("GET", remote.url, headers=headers) as response:
            _refuse_downgrade(remote, response)
            if response.status_code == 416 and start:
                _after_416(remote, response, part, start)
                return
            _refuse_status(remote, response)
            _receive(remote, response, part, start, job)
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        raise _AgainError(_words(error)) from error
    except httpx2.TooManyRedirects as error:
        raise DownloadError(f"{remote.origin}: the server redirects for ever") from error


def _read_partial(part: Path) -> _Partial:
    try:
        return msgspec.json.decode(part.with_name(part.name + ".json").read_bytes(), type=_Partial)
    except (FileNotFoundError, msgspec.MsgspecError):
        return _Partial(origin="", sha256="")


def _resume_at(known: _Partial, remote: Remote, part: Path) -> int:
    """Count the bytes that may be continued; cut the file when they are of another one."""
    same = known.origin == remote.origin and known.sha256 == remote.sha256
    if same and (remote.sha256 or known.validator):
        return size_or_zero(part)
    part.unlink(missing_ok=True)
    return 0


def _receive(remote: Remote, response: httpx2.Response, part: Path, start: int, job: Job) -> None:
    offset, total = _placement(response, start)
    if remote.size_bytes and total is not None and total != remote.size_bytes:
        raise ChecksumError(
            f"{remote.origin} has {total} bytes, not the promised {remote.size_bytes}; nothing was "
            f"fetched"
        )
    if total is not None:
        need_room(part.parent, total - size_or_zero(part), remote.file_name)
    validator = _validator(response)
    if offset == 0 and _read_partial(part).validator not in ("", validator):
        part.unlink(missing_ok=True)  # the server has another file now
    state = _Partial(origin=remote.origin, sha256=remote.sha256, validator=validator)
    write_whole(part.with_name(part.name + ".json"), msgspec.json.encode(state))
    job.at(offset, total)
    existing = "r+b" if part.exists() else "w+b"
    with (
        job.waking(lambda: _hang_up(response)),
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
        raise _AgainError(f"the server sent {offset} of {total} bytes")


def _hang_up(response: httpx2.Response) -> None:
    """End a read that waits in another thread. The connection is of no use afterwards."""
    stream = response.extensions.get("network_stream")
    connection = stream.get_extra_info("socket") if stream else None
    if connection is not None:
        with suppress(OSError):
            socket.socket.shutdown(
                connection, socket.SHUT_RDWR
            )  # the plain one, also under TLS: no farewell to wait for


def _write(descriptor: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]


def _placement(response: httpx2.Response, start: int) -> tuple[int, int | None]:
    """(where the body begins, the whole file's length or None), from the response's own words."""
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        raise DownloadError(f"{response.url.host} sends the file in an encoding that was not asked for")
    length = response.headers.get("Content-Length", "")
    if response.status_code == 200:
        return 0, int(length) if length.isdecimal() else None
    unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    first, _, _last = span.partition("-")
    if unit != "bytes" or not first.isdecimal() or int(first) != start:
        raise _AgainError(
            f"asked to go on at byte {start}, the server answers {rest or 'without saying where'}"
        )
    if total.isdecimal():
        return start, int(total)
    return start, start + int(length) if length.isdecimal() else None


def _after_416(remote: Remote, response: httpx2.Response, part: Path, start: int) -> None:
    """ "Range not satisfiable": the partial file is complete, or longer than the file is now."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    expected = int(total) if total.isdecimal() else remote.size_bytes
    if expected != start:
        part.unlink(missing_ok=True)
        raise _AgainError("the file on the server is shorter than what is here; starting over")


def _refuse_downgrade(remote: Remote, response: httpx2.Response) -> None:
    if remote.url.startswith("https:") and any(
        hop.url.scheme != "https" for hop in (*response.history, response)
    ):
        raise DownloadError(f"{remote.origin}: the server redirects to an unencrypted address")


def _refuse_status(remote: Remote, response: httpx2.Response) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status in (401, 403):
        raise AuthenticationError(
            f"{remote.origin}: the server refuses ({status}): a token or an accepted licence is missing"
        )
    if status in (404, 410):
        raise SourceNotFoundError(f"{remote.origin}: the server has no such file ({status})")
    if status in _AGAIN:
        after = response.headers.get("Retry-After", "")
        raise _AgainError(f"the server answers {status}", float(after) if after.isdecimal() else 0.0)
    raise DownloadError(f"{remote.origin}: the server answers {status}")


def _validator(response: httpx2.Response) -> str:
    """What If-Range may carry: a strong ETag, else Last-Modified, else nothing."""
    etag = response.headers.get("ETag", "")
    if etag.startswith('"'):
        return etag
    return response.headers.get("Last-Modified", "")


def _words(error: Exception) -> str:
    known: dict[type[Exception], str] = {
        httpx2.ConnectError: "cannot connect",
        httpx2.ConnectTimeout: "no answer to the connection",
        httpx2.ReadTimeout: "the server fell silent",
        httpx2.RemoteProtocolError: "the connection was dropped",
        httpx2.ReadError: "the connection was dropped",
    }
    what = known.get(type(error), type(error).__name__)
    return f"{what} ({error})" if str(error) else what
