"""The ASGI application: one front door for every request, behind it Starlette's router.

The front door gives each request an id, checks Host, Origin and key, counts it in and out, and turns
whatever is raised into the error envelope of the route. Nothing reaches a route that has not passed it.
"""

from __future__ import annotations

import re
import secrets
from contextlib import AbstractContextManager, nullcontext

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.errors import EdgeInferError
from edgeinfer.server.core.exchange import Endpoint, Exchange
from edgeinfer.server.core.problems import Dialect, Problem, from_error, internal
from edgeinfer.server.core.replies import json_reply
from edgeinfer.server.guards.connection import Connection
from edgeinfer.server.guards.crash_replies import noting
from edgeinfer.server.guards.security import cors_headers
from edgeinfer.server.openapi import document
from edgeinfer.server.operations import OPERATIONS, Operation

_REQUEST_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)
_ANTHROPIC_PATHS = "/v1/messages"


def build_app(endpoint: Endpoint) -> ASGIApp:
    """The application of `endpoint`."""
    return _FrontDoor(endpoint)


async def _openapi(request: Request) -> Response:
    return json_reply(document())


class _FrontDoor:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        routes = [Route(op.path, op.handler, methods=[op.method]) for op in OPERATIONS]
        routes.append(Route("/openapi.json", _openapi, methods=["GET"]))
        self._router = Router(routes, redirect_slashes=False)
        self._operations: dict[tuple[str, str], Operation] = {
            (op.method, op.path): op for op in OPERATIONS
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        dialect: Dialect = "anthropic" if scope["path"].startswith(_ANTHROPIC_PATHS) else "openai"
        exchange = Exchange(self._endpoint, request_id, "", dialect, headers)
        scope["edgeinfer"] = exchange
        extra = {
            "x-request-id": request_id,
            "request-id": request_id,
            "x-content-type-options": "nosniff",
        }

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in extra.items()),
                ]
            await send(message)

        try:
            await self._pass(exchange, scope, receive, sending, extra)
        except Problem as problem:
            await self._refuse(exchange, problem, scope, receive, sending)
        except EdgeInferError as error:
            await self._refuse(exchange, from_error(error), scope, receive, sending)
        except HTTPException as error:
            await self._refuse(exchange, self._from_router(error, scope), scope, receive, sending)
        except Exception as error:  # noqa: BLE001  the front door of the process: a defect is a 500 with a request id
            self._endpoint.log.error("internal", error, request_id=request_id)
            await self._refuse(exchange, internal(request_id), scope, receive, sending)
        finally:
            self._record(exchange, scope)

    async def _pass(
        self, exchange: Exchange, scope: Scope, receive: Receive, send: Send, extra: dict[str, str]
    ) -> None:
        """Check, then route. Raises Problem."""
        gate, headers = self._endpoint.gate, exchange.headers
        gate.check_host(headers)
        origin = gate.check_origin(headers, scope["scheme"])
        if origin is not None:
            preflight = scope["method"] == "OPTIONS"
            extra |= cors_headers(origin, preflight=preflight)
            if preflight:
                await Response(status_code=204)(scope, receive, send)
                return
        exchange.key = gate.check_key(headers, scope["path"])
        scope["app"] = (
            self._router
        )  # makes Starlette raise its 404 and 405 instead of answering in plain text
        operation = self._operation(scope)
        exchange.route = operation.path if operation else ""
        if operation is None or not operation.uses_model:
            await self._router(scope, receive, send)
            return
        self._endpoint.enter(exchange.key)
        try:
            with (
                self._endpoint.metrics.in_flight.track_inprogress(),
                _noting(exchange, scope, send) as noting,
            ):
                await self._router(scope, receive, noting)
        finally:
            self._endpoint.leave(exchange.key)

    def _operation(self, scope: Scope) -> Operation | None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        found = self._operations.get((method, scope["path"]))
        if found is not None:
            return found
        for route in self._router.routes:
            if route.matches(scope)[0] is Match.FULL and isinstance(route, Route):
                return self._operations.get((method, route.path))
        return None

    def _from_router(self, error: HTTPException, scope: Scope) -> Problem:
        """Starlette's 404 and 405 as ours; Allow names the methods of every operation on the path."""
        if error.status_code != 405:
            return Problem(error.status_code, "No such route.", code="not_found")
        matching = (
            r
            for r in self._router.routes
            if isinstance(r, Route) and r.matches(scope)[0] is not Match.NONE
        )
        allow = sorted(
            {method for route in matching for method in route.methods or () if method != "HEAD"}
        )
        headers = {"allow": ", ".join(allow)}
        return Problem(
            405, "This method is not allowed here.", code="method_not_allowed", headers=headers
        )

    async def _refuse(
        self, exchange: Exchange, problem: Problem, scope: Scope, receive: Receive, send: Send
    ) -> None:
        exchange.how = problem.code or ""
        if exchange.status:
            return  # the answer had begun: the connection is closed instead
        body = problem.body(exchange.dialect, exchange.id)
        await Response(body, problem.status, problem.headers, "application/json")(scope, receive, send)

    def _record(self, exchange: Exchange, scope: Scope) -> None:
        endpoint = self._endpoint
        route = exchange.route or "other"
        endpoint.metrics.requests.labels(
            route, str(exchange.status), exchange.model, exchange.version
        ).inc()
        if exchange.completion_tokens:
            endpoint.metrics.e2e.labels(exchange.model, exchange.version).observe(exchange.seconds)
        if route in ("/health", "/metrics"):
            return
        ttft_ms = None if exchange.ttft_s is None else round(exchange.ttft_s * 1000, 1)
        endpoint.log.info(
            "request",
            request_id=exchange.id,
            method=scope["method"],
            route=route,
            status=exchange.status,
            model=exchange.model,
            key=exchange.key,
            ms=round(exchange.seconds * 1000, 1),
            ttft_ms=ttft_ms,
            prompt_tokens=exchange.prompt_tokens,
            completion_tokens=exchange.completion_tokens,
            finish=exchange.how,
        )


def _noting(exchange: Exchange, scope: Scope, send: Send) -> AbstractContextManager[Send]:
    """`send`, noting how far the answer is where somebody could go on with it; without a socket there
    is nobody.
    """
    connection: Connection | None = scope.get("connection")
    return (
        noting(connection, exchange.route, exchange.dialect, send) if connection else nullcontext(send)
    )


async def _lifespan(receive: Receive, send: Send) -> None:
    """uvicorn asks; there is nothing to start here that the server has not started."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
