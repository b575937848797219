"""Run the endpoint: serve its sockets with uvicorn, report readiness, drain, exit when idle.

SIGTERM or SIGINT begins a drain: new requests are refused, and running ones get `drain_s` seconds to
finish. A second signal ends the endpoint at once. (uvicorn's own signal handlers are not used.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import uvicorn

from edgeinfer.errors import EdgeInferError
from edgeinfer.server.app import EndpointApp
from edgeinfer.server.connection import unless
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.guards.protocol import GuardedProtocol
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.logs import capture


def url(listener: socket.socket, *, tls: bool) -> str:
    """Return a listener's URL as a client would type it, e.g. `http://127.0.0.1:8080`."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


def notify(*lines: str) -> bool:
    """Send lines such as `READY=1` to systemd (sd_notify); return whether it received them."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto("\n".join(lines).encode(), target)
    except OSError:
        return False
    return True


#: Time (s) for clients to receive their last events after a drain has cancelled their answers.
_DELIVERY_S = 2.0


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `EndpointServer`.

    - `idle_exit_s`: how long (s) the server runs without requests before it ends; None: forever.
    - `tls_cert`, `tls_key`: PEM files; None serves plain HTTP.
    - `preload`: load the default model at once, not when a request needs it.
    """

    idle_exit_s: float | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    preload: bool = True


class ServeOutcome(msgspec.Struct, frozen=True):
    """Why the server ended, and whether `EndpointServer.drain` cut off some answers."""

    reason: Literal["signal", "idle"]
    cut_short: bool = False


class EndpointServer(uvicorn.Server):
    """The uvicorn server of an endpoint."""

    def __init__(
        self, endpoint: Endpoint, gate: Gate, listeners: Sequence[socket.socket], options: RunOptions
    ) -> None:
        limits = endpoint.limits
        config = uvicorn.Config(
            EndpointApp(endpoint, gate),
            http=functools.partial(GuardedProtocol, limits),  # type: ignore[arg-type]  # it is only called
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(limits.idle_s),
            timeout_graceful_shutdown=int(limits.drain_s + _DELIVERY_S) + 1,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )
        super().__init__(config)
        self._endpoint = endpoint
        self._listeners = listeners
        for listener in listeners:
            # asyncio sets TCP_NODELAY only if the socket's protocol number is known. Otherwise the body
            # of a second reply waited 40 ms for the client's delayed ACK of the head.
            if listener.family != socket.AF_UNIX:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._options = options
        self._reason: Literal["signal", "idle"] = "signal"
        self._cut_short = False
        self._drain_timer: asyncio.TimerHandle | None = None
        self._forced = asyncio.Event()

    async def run(self) -> ServeOutcome:  # type: ignore[override]  # uvicorn's `run` starts a loop itself
        """Serve until a signal or `idle_exit_s` without requests, then unload the models."""
        endpoint = self._endpoint
        capture(endpoint.log)
        with self.signals():
            serving = asyncio.create_task(self._serve(list(self._listeners)))
            watching = asyncio.create_task(self._report_and_watch_idle())
            try:
                await serving
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
                notify("STOPPING=1")
                if endpoint.tools is not None:
                    await endpoint.in_thread(endpoint.tools.close)
                await endpoint.models.close()
                await endpoint.end_traces()
                if endpoint.payload_log is not None:
                    await endpoint.in_thread(endpoint.payload_log.close)
                endpoint.threads.shutdown(wait=False, cancel_futures=True)
                endpoint.engine_calls.close()
                endpoint.preparation.close()
        return ServeOutcome(self._reason, self._cut_short)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Drain on SIGTERM and SIGINT while the block runs; outside the main thread, do nothing."""
        loop = asyncio.get_running_loop()
        handled = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, self.drain, signal.Signals(number).name)
                handled.append(number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def drain(self, reason: str) -> None:
        """Refuse new requests, and end the server when the running requests have ended.

        After `drain_s`, or if `drain` is called again, answers are cut off. `reason` is "idle" or the
        signal's name.
        """
        if self.should_exit:
            self._endpoint.cancel_all()
            self.force_exit = True
            self._forced.set()
            return
        self._reason = "idle" if reason == "idle" else "signal"
        self._endpoint.draining = True
        n_running = self._endpoint.in_flight
        hint = "a second Ctrl-C ends at once" if n_running and reason == "SIGINT" else None
        self._endpoint.log.info("draining", why=reason, running=n_running, hint=hint)
        notify("STOPPING=1", f"STATUS=finishing {n_running} requests")
        drain_s, loop = self._endpoint.limits.drain_s, asyncio.get_running_loop()
        self._drain_timer = loop.call_later(drain_s, self._cut_off_answers)
        self.should_exit = True

    def _cut_off_answers(self) -> None:
        if self._endpoint.running:
            self._cut_short = True
            self._endpoint.log.warning("drain-limit", running=len(self._endpoint.running))
        self._endpoint.cancel_all()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the sockets and wait for running answers, unless a second signal comes.

        uvicorn itself would wait for open connections in spite of the second signal (Python 3.12).
        """
        await unless(self._forced.wait(), super().shutdown(sockets))
        if self._drain_timer is not None:
            self._drain_timer.cancel()

    async def _report_and_watch_idle(self) -> None:
        endpoint, options = self._endpoint, self._options
        loading = asyncio.create_task(_preload(endpoint)) if options.preload else None
        while not self.started:
            await asyncio.sleep(0.001)
        urls = [url(listener, tls=options.tls_cert is not None) for listener in self._listeners]
        if sys.stderr.isatty():
            sys.stderr.write(f"chat: edgeinfer web · API: {urls[0]}/v1 · Ctrl+C stops it\n")
        endpoint.host.listens_at(urls[0])
        endpoint.log.info("listening", url=" ".join(urls), model=endpoint.models.default)
        if loading is not None:
            await loading
        notify("READY=1", f"STATUS=serving {endpoint.models.default} at {urls[0]}")
        if options.idle_exit_s is None:
            return
        endpoint.last_activity = time.monotonic()
        while True:
            idle_s = 0.0 if endpoint.in_flight else time.monotonic() - endpoint.last_activity
            if idle_s >= options.idle_exit_s:
                self.drain("idle")
                return
            await asyncio.sleep(min(1.0, max(0.05, options.idle_exit_s - idle_s)))


async def _preload(endpoint: Endpoint) -> None:
    """Load the default model. A failure is logged and reported by /health; the server keeps running."""
    models = endpoint.models
    started_s = time.perf_counter()
    try:
        lease = await models.acquire(models.default)
    except EdgeInferError as error:
        endpoint.log.error("model-failed", model=models.default, message=error.message_and_hint)
        return
    except Exception as error:  # noqa: BLE001  other models may still load: report it and keep running
        endpoint.log.error("model-failed", error, model=models.default)
        return
    lease.release()
    endpoint.was_ready = True
    endpoint.log.info(
        "ready",
        model=models.default,
        seconds=round(time.perf_counter() - started_s, 3),
        start=endpoint.host.start.how,
        ready_ms=endpoint.host.start.ready_ms,
        reason=endpoint.host.start.reason,
    )
