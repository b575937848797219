"""Every dialect and every route, once, for the router, the metrics' labels and the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.server.anthropic.dialect import ANTHROPIC
from edgeinfer.server.core.dialect import Dialect, Operation
from edgeinfer.server.core.exchange import json_reply
from edgeinfer.server.native.dialect import NATIVE
from edgeinfer.server.ollama.dialect import OLLAMA
from edgeinfer.server.openai.dialect import OPENAI
from edgeinfer.server.openapi import document
from edgeinfer.server.responses.dialect import RESPONSES

#: The first one's envelope is for paths that are nobody's.
DIALECTS: tuple[Dialect, ...] = (OPENAI, RESPONSES, ANTHROPIC, NATIVE, OLLAMA)
OPERATIONS: tuple[Operation, ...] = tuple(o for dialect in DIALECTS for o in dialect.operations)


async def _openapi(request: Request) -> Response:
    return json_reply(document(DIALECTS))


class Place(NamedTuple):
    """What is at a path: operations by method, whose they are, and what stands in the path."""

    methods: Mapping[str, Operation]
    dialect: Dialect
    params: Mapping[str, str] = {}


def _places() -> dict[str, Place]:
    description = Operation(
        method="GET", path="/openapi.json", handler=_openapi, summary="This document.", uses_model=False
    )
    places = {description.path: Place({"GET": description, "HEAD": description}, OPENAI)}
    for dialect in DIALECTS:
        for operation in dialect.operations:
            here = places.get(operation.path, Place({}, dialect))
            methods = {**here.methods, operation.method: operation}
            if operation.method == "GET":
                methods["HEAD"] = operation
            places[operation.path] = Place(methods, dialect)
    return places


_EXACT = _places()
#: A model's name may hold slashes (`ollama/someone/model:tag`): a path with more behind it goes first.
_PATTERNS = [
    (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]|[^/].*[^/])", path)), place)
    for path, place in sorted(_EXACT.items(), key=lambda item: -len(item[0]))
    if "{" in path
]


def _known(path: str) -> Place | None:
    exact = _EXACT.get(path)
    if exact is not None:
        return exact
    for pattern, place in _PATTERNS:
        found = pattern.fullmatch(path)
        if found is not None:
            return place._replace(params=found.groupdict())
    return None


def _spellings(path: str) -> tuple[str, ...]:
    """Join repeated slashes, drop KServe's `/openai`, and try one `/v1` more and one fewer."""
    plain = re.sub(r"/{2,}", "/", path).removeprefix("/openai").rstrip("/") or "/"
    return (plain, f"/v1{plain}", plain.removeprefix("/v1"))


def find(path: str) -> Place:
    """The operations at `path`. Without any, the dialect is that of the nearest path above it.

    A base URL is written with `/v1` or without, and with a slash at its end or without: all are found.
    """
    found = _known(path)
    if found is not None:
        return found
    for spelled in _spellings(path):
        found = _known(spelled)
        if found is not None:
            return found
    above = [place.dialect for known, place in _EXACT.items() if path.startswith(f"{known}/")]
    above += [d for d in DIALECTS if d.prefix and path.startswith(d.prefix)]
    return Place({}, above[0] if above else DIALECTS[0])
