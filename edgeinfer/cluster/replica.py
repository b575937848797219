"""A replica: a process `edgeinfer serve` for one model, which listens on a unix socket.

The first start on a node is cold. An idle replica takes a snapshot, from which later starts resume.
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

from edgeinfer.cluster.messages import (
    Ack,
    Chunk,
    ModelSettings,
    Request,
    ResponseStart,
    strip_hop_by_hop,
)
from edgeinfer.platform import process

#: Time limit (s) of a start, which may load 15 GB from a slow disk. Ray's own limit is longer.
_READY_S = 600.0
#: Timeout (s) of a health check.
_HEALTH_S = 10.0
#: Time (s) from SIGTERM until a removed replica is killed. Its requests may take up to 33 s to end.
ENDING_S = 35.0


class EndpointReplica:
    """One replica: starts an `edgeinfer serve` process, and forwards requests to it.

    All methods of an object must be called on the same event loop.
    """

    def __init__(self, settings: ModelSettings, name: str) -> None:
        self._name = name
        self._folder = tempfile.mkdtemp(prefix="edgeinfer-")
        path = f"{self._folder}/endpoint.sock"
        self._endpoint = self.start(path, settings)
        self._client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=path, limits=httpx2.Limits(max_connections=None)),
            base_url="http://localhost",
            timeout=None,  # prefilling a long prompt may take minutes
        )

    async def ready(self) -> None:
        """Wait until the endpoint is healthy.

        Raises RuntimeError if its process ends, TimeoutError after `_READY_S`.
        """
        async with asyncio.timeout(_READY_S):
            while not await self.is_healthy():
                await asyncio.sleep(0.01)

    async def check(self) -> None:
        """Check that the endpoint is healthy.

        Raises RuntimeError if it is not, or if its process has ended, and TimeoutError if there is no
        answer in `_HEALTH_S`.
        """
        async with asyncio.timeout(_HEALTH_S):
            if not await self.is_healthy():
                raise RuntimeError("`edgeinfer serve` is not healthy: its log says why")

    async def metrics(self) -> str:
        """Return the endpoint's metrics in Prometheus' format; "" if the request fails."""
        try:
            response = await self._client.get("/metrics", timeout=_HEALTH_S)
        except httpx2.HTTPError:
            return ""
        return response.text if response.is_success else ""

    async def answer(self, request: Request) -> AsyncIterator[Chunk]:
        """Yield an `Ack`, a `ResponseStart`, and the body. Closing the iterator cancels the request."""
        yield Ack(self._name)
        async with self._client.stream(
            request.method, request.target, headers=list(request.headers), content=request.body
        ) as response:
            yield ResponseStart(
                response.status_code, strip_hop_by_hop(tuple(response.headers.multi_items()))
            )
            async for piece in response.aiter_raw():
                yield piece

    async def close(self) -> None:
        """End the process: SIGTERM lets running requests finish; after `ENDING_S` it is killed."""
        self._endpoint.terminate()
        try:
            await asyncio.to_thread(self._endpoint.wait, ENDING_S)
        except subprocess.TimeoutExpired:
            self._endpoint.kill()
            await asyncio.to_thread(self._endpoint.wait)
        await self._client.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def is_healthy(self) -> bool:
        """Return whether GET /health succeeds. Raises RuntimeError if the process has ended."""
        if self._endpoint.poll() is not None:
            raise RuntimeError(f"`edgeinfer serve` ended with status {self._endpoint.returncode}")
        return (await self._client.get("/health")).is_success

    def start(self, path: str, settings: ModelSettings) -> subprocess.Popen[bytes]:
        """Start the process, which listens on the unix socket `path`.

        The process is killed when the thread that called `start` ends.
        """
        command = ["serve", settings.model, "--threads", str(settings.cpus), *settings.serve]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1024)
            arguments = [str(os.getpid()), str(listener.fileno()), *command]
            return subprocess.Popen(
                process.child_command("edgeinfer.cluster.child_endpoint", *arguments),
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
            )
