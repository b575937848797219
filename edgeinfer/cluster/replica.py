"""A replica: `edgeinfer serve` of one model on a socket of its own, resumed if its node has a snapshot.

The first start on a node is cold; the endpoint builds the snapshot when it rests, as everywhere.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator

import httpx2

from edgeinfer.cluster.asking import Accepted, Asked, Head, Part, passed_on
from edgeinfer.cluster.settings import ModelSettings
from edgeinfer.platform import process

#: Whoever loads 15 GB from a slow disk; Ray's own limit for a replica's start is longer.
_READY_S = 600.0
_HEALTH_S = 10.0
#: After this the endpoint has cut what it drained; it takes 10 s by default.
_ENDING_S = 15.0


class Replica:
    """One endpoint, and the way to it. Made and used in the loop of a replica's actor."""

    def __init__(self, settings: ModelSettings, name: str) -> None:
        self._name = name
        self._folder = tempfile.mkdtemp(prefix="edgeinfer-")
        path = f"{self._folder}/endpoint.sock"
        self._endpoint = self.start(path, settings)
        self._client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=path, limits=httpx2.Limits(max_connections=None)),
            base_url="http://localhost",
            timeout=None,  # a long prompt is read for as long as it takes
        )

    async def ready(self) -> None:
        """Wait until the endpoint could answer. Raises TimeoutError, RuntimeError when it ended."""
        async with asyncio.timeout(_READY_S):
            while not await self.is_healthy():
                await asyncio.sleep(0.01)

    async def check(self) -> None:
        """Raises RuntimeError, TimeoutError when the endpoint would not answer."""
        async with asyncio.timeout(_HEALTH_S):
            await self.is_healthy()

    async def metrics(self) -> str:
        """The endpoint's Prometheus text; "" where it wants a key for that, or has no time."""
        try:
            found = await self._client.get("/metrics", timeout=_HEALTH_S)
        except httpx2.HTTPError:
            return ""
        return found.text if found.is_success else ""

    async def answer(self, asked: Asked) -> AsyncIterator[Part]:
        """The parts of the answer as they come. Closing it ends the generation."""
        yield Accepted(self._name)
        async with self._client.stream(
            asked.method, asked.target, headers=list(asked.headers), content=asked.body
        ) as response:
            yield Head(response.status_code, passed_on(tuple(response.headers.multi_items())))
            async for piece in response.aiter_raw():
                yield piece

    async def close(self) -> None:
        """End the endpoint as SIGTERM does: what runs ends first, within its limit."""
        self._endpoint.terminate()
        try:
            await asyncio.to_thread(self._endpoint.wait, _ENDING_S)
        except subprocess.TimeoutExpired:
            self._endpoint.kill()
            await asyncio.to_thread(self._endpoint.wait)
        await self._client.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def is_healthy(self) -> bool:
        """Whether the endpoint could answer. Raises RuntimeError when it has ended."""
        if self._endpoint.poll() is not None:
            raise RuntimeError(f"`edgeinfer serve` ended with {self._endpoint.returncode}")
        return (await self._client.get("/health")).is_success

    def start(self, path: str, settings: ModelSettings) -> subprocess.Popen[bytes]:
        """Start the endpoint, listening at `path` from now on; it dies with the thread that calls."""
        words = ["serve", settings.model, "--threads", str(settings.cpus), *settings.serve]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1024)
            tied = [str(os.getpid()), str(listener.fileno()), *words]
            return subprocess.Popen(
                process.child_command("edgeinfer.cluster.tied", *tied),
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
            )
