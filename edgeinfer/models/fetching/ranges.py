"""One file over several connections, each of which writes a stretch of its own.

A connection without work takes half of the longest stretch that another still has before it, so that
a slow one is helped and all end together. A connection that is refused leaves its stretch to the
others; the last one is patient, as one connection is. Every byte written is counted in `spans`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx2
import msgspec

from edgeinfer.errors import AuthenticationError, DownloadError
from edgeinfer.models.fetching import http_client, spans
from edgeinfer.models.fetching.http_client import AgainError, WholeOnlyError
from edgeinfer.models.progress import FETCHED_IS_KEPT, Job, Patience
from edgeinfer.system.disk import room_errors
from edgeinfer.units import format_bytes

#: Ask for the bytes from one to before another (None: to the last), if a validator still holds.
Opened = Callable[[int, int | None, str], AbstractContextManager[httpx2.Response]]

_POLL_S = 0.1
_FAREWELL_S = 2.0
#: A short rest that needs longer than this is another connection's to fetch.
_IDLE_S = 3.0
#: A stretch shorter than twice this is not divided: a request costs more.
_SHORTEST = 1 << 18


class Whole(msgspec.Struct, frozen=True):
    """The file as the first answer described it. `checked`: its SHA-256 will be compared."""

    origin: str
    size_bytes: int
    validator: str
    checked: bool


class _Stretch:
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


def receive(
    whole: Whole, first: httpx2.Response, offset: int, part: Path, job: Job, opened: Opened
) -> None:
    """Fetch what is missing of `part`, after the answer `first` whose body starts at `offset`.

    Raises WholeOnlyError when the server turns out to give no ranges, AgainError when the file changed
    (nothing of it is kept), DownloadError and its kin, DiskFullError, InterruptedByUser.
    """
    crew = _Crew(whole, part, job.patience, opened)
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
            spans.place(part).unlink()
            job.at(whole.size_bytes, whole.size_bytes)
        case _ChangedError():
            spans.drop(part)
            raise AgainError("the server has another file now; starting over")
        case failure:
            raise failure


class _Crew:
    """The connections of one file, and what each has to do. `_state` is held for moments only."""

    def __init__(self, whole: Whole, part: Path, patience: Patience, opened: Opened) -> None:
        there = spans.read(part, checked=whole.checked)
        self.done = sum(end - start for start, end in there)
        self.failure: BaseException | None = None
        self._whole = whole
        self._part = part
        self._patience = patience
        self._opened = opened
        self._left = _gaps(there, whole.size_bytes)
        self._spans = spans.SpanFile(part, there)
        self._file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._state = threading.Condition()
        self._stopped = threading.Event()
        self._working: list[_Stretch] = []
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
        until = time.monotonic() + _FAREWELL_S
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

    def _goes_on(self, stretch: _Stretch, first: httpx2.Response) -> None:
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

    def _take(self) -> _Stretch | None:
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
            if busiest.missing < 2 * _SHORTEST:
                slow = [one for one in self._working if one.missing > 0 and one.is_slow()]
                if not slow:
                    return None
                busiest = slow[0]
                middle = busiest.at
            end, busiest.end = busiest.end, middle
            return self._begin(middle, end)

    def _begin(self, start: int, end: int) -> _Stretch:
        stretch = _Stretch(start, end, self._spans.add(start))
        self._working.append(stretch)
        return stretch

    def _finish(self, stretch: _Stretch) -> bool:
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

    def _ask(self, stretch: _Stretch) -> None:
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

    def _leaves(self, stretch: _Stretch, error: Exception, failures: int) -> bool:
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

    def _pour(self, stretch: _Stretch, response: httpx2.Response) -> None:
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

    def _write(self, stretch: _Stretch, chunk: bytes) -> bool:
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


def _gaps(there: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    edges = [0, *(edge for stretch in there for edge in stretch), size]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def _describe(error: Exception) -> str:
    if isinstance(error, httpx2.TransportError):
        return http_client.describe_trouble(error)
    return str(error)
