"""Call the endpoint's routes without a socket, for `edgeinfer batch` and `eval`."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.server.callers import Caller

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: Statuses of an endpoint that is busy or loading.
_BUSY = (429, 503)
#: Pauses (s) before retries: after a status in `_BUSY`, and after a 500, where a retry rarely helps.
_BUSY_PAUSES_S = (0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0)
_DEFECT_PAUSES_S = (0.4, 1.6)

BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


class BatchLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a batch file, in the format of OpenAI's Batch API."""

    custom_id: str
    url: BatchUrl
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


def read_lines(path: Path) -> list[BatchLine]:
    """Read a JSON request from each line of a file; empty lines are skipped.

    Raises OSError, and UsageError with the number of an invalid line.
    """

    def refuse(number: int, problem: str) -> UsageError:
        return UsageError(f"{path}:{number}: {problem}", hint="correct that line of the file")

    decoder = msgspec.json.Decoder(BatchLine)
    first: dict[str, int] = {}
    lines = []
    for number, text in enumerate(path.read_bytes().split(b"\n"), 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            fields = f"custom_id, method, body and url ({', '.join(get_args(BatchUrl))})"
            raise refuse(number, f"{error}; each line needs {fields}") from error
        if line.body.get("stream"):
            raise refuse(number, 'a batch cannot stream: leave "stream" out')
        first_line = first.setdefault(line.custom_id, number)
        if first_line != number:
            raise refuse(number, f"custom_id {line.custom_id!r} is already used on line {first_line}")
        lines.append(line)
    return lines


class BatchReply(msgspec.Struct, frozen=True):
    """The endpoint's response to one request of a batch. `body` is JSON."""

    status: int
    request_id: str
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller) -> BatchReply:
    """POST `body` as JSON for `caller`. Does not raise: a failure is a reply with an error status."""
    import httpx2  # this import takes 75 to 120 ms, and only batches need it

    async def app_for_caller(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"caller": caller}, receive, send)

    headers = {"host": "localhost", "content-type": "application/json"}
    transport = httpx2.ASGITransport(app_for_caller)
    async with httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        reply = await client.post(f"http://localhost{path}", content=body, headers=headers)
    return BatchReply(reply.status_code, reply.headers["x-request-id"], reply.content)


async def post_with_retries(app: ASGIApp, caller: Caller, line: BatchLine) -> BatchReply:
    """POST `line`, with pauses and retries after temporary failures; return the last reply."""
    body = msgspec.json.encode(line.body)
    for n_tries in itertools.count():
        reply = await post(app, line.url, body, caller)
        pauses_s = _BUSY_PAUSES_S if reply.status in _BUSY else _DEFECT_PAUSES_S
        if not may_retry(reply) or n_tries >= len(pauses_s):
            break
        await asyncio.sleep(pauses_s[n_tries])
    return reply


def may_retry(reply: BatchReply) -> bool:
    """Return whether the same request may succeed later: the reply is a 429 or a 5xx."""
    return reply.status in _BUSY or reply.status >= 500


def answer_line(line: BatchLine, reply: BatchReply) -> bytes:
    """Encode a line of the output file, in the format of OpenAI's Batch API."""
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
