"""Forward HTTP requests to the model that they name; report a dead replica to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from edgeinfer import prefix_affinity
from edgeinfer.cluster.messages import Ack, Chunk, Request, ResponseStart, strip_hop_by_hop
from edgeinfer.server import app
from edgeinfer.server.context import json_reply
from edgeinfer.server.dialect import Dialect
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import LOOPBACK_HOSTS, Gate
from edgeinfer.server.problems import Problem, unavailable

#: Response header with the id that Ray has given to the answering replica.
REPLICA_HEADER = "x-edgeinfer-replica"
_LOG = logging.getLogger("ray.serve")
_STREAMS = ("text/event-stream", "application/x-ndjson")
_HEALTH_PATHS = ("/health", "/healthz")


#: Function that sends a request to a replica of one model. It yields an `Ack`, a `ResponseStart`, and
#: the pieces of the body.
Answer = Callable[[Request], AsyncIterator[Chunk]]


class FrontEnd:
    """Forwards each request to the model that it names, or to the first model if it names none."""

    def __init__(self, models: Mapping[str, Answer], start_s: float, hosts: Sequence[str] = ()) -> None:
        self._gate = Gate(keys=Keys([]), hosts=LOOPBACK_HOSTS | {*hosts}, any_address=True)
        self._models = models
        self._start_s = start_s
        self._first = next(iter(models))

    async def answer(self, request: HttpRequest) -> Response:
        """Forward a request to a replica, except for health checks and the list of models.

        The front end answers these itself.
        """
        # do not use `request.url`: it contains the Host header, which is not yet checked
        route = app.match_route(request.scope["path"])
        try:
            return await self._answer(request, route)
        except Problem as problem:
            body = route.dialect.error_body(problem, "")
            return Response(body, problem.status, problem.headers, media_type="application/json")

    async def _answer(self, request: HttpRequest, route: app.RouteMatch) -> Response:
        self._gate.check_host(request.headers)  # a replica cannot: its HTTP client sets another Host
        if request.scope["path"] in _HEALTH_PATHS:
            return json_reply({"status": "ok"})
        if request.method == "GET" and route is app.match_route("/v1/models"):
            card = {"object": "model", "created": 0, "owned_by": "edgeinfer"}
            cards = [{"id": name, **card} for name in self._models]
            return json_reply({"object": "list", "data": cards})
        body = await request.body()
        fields = decode_json(body)
        model = _model_in_path(route) or requested_model(fields) or self._first
        if model not in self._models:
            message = f"this application has no model {model!r}; it serves {', '.join(self._models)}"
            raise Problem(404, message, param="model", code="model_not_found")
        headers, hashes = strip_hop_by_hop(tuple(request.headers.items())), prefix_hashes(fields)
        forwarded = Request(request.method, _target(request.scope), headers, body, hashes)
        return await self._forward(model, forwarded, route.dialect)

    async def _forward(self, model: str, request: Request, dialect: Dialect) -> Response:
        """Forward the request to a replica; if the replica dies before it responds, to another one.

        Raises Problem 503 if no replica starts in time, or if the second one dies, too.
        """
        for _ in range(2):
            chunks = self._models[model](request)
            try:
                async with asyncio.timeout(self._start_s):
                    ack = await anext(chunks)
                start = await anext(chunks)
            except TimeoutError:
                message = f"No replica of {model} has started within {self._start_s:g} s"
                message += "; Ray's `serve status` shows why."
                raise unavailable(message, "model_unavailable", 10) from None
            except Exception:  # noqa: BLE001  # Ray raises many kinds of errors if a replica has ended
                _LOG.warning("a replica ended before it answered", exc_info=True)
            else:
                assert isinstance(ack, Ack)
                assert isinstance(start, ResponseStart)
                headers = (*start.headers, (REPLICA_HEADER, ack.replica))
                return _response(ResponseStart(start.status, headers), chunks, dialect)
        raise _unavailable()


def _model_in_path(route: app.RouteMatch) -> str:
    """Return the model that the path names, `small` for `/v1/models/small/unload`; "" for none."""
    is_model = any(o.path.startswith("/v1/models/{id}") for o in route.methods.values())
    return route.params["id"] if is_model else ""


def _target(scope: Mapping[str, Any]) -> str:
    """Return the path and query of a request as the client wrote them, e.g. `/v1/models?limit=2`."""
    path = scope.get("raw_path", b"").decode("latin-1") or quote(scope["path"])
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _response(start: ResponseStart, chunks: AsyncIterator[Chunk], dialect: Dialect) -> Response:
    kind = next((value for name, value in start.headers if name == "content-type"), "")
    pieces = _pieces(chunks, dialect if kind.startswith(_STREAMS) else None)
    response = StreamingResponse(pieces, start.status)
    response.raw_headers = [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in start.headers
    ]
    return response


async def _pieces(chunks: AsyncIterator[Chunk], dialect: Dialect | None) -> AsyncIterator[bytes]:
    """Yield the body's pieces. If the replica dies, yield `dialect`'s error event, or raise if None."""
    try:
        async for chunk in chunks:
            assert isinstance(chunk, bytes)
            yield chunk
    except Exception:
        if dialect is None:
            raise
        _LOG.warning("a replica ended in the middle of an answer", exc_info=True)
        yield dialect.error_events(_unavailable(), "")


def _unavailable() -> Problem:
    return unavailable(
        "The process that worked on this request has ended; send the request again.", "replica_ended", 1
    )


#: Request fields of all APIs that form the prompt, in the order in which chat templates use them.
_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")


def decode_json(body: bytes) -> object:
    """Decode a JSON body; return None if it is invalid (the replica then answers with the error)."""
    try:
        return msgspec.json.decode(body) if body else None
    except msgspec.DecodeError:
        return None


def prefix_hashes(body: object) -> tuple[int, ...]:
    """Return the hashes of the prompt's prefixes in a decoded request body; () without one."""
    if not isinstance(body, dict):
        return ()
    return prefix_affinity.prefix_hashes([body[field] for field in _PROMPT_FIELDS if field in body])


def requested_model(body: object) -> str:
    """Return the field `model` of a decoded request body; "" if it is missing, or not a text."""
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else ""
