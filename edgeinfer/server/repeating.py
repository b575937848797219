"""Requests that may be sent again: `Idempotency-Key`, and answers that are read by id.

A request with the key is answered once. Sent again, with the same body, it joins the answer that is
being made, from its beginning, or gets the one that was made. So a client that lost its connection
sends its request again and misses nothing.
"""

from __future__ import annotations

import hashlib
import re

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edgeinfer.server.core.bodies import read_body
from edgeinfer.server.core.exchange import Endpoint, Exchange
from edgeinfer.server.core.kept import Kept
from edgeinfer.server.core.problems import Problem

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class RepeatMiddleware:
    """Keep the answers of requests with an Idempotency-Key, and of those that may be stored."""

    def __init__(self, app: ASGIApp, endpoint: Endpoint) -> None:
        self._app = app
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["edgeinfer"]
        operation = exchange.operation
        if operation is None or not operation.uses_model or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        name = exchange.headers.get("idempotency-key")
        if name is not None:
            await self._repeat(name, scope, receive, send)
        elif operation.may_store and self._endpoint.stored is not None:
            kept = Kept(b"", self._endpoint.limits)
            kept.start(self._app, scope, await read_body(Request(scope, receive)))
            await kept.read(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _repeat(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with a key, or let it join the one that came first."""
        exchange: Exchange = scope["edgeinfer"]
        if not _KEY.fullmatch(name):
            raise Problem(
                400,
                "Idempotency-Key must be 1 to 255 visible ASCII characters.",
                code="invalid_idempotency_key",
            )
        body = await read_body(Request(scope, receive))
        fingerprint = _fingerprint(scope, body)
        kept = self._endpoint.repeatable.find(exchange.key, name)
        if kept is None:
            kept = self._begin(exchange, name, fingerprint)
            kept.start(self._app, scope, body)
        else:
            _refuse_other(kept, fingerprint)
            exchange.reply_headers["idempotent-replayed"] = "true"
        await kept.read(receive, send)

    def _begin(self, exchange: Exchange, name: str, fingerprint: bytes) -> Kept:
        limits = self._endpoint.limits
        kept = Kept(fingerprint, limits)
        kept.unread_s = limits.unread_s
        self._endpoint.repeatable.add(exchange.key, name, kept)
        return kept


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    """What a request must have in common with the one that its key was first used for."""
    found = hashlib.sha256(scope["path"].encode())
    found.update(b"\0%b\0" % scope["query_string"])
    found.update(body)
    return found.digest()


def _refuse_other(kept: Kept, fingerprint: bytes) -> None:
    """Raises Problem 422 for another request, 409 for an answer too long to be told again."""
    if kept.fingerprint != fingerprint:
        raise Problem(
            422,
            "This Idempotency-Key was used for another request: another body, query or path.",
            code="idempotency_key_reused",
        )
    if kept.is_too_long:
        raise Problem(
            409,
            "The answer to this Idempotency-Key is too long to be told again; it is still being made.",
            code="idempotency_conflict",
        )
