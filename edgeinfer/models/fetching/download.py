"""Download one file over HTTP, resumable and over several connections, into a partial file.

`FILE.part.json` says which file the bytes belong to. A download continues only if the server confirms
the file by its own validator (a strong ETag, or Last-Modified), or if its SHA-256 is known and compared
afterwards. Verifying and renaming are the caller's.

Each connection writes one segment. An idle one takes half of the longest segment in progress, so that
all end together. One that fails without a new byte leaves its segment to the others; if none is left,
the whole download is tried again. `FILE.part.spans` exists only during such a download: 16 bytes a
span, its first byte and its length, little-endian. A length grows after its bytes were written, so a
killed process loses none of them.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx2  # 75–120 ms, which is why nothing but a pull imports this module
import msgspec

from edgeinfer.errors import AuthenticationError, ChecksumError, DownloadError
from edgeinfer.models.fetching import http_client
from edgeinfer.models.fetching.http_client import NoRangesError, RetryableError
from edgeinfer.models.progress import FETCHED_IS_KEPT, Job
from edgeinfer.platform.disk import need_room, room_errors, size_or_zero, write_whole
from edgeinfer.units import format_bytes

PART = ".part"
_SPANS = ".spans"
_ENTRY = struct.Struct("<QQ")
_POLL_S = 0.1
_JOIN_TIMEOUT_S = 2.0
#: A short rest that needs longer than this is another connection's to fetch.
_IDLE_S = 3.0
#: A segment shorter than twice this is not divided: a request costs more.
_MIN_SEGMENT_BYTES = 1 << 18

#: Ask for the bytes from one to before another (None: to the last), if a validator still holds.
_OpenRange = Callable[[int, int | None, str], AbstractContextManager[httpx2.Response]]


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """A file on a server; 0 and "" mean unknown. The first host alone gets `headers`."""

    url: str
    file_name: str
    origin: str
    size_bytes: int = 0
    sha256: str = ""
    headers: dict[str, str] = {}


class _PartialState(msgspec.Struct, frozen=True, kw_only=True):
    """Which file the partial bytes are of. `validator` "": the server gave none to trust.

    `boot_id` is of the kernel's latest start: what was written since then no power cut has lost.
    """

    origin: str
    sha256: str
    validator: str = ""
    boot_id: str = ""


class _ChangedError(Exception):
    """The server has another file now."""


def fetch(remote: Remote, folder: Path, job: Job) -> Path:
    """Download `remote` into `folder` and return the partial file, complete but not verified.

    Raises DownloadError and its kin, ChecksumError if the server's length is not the promised one,
    DiskFullError, InterruptedByUser. What was fetched is kept for the next time, except when it turns
    out to be of another file.
    """
    part = folder / (remote.file_name + PART)
    retry_policy = job.retry_policy
    failures = 0
    parallel = retry_policy.connections > 1
    timeout = httpx2.Timeout(retry_policy.silence_s, connect=retry_policy.connect_s)
    with http_client.client(remote.origin, timeout) as client:
        while True:
            had = fetched_bytes(part)
            try:
                _try_once(client, remote, part, job, parallel=parallel)
                return part
            except RetryableError as again:
                job.check()  # a connection that was shut down because of a cancellation
                parallel &= not isinstance(again, NoRangesError)
                kept = fetched_bytes(part)
                failures = 0 if kept > had else failures + 1
                if failures >= retry_policy.attempts:
                    raise DownloadError(
                        f"{remote.origin}: {again}; gave up after {failures} attempts, "
                        f"{format_bytes(kept)} are kept"
                    ) from again
                pause = retry_policy.pause(failures, again.wait_s)
                job.note(f"{again}; trying again in {pause:.0f} s")
                job.wait(pause)


def _try_once(client: httpx2.Client, remote: Remote, part: Path, job: Job, *, parallel: bool) -> None:
    known = _read_state(part)
    start = _resume_at(known, remote, part)

    @contextmanager
    def open_range(start: int, end: int | None, validator: str) -> Iterator[httpx2.Response]:
        headers = remote.headers | http_client.range_headers(start, end, validator)
        with client.stream("GET", remote.url, headers=headers) as response:
            yield response

    try:
        with open_range(start, None, known.validator) as response:
            if response.status_code == 416 and start:
                _after_416(remote, response, part, start)
                return
            http_client.refuse_status(remote.origin, response)
            _receive(remote, response, part, start, job, open_range if parallel else None)
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        if http_client.is_untrusted(error):
            raise DownloadError(
                f"{remote.origin}: {http_client.describe_transport_error(error)}",
                hint="SSL_CERT_FILE=FILE names the certificates to trust, as a company's proxy needs",
            ) from error
        if isinstance(error, httpx2.ConnectError) and http_client.is_loopback(error.request.url.host):
            raise DownloadError(f"{remote.origin}: nothing listens there ({error})") from error
        raise RetryableError(http_client.describe_transport_error(error)) from error
    except httpx2.TooManyRedirects as error:
        raise DownloadError(f"{remote.origin}: the server redirects for ever") from error


def _read_state(part: Path) -> _PartialState:
    try:
        return msgspec.json.decode(part.with_name(part.name + ".json").read_bytes(), type=_PartialState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return _PartialState(origin="", sha256="")


def _resume_at(known: _PartialState, remote: Remote, part: Path) -> int:
    """Return the first missing byte; the file is removed if its bytes are of another one."""
    same = known.origin == remote.origin and known.sha256 == remote.sha256
    intact = known.boot_id == _boot_id() or not _spans_path(part).exists()
    if not same or not (remote.sha256 or (known.validator and intact)):
        _drop(part)
    spans = _read_spans(part)
    return spans[0][1] if spans and spans[0][0] == 0 else 0


def _receive(
    remote: Remote,
    response: httpx2.Response,
    part: Path,
    start: int,
    job: Job,
    open_range: _OpenRange | None,
) -> None:
    offset, total = http_client.placement(response, start)
    if remote.size_bytes and total is not None and total != remote.size_bytes:
        raise ChecksumError(
            f"{remote.origin} has {total} bytes, not the promised {remote.size_bytes}; nothing was "
            f"fetched"
        )
    if total is not None:
        need_room(part.parent, total - fetched_bytes(part), remote.file_name)
    validator = http_client.validator(response)
    if offset == 0 and _read_state(part).validator not in ("", validator):
        _drop(part)  # the server has another file now
    state = _PartialState(
        origin=remote.origin, sha256=remote.sha256, validator=validator, boot_id=_boot_id()
    )
    write_whole(part.with_name(part.name + ".json"), msgspec.json.encode(state))
    if open_range and total and offset == start and _worth_splitting(state, response, total, part, job):
        pool = _ConnectionPool(state, total, part, open_range)
        pool.run(response, offset, job)
        return
    _truncate_to_first_span(part)
    _receive_whole(response, offset, total, part, job)


def _worth_splitting(
    state: _PartialState, response: httpx2.Response, total: int, part: Path, job: Job
) -> bool:
    """Return whether several connections help: much is missing, and no two files can be mixed."""
    missing = total - fetched_bytes(part)
    known = bool(state.sha256 or state.validator)
    begun = missing >= job.retry_policy.parallel_bytes or _spans_path(part).exists()
    return begun and known and http_client.has_ranges(response)


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
        for chunk in response.iter_raw():
            _write(file.fileno(), chunk, offset)
            offset += len(chunk)
            job.at(offset)
        file.truncate(offset)  # a longer tail of an earlier file ends here
    if total is not None and offset != total:
        raise RetryableError(f"the server sent {offset} of {total} bytes")


def _write(descriptor: int, chunk: bytes | memoryview, offset: int) -> None:
    view = memoryview(chunk)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _after_416(remote: Remote, response: httpx2.Response, part: Path, start: int) -> None:
    """ "Range not satisfiable": the partial file is complete, or longer than the file is now."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    expected = int(total) if total.isdecimal() else remote.size_bytes
    if expected != start:
        _drop(part)
        raise RetryableError("the file on the server is shorter than what is here; starting over")
    _truncate_to_first_span(part)


class _Segment:
    """Bytes that one connection fetches: `at` is the next one, `end` may come nearer meanwhile."""

    def __init__(self, start: int, end: int, span: int) -> None:
        self.start = start
        self.at = start
        self.end = end
        self.span = span
        self.began = time.monotonic()

    @property
    def missing(self) -> int:
        return self.end - self.at

    def is_slow(self) -> bool:
        """Return whether its rest would take longer than another connection should be idle."""
        age = time.monotonic() - self.began
        return age > _IDLE_S and self.missing * age > _IDLE_S * (self.at - self.start)


class _ConnectionPool:
    """The connections of one file, each in a thread. `_state` is held for moments only."""

    def __init__(
        self, remote: _PartialState, size_bytes: int, part: Path, open_range: _OpenRange
    ) -> None:
        spans = _read_spans(part)
        edges = [0, *(edge for span in spans for edge in span), size_bytes]
        self._pending = [
            pair for pair in zip(edges[::2], edges[1::2], strict=True) if pair[0] < pair[1]
        ]
        self._done = sum(end - start for start, end in spans)
        self._remote = remote
        self._size_bytes = size_bytes
        self._part = part
        self._open_range = open_range
        self._spans = _SpanFile(part, spans)
        self._file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._state = threading.Condition()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._last_error: Exception = RetryableError("the connections ended early")
        self._working: list[_Segment] = []
        self._responses: set[httpx2.Response] = set()
        self._notes: list[str] = []
        self._threads: list[threading.Thread] = []

    def run(self, first: httpx2.Response, offset: int, job: Job) -> None:
        """Fetch what is missing of the file; the body of the response `first` begins at `offset`.

        Raises NoRangesError if the server turns out to give no ranges, RetryableError if the file
        changed (nothing of it is kept) or no connection is left, DownloadError and its kin,
        DiskFullError, InterruptedByUser.
        """
        try:
            with self._state:
                segment = self._begin(*self._pending.pop(0))
                assert segment.start == offset
            self._spawn(lambda: self._work(segment, first))
            for _ in range(job.retry_policy.connections - 1):
                self._spawn(self._work)
            while self._is_running():
                notes, self._notes = self._notes, []
                for note in notes:
                    job.note(note)
                job.at(self._done, self._size_bytes)
        finally:
            self._stop()
        if isinstance(self._failure, _ChangedError):
            _drop(self._part)
            raise RetryableError("the server has another file now; starting over")
        if self._failure is not None:
            raise self._failure
        if self._done < self._size_bytes:
            if isinstance(self._last_error, RetryableError | AuthenticationError):
                raise self._last_error
            raise RetryableError(_describe(self._last_error)) from self._last_error
        os.truncate(self._part, self._size_bytes)
        _spans_path(self._part).unlink()
        job.at(self._size_bytes, self._size_bytes)

    def _is_running(self) -> bool:
        """Wait a moment, and return whether there is still work and nothing failed for good."""

        def is_over() -> bool:
            whole = self._done == self._size_bytes
            alive = any(thread.is_alive() for thread in self._threads)
            return whole or not alive or self._failure is not None

        with self._state:
            self._state.wait_for(is_over, _POLL_S)
            return not is_over()

    def _stop(self) -> None:
        """End every connection. Nothing is written afterwards."""
        with self._state:
            self._stopped.set()
            for response in self._responses:
                http_client.hang_up(response)
        until = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # one may still be connecting
            os.close(self._file)
            self._spans.close()

    def _spawn(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                with room_errors(self._part, FETCHED_IS_KEPT):
                    work()
            except BaseException as error:  # noqa: BLE001  # `run` raises it
                with self._state:
                    if self._failure is None and not self._stopped.is_set():
                        self._failure = error
            finally:
                with self._state:
                    self._state.notify_all()

        thread = threading.Thread(target=run, name="pull-range", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, segment: _Segment | None = None, first: httpx2.Response | None = None) -> None:
        """Fetch segments until none is left, or a request fails without a new byte."""
        while not self._stopped.is_set():
            segment = segment or self._take()
            if segment is None:
                if not self._n_fetching():
                    return
                self._stopped.wait(_POLL_S)
                continue
            had = segment.at
            try:
                if first is None:
                    self._request(segment)
                else:
                    self._receive(segment, first)
            except (RetryableError, AuthenticationError, httpx2.TransportError) as error:
                if not self._stopped.is_set() and not self._goes_on(error, segment.at > had):
                    return
            finally:
                self._end(segment)
            segment = first = None

    def _goes_on(self, error: Exception, progressed: bool) -> bool:
        with self._state:
            self._last_error = error
            then = "asking again" if progressed else "one connection less"
            self._notes.append(f"{_describe(error)}; {then}")
        return progressed

    def _n_fetching(self) -> int:
        with self._state:
            return sum(one.missing > 0 for one in self._working)

    def _take(self) -> _Segment | None:
        """Begin the longest pending segment, half of the longest in progress, or a slow one's rest."""
        with self._state:
            if self._pending:
                longest = max(self._pending, key=lambda gap: gap[1] - gap[0])
                self._pending.remove(longest)
                return self._begin(*longest)
            busiest = max(self._working, key=lambda one: one.missing, default=None)
            if busiest is None or busiest.missing == 0:
                return None
            middle = busiest.at + busiest.missing // 2
            if busiest.missing < 2 * _MIN_SEGMENT_BYTES:
                slow = [one for one in self._working if one.missing > 0 and one.is_slow()]
                if not slow:
                    return None
                busiest = slow[0]
                middle = busiest.at
            end, busiest.end = busiest.end, middle
            return self._begin(middle, end)

    def _begin(self, start: int, end: int) -> _Segment:
        segment = _Segment(start, end, self._spans.add(start))
        self._working.append(segment)
        return segment

    def _end(self, segment: _Segment) -> None:
        with self._state:
            self._working.remove(segment)
            if segment.missing > 0:
                self._pending.append((segment.at, segment.end))

    def _request(self, segment: _Segment) -> None:
        with self._open_range(segment.at, segment.end, self._remote.validator) as response:
            if response.status_code == 416:
                raise _ChangedError
            http_client.refuse_status(self._remote.origin, response)
            if self._remote.validator and http_client.validator(response) != self._remote.validator:
                raise _ChangedError
            if response.status_code == 200 and segment.at:
                raise NoRangesError("the server gives no ranges of the file")
            if http_client.placement(response, segment.at)[1] != self._size_bytes:
                raise _ChangedError
            self._receive(segment, response)

    def _receive(self, segment: _Segment, response: httpx2.Response) -> None:
        with self._state:
            self._responses.add(response)
        try:
            for chunk in response.iter_raw():
                if not self._store(segment, chunk):
                    return
            if segment.missing > 0 and not self._stopped.is_set():
                raise RetryableError("the connection was dropped")
        finally:
            with self._state:
                self._responses.discard(response)

    def _store(self, segment: _Segment, chunk: bytes) -> bool:
        """Write and count a chunk; return whether the segment goes on."""
        with self._state:
            if self._stopped.is_set():
                return False
            at = segment.at
            view = memoryview(chunk)[: segment.missing]
            segment.at += len(view)
        _write(self._file, view, at)
        self._spans.grow(segment.span, at + len(view) - segment.start)
        with self._state:
            self._done += len(view)
        return segment.missing > 0


def _describe(error: Exception) -> str:
    return (
        http_client.describe_transport_error(error)
        if isinstance(error, httpx2.TransportError)
        else str(error)
    )


class _SpanFile:
    """The open list of spans of one partial file."""

    def __init__(self, part: Path, spans: list[tuple[int, int]]) -> None:
        entries = b"".join(_ENTRY.pack(start, end - start) for start, end in spans)
        write_whole(_spans_path(part), entries)
        self._file = open(_spans_path(part), "r+b", buffering=0)  # noqa: SIM115  # `close` closes it
        self._n = len(spans)
        self.close = self._file.close

    def add(self, start: int) -> int:
        """Begin an empty span and return its number."""
        number = self._n
        self._n += 1
        os.pwrite(self._file.fileno(), _ENTRY.pack(start, 0), number * _ENTRY.size)
        return number

    def grow(self, number: int, length: int) -> None:
        """Set the length of a span, whose bytes were written before."""
        at = number * _ENTRY.size + _ENTRY.size // 2
        os.pwrite(self._file.fileno(), length.to_bytes(8, "little"), at)


def _spans_path(part: Path) -> Path:
    return part.with_name(part.name + _SPANS)


def fetched_bytes(part: Path) -> int:
    """Count the bytes of the partial file that were fetched."""
    return sum(end - start for start, end in _read_spans(part))


def _read_spans(part: Path) -> list[tuple[int, int]]:
    """Return the fetched spans as (first byte, end), in order, not touching each other.

    Without a list of spans, a partial file is whole from its beginning.
    """
    size = size_or_zero(part)
    try:
        entries = _spans_path(part).read_bytes()
    except FileNotFoundError:
        return [(0, size)] if size else []
    merged: list[tuple[int, int]] = []
    for start, length in sorted(
        _ENTRY.iter_unpack(entries[: len(entries) - len(entries) % _ENTRY.size])
    ):
        end = min(start + length, size)
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _drop(part: Path) -> None:
    """Remove a partial file, then its spans: a kill in between leaves spans of nothing."""
    part.unlink(missing_ok=True)
    _spans_path(part).unlink(missing_ok=True)


def _truncate_to_first_span(part: Path) -> None:
    """Cut the partial file to what is whole from its beginning."""
    if _spans_path(part).exists():
        spans = _read_spans(part)
        if part.exists():
            os.truncate(part, spans[0][1] if spans and spans[0][0] == 0 else 0)
        _spans_path(part).unlink()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return "unknown"
