"""Download one file over HTTP, resumable and over several connections, into a partial file.

`FILE.part.json` says which file the bytes belong to. A download continues only if the server confirms
the file by its own validator (a strong ETag, or Last-Modified), or if its SHA-256 is known and compared
afterwards. Verifying and renaming are the caller's.

Each connection writes one segment. An idle connection takes half of the longest segment in progress, so
that all end together. A refused connection leaves its segment to the others; the last one retries, as a
single connection does. `FILE.part.spans` exists only during such a download: 40 bytes of boot id, then
16 bytes a span, its first byte and its length, little-endian. A length grows after its bytes were
written, so a killed process loses none of them.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx2
import msgspec

from edgeinfer.errors import AuthenticationError, ChecksumError, DownloadError
from edgeinfer.models.fetching import http_client
from edgeinfer.models.fetching.http_client import AgainError, WholeOnlyError
from edgeinfer.models.progress import FETCHED_IS_KEPT, Job, Patience
from edgeinfer.platform.disk import need_room, room_errors, size_or_zero, write_whole
from edgeinfer.units import format_bytes

#: Ask for the bytes from one to before another (None: to the last), if a validator still holds.
_OpenRange = Callable[[int, int | None, str], AbstractContextManager[httpx2.Response]]

_POLL_S = 0.1
_JOIN_TIMEOUT_S = 2.0
#: A short rest that needs longer than this is another connection's to fetch.
_IDLE_S = 3.0
#: A stretch shorter than twice this is not divided: a request costs more.
_MIN_SEGMENT_BYTES = 1 << 18


class _RemoteState(msgspec.Struct, frozen=True):
    """The file as the first answer described it. `checked`: its SHA-256 will be compared."""

    origin: str
    size_bytes: int
    validator: str
    checked: bool


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
        """Whether its rest would take more seconds than another connection should be idle for."""
        age = time.monotonic() - self.began
        return age > _IDLE_S and self.missing * age > _IDLE_S * (self.at - self.start)


class _ChangedError(Exception):
    """The server has another file now."""


def _receive_segments(
    whole: _RemoteState, first: httpx2.Response, offset: int, part: Path, job: Job, opened: _OpenRange
) -> None:
    """Fetch what is missing of `part`, after the answer `first` whose body starts at `offset`.

    Raises WholeOnlyError when the server turns out to give no ranges, AgainError when the file changed
    (nothing of it is kept), DownloadError and its kin, DiskFullError, InterruptedByUser.
    """
    crew = _Pool(whole, part, job.patience, opened)
    try:
        crew.start(first, offset)
        while crew.wait(_POLL_S):
            for note in crew.new_notes():
                job.note(note)
            job.at(crew.done, whole.size_bytes)
    except BaseException:
        crew.stop()
        raise
    crew.stop()
    match crew.failure:
        case None if crew.done < whole.size_bytes:
            raise AgainError("the connections ended early")
        case None:
            os.truncate(part, whole.size_bytes)
            _spans_path(part).unlink()
            job.at(whole.size_bytes, whole.size_bytes)
        case _ChangedError():
            _drop(part)
            raise AgainError("the server has another file now; starting over")
        case failure:
            raise failure


class _Pool:
    """The connections of one file, and what each has to do. `_state` is held for moments only."""

    def __init__(self, whole: _RemoteState, part: Path, patience: Patience, opened: _OpenRange) -> None:
        there = _read_spans(part, checked=whole.checked)
        self.done = sum(end - start for start, end in there)
        self.failure: BaseException | None = None
        self._whole = whole
        self._part = part
        self._patience = patience
        self._opened = opened
        self._left = _missing_segments(there, whole.size_bytes)
        self._spans = _SpanFile(part, there)
        self._file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._state = threading.Condition()
        self._stopped = threading.Event()
        self._working: list[_Segment] = []
        self._answers: set[httpx2.Response] = set()
        self._notes: list[str] = []
        self._threads: list[threading.Thread] = []
        self._n_alive = 0

    # --- from outside

    def start(self, first: httpx2.Response, offset: int) -> None:
        """Begin: one connection goes on with `first`, the others ask for their own."""
        with self._state:
            stretch = self._begin(*self._left.pop(0))
            assert stretch.start == offset
        self._spawn(lambda: self._goes_on(stretch, first))
        for _ in range(self._patience.connections - 1):
            self._spawn(self._work)

    def wait(self, seconds: float) -> bool:
        """Wait a moment; whether there is still work, and nothing failed for good."""
        with self._state:
            self._state.wait_for(self._is_over, seconds)
            return not self._is_over()

    def _is_over(self) -> bool:
        whole = self.done == self._whole.size_bytes
        return whole or self._n_alive == 0 or self.failure is not None

    def new_notes(self) -> list[str]:
        """What a person should know, once."""
        with self._state:
            notes, self._notes = self._notes, []
        return notes

    def stop(self) -> None:
        """End every connection. Nothing is written afterwards."""
        with self._state:
            self._stopped.set()
            for response in self._answers:
                http_client.hang_up(response)
        until = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # one may still be connecting
            os.close(self._file)
            self._spans.close()

    # --- each connection, in a thread of its own

    def _spawn(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                with room_errors(self._part, FETCHED_IS_KEPT):
                    work()
            except BaseException as error:  # noqa: BLE001  # whoever waits raises it
                self._fail(error)
            finally:
                with self._state:
                    self._n_alive -= 1
                    self._state.notify_all()

        thread = threading.Thread(target=run, name="pull-range", daemon=True)
        self._threads.append(thread)
        with self._state:
            self._n_alive += 1
        thread.start()

    def _fail(self, error: BaseException) -> None:
        with self._state:
            if self.failure is None and not self._stopped.is_set():
                self.failure = error

    def _goes_on(self, stretch: _Segment, first: httpx2.Response) -> None:
        try:
            self._pour(stretch, first)
        except (AgainError, httpx2.TransportError) as error:
            self._say(f"{_describe(error)}; asking again")
        if self._finish(stretch):
            self._work()

    def _work(self) -> None:
        while not self._stopped.is_set():
            stretch = self._take()
            if stretch is None:
                if not self._n_fetching():
                    return
                self._stopped.wait(_POLL_S)
            elif not self._finish(stretch):
                return

    def _n_fetching(self) -> int:
        with self._state:
            return sum(one.missing > 0 for one in self._working)

    def _take(self) -> _Segment | None:
        """The longest stretch that nobody works on, half of the longest, or a slow one's whole rest."""
        with self._state:
            if self._stopped.is_set():
                return None
            if self._left:
                longest = max(self._left, key=lambda gap: gap[1] - gap[0])
                self._left.remove(longest)
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
        stretch = _Segment(start, end, self._spans.add(start))
        self._working.append(stretch)
        return stretch

    def _finish(self, stretch: _Segment) -> bool:
        """Fetch the stretch to its end; False: the server refuses it, and others have the rest."""
        failures = 0
        try:
            while stretch.missing > 0 and not self._stopped.is_set():
                had = stretch.at
                try:
                    self._ask(stretch)
                except (AgainError, httpx2.TransportError, AuthenticationError) as error:
                    failures = 0 if stretch.at > had else failures + 1
                    if self._leaves(stretch, error, failures):
                        return False
                    pause = self._patience.pause(failures, getattr(error, "wait_s", 0.0))
                    self._say(f"{_describe(error)}; trying again in {pause:.0f} s")
                    self._stopped.wait(pause)
            return True
        finally:
            with self._state:
                self._working.remove(stretch)

    def _ask(self, stretch: _Segment) -> None:
        with self._opened(stretch.at, stretch.end, self._whole.validator) as response:
            self._refuse(response, stretch.at)
            self._pour(stretch, response)

    def _refuse(self, response: httpx2.Response, start: int) -> None:
        if response.status_code == 416:
            raise _ChangedError
        http_client.refuse_status(self._whole.origin, response)
        now = http_client.validator(response)
        if self._whole.validator and now != self._whole.validator:
            raise _ChangedError
        if response.status_code == 200 and start:
            raise WholeOnlyError("the server gives the file as a whole only")
        _, total = http_client.placement(response, start)
        if total != self._whole.size_bytes:
            raise _ChangedError

    def _leaves(self, stretch: _Segment, error: Exception, failures: int) -> bool:
        """Whether this connection ends and leaves its stretch to others. Raises when there are none."""
        refused = isinstance(error, AuthenticationError | WholeOnlyError)
        if not refused and failures < self._patience.attempts:
            return False
        others = self._n_fetching() - (stretch.missing > 0)
        with self._state:
            if others:
                self._left.append((stretch.at, stretch.end))
                self._notes.append(f"{_describe(error)}; one connection less")
                return True
        if refused:
            raise error
        raise DownloadError(
            f"{self._whole.origin}: {_describe(error)}; gave up after {failures} attempts, "
            f"{format_bytes(self.done)} are kept"
        ) from error

    def _pour(self, stretch: _Segment, response: httpx2.Response) -> None:
        with self._state:
            self._answers.add(response)
        try:
            for chunk in response.iter_raw():
                if not self._write(stretch, chunk):
                    return
            if stretch.missing > 0 and not self._stopped.is_set():
                raise AgainError("the connection was dropped")
        finally:
            with self._state:
                self._answers.discard(response)

    def _write(self, stretch: _Segment, chunk: bytes) -> bool:
        """Write and count a piece; whether the stretch goes on."""
        with self._state:
            if self._stopped.is_set():
                return False
            at = stretch.at
            view = memoryview(chunk)[: stretch.missing]
            stretch.at += len(view)
        written = 0
        while written < len(view):
            written += os.pwrite(self._file, view[written:], at + written)
        self._spans.grow(stretch.span, at + written - stretch.start)
        with self._state:
            self.done += written
        return stretch.missing > 0

    def _say(self, note: str) -> None:
        with self._state:
            self._notes.append(note)


def _missing_segments(there: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    edges = [0, *(edge for stretch in there for edge in stretch), size]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def _describe(error: Exception) -> str:
    if isinstance(error, httpx2.TransportError):
        return http_client.describe_trouble(error)
    return str(error)


_SPANS = ".spans"
_HEAD_BYTES = 40
_ENTRY = struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")


def _spans_path(part: Path) -> Path:
    """Where the spans of a partial file are kept."""
    return part.with_name(part.name + _SPANS)


def fetched_bytes(part: Path) -> int:
    """Count the bytes of the partial file that were fetched."""
    return sum(end - start for start, end in _read_spans(part))


def _read_spans(part: Path, *, checked: bool = True) -> list[tuple[int, int]]:
    """The fetched stretches as (first byte, end), in order, not touching each other.

    `checked` is false when nothing will compare the whole file with a digest: what a power cut may have
    lost is not counted then.
    """
    size = size_or_zero(part)
    try:
        content = _spans_path(part).read_bytes()
    except FileNotFoundError:
        return [(0, size)] if size else []
    if not checked and content[:_HEAD_BYTES] != _boot_id():
        return []
    spans = content[_HEAD_BYTES:]
    entries = _ENTRY.iter_unpack(spans[: len(spans) - len(spans) % _ENTRY.size])
    return _merged_spans((start, min(start + length, size)) for start, length in entries)


def _drop(part: Path) -> None:
    """Remove a partial file and what is known of it, in the order that a kill cannot twist."""
    part.unlink(missing_ok=True)
    _spans_path(part).unlink(missing_ok=True)


def _truncate_to_first_span(part: Path, *, checked: bool) -> int:
    """Cut the partial file to what is whole from its beginning; its size then."""
    if _spans_path(part).exists():
        spans = _read_spans(part, checked=checked)
        whole = spans[0][1] if spans and spans[0][0] == 0 else 0
        if part.exists():
            os.truncate(part, whole)
        _spans_path(part).unlink()
    return size_or_zero(part)


class _SpanFile:
    """The open list of spans of one partial file."""

    def __init__(self, part: Path, spans: list[tuple[int, int]]) -> None:
        entries = b"".join(_ENTRY.pack(start, end - start) for start, end in spans)
        write_whole(_spans_path(part), _boot_id() + entries)
        self._file = open(_spans_path(part), "r+b", buffering=0)  # noqa: SIM115  # `close` closes it
        self._n = len(spans)

    def add(self, start: int) -> int:
        """Begin an empty span; its number."""
        number = self._n
        self._n += 1
        os.pwrite(self._file.fileno(), _ENTRY.pack(start, 0), _HEAD_BYTES + number * _ENTRY.size)
        return number

    def grow(self, number: int, length: int) -> None:
        """The span has `length` bytes now, which were written before."""
        at = _HEAD_BYTES + number * _ENTRY.size + _LENGTH.size
        os.pwrite(self._file.fileno(), _LENGTH.pack(length), at)

    def close(self) -> None:
        self._file.close()


def _merged_spans(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _boot_id() -> bytes:
    """This start of the machine, in 40 bytes: what was written since then no power cut has lost."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()[:_HEAD_BYTES].ljust(_HEAD_BYTES)
    except OSError:
        return b"unknown".ljust(_HEAD_BYTES)


PART = ".part"


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """A file on a server; 0 and "" mean unknown. The first host alone gets `headers`."""

    url: str
    file_name: str
    origin: str
    size_bytes: int = 0
    sha256: str = ""
    headers: dict[str, str] = {}


class _PartialState(msgspec.Struct, frozen=True, kw_only=True):
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
            had = fetched_bytes(part)
            try:
                _try_once(client, remote, part, job, alone=alone)
                return part
            except AgainError as again:
                job.check()  # a connection that was shut down because somebody asked to stop
                alone |= isinstance(again, WholeOnlyError)
                failures = 0 if fetched_bytes(part) > had else failures + 1
                if failures >= patience.attempts:
                    raise DownloadError(
                        f"{remote.origin}: {again}; gave up after {failures} attempts, "
                        f"{format_bytes(fetched_bytes(part))} are kept"
                    ) from again
                pause = patience.pause(failures, again.wait_s)
                job.note(f"{again}; trying again in {pause:.0f} s")
                job.wait(pause)


def _try_once(client: httpx2.Client, remote: Remote, part: Path, job: Job, *, alone: bool) -> None:
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


def _read_partial(part: Path) -> _PartialState:
    try:
        return msgspec.json.decode(part.with_name(part.name + ".json").read_bytes(), type=_PartialState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return _PartialState(origin="", sha256="")


def _resume_at(known: _PartialState, remote: Remote, part: Path) -> int:
    """The first byte that is missing; the file is removed when its bytes are of another one."""
    same = known.origin == remote.origin and known.sha256 == remote.sha256
    if not same or not (remote.sha256 or known.validator):
        _drop(part)
    there = _read_spans(part, checked=bool(remote.sha256))
    return there[0][1] if there and there[0][0] == 0 else 0


def _receive(
    remote: Remote,
    response: httpx2.Response,
    part: Path,
    start: int,
    job: Job,
    opened: _OpenRange | None,
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
    if offset == 0 and _read_partial(part).validator not in ("", validator):
        _drop(part)  # the server has another file now
    state = _PartialState(origin=remote.origin, sha256=remote.sha256, validator=validator)
    write_whole(part.with_name(part.name + ".json"), msgspec.json.encode(state))
    if (
        opened
        and total is not None
        and offset == start
        and _worth_splitting(remote, response, total, part, job)
    ):
        whole = _RemoteState(remote.origin, total, validator, bool(remote.sha256))
        _receive_segments(whole, response, offset, part, job, opened)
        return
    _truncate_to_first_span(part, checked=bool(remote.sha256))
    _receive_whole(response, offset, total, part, job)


def _worth_splitting(
    remote: Remote, response: httpx2.Response, total: int, part: Path, job: Job
) -> bool:
    """Whether several connections are of use: much is missing, and no two files can be mixed."""
    missing = total - fetched_bytes(part)
    many = missing >= job.patience.parallel_bytes
    known = bool(remote.sha256 or http_client.validator(response))
    begun = _spans_path(part).exists()
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
        _drop(part)
        raise AgainError("the file on the server is shorter than what is here; starting over")
    _truncate_to_first_span(part, checked=bool(remote.sha256))
