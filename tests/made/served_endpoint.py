"""An endpoint on a real socket, in a thread of the test's process, with a scripted or a real engine."""

import asyncio
import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from fake_engine import FakeEngine, StepGate
from loop_watchdog import watch_loop
from other_processes import wait_until

from edgeinfer.cli.endpoint_setup import ModelAdmin, bind
from edgeinfer.host import EngineHost, LoadProgress
from edgeinfer.runtime.interface import Engine
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.lifecycle import EndpointServer, RunOptions, ServeOutcome
from edgeinfer.server.limits import Limits
from edgeinfer.server.logs import Log
from edgeinfer.server.model_entry import LoadedEngine
from edgeinfer.server.model_pool import AvailableModel, ModelPool
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
    log: Any
    outcome: Future[ServeOutcome]
    client: httpx2.Client
    #: Threads for requests that run during the test.
    pool: ThreadPoolExecutor

    def drain(self, reason: str = "SIGTERM") -> None:
        self.loop.call_soon_threadsafe(self.server.drain, reason)

    def wait_ended(self) -> ServeOutcome:
        return self.outcome.result(60)

    def get(self, path: str, status: int = 0, **options: Any) -> httpx2.Response:
        """Fail unless the answer has `status`; 0 is any."""
        answer = self.client.get(path, **options)
        assert status in (0, answer.status_code), answer.text
        return answer

    def post(self, path: str, body: Any = None, status: int = 0, **options: Any) -> httpx2.Response:
        """Send a body as JSON; fail unless the answer has `status`; 0 is any."""
        answer = self.client.post(path, json=body, **options)
        assert status in (0, answer.status_code), answer.text
        return answer

    def chat(self, **body: Any) -> httpx2.Response:
        return self.post(CHAT, {"messages": HI} | body)

    def stream(self, **body: Any) -> contextlib.AbstractContextManager[httpx2.Response]:
        """Open the event stream of an answer."""
        return self.client.stream("POST", CHAT, json={"messages": HI, "stream": True} | body)

    def begin(self, gate: StepGate, **body: Any) -> Future[httpx2.Response]:
        """Send a chat request in a thread; return when the scripted answer waits at `gate`."""
        asking = self.pool.submit(self.chat, **body)
        assert gate.reached.wait(60)
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
    port: int = 0,
    limits: Limits | None = None,
    options: RunOptions | None = None,
    store_responses: bool = False,
    log_payloads: str = "",
    wait_ready: bool = True,
    log: Any = None,
    has_page: bool = False,
    **parts: Any,
) -> Iterator[Served]:
    """Serve until the block ends.

    `load` loads a model by name; without it, `engine` is that of the only model. `names` are the names
    of the pulled models, the default one first. `parts` are further arguments of `Endpoint`.
    """
    engine = engine or FakeEngine()
    limits, options = limits or Limits(), options or RunOptions()
    names = names or [engine.info.model]
    log = log or io.StringIO()
    (listener,) = bind("127.0.0.1", port)
    port = listener.getsockname()[1]
    starting: Future[tuple[Endpoint, EndpointServer, asyncio.AbstractEventLoop]] = Future()

    async def main() -> ServeOutcome:
        times = {"keep_alive_s": keep_alive_s, "memory_wait_s": memory_wait_s}
        models = ModelPool(
            load=load or (lambda name, progress: LoadedEngine(engine=engine)),
            list_pulled=pulled or (lambda: [AvailableModel(name=name, size_bytes=1) for name in names]),
            available_bytes=available_bytes,
            default=names[0],
            aliases=aliases,
            **times,
        )
        responses = ResponseStore(limits) if store_responses else None
        host, json_log = EngineHost(), Log("json", log)
        endpoint = Endpoint(models, limits, json_log, host, responses=responses, **parts)
        if has_page:
            endpoint.web = _page(endpoint, port, keys)
        if log_payloads:
            endpoint.payload_log = PayloadLog(Path(log_payloads), endpoint)
        server = EndpointServer(endpoint, gate or Gate(keys=Keys(keys)), [listener], options)
        starting.set_result((endpoint, server, asyncio.get_running_loop()))
        return await server.run()

    scheme = "https" if options.tls_cert else "http"
    url = f"{scheme}://127.0.0.1:{port}"
    with (
        ThreadPoolExecutor(32) as pool,
        httpx2.Client(base_url=url, timeout=60, verify=False) as client,
        contextlib.ExitStack() as stack,
    ):
        outcome = pool.submit(asyncio.run, main())
        endpoint, server, loop = starting.result(60)
        live_server = Served(url, port, endpoint, server, loop, log, outcome, client, pool)
        stack.enter_context(watch_loop(loop))
        try:
            if wait_ready and options.preload:
                wait_until(lambda: '"ready"' in log.getvalue() or outcome.done(), "the endpoint")
            yield live_server
        finally:
            if not outcome.done():
                with contextlib.suppress(RuntimeError):  # the first signal may have closed the loop
                    live_server.drain()
                    live_server.drain()
            outcome.result(60)


def _page(endpoint: Endpoint, port: int, keys: Sequence[str]) -> Web:
    return Web(Access(port, Keys(keys)), endpoint, ModelAdmin())


def with_page(live_server: Served, keys: Sequence[str] = ()) -> Served:
    """Switch on the chat page of an endpoint; return it."""
    live_server.endpoint.web = _page(live_server.endpoint, live_server.port, keys)
    return live_server
