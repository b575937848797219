"""The worker's side: an engine that answers one other process over a socket."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from edgeinfer.errors import EdgeInferError, EngineError, to_fields
from edgeinfer.host import LoadProgress, Start
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import Adapter
from edgeinfer.runtime.requests import Message, Tool
from edgeinfer.workers.wire import (
    Accepted,
    Answer,
    Call,
    Cancel,
    Item,
    Loading,
    Problem,
    Ready,
    Submit,
    ToWorker,
    Wire,
)

#: What may be called by name, with plain arguments.
CALLS = (
    "tokenize",
    "detokenize",
    "apply_template",
    "tokenize_chat",
    "embed",
    "rerank",
    "begun_with",
    "use_adapters",
    "metrics",
    "use_threads",
)


def serve(sock: socket.socket, start: Start, load: Callable[[LoadProgress], Engine]) -> None:
    """Load the engine, then answer the other side until it closes the socket."""
    wire = Wire(sock)
    with contextlib.suppress(OSError):  # the other side is gone: so are we
        try:
            engine = load(lambda stage, fraction: wire.send(Loading(stage, fraction)))
        except EdgeInferError as error:
            wire.send(Problem(0, to_fields(error)))
        else:
            wire.send(Ready(engine.info, start))
            _Server(wire, engine).run()
            engine.close()  # writes what was computed; the other side waits for the end of the socket
    wire.close()


class _Server:
    def __init__(self, wire: Wire, engine: Engine) -> None:
        self._wire, self._engine = wire, engine
        self._running: dict[int, Any] = {}
        self._calls = ThreadPoolExecutor(4, "calls")

    def run(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToWorker)
        while (frame := self._wire.receive(decoder)) is not None:
            if isinstance(frame, Submit):
                self._submit(frame)
            elif isinstance(frame, Cancel):
                generation = self._running.get(frame.id)
                if generation is not None:
                    generation.cancel()
            else:
                self._calls.submit(self._guarded, frame.id, functools.partial(self._call, frame))
        self._calls.shutdown(wait=True, cancel_futures=True)

    def _submit(self, frame: Submit) -> None:
        try:
            generation = self._engine.submit(frame.request)
        except EdgeInferError as error:
            self._wire.send(Problem(frame.id, to_fields(error)))
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
        if frame.method in ("apply_template", "tokenize_chat"):
            arguments = [
                msgspec.convert(arguments[0], list[Message]),
                msgspec.convert(arguments[1], list[Tool]),
                arguments[2],
            ]
        elif frame.method == "use_adapters":
            arguments = [msgspec.convert(arguments[0], list[Adapter])]
        value = getattr(self._engine, frame.method)(*arguments, **named)
        self._wire.send(Answer(frame.id, msgspec.Raw(msgspec.msgpack.encode(value))))

    def _guarded(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except EdgeInferError as error:
            with contextlib.suppress(OSError):
                self._wire.send(Problem(number, to_fields(error)))
        except OSError:  # the other side is gone; `run` ends too
            pass
        finally:
            if self._engine.health():  # the process ends, and the other side starts another
                self._wire.hang_up()
