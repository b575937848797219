"""An engine in a worker process: the client (`RemoteEngine`) and the server (`serve_engine`).

Client and server exchange msgpack messages over a socket, each preceded by its length (4 bytes, little
endian). A worker sends the events of a generation as they occur, and one result for any other call. If
the worker dies, all running requests end with EngineClosedError. If the client closes the socket, the
worker stores its pending KV blocks on the disk and ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from edgeinfer.errors import EdgeInferError, EngineClosedError, EngineError, from_fields, to_fields
from edgeinfer.host import LoadProgress, ProcessStart
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import Event, Finished
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import Adapter, EngineInfo, EngineMetrics
from edgeinfer.runtime.requests import GenerateRequest

MAX_BYTES = 1 << 30


class Frame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message between the client (`RemoteEngine`) and the worker process (`serve_engine`)."""


class Submit(Frame, frozen=True):
    id: int
    request: GenerateRequest


class Cancel(Frame, frozen=True):
    id: int


class Call(Frame, frozen=True):
    id: int
    method: str
    arguments: msgspec.Raw


class CallFailed(Frame, frozen=True):
    """The error of the call `id`, in the form of `errors.to_fields`. `id` is 0 if loading failed."""

    id: int
    error: dict[str, str]


class Loading(Frame, frozen=True):
    stage: str
    fraction: float | None


class Ready(Frame, frozen=True):
    info: EngineInfo
    start: ProcessStart


class Accepted(Frame, frozen=True):
    id: int


class StreamEvent(Frame, frozen=True):
    id: int
    event: Event


class CallResult(Frame, frozen=True):
    id: int
    value: msgspec.Raw


ToWorker = Submit | Cancel | Call
FromWorker = CallFailed | Loading | Ready | Accepted | StreamEvent | CallResult


class FrameSocket:
    """Sends and receives frames over a stream socket. Only one thread may receive; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Send one frame. Raises OSError if the other process has ended."""
        with self._sending:
            body = self._encoder.encode(frame)
            self._sock.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
        """Wait for the next frame; return None if the other side has closed the socket."""
        try:
            head = self._file.read(4)
            size = int.from_bytes(head, "little")
            body = self._file.read(size) if len(head) == 4 and size <= MAX_BYTES else b""
        except OSError:
            return None
        return decoder.decode(body) if body and len(body) == size else None

    def finish(self) -> None:
        """Tell the other side that no more frames follow. Frames can still be received."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """Shut the socket down, so that `receive` returns None on both sides. Thread-safe."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only the receiving thread may call this, after `receive` returned None."""
        self.hang_up()
        self._file.close()
        self._sock.close()


T = TypeVar("T")

#: Time (s) that `close` gives a worker to store its pending KV blocks.
_END_S = 30.0


def _forwarding(method: str, kind: type[T]) -> Callable[..., T]:
    def call(engine: ForwardingEngine, /, *arguments: Any, **named: Any) -> T:
        return engine._forward(method, kind, *arguments, **named)

    return call


class ForwardingEngine:
    """Base class of engines that pass each method call to another engine, by a subclass's `_forward`.

    The methods have the parameters and results that `Engine` declares.
    """

    def _forward(self, method: str, kind: type[T], *arguments: Any, **named: Any) -> T:
        raise NotImplementedError

    tokenize = _forwarding("tokenize", list[int])
    detokenize = _forwarding("detokenize", bytes)
    tokenize_chat = _forwarding("tokenize_chat", list[int])
    embed = _forwarding("embed", list[list[float]])
    rerank = _forwarding("rerank", list[float])
    agent_prefix = _forwarding("agent_prefix", list[int])


class RemoteEngine(ForwardingEngine):
    """An `Engine` that passes each method call to the engine in a worker process."""

    def __init__(self, sock: socket.socket, progress: LoadProgress | None = None) -> None:
        """Wait until the worker is ready. Raises what loading raises, and EngineClosedError."""
        self._wire = FrameSocket(sock)
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._streams: dict[int, EventStream] = {}
        self._waiting: dict[int, Future[FromWorker]] = {}
        self._closed = False
        ready = self._handshake(progress)
        self._info = ready.info
        self.start = ready.start
        name = f"worker {ready.info.model}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

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
            if isinstance(frame, CallFailed):
                raise from_fields(frame.error)
            raise EngineClosedError(
                "the worker process died before its model was loaded",
                hint="check that memory is free (`edgeinfer doctor`), then run the command again",
            )

    @property
    def is_open(self) -> bool:
        """Return whether the worker is running and `close` was not called."""
        return not self._closed

    def health(self) -> str:
        """Return "the process of MODEL has ended", or "" while the worker runs.

        The worker also ends if its decode loop fails.
        """
        return self._gone_error().message if self._closed else ""

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: GenerateRequest) -> EventStream:
        """Submit a request to the worker's engine.

        Raises what `Engine.submit` raises, and EngineClosedError if the worker has ended.
        """
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

    def use_adapters(self, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
        loaded = self._forward("use_adapters", tuple[Adapter, ...], list(adapters))
        self._info = msgspec.structs.replace(self._info, lora=loaded)
        return loaded

    metrics = _forwarding("metrics", EngineMetrics)
    #: Sets the number of decode threads, from the next decode step on.
    use_threads = _forwarding("use_threads", type(None))

    def close(self) -> None:
        """End the worker, which may store its pending KV blocks for up to `_END_S`. Idempotent."""
        self._closed = True
        self._wire.finish()
        self._reader.join(_END_S)
        self._wire.hang_up()

    def _forward(self, method: str, kind: type[T], *arguments: Any, **named: Any) -> T:
        number = next(self._ids)
        raw = msgspec.Raw(msgspec.msgpack.encode((arguments, named)))
        answer = self._ask(number, Call(number, method, raw))
        assert isinstance(answer, CallResult)
        return msgspec.msgpack.decode(answer.value, type=kind)

    def _ask(self, number: int, frame: Frame) -> FromWorker:
        answer: Future[FromWorker] = Future()
        with self._lock:
            if self._closed:
                raise self._gone_error()
            self._waiting[number] = answer
        try:
            self._wire.send(frame)
        except OSError as error:
            raise self._gone_error() from error
        return answer.result()

    def _cancel(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._wire.send(Cancel(number))

    def _gone_error(self) -> EngineClosedError:
        name = self._info.model if hasattr(self, "_info") else "the model"
        hint = "send the request again: a new process will be started"
        return EngineClosedError(f"the process of {name} has ended", hint=hint)

    def _read(self) -> None:
        while (frame := self._wire.receive(self._decoder)) is not None:
            self._dispatch(frame)
        with self._lock:
            self._closed = True
            streams, self._streams = list(self._streams.values()), {}
            waiting, self._waiting = list(self._waiting.values()), {}
        for stream in streams:
            stream.put(self._gone_error())
        for answer in waiting:
            answer.set_exception(self._gone_error())
        self._wire.close()

    def _dispatch(self, frame: Any) -> None:
        if isinstance(frame, StreamEvent):
            is_last = isinstance(frame.event, Finished)
            with self._lock:
                stream = self._streams.pop(frame.id, None) if is_last else self._streams.get(frame.id)
            if stream is not None:
                stream.put(frame.event)
            return
        with self._lock:
            answer = self._waiting.pop(frame.id, None)
            stream = self._streams.pop(frame.id, None) if answer is None else None
        error = from_fields(frame.error) if isinstance(frame, CallFailed) else None
        if answer is not None and error is None:
            answer.set_result(frame)
        elif answer is not None:
            answer.set_exception(error)
        elif stream is not None and error is not None:
            if not isinstance(error, EngineError):
                error = EngineError(error.message, hint=error.hint)
            stream.put(error)


#: Methods of `Engine` that the worker's client may call. Msgpack encodes their arguments and results.
CALLS = """
    tokenize detokenize tokenize_chat embed rerank agent_prefix use_adapters metrics
    use_threads
""".split()


def serve_engine(
    sock: socket.socket, load: Callable[[LoadProgress], tuple[Engine, ProcessStart]]
) -> None:
    """Load an engine, and run it for the client until the client closes the socket.

    The client sends frames such as `Submit`, `Cancel` and `Call`. `load` gets a callback for its
    progress; it returns the engine, and whether this process was resumed or started cold. If loading
    fails, the client gets the error.
    """
    wire = FrameSocket(sock)
    with contextlib.suppress(OSError):  # the client has ended: this process ends, too
        try:
            engine, start = load(lambda stage, fraction: wire.send(Loading(stage, fraction)))
        except EdgeInferError as error:
            wire.send(CallFailed(0, to_fields(error)))
        else:
            wire.send(Ready(engine.info, start))
            _Server(wire, engine).run()
            engine.close()  # stores pending KV blocks, for which the client waits
    wire.close()


class _Server:
    def __init__(self, wire: FrameSocket, engine: Engine) -> None:
        self._wire, self._engine = wire, engine
        self._running: dict[int, Any] = {}
        self._preparing: set[threading.Thread] = set()
        self._calls = ThreadPoolExecutor(4, "calls")

    def run(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToWorker)
        while (frame := self._wire.receive(decoder)) is not None:
            if isinstance(frame, Submit):
                # each request gets a thread: `submit` may take a minute for a schema or a picture
                work = functools.partial(self._generate, frame)
                thread = threading.Thread(
                    target=self._answer_errors, args=(frame.id, work), name="generation", daemon=True
                )
                self._preparing.add(thread)
                thread.start()
            elif isinstance(frame, Cancel):
                generation = self._running.get(frame.id)
                if generation is not None:
                    generation.cancel()
            else:
                self._calls.submit(self._answer_errors, frame.id, functools.partial(self._call, frame))
        self._calls.shutdown(wait=True, cancel_futures=True)
        for thread in tuple(self._preparing):  # wait, because the caller closes the engine next
            thread.join()

    def _generate(self, frame: Submit) -> None:
        try:
            generation = self._running[frame.id] = self._engine.submit(frame.request)
        finally:
            self._preparing.discard(threading.current_thread())
        try:
            self._wire.send(Accepted(frame.id))
            for event in generation:
                self._wire.send(StreamEvent(frame.id, event))
        finally:
            self._running.pop(frame.id, None)

    def _call(self, frame: Call) -> None:
        if frame.method not in CALLS:
            raise EngineError(
                f"the model's process has no method {frame.method}: it may be of another version",
                hint="stop all processes of edgeinfer, then run the command again",
            )
        arguments, named = msgspec.msgpack.decode(frame.arguments)
        if frame.method == "tokenize_chat":
            arguments = [msgspec.convert(arguments[0], GenerateRequest)]
        elif frame.method == "use_adapters":
            arguments = [msgspec.convert(arguments[0], list[Adapter])]
        value = getattr(self._engine, frame.method)(*arguments, **named)
        self._wire.send(CallResult(frame.id, msgspec.Raw(msgspec.msgpack.encode(value))))

    def _answer_errors(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except EdgeInferError as error:
            with contextlib.suppress(OSError):
                self._wire.send(CallFailed(number, to_fields(error)))
        except OSError:  # the client has ended: `run` notices that, too
            pass
        except Exception as error:  # noqa: BLE001  without a reply the client would wait forever
            defect = EngineError(f"a defect of edgeinfer in the model's process: {error!r}")
            with contextlib.suppress(OSError):
                self._wire.send(CallFailed(number, to_fields(defect)))
            traceback.print_exc()
        finally:
            if self._engine.health():  # the decode loop has failed: end, so that another worker starts
                self._wire.hang_up()
