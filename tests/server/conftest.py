"""A served endpoint on a real socket, in a thread of the test's process, around a scripted or a real
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from made_models import make_llama
from other_processes import wait_until

from edgeinfer.host import Host, LoadProgress
from edgeinfer.runtime import fake
from edgeinfer.runtime.fake import FakeEngine
from edgeinfer.runtime.interface import Engine
from edgeinfer.server.answer_journal import AnswerJournal
from edgeinfer.server.batches import Batches
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.guards import sockets
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.lifecycle import EndpointServer, RunOptions, ServeOutcome
from edgeinfer.server.limits import Limits
from edgeinfer.server.logs import Log
from edgeinfer.server.model_pool import (
    AvailableModel,
    LoadedEngine,
    ModelAdministrator,
    ModelPool,
    ModelSources,
)
from edgeinfer.server.payload_log import PayloadLog

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@dataclass
class Setup:
    """How to serve. `load` makes the engine of a name; `engine` is the default model's, unless `load`
    is given.
    """

    engine: Engine | None = None
    load: Callable[[str, LoadProgress], LoadedEngine] | None = None
    names: Sequence[str] = ("fake",)
    gate: Gate = field(default_factory=lambda: Gate(keys=Keys([])))
    limits: Limits = field(default_factory=Limits)
    keep_alive_s: float = 300.0
    room_s: float = 60.0
    available_bytes: Callable[[], int] = lambda: 1 << 50
    options: RunOptions = field(default_factory=RunOptions)
    payloads: PayloadLog | None = None
    host: str = "127.0.0.1"
    pulled: Callable[[], Sequence[AvailableModel]] | None = None
    model_admin: ModelAdministrator | None = None
    wait_ready: bool = True
    refuse_unknown: bool = False
    aliases: dict[str, str] = field(default_factory=dict)
    store_responses: bool = False
    batches: Path | None = None


@dataclass
class Served:
    """A running endpoint."""

    url: str
    port: int
    endpoint: Endpoint
    server: EndpointServer
    loop: asyncio.AbstractEventLoop
    log: io.StringIO
    thread: threading.Thread
    ended: list[ServeOutcome | BaseException]
    client: httpx2.Client
    #: Runs requests beside the test.
    pool: ThreadPoolExecutor

    def drain(self, why: str = "SIGTERM") -> None:
        self.loop.call_soon_threadsafe(self.server.drain, why)

    def wait_ended(self) -> ServeOutcome:
        self.thread.join(30)
        assert not self.thread.is_alive(), "the endpoint did not end"
        (ended,) = self.ended
        assert isinstance(ended, ServeOutcome), ended
        return ended

    def chat(self, **body: Any) -> httpx2.Response:
        return self.client.post(CHAT, json={"messages": HI} | body)

    def stream(self, **body: Any) -> contextlib.AbstractContextManager[httpx2.Response]:
        """Open the stream of an answer, to be read piece by piece."""
        return self.client.stream("POST", CHAT, json={"messages": HI, "stream": True} | body)

    def begin(self, gate: fake.StepGate, **body: Any) -> Future[httpx2.Response]:
        """Ask in a thread; return once the scripted answer waits at `gate`."""
        asking = self.pool.submit(self.chat, **body)
        assert gate.reached.wait(20)
        return asking

    def events(self, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
        """Stream an answer; return names and data of its events, without comments and `[DONE]`."""
        text = self.client.post(path, json=body | {"stream": True}).text
        found = []
        for block in text.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] not in ":")
            if fields.get("data", "[DONE]") != "[DONE]":
                found.append((fields.get("event", ""), json.loads(fields["data"])))
        return found


@contextlib.contextmanager
def served(setup: Setup) -> Iterator[Served]:
    """Serve until the block ends."""
    engine = setup.engine or FakeEngine()
    names = list(setup.names)
    load = setup.load or (lambda name, progress: LoadedEngine(engine=engine))
    log = io.StringIO()
    (listener,) = sockets.bind(setup.host, 0)[:1]
    started = threading.Event()
    box: dict[str, Any] = {}
    ended: list[ServeOutcome | BaseException] = []

    async def main() -> ServeOutcome:
        sources = ModelSources(
            load=load,
            pulled=setup.pulled or (lambda: [AvailableModel(name=n, size_bytes=1) for n in names]),
            available_bytes=setup.available_bytes,
        )
        models = ModelPool(
            sources,
            default=names[0],
            keep_alive_s=setup.keep_alive_s,
            room_s=setup.room_s,
            aliases=setup.aliases,
        )
        endpoint = Endpoint(
            models,
            setup.limits,
            Log("json", log),
            Host(),
            payloads=setup.payloads,
            refuse_unknown=setup.refuse_unknown,
            journal=AnswerJournal(setup.limits) if setup.store_responses else None,
            batches=Batches(setup.batches) if setup.batches else None,
            model_admin=setup.model_admin,
        )
        server = EndpointServer(endpoint, setup.gate, [listener], setup.options)
        box.update(endpoint=endpoint, loop=asyncio.get_running_loop(), server=server)
        started.set()
        return await server.run()

    def body() -> None:
        try:
            ended.append(asyncio.run(main()))
        except BaseException as error:  # kept for the test to see
            ended.append(error)
            started.set()

    port = listener.getsockname()[1]
    scheme = "https" if setup.options.tls_cert else "http"
    thread = threading.Thread(target=body, name="served")
    thread.start()
    assert started.wait(20)
    assert not ended, ended
    url = f"{scheme}://127.0.0.1:{port}"
    with (
        ThreadPoolExecutor(32) as pool,
        httpx2.Client(base_url=url, timeout=30, verify=scheme == "http") as client,
    ):
        here = Served(
            url, port, box["endpoint"], box["server"], box["loop"], log, thread, ended, client, pool
        )
        try:
            if setup.wait_ready and setup.options.preload:
                wait_until(lambda: '"ready"' in log.getvalue() or ended, "the endpoint to be ready")
            yield here
        finally:
            if thread.is_alive():
                here.drain()
                here.drain()
            thread.join(30)
            assert not thread.is_alive(), "the endpoint did not end"
            assert all(isinstance(e, ServeOutcome) for e in ended), ended


def _starter() -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:

        def start(engine: Engine | None = None, **fields: Any) -> Served:
            return stack.enter_context(served(Setup(engine=engine, **fields)))

        yield start


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """`serve(engine, ...)`: an endpoint for this test, with `Setup`'s fields as keywords."""
    yield from _starter()


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Callable[..., Served]]:
    """The same for all tests of a file."""
    yield from _starter()


def exchange_raw(port: int, request: bytes, seconds: float = 20) -> bytes:
    """Send bytes, return everything until the endpoint closes (or a whole answer without a body to come
    is there).
    """
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(seconds)
        with contextlib.suppress(
            ConnectionError
        ):  # closed while we were still sending: what it said is still to be read
            client.sendall(request)
        reply = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65_536):
                reply += piece
                head, _, body = reply.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                if length and len(body) >= int(length[1]):
                    break
        return reply


@pytest.fixture(scope="session")
def raw_exchange() -> Callable[..., bytes]:
    """`raw_exchange(port, request)`: bytes in, bytes out."""
    return exchange_raw


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.setfsuid(65_534)  # of this thread alone
    try:
        yield
    finally:
        libc.setfsuid(0)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """`with stranger():` makes sockets that are another user's, as this program sees it."""
    own = os.getuid()
    if own == 0:
        return _as_nobody
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    return contextlib.nullcontext


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """`until(condition, what)`: wait for a condition."""
    return wait_until


@pytest.fixture(scope="session")
def real(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The real small model, served once for all tests that only ask it things."""
    from edgeinfer.runtime.engine import load_engine
    from edgeinfer.runtime.options import LoadOptions, ModelFiles

    files = ModelFiles(name="smollm2", paths=(str(smollm2),), sha256="ab" * 32)
    engine = load_engine(files, LoadOptions(n_ctx=4096, n_parallel=4, n_threads=1), None)
    with served(Setup(engine=engine, names=("smollm2",), aliases={"*": ""})) as here:
        yield here


@pytest.fixture
def chatterer(tmp_path: Path) -> Callable[[], Engine]:
    """Loads the real engine with a model of random numbers that is done in no time."""
    from edgeinfer.runtime.engine import load_engine
    from edgeinfer.runtime.options import LoadOptions, ModelFiles

    files = ModelFiles(name="chatterer", paths=(str(make_llama(tmp_path / "chatterer.gguf")),))
    return lambda: load_engine(files, LoadOptions(n_ctx=256, n_parallel=4, n_threads=1), None)
