"""The ASGI application: finds the route of each request, checks access, counts and logs requests."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from edgeinfer.server.anthropic.messages import ANTHROPIC
from edgeinfer.server.callers import Caller
from edgeinfer.server.context import RequestContext, json_reply
from edgeinfer.server.dialect import Dialect, Operation
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.guards.security import OPEN_ROUTES, Gate, cors_headers
from edgeinfer.server.native.routes import NATIVE
from edgeinfer.server.ollama.routes import OLLAMA
from edgeinfer.server.openai.routes import OPENAI
from edgeinfer.server.openapi import document
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_body import decode, decode_query
from edgeinfer.server.responses.responses import RESPONSES
from edgeinfer.server.tracing import Span
from edgeinfer.server.web.access import PATH as PAGE
from edgeinfer.server.web.access import user_of

_REQUEST_ID = re.compile(r"[\w.:+/=-]{1,128}", re.ASCII)
_ADMIN_ONLY = (
    "This route needs the first API key or, if the endpoint has no keys, the user who started it."
)


class EndpointApp:
    """The ASGI application of an endpoint. `scope["edgeinfer"]` is a request's `RequestContext`."""

    def __init__(self, endpoint: Endpoint, gate: Gate) -> None:
        self._endpoint = endpoint
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, then count and log it. Any exception becomes an error response."""
        context = self._context(scope)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                added = ((k.encode(), v.encode()) for k, v in context.reply_headers.items())
                message["headers"] = [*message["headers"], *added]
            await send(message)

        try:
            await self._answer(context, scope, receive, sending)
        except Exception as error:  # noqa: BLE001  an unexpected exception becomes a 500 with the request's id
            problem = context.problem = self._endpoint.problem_of(error, context.id)
            context.outcome = problem.code or ""
            if not context.status:  # after the status, only closing the connection can report an error
                body = context.dialect.error_body(problem, context.id)
                refusal = Response(body, problem.status, problem.headers, "application/json")
                await refusal(scope, receive, sending)
        finally:
            self._record(context, scope["method"])
            # free large values now: the context and the ASGI scope refer to each other, so only a later
            # garbage collection frees them
            context.body, context.answers = None, []
            context.receipts.clear()

    def _context(self, scope: Scope) -> RequestContext:
        """Make the context of a request: its id, its route and the route's dialect."""
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"req_{secrets.token_hex(12)}"
        path = scope["path"]
        has_page = self._endpoint.web is not None
        if path == "/" and has_page and "text/html" in headers.get("accept", ""):
            path = PAGE
        match = match_route(path)
        if match.dialect.prefix == PAGE and not has_page:
            match = RouteMatch({}, match.dialect)
        context = RequestContext(
            self._endpoint,
            request_id,
            match.methods.get(scope["method"]),
            match.dialect,
            headers,
            match.params.get("id", ""),
            {"x-request-id": request_id, "request-id": request_id, "x-content-type-options": "nosniff"},
        )
        scope["edgeinfer"] = context
        scope["app"] = self
        return context

    async def _answer(
        self, context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Check Host, Origin and API key, then answer. Raises Problem if a check fails."""
        self._gate.check_host(context.headers)
        origin = self._gate.check_origin(context.headers, scope["scheme"])
        if origin is not None:
            is_preflight = scope["method"] == "OPTIONS"
            names = context.headers.get("access-control-request-headers", "") if is_preflight else None
            context.reply_headers |= cors_headers(origin, names)
            if is_preflight:
                await Response(status_code=204)(scope, receive, send)
                return
        self._admit(context, scope)
        with self._count_use(context):
            await _handle(scope, receive, send)

    def _admit(self, context: RequestContext, scope: Scope) -> None:
        operation = context.operation
        page = operation.web if operation is not None else ""
        caller = context.caller = scope.get("caller") or self._caller(context, scope, page)
        is_restricted = operation is not None and (operation.is_admin or page == "cookie")
        if is_restricted and not caller.is_admin:
            raise Problem(403, _ADMIN_ONLY, code="admin_only")
        if caller.name:
            context.cache_salt = self._gate.cache_salt(caller)

    def _caller(self, context: RequestContext, scope: Scope, page: str) -> Caller:
        key, connection = "", scope.get("connection")
        if page == "cookie":
            cookies = context.headers.get("cookie", "")
            key = self._endpoint.web.access.check(cookies, user_of(connection))
        elif not page:
            key = self._gate.check_key(context.headers, context.route)
        is_open = context.route in OPEN_ROUTES
        return Caller(key, is_admin=False) if is_open else self._gate.caller(key, connection)

    @contextlib.contextmanager
    def _count_use(self, context: RequestContext) -> Iterator[None]:
        """Count a request towards the limits while it runs. Raises Problem if a limit is reached."""
        uses_model = context.operation is not None and context.operation.uses_model
        if uses_model:
            self._endpoint.admit_request(context.key)
        try:
            yield
        finally:
            context.__dict__.pop("request", None)
            self._endpoint.bodies.give_back(context.caller.turn, context.held_bytes)
            if uses_model:
                self._endpoint.release_request(context.key)

    def _record(self, context: RequestContext, method: str) -> None:
        """Write an ended request to the metrics, the log, the trace and the payload log."""
        endpoint, metrics = self._endpoint, self._endpoint.metrics
        model = (context.model, context.version)
        metrics.request_ended(context.route, context.status, context.key, *model)
        if context.completion_tokens:
            metrics.e2e.labels(*model).observe(context.seconds)
        if context.route in OPEN_ROUTES or context.route == "/metrics":
            return
        if endpoint.payload_log is not None and context.body is not None:
            endpoint.payload_log.write(context, method)
        endpoint.trace(
            Span(f"{method} {context.route}", context.started, time.perf_counter()),
            context.spans,
            {
                "http.response.status_code": context.status,
                "gen_ai.request.model": context.model,
                "gen_ai.usage.input_tokens": context.prompt_tokens,
                "gen_ai.usage.output_tokens": context.completion_tokens,
                "edgeinfer.cached_tokens": context.cached_tokens,
                "edgeinfer.request_id": context.id,
            },
            context.headers.get("traceparent", ""),
        )
        endpoint.log.info(
            "request",
            request_id=context.id,
            route=context.route,
            status=context.status,
            model=context.model,
            method=method,
            key=context.key,
            ms=round(context.seconds * 1000, 1),
            ttft_ms=None if context.ttft_s is None else round(context.ttft_s * 1000, 1),
            prompt_tokens=context.prompt_tokens,
            cached_tokens=context.cached_tokens,
            completion_tokens=context.completion_tokens,
            finish=context.outcome,
            normalized=", ".join(context.normalized),
            ignored=", ".join(context.ignored),
        )


async def _handle(scope: Scope, receive: Receive, send: Send) -> None:
    """Decode a request's body and query, call the route's handler and send its answer."""
    context: RequestContext = scope["edgeinfer"]
    operation = context.operation
    if operation is None:
        raise _no_route(scope["path"], hides_page=context.endpoint.web is None)
    context.request = Request(scope, receive, send)
    arguments: dict[str, object] = {}
    if "body" in operation.takes:
        arguments["body"] = await decode(context, operation.body)
    if "query" in operation.takes:
        arguments["query"] = decode_query(context, operation.query)
    answer = await operation.handler(context, **arguments)
    if not isinstance(answer, Response):
        answer = json_reply(answer)
    await answer(scope, receive, send)


def _no_route(path: str, *, hides_page: bool) -> Problem:
    match = match_route(path)
    hidden = hides_page and match.dialect.prefix == PAGE
    methods = [] if hidden else sorted(match.methods)
    if not methods:
        message = "There is no such route; GET /openapi.json lists all routes."
        return Problem(404, message, code="not_found")
    allow = {"allow": ", ".join(methods)}
    return Problem(
        405,
        "This route does not have this method; the header Allow lists its methods.",
        code="method_not_allowed",
        headers=allow,
    )


#: The documented APIs. An unknown path gets an error of the first, OpenAI's. The web page's dialect is
#: left out, because the page's routes may change.
DIALECTS: tuple[Dialect, ...] = (OPENAI, RESPONSES, ANTHROPIC, NATIVE, OLLAMA)
OPERATIONS: tuple[Operation, ...] = tuple(o for dialect in DIALECTS for o in dialect.operations)


async def _openapi(context: RequestContext) -> dict[str, object]:
    return document(DIALECTS)


class RouteMatch(NamedTuple):
    """The operations at a path, by HTTP method, with the path's API (dialect) and parameters.

    `methods` is empty if the path is unknown: `dialect` is then the API whose error format is used.
    `params` are e.g. {"id": "qwen3"} for `/v1/models/{id}`.
    """

    methods: Mapping[str, Operation]
    dialect: Dialect
    params: Mapping[str, str] = {}


class _Routes:
    """Finds the operations at a path, exactly or by a pattern like `/v1/models/{id}`."""

    def __init__(self, dialects: Sequence[Dialect], *more: Operation) -> None:
        self.dialects = dialects
        self.exact = {o.path: RouteMatch({"GET": o, "HEAD": o}, dialects[0]) for o in more}
        for dialect in dialects:
            for operation in dialect.operations:
                match = self.exact.get(operation.path, RouteMatch({}, dialect))
                methods = {**match.methods, operation.method: operation}
                if operation.method == "GET":
                    methods["HEAD"] = operation
                self.exact[operation.path] = RouteMatch(methods, dialect)
        #: Paths with `{id}` as regular expressions, the longest first: `{id}` also matches slashes, so
        #: `/v1/models/{id}` would match `/v1/models/ollama/someone/model:tag/unload`, too.
        self._patterns = [
            (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]|[^/].*[^/])", path)), match)
            for path, match in sorted(self.exact.items(), key=lambda item: -len(item[0]))
            if "{" in path
        ]

    def find(self, path: str) -> RouteMatch | None:
        exact = self.exact.get(path)
        if exact is not None:
            return exact
        for pattern, match in self._patterns:
            params = pattern.fullmatch(path)
            if params is not None:
                return match._replace(params=params.groupdict())
        return None


_ROUTES = _Routes(
    DIALECTS,
    Operation(
        method="GET", path="/openapi.json", handler=_openapi, summary="This document.", uses_model=False
    ),
)


@cache
def _page_routes() -> _Routes:
    # this import takes 44 ms, and only the web page needs it
    from edgeinfer.server.web.routes import WEB

    return _Routes([WEB])


def _spellings(path: str) -> tuple[str, ...]:
    """Return the paths that a client may mean, for example `/v1/models` by `//openai/v1/models/`."""
    plain = re.sub(r"/{2,}", "/", path).removeprefix("/openai").rstrip("/") or "/"
    return (plain, f"/v1{plain}", plain.removeprefix("/v1"))


def match_route(path: str) -> RouteMatch:
    """Find the operations at `path`, and the API whose error format is used.

    An unknown path has no operations. Clients configure a base URL with or without `/v1` and a final
    slash, so all these spellings match.
    """
    spellings = _spellings(path)
    routes = _page_routes() if spellings[0].startswith(PAGE) else _ROUTES
    for spelling in (path, *spellings):
        if (match := routes.find(spelling)) is not None:
            return match
    similar = [match.dialect for parent, match in routes.exact.items() if path.startswith(f"{parent}/")]
    similar += [d for d in routes.dialects if d.prefix and path.startswith(d.prefix)]
    return RouteMatch({}, similar[0] if similar else routes.dialects[0])
