"""The endpoint's routes without a socket, for batches: `edgeinfer batch` and /v1/batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from starlette.types import ASGIApp, Message

#: Pauses between the tries of a request that failed in a way that may pass.
_BUSY_PAUSES_S = (0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0)
_DEFECT_PAUSES_S = (0.4, 1.6)
#: Statuses of an endpoint that is busy or loading; a 500 is a defect, which rarely passes.
_BUSY = (429, 503)
#: Headers by which a client is known and admitted.
_IDENTITY = ("host", "authorization", "x-api-key")

BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


class BatchLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request of a batch."""

    custom_id: str
    url: BatchUrl
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


class Reply(msgspec.Struct, frozen=True):
    """What a route answered."""

    status: int
    request_id: str
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, asker: Mapping[str, str]) -> Reply:
    """POST `body` as JSON. Raises nothing of its own: failures are answers."""
    identity = {"host": "localhost"} | {n: asker[n] for n in _IDENTITY if n in asker}
    headers = [
        *((name.encode(), value.encode("latin-1")) for name, value in identity.items()),
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


async def ask(app: ASGIApp, headers: Mapping[str, str], line: BatchLine) -> Reply:
    """Ask as a client with `headers`: the final answer, or the last failure when no pause is left."""
    body = msgspec.json.encode(line.body)
    tries = 0
    while True:
        reply = await post(app, line.url, body, headers)
        pauses_s = _BUSY_PAUSES_S if reply.status in _BUSY else _DEFECT_PAUSES_S
        if not may_pass(reply) or tries >= len(pauses_s):
            return reply
        await asyncio.sleep(pauses_s[tries])
        tries += 1


def may_pass(reply: Reply) -> bool:
    """Whether the same request may be answered another time: the endpoint failed, not the request."""
    return reply.status in _BUSY or reply.status >= 500


def answer_line(line: BatchLine, reply: Reply) -> bytes:
    """A line of the output."""
    answer = {
        "id": f"batch_{reply.request_id}",
        "custom_id": line.custom_id,
        "response": {
            "status_code": reply.status,
            "request_id": reply.request_id,
            "body": msgspec.Raw(reply.body),
        },
        "error": None,
    }
    return msgspec.json.encode(answer) + b"\n"
