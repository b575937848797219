"""Threads that prepare requests for the engine: template, schema, grammar and tokens.

Requests with a schema or tools have threads of their own: an expensive schema delays only those. No
request waits for its preparation longer than `timeout_s`, and the endpoint is not healthy while all
threads of a pool are stuck.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from edgeinfer.runtime.interface import Engine, Generation
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server.core.problems import unavailable


class Preparation:
    """Lives on one event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._plain = _Pool("prepare", 4)
        self._constrained = _Pool("compile", 2)

    async def submit(self, engine: Engine, request: GenerateRequest) -> Generation:
        """Submit in a thread; a generation that comes too late for its client is cancelled.

        Raises what `Engine.submit` does, and Problem 503 after `timeout_s`.
        """
        pool = self._constrained if request.constraint or request.tools else self._plain
        submitting = pool.begin(lambda: engine.submit(request))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(submitting)
        except TimeoutError:
            submitting.add_done_callback(_cancel_late)
            raise unavailable(
                f"Preparing this request took longer than {self._timeout_s:g} s: the endpoint is "
                "overloaded, or the schema, tools or prompt are too expensive.",
                "preparation_timeout",
                10,
            ) from None
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel_late)
            raise

    def failure(self) -> str:
        """Name the pool in which no thread has become free for `timeout_s`; "" if there is none."""
        stuck = [
            pool.name for pool in (self._plain, self._constrained) if pool.is_stuck(self._timeout_s)
        ]
        return (
            f"no thread to {stuck[0]} requests has become free for {self._timeout_s:g} s"
            if stuck
            else ""
        )

    def close(self) -> None:
        """Begin nothing more; what runs is left to itself."""
        self._plain.close()
        self._constrained.close()


def _cancel_late(submitting: Future[Generation]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


class _Pool:
    def __init__(self, name: str, n_threads: int) -> None:
        self.name = name
        self._n_threads = n_threads
        self._threads = ThreadPoolExecutor(n_threads, name)
        self._begun: dict[object, float] = {}

    def begin(self, work: Callable[[], Generation]) -> Future[Generation]:
        return self._threads.submit(self._run, work)

    def _run(self, work: Callable[[], Generation]) -> Generation:
        mark = object()
        self._begun[mark] = time.monotonic()
        try:
            return work()
        finally:
            del self._begun[mark]

    def is_stuck(self, after_s: float) -> bool:
        begun = tuple(self._begun.values())
        return len(begun) == self._n_threads and time.monotonic() - max(begun) > after_s

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
