"""The endpoint's routes without a socket, for `edgeinfer batch`."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import ASGIApp, Message


class Reply(msgspec.Struct, frozen=True):
    """What a route answered."""

    status: int
    request_id: str
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Reply:
    """POST `body` as JSON. Raises nothing of its own: failures are answers."""
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
    line = _Line(body)
    await app(scope, line.receive, line.send)
    return Reply(line.status, line.request_id, b"".join(line.parts))


class _Line:
    """Both directions of one call. The caller never leaves: `receive` waits once the body was taken."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.request_id = ""
        self.parts: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            self.parts.append(message.get("body", b""))
