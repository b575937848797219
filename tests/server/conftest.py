"""An endpoint on a real socket, in a thread of the test's process, with a scripted or a real engine."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_engine import FakeEngine, StepGate
from fake_hub import FaultServer
from loop_watchdog import watch_loop
from made_models import FIM, make_llama
from other_processes import wait_until

from edgeinfer.cli.endpoint_setup import ModelAdmin
from edgeinfer.host import EngineHost, LoadProgress
from edgeinfer.runtime.interface import Engine
from edgeinfer.server import lifecycle
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.lifecycle import EndpointServer, RunOptions, ServeOutcome
from edgeinfer.server.limits import Limits
from edgeinfer.server.logs import Log
from edgeinfer.server.model_pool import AvailableModel, LoadedEngine, ModelPool, ModelPoolCallbacks
from edgeinfer.server.payload_log import PayloadLog
from edgeinfer.server.response_store import ResponseStore
from edgeinfer.server.web.access import Access, Web

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@dataclass
class Served:
    """A running endpoint, with a client for it."""

    url: str
    port: int
    endpoint: Endpoint
    server: EndpointServer
    loop: asyncio.AbstractEventLoop
    log: io.StringIO
    outcome: Future[ServeOutcome]
    client: httpx2.Client
    #: Threads for requests that run during the test.
    pool: ThreadPoolExecutor

    def drain(self, reason: str = "SIGTERM") -> None:
        self.loop.call_soon_threadsafe(self.server.drain, reason)

    def wait_ended(self) -> ServeOutcome:
        return self.outcome.result(30)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.client.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, **body: Any) -> httpx2.Response:
        return self.post(CHAT, {"messages": HI} | body)

    def stream(self, **body: Any) -> contextlib.AbstractContextManager[httpx2.Response]:
        """Open the event stream of an answer."""
        return self.client.stream("POST", CHAT, json={"messages": HI, "stream": True} | body)

    def begin(self, gate: StepGate, **body: Any) -> Future[httpx2.Response]:
        """Send a chat request in a thread; return when the scripted answer waits at `gate`."""
        asking = self.pool.submit(self.chat, **body)
        assert gate.reached.wait(20)
        return asking

    def events(self, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
        """Stream an answer; return (name, data) of its events, without comments and `[DONE]`."""
        text = self.client.post(path, json=body | {"stream": True}).text
        received = []
        for block in text.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] not in ":")
            if fields.get("data", "[DONE]") != "[DONE]":
                received.append((fields.get("event", ""), json.loads(fields["data"])))
        return received


@contextlib.contextmanager
def serving(
    engine: Engine | None = None,
    *,
    load: Callable[[str, LoadProgress], LoadedEngine] | None = None,
    names: Sequence[str] = (),
    pulled: Callable[[], Sequence[AvailableModel]] | None = None,
    available_bytes: Callable[[], int] = lambda: 1 << 50,
    keep_alive_s: float = 300.0,
    memory_wait_s: float = 60.0,
    aliases: dict[str, str] | None = None,
    keys: Sequence[str] = (),
    gate: Gate | None = None,
    limits: Limits | None = None,
    options: RunOptions | None = None,
    store_responses: bool = False,
    log_payloads: str = "",
    wait_ready: bool = True,
    **parts: Any,
) -> Iterator[Served]:
    """Serve until the block ends.

    `load` loads a model by name; without it, `engine` is that of the only model. `names` are the names
    of the pulled models, the default one first. `parts` are further arguments of `Endpoint`.
    """
    engine = engine or FakeEngine()
    limits, options = limits or Limits(), options or RunOptions()
    names = names or [engine.info.model]
    callbacks = ModelPoolCallbacks(
        load=load or (lambda name, progress: LoadedEngine(engine=engine)),
        list_pulled=pulled or (lambda: [AvailableModel(name=name, size_bytes=1) for name in names]),
        available_bytes=available_bytes,
    )
    log = io.StringIO()
    (listener,) = lifecycle.bind("127.0.0.1", 0)
    starting: Future[tuple[Endpoint, EndpointServer, asyncio.AbstractEventLoop]] = Future()

    async def main() -> ServeOutcome:
        models = ModelPool(
            callbacks,
            default=names[0],
            keep_alive_s=keep_alive_s,
            memory_wait_s=memory_wait_s,
            aliases=aliases,
        )
        responses = ResponseStore(limits) if store_responses else None
        endpoint = Endpoint(
            models, limits, Log("json", log), EngineHost(), responses=responses, **parts
        )
        if log_payloads:
            endpoint.payload_log = PayloadLog(Path(log_payloads), endpoint)
        server = EndpointServer(endpoint, gate or Gate(keys=Keys(keys)), [listener], options)
        starting.set_result((endpoint, server, asyncio.get_running_loop()))
        return await server.run()

    port = listener.getsockname()[1]
    scheme = "https" if options.tls_cert else "http"
    url = f"{scheme}://127.0.0.1:{port}"
    with (
        ThreadPoolExecutor(32) as pool,
        httpx2.Client(base_url=url, timeout=30, verify=scheme == "http") as client,
        contextlib.ExitStack() as stack,
    ):
        outcome = pool.submit(asyncio.run, main())
        endpoint, server, loop = starting.result(20)
        live_server = Served(url, port, endpoint, server, loop, log, outcome, client, pool)
        stack.enter_context(watch_loop(loop))
        try:
            if wait_ready and options.preload:
                wait_until(
                    lambda: '"ready"' in log.getvalue() or outcome.done(), "the endpoint to be ready"
                )
            yield live_server
        finally:
            if not outcome.done():
                live_server.drain()
                live_server.drain()
            outcome.result(30)


def _starter() -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:
        yield lambda engine=None, **setup: stack.enter_context(serving(engine, **setup))


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Return `serve(engine, ...)`, which starts an endpoint for this test (arguments: `serving`)."""
    yield from _starter()


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Callable[..., Served]]:
    """Return the same as `serve`, for endpoints that all tests of a file share."""
    yield from _starter()


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    """The scripted engine of `live_server`."""
    return FakeEngine()


@pytest.fixture(scope="module")
def live_server(serve_module: Callable[..., Served], engine: FakeEngine) -> Served:
    """An endpoint that all tests of a file share."""
    return serve_module(engine)


def exchange_raw(port: int, request: bytes, seconds: float = 20) -> bytes:
    """Send bytes; return the reply until the endpoint closes, or its Content-Length is reached."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(seconds)
        with contextlib.suppress(ConnectionError):  # the endpoint closed: its reply is still there
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
    """Return `exchange_raw(port, request)`."""
    return exchange_raw


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.setfsuid(65_534)  # it applies only to this thread
    try:
        yield
    finally:
        libc.setfsuid(0)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager in which sockets seem to belong to another user."""
    uid = os.getuid()
    if uid == 0:
        return _as_nobody
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    return contextlib.nullcontext


@pytest.fixture
def another_user() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager in which sockets belong to another user. Skips without root."""
    if os.getuid() != 0:
        pytest.skip("a socket of another user needs root")
    return _as_nobody


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Return `wait_until(condition, awaited)`."""
    return wait_until


def _load_model(path: Path, name: str, *, projector: Path | None = None, **options: Any) -> Engine:
    from edgeinfer.runtime.engine import load_engine
    from edgeinfer.runtime.options import LoadOptions, ModelFiles

    files = ModelFiles(name=name, paths=(str(path),), sha256="ab" * 32, projector=str(projector or ""))
    return load_engine(files, LoadOptions(**{"n_parallel": 2, "n_threads": 1} | options))


@pytest.fixture(scope="session")
def load_model() -> Callable[..., Engine]:
    """Return `load_model(path, name, n_ctx=...)`, which loads a real engine with load options."""
    return _load_model


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Iterator[Served]:
    """The real small model behind an endpoint that all tests share."""
    engine = _load_model(smollm2, "smollm2", n_ctx=4096, n_parallel=4)
    # keep the model loaded, because the endpoint could not load it again
    with serving(engine, aliases={"*": ""}, keep_alive_s=-1) as live_server:
        yield live_server


@pytest.fixture
def chatterer(tmp_path: Path) -> Callable[[], Engine]:
    """Return a function that loads a tiny real model with random weights."""
    import edgeinfer.runtime.engine  # noqa: F401  `--fast` skips the test here; in the server's thread it could not

    path = make_llama(tmp_path / "chatterer.gguf")
    return lambda: _load_model(path, "chatterer", n_ctx=256, n_parallel=4)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """The file of a tiny model with a chat template."""
    return make_llama(tmp_path_factory.mktemp("made") / "made.gguf", fim=tuple(FIM))


@pytest.fixture
def hub(gguf, monkeypatch):
    """A fake Hugging Face with that model as `hf.co/someone/Tiny-GGUF:Q8_0`."""
    server = FaultServer()
    thread = threading.Thread(target=server.httpd.serve_forever, daemon=True)
    thread.start()
    server.repos["someone/Tiny-GGUF"] = {"Tiny-Q8_0.gguf": gguf.read_bytes()}
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.release.set()
    server.httpd.shutdown()
    server.httpd.server_close()
    thread.join()


def with_page(live_server, keys=()):
    """Switch on the chat page of an endpoint."""
    admin = ModelAdmin()
    live_server.endpoint.web = Web(Access(live_server.port, Keys(keys)), live_server.endpoint, admin)
    return live_server
