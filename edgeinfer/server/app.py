"""What every request passes on its way to a route, one concern a class, in this order.

Each is an ASGI application around the next. The request's `RequestContext` lies in its scope.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgeinfer.errors import EdgeInferError
from edgeinfer.server.answer_journal import JournaledAnswer
from edgeinfer.server.anthropic.routes import ANTHROPIC
from edgeinfer.server.connection import Connection
from edgeinfer.server.context import RequestContext, json_reply
from edgeinfer.server.dialect import Dialect, Operation
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.guards.security import OPEN_ROUTES, Gate, cors_headers
from edgeinfer.server.native.routes import NATIVE
from edgeinfer.server.ollama.routes import OLLAMA
from edgeinfer.server.openai.routes import OPENAI
from edgeinfer.server.openapi import document
from edgeinfer.server.payload_log import PayloadLog
from edgeinfer.server.problems import Problem, from_error, internal
from edgeinfer.server.request_body import read_body
from edgeinfer.server.responses.routes import RESPONSES

_REQUEST_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)


class _EndpointMiddleware:
    def __init__(self, app: ASGIApp, endpoint: Endpoint) -> None:
        self._app = app
        self._endpoint = endpoint


class ContextMiddleware(_EndpointMiddleware):
    """Give a request its id, its operation and its dialect, and put the id onto the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        match = match_route(scope["path"])
        scope["path_params"] = match.params
        operation = match.methods.get(scope["method"])
        context = RequestContext(self._endpoint, request_id, operation, match.dialect, headers)
        context.reply_headers = {
            "x-request-id": request_id,
            "request-id": request_id,
            "x-content-type-options": "nosniff",
        }
        scope["edgeinfer"] = context
        scope["app"] = self

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                added = ((k.encode(), v.encode()) for k, v in context.reply_headers.items())
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, sending)


class RecordMiddleware(_EndpointMiddleware):
    """Count a request and write its line to the log, and to the payload log, whatever became of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._record(scope["edgeinfer"], scope["method"])
            if self._endpoint.payloads is not None:
                self._write_payload(scope["edgeinfer"], self._endpoint.payloads)

    def _record(self, context: RequestContext, method: str) -> None:
        metrics = self._endpoint.metrics
        model = (context.model, context.version)
        metrics.request_ended(context.route, context.status, context.key, *model)
        if context.completion_tokens:
            metrics.e2e.labels(*model).observe(context.seconds)
        if context.route in OPEN_ROUTES or context.route == "/metrics":
            return
        ttft_ms = None if context.ttft_s is None else round(context.ttft_s * 1000, 1)
        self._endpoint.log.info(
            "request",
            request_id=context.id,
            method=method,
            route=context.route,
            status=context.status,
            model=context.model,
            key=context.key,
            ms=round(context.seconds * 1000, 1),
            ttft_ms=ttft_ms,
            prompt_tokens=context.prompt_tokens,
            cached_tokens=context.cached_tokens,
            completion_tokens=context.completion_tokens,
            finish=context.outcome,
            normalized=", ".join(context.normalized),
            ignored=", ".join(context.ignored),
        )

    def _write_payload(self, context: RequestContext, payloads: PayloadLog) -> None:
        if context.body is None:
            return
        facts = {
            "request_id": context.id,
            "route": context.route,
            "status": context.status,
            "model": context.model,
            "outcome": context.outcome,
        }
        try:
            payloads.write(facts, context.body, context.answer)
        except OSError as error:
            self._endpoint.log.error("payload-log", error)


class ErrorMiddleware(_EndpointMiddleware):
    """Turn whatever is raised into the error envelope of the request's dialect."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope["edgeinfer"]
        try:
            await self._app(scope, receive, send)
            return
        except Problem as error:
            problem = error
        except EdgeInferError as error:
            problem = from_error(error)
        except Exception as error:  # noqa: BLE001  the front door of the process: a defect is a 500 with a request id
            self._endpoint.log.error("internal", error, request_id=context.id)
            problem = internal(context.id)
        context.outcome = problem.code or ""
        if context.status:
            return  # the answer had begun: the connection is closed instead
        context.answer = context.dialect.error_body(problem, context.id)
        answer = Response(context.answer, problem.status, problem.headers, "application/json")
        await answer(scope, receive, send)


class GateMiddleware:
    """Refuse requests for a foreign Host, of other web pages, without a key, of another user's program.

    Answer preflights and add CORS headers for the origins that are named. What changes others' answers
    is for administrators.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope["edgeinfer"]
        self._gate.check_host(context.headers)
        origin = self._gate.check_origin(context.headers, scope["scheme"])
        if origin is not None:
            is_preflight = scope["method"] == "OPTIONS"
            asked = context.headers.get("access-control-request-headers", "") if is_preflight else None
            context.reply_headers |= cors_headers(origin, asked)
            if is_preflight:
                await Response(status_code=204)(scope, receive, send)
                return
        self._admit(context, scope.get("connection"))
        await self._app(scope, receive, send)

    def _admit(self, context: RequestContext, connection: Connection | None) -> None:
        context.key = self._gate.check_key(context.headers, context.route)
        if context.route not in OPEN_ROUTES:
            self._gate.check_user(connection)
            context.is_admin = self._gate.is_admin(context.key, connection)
        if context.operation is not None and context.operation.is_admin and not context.is_admin:
            raise Problem(
                403,
                "This needs the endpoint's first API key or, without keys, the user who started it.",
                kind="permission_error",
                code="admin_only",
            )
        if context.key:
            context.cache_salt = self._gate.keys.cache_salt(context.key)


class LimitMiddleware(_EndpointMiddleware):
    """Count requests that use a model while they run, and refuse those beyond the limits."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope["edgeinfer"]
        if not context.uses_model:
            await self._app(scope, receive, send)
            return
        self._endpoint.enter(context.key)
        try:
            await self._app(scope, receive, send)
        finally:
            if (
                context.journaled is not None and not context.journaled.is_done
            ):  # it goes on without its reader
                context.journaled.done_callbacks.append(lambda kept: self._endpoint.leave(context.key))
            else:
                self._endpoint.leave(context.key)


class JournalMiddleware(_EndpointMiddleware):
    """Let an answer that may be stored outlive the connection that asked for it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope["edgeinfer"]
        operation = context.operation
        if operation is None or not operation.may_store or self._endpoint.journal is None:
            await self._app(scope, receive, send)
            return
        body = await read_body(Request(scope, receive))
        context.journaled = JournaledAnswer(self._endpoint.limits.kept_bytes, lambda: context.outcome)
        context.journaled.start(self._app, scope, body)
        await context.journaled.read(receive, send)


def build_app(endpoint: Endpoint, gate: Gate) -> ASGIApp:
    """Build the ASGI application of `endpoint`, guarded by `gate`, without a lifespan."""
    app: ASGIApp = JournalMiddleware(_route, endpoint)
    app = LimitMiddleware(app, endpoint)
    app = GateMiddleware(app, gate)
    app = ErrorMiddleware(app, endpoint)
    app = RecordMiddleware(app, endpoint)
    return ContextMiddleware(app, endpoint)


async def _route(scope: Scope, receive: Receive, send: Send) -> None:
    context: RequestContext = scope["edgeinfer"]
    if context.operation is None:
        raise _nothing_here(scope["path"])
    answer = await context.operation.handler(Request(scope, receive, send))
    context.answer = getattr(answer, "body", None)  # a generation has none yet, and records its own
    await answer(scope, receive, send)


def _nothing_here(path: str) -> Problem:
    methods = sorted(method for method in match_route(path).methods if method != "HEAD")
    if not methods:
        return Problem(404, "No such route.", code="not_found")
    allow = {"allow": ", ".join(methods)}
    return Problem(405, "This method is not allowed here.", code="method_not_allowed", headers=allow)


#: The first one's envelope is for paths that are nobody's.
DIALECTS: tuple[Dialect, ...] = (OPENAI, RESPONSES, ANTHROPIC, NATIVE, OLLAMA)
OPERATIONS: tuple[Operation, ...] = tuple(o for dialect in DIALECTS for o in dialect.operations)


async def _openapi(request: Request) -> Response:
    return json_reply(document(DIALECTS))


class RouteMatch(NamedTuple):
    """What is at a path: operations by method, whose they are, and what stands in the path."""

    methods: Mapping[str, Operation]
    dialect: Dialect
    params: Mapping[str, str] = {}


def _routes() -> dict[str, RouteMatch]:
    description = Operation(
        method="GET", path="/openapi.json", handler=_openapi, summary="This document.", uses_model=False
    )
    places = {description.path: RouteMatch({"GET": description, "HEAD": description}, OPENAI)}
    for dialect in DIALECTS:
        for operation in dialect.operations:
            here = places.get(operation.path, RouteMatch({}, dialect))
            methods = {**here.methods, operation.method: operation}
            if operation.method == "GET":
                methods["HEAD"] = operation
            places[operation.path] = RouteMatch(methods, dialect)
    return places


_EXACT = _routes()
#: A model's name may hold slashes (`ollama/someone/model:tag`): a path with more behind it goes first.
_PATTERNS = [
    (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]|[^/].*[^/])", path)), match)
    for path, match in sorted(_EXACT.items(), key=lambda item: -len(item[0]))
    if "{" in path
]


def _known(path: str) -> RouteMatch | None:
    exact = _EXACT.get(path)
    if exact is not None:
        return exact
    for pattern, match in _PATTERNS:
        found = pattern.fullmatch(path)
        if found is not None:
            return match._replace(params=found.groupdict())
    return None


def _spellings(path: str) -> tuple[str, ...]:
    """Join repeated slashes, drop KServe's `/openai`, and try one `/v1` more and one fewer."""
    plain = re.sub(r"/{2,}", "/", path).removeprefix("/openai").rstrip("/") or "/"
    return (plain, f"/v1{plain}", plain.removeprefix("/v1"))


def match_route(path: str) -> RouteMatch:
    """Find the operations at `path`; without any, the dialect of the nearest path above it.

    A base URL is written with `/v1` or without, and with a slash at its end or without: all are found.
    """
    found = _known(path)
    if found is not None:
        return found
    for spelled in _spellings(path):
        found = _known(spelled)
        if found is not None:
            return found
    above = [match.dialect for known, match in _EXACT.items() if path.startswith(f"{known}/")]
    above += [d for d in DIALECTS if d.prefix and path.startswith(d.prefix)]
    return RouteMatch({}, above[0] if above else DIALECTS[0])
