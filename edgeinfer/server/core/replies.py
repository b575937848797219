"""JSON answers."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def json_reply(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as application/json."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")
