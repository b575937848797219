"""The ASGI application: every middleware in order, then the route."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edgeinfer.server import middlewares as m
from edgeinfer.server.core.exchange import Endpoint, Exchange
from edgeinfer.server.core.problems import Problem
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.operations import find


def build_app(endpoint: Endpoint, gate: Gate) -> ASGIApp:
    """Build the application of `endpoint`, guarded by `gate`. It knows requests alone, no lifespan."""
    payloads = endpoint.payloads
    middlewares = [
        Middleware(m.ExchangeMiddleware, endpoint),
        Middleware(m.RecordMiddleware, endpoint),
        *([Middleware(m.PayloadMiddleware, payloads, endpoint.log)] if payloads else []),
        Middleware(m.ErrorMiddleware, endpoint),
        Middleware(m.HostMiddleware, gate),
        Middleware(m.OriginMiddleware, gate),
        Middleware(m.KeyMiddleware, gate),
        Middleware(m.LimitMiddleware, endpoint),
        Middleware(m.StoreMiddleware, endpoint),
    ]
    app: ASGIApp = _route
    for kind, args, options in reversed(middlewares):
        app = kind(app, *args, **options)
    endpoint.app = app
    return app


async def _route(scope: Scope, receive: Receive, send: Send) -> None:
    exchange: Exchange = scope["edgeinfer"]
    if exchange.operation is None:
        raise _nothing_here(scope["path"])
    answer = await exchange.operation.handler(Request(scope, receive, send))
    await answer(scope, receive, send)


def _nothing_here(path: str) -> Problem:
    methods = sorted(method for method in find(path).methods if method != "HEAD")
    if not methods:
        return Problem(404, "No such route.", code="not_found")
    allow = {"allow": ", ".join(methods)}
    return Problem(405, "This method is not allowed here.", code="method_not_allowed", headers=allow)
