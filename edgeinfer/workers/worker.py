"""An engine in another process: `RemoteEngine` here, `serve` there, one unix socket between them.

Messages are msgpack with four bytes of length in front. A generation's events come back as they are
made; the other calls answer once. When the worker dies, everything in flight ends with
EngineClosedError; when this side closes, the worker ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from edgeinfer import errors
from edgeinfer.errors import EdgeInferError, EngineClosedError, EngineError
from edgeinfer.host import LoadProgress, Start
from edgeinfer.runtime.events import Event, Finished
from edgeinfer.runtime.generation import EventStream
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo, EngineMetrics
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool

#: What may be called by name, with plain arguments.
CALLS = ("tokenize", "detokenize", "apply_template", "embed", "rerank", "metrics")
MAX_BYTES = 1 << 30
T = TypeVar("T")


class _Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Anything on the wire."""


class Submit(_Frame, frozen=True):
    id: int
    request: GenerateRequest


class Cancel(_Frame, frozen=True):
    id: int


class Call(_Frame, frozen=True):
    id: int
    method: str
    arguments: msgspec.Raw


class Problem(_Frame, frozen=True):
    """An error of ours. `id` 0: the engine did not come to be."""

    id: int
    code: str
    message: str
    hint: str | None = None
    param: str | None = None


class Loading(_Frame, frozen=True):
    stage: str
    fraction: float | None


class Ready(_Frame, frozen=True):
    info: EngineInfo
    start: Start


class Accepted(_Frame, frozen=True):
    id: int


class Item(_Frame, frozen=True):
    id: int
    event: Event


class Answer(_Frame, frozen=True):
    id: int
    value: msgspec.Raw


_ToWorker = Submit | Cancel | Call
_FromWorker = Problem | Loading | Ready | Accepted | Item | Answer
_CLASSES: dict[str, type[EdgeInferError]] = {
    cls.code: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, EdgeInferError)
}


def _problem(number: int, error: EdgeInferError) -> Problem:
    return Problem(number, error.code, error.message, error.hint, getattr(error, "param", None))


def _error(problem: Problem) -> EdgeInferError:
    cls = _CLASSES.get(problem.code, EngineError)
    error = cls(problem.message, hint=problem.hint)
    if problem.param is not None:
        error.param = problem.param  # type: ignore[attr-defined]
    return error


class _Wire:
    """Whole frames over a stream socket. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()

    def send(self, frame: _Frame) -> None:
        """Raises OSError when the other side is gone."""
        with self._sending:
            body = self._encoder.encode(frame)
            self._sock.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
        """The next frame, or None at the end."""
        try:
            head = self._file.read(4)
            size = int.from_bytes(head, "little")
            body = self._file.read(size) if len(head) == 4 and size <= MAX_BYTES else b""
        except OSError:
            return None
        return decoder.decode(body) if body and len(body) == size else None

    def hang_up(self) -> None:
        """From any thread: the side that receives, here and there, comes to the end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the side that receives, when it has come to the end."""
        self.hang_up()
        self._file.close()
        self._sock.close()


class RemoteEngine:
    """The `Engine` of a worker process."""

    def __init__(self, sock: socket.socket, progress: LoadProgress | None = None) -> None:
        """Wait until the worker is ready. Raises what loading raised there, EngineClosedError when it
        died.
        """
        self._wire = _Wire(sock)
        self._decoder = msgspec.msgpack.Decoder(_FromWorker)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._streams: dict[int, EventStream] = {}
        self._waiting: dict[int, queue.SimpleQueue[_FromWorker | EngineClosedError]] = {}
        self._closed = False
        ready = self._handshake(progress)
        self._info, self.start = ready.info, ready.start
        threading.Thread(target=self._read, name=f"worker {ready.info.model}", daemon=True).start()

    def _handshake(self, progress: LoadProgress | None) -> Ready:
        while True:
            frame = self._wire.receive(self._decoder)
            if isinstance(frame, Ready):
                return frame
            if isinstance(frame, Loading):
                if progress is not None:
                    progress(frame.stage, frame.fraction)
                continue
            self._wire.close()
            raise (
                _error(frame)
                if isinstance(frame, Problem)
                else EngineClosedError("the worker died while it started")
            )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: GenerateRequest) -> EventStream:
        """Validate there and queue; see `Engine.submit`."""
        number = next(self._ids)
        stream = EventStream(lambda: self._cancel(number))
        with self._lock:
            self._streams[number] = stream
        try:
            self._ask(number, Submit(number, request))
        except BaseException:
            with self._lock:
                self._streams.pop(number, None)
            raise
        return stream

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        return self._call(
            "tokenize", list[int], text, add_special=add_special, parse_special=parse_special
        )

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return self._call("detokenize", bytes, list(tokens))

    def apply_template(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        return self._call("apply_template", str, list(messages), list(tools))

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        return self._call(
            "embed",
            list[list[float]],
            [text if isinstance(text, str) else list(text) for text in texts],
        )

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        return self._call("rerank", list[float], query, list(documents))

    def metrics(self) -> EngineMetrics:
        return self._call("metrics", EngineMetrics)

    def close(self) -> None:
        """End the worker. Idempotent."""
        self._closed = True
        self._wire.hang_up()

    # --- the wire

    def _call(self, method: str, kind: type[T], *arguments: Any, **named: Any) -> T:
        number = next(self._ids)
        raw = msgspec.Raw(msgspec.msgpack.encode((arguments, named)))
        answer = self._ask(number, Call(number, method, raw))
        assert isinstance(answer, Answer)
        return msgspec.msgpack.decode(answer.value, type=kind)

    def _ask(self, number: int, frame: _Frame) -> _FromWorker:
        box: queue.SimpleQueue[_FromWorker | EngineClosedError] = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                raise self._gone()
            self._waiting[number] = box
        try:
            self._wire.send(frame)
        except OSError as error:
            raise self._gone() from error
        answer = box.get()
        if isinstance(answer, EngineClosedError):
            raise answer
        if isinstance(answer, Problem):
            raise _error(answer)
        return answer

    def _cancel(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._wire.send(Cancel(number))

    def _gone(self) -> EngineClosedError:
        name = self._info.model if hasattr(self, "_info") else "the model"
        return EngineClosedError(
            f"the process of {name} has ended", hint="ask again: it is started anew"
        )

    def _read(self) -> None:
        while (frame := self._wire.receive(self._decoder)) is not None:
            self._dispatch(frame)
        with self._lock:
            self._closed = True
            streams, self._streams = list(self._streams.values()), {}
            waiting, self._waiting = list(self._waiting.values()), {}
        for stream in streams:
            stream.put(self._gone())
        for box in waiting:
            box.put(self._gone())
        self._wire.close()

    def _dispatch(self, frame: Any) -> None:
        if isinstance(frame, Item):
            ended = isinstance(frame.event, Finished)
            with self._lock:
                stream = self._streams.pop(frame.id, None) if ended else self._streams.get(frame.id)
            if stream is not None:
                stream.put(frame.event)
            return
        with self._lock:
            box = self._waiting.pop(frame.id, None)
            stream = self._streams.pop(frame.id, None) if box is None else None
        if box is not None:
            box.put(frame)
        elif stream is not None and isinstance(frame, Problem):
            error = _error(frame)
            stream.put(
                error if isinstance(error, EngineError) else EngineError(error.message, hint=error.hint)
            )


def serve(sock: socket.socket, start: Start, load: Callable[[LoadProgress], Engine]) -> None:
    """Load the engine, then answer the other side until it closes the socket."""
    wire = _Wire(sock)
    with contextlib.suppress(OSError):  # the other side is gone: so are we
        try:
            engine = load(lambda stage, fraction: wire.send(Loading(stage, fraction)))
        except EdgeInferError as error:
            wire.send(_problem(0, error))
        else:
            wire.send(Ready(engine.info, start))
            _Server(wire, engine).run()
    wire.close()


class _Server:
    """The worker's side."""

    def __init__(self, wire: _Wire, engine: Engine) -> None:
        self._wire, self._engine = wire, engine
        self._running: dict[int, Any] = {}
        self._calls = ThreadPoolExecutor(4, "calls")

    def run(self) -> None:
        decoder = msgspec.msgpack.Decoder(_ToWorker)
        while (frame := self._wire.receive(decoder)) is not None:
            if isinstance(frame, Submit):
                self._submit(frame)
            elif isinstance(frame, Cancel):
                generation = self._running.get(frame.id)
                if generation is not None:
                    generation.cancel()
            else:
                self._calls.submit(self._guarded, frame.id, functools.partial(self._call, frame))
        self._calls.shutdown(wait=False, cancel_futures=True)

    def _submit(self, frame: Submit) -> None:
        try:
            generation = self._engine.submit(frame.request)
        except EdgeInferError as error:
            self._wire.send(_problem(frame.id, error))
            return
        self._running[frame.id] = generation
        self._wire.send(Accepted(frame.id))
        pump = functools.partial(self._pump, frame.id, generation)
        threading.Thread(target=self._guarded, args=(frame.id, pump), daemon=True).start()

    def _pump(self, number: int, generation: Any) -> None:
        try:
            for event in generation:
                self._wire.send(Item(number, event))
        finally:
            self._running.pop(number, None)

    def _call(self, frame: Call) -> None:
        if frame.method not in CALLS:
            raise EngineError(f"a worker has no {frame.method}")
        arguments, named = msgspec.msgpack.decode(frame.arguments)
        if frame.method == "apply_template":
            arguments = [
                msgspec.convert(arguments[0], list[Message]),
                msgspec.convert(arguments[1], list[Tool]),
            ]
        value = getattr(self._engine, frame.method)(*arguments, **named)
        self._wire.send(Answer(frame.id, msgspec.Raw(msgspec.msgpack.encode(value))))

    def _guarded(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except EdgeInferError as error:
            with contextlib.suppress(OSError):
                self._wire.send(_problem(number, error))
        except OSError:  # the other side is gone; `run` ends too
            pass
