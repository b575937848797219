"""The engine of a worker process, as the process sees it that asked for the worker.

When the worker dies, everything in flight ends with EngineClosedError; when this side closes, the
worker writes what it has computed, and ends.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from edgeinfer.errors import EngineClosedError, EngineError, from_fields
from edgeinfer.host import LoadProgress
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.generation import EventStream
from edgeinfer.runtime.options import Adapter, EngineInfo, EngineMetrics
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool
from edgeinfer.workers.wire import (
    Answer,
    Call,
    Cancel,
    Frame,
    FromWorker,
    Item,
    Loading,
    Problem,
    Ready,
    Submit,
    Wire,
)

T = TypeVar("T")

#: A worker that is asked to end has this long (seconds) to write what it has computed.
_END_S = 30.0


class RemoteEngine:
    """The `Engine` of a worker process."""

    def __init__(self, sock: socket.socket, progress: LoadProgress | None = None) -> None:
        """Wait for the worker. Raises what loading raised there, EngineClosedError."""
        self._wire = Wire(sock)
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._streams: dict[int, EventStream] = {}
        self._waiting: dict[int, queue.SimpleQueue[FromWorker | EngineClosedError]] = {}
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
            if isinstance(frame, Problem):
                raise from_fields(frame.error)
            raise EngineClosedError("the worker died while it started")

    @property
    def is_open(self) -> bool:
        """Whether the worker runs and was not asked to end."""
        return not self._closed

    def health(self) -> str:
        """See `Engine.health`: a worker whose decode loop has failed ends."""
        return self._gone().message if self._closed else ""

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

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: dict[str, Any] | None = None,
    ) -> str:
        return self._call("apply_template", str, list(messages), list(tools), options or {})

    def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: dict[str, Any] | None = None,
    ) -> list[int]:
        return self._call("tokenize_chat", list[int], list(messages), list(tools), options or {})

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        return self._call(
            "embed",
            list[list[float]],
            [text if isinstance(text, str) else list(text) for text in texts],
        )

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        return self._call("rerank", list[float], query, list(documents))

    def begun_with(self, agent: str, salt: str = "") -> list[int]:
        return self._call("begun_with", list[int], agent, salt)

    def use_adapters(self, wanted: Sequence[Adapter]) -> tuple[Adapter, ...]:
        loaded = self._call("use_adapters", tuple[Adapter, ...], list(wanted))
        self._info = msgspec.structs.replace(self._info, lora=loaded)
        return loaded

    def metrics(self) -> EngineMetrics:
        return self._call("metrics", EngineMetrics)

    def use_threads(self, n_threads: int) -> None:
        """Decode with so many threads from the next step on."""
        self._call("use_threads", type(None), n_threads)

    def close(self) -> None:
        """End the worker, and wait until it has written what it has computed. Idempotent."""
        self._closed = True
        self._wire.finish()
        self._reader.join(_END_S)
        self._wire.hang_up()

    # --- the wire

    def _call(self, method: str, kind: type[T], *arguments: Any, **named: Any) -> T:
        number = next(self._ids)
        raw = msgspec.Raw(msgspec.msgpack.encode((arguments, named)))
        answer = self._ask(number, Call(number, method, raw))
        assert isinstance(answer, Answer)
        return msgspec.msgpack.decode(answer.value, type=kind)

    def _ask(self, number: int, frame: Frame) -> FromWorker:
        box: queue.SimpleQueue[FromWorker | EngineClosedError] = queue.SimpleQueue()
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
            raise from_fields(answer.error)
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
            error = from_fields(frame.error)
            stream.put(
                error if isinstance(error, EngineError) else EngineError(error.message, hint=error.hint)
            )
