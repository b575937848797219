"""The OpenAPI 3.1 document, generated from the wire types and the operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edgeinfer import __version__
from edgeinfer.server.core.dialect import Dialect, Operation

_REF = "#/components/schemas/{name}"
#: Status → what it says; every operation may give these.
_REFUSALS = {
    "400": "The request is wrong; the error names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The Host or the Origin is not allowed.",
    "429": "Too many requests at once for this key; Retry-After says when to come back.",
    "500": "A defect of ours.",
    "503": "The queue is full, the model is not available, or the endpoint shuts down; "
    "Retry-After says when to come back.",
}
#: One server-sent event; its data is JSON, or [DONE].
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_BODY_REFUSALS = {"413": "The body is too long.", "415": "The body is not application/json."}


def document(dialects: Sequence[Dialect]) -> dict[str, Any]:
    """The whole document."""
    _, components = msgspec.json.schema_components(_types(dialects), ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for dialect in dialects:
        for operation in dialect.operations:
            described = _operation(operation, dialect.error_type)
            paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edgeinfer",
            "version": __version__,
            "description": "The local endpoint of edgeinfer. Unknown fields are refused.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _types(dialects: Sequence[Dialect]) -> list[type]:
    kinds: dict[type, None] = {}
    for dialect in dialects:
        kinds[dialect.error_type] = None
        for operation in dialect.operations:
            found = (operation.body, operation.reply, *operation.also.values())
            kinds |= {kind: None for kind in found if kind is not None}
    return list(kinds)


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(kind)}}


def _operation(operation: Operation, error: type) -> dict[str, Any]:
    named = operation.path.replace("/", "_").replace("{", "").replace("}", "")
    described: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}{named}",
        "summary": operation.summary,
        "responses": _responses(operation, error),
    }
    parameters = [*_path_parameters(operation), *_query_parameters(operation)]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
    return described


def _responses(operation: Operation, error: type) -> dict[str, Any]:
    content: dict[str, Any] = {operation.reply_type: {"schema": {"type": "string"}}}
    if operation.reply is not None:
        content = _json(operation.reply)
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    said = dict(_REFUSALS)
    if operation.body is not None:
        said |= _BODY_REFUSALS
    if operation.uses_model or "{id}" in operation.path:
        said["404"] = "No such model."
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status, words in sorted(said.items()):
        responses[status] = {"description": words, "content": _json(error)}
    for status, kind in operation.also.items():
        schema = {"anyOf": [_ref(kind), _ref(error)]}
        responses[status]["content"] = {"application/json": {"schema": schema}}
    return responses


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    if "{id}" not in operation.path:
        return []
    return [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    """A query's fields as parameters; null makes no sense in a query and lists are left to the body."""
    if operation.query is None:
        return []
    schema = msgspec.json.schema_components([operation.query], ref_template=_REF)[1][
        operation.query.__name__
    ]
    required = set(schema.get("required", ()))
    found = []
    for name, field in schema["properties"].items():
        plain = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
        if any(option.get("type") == "array" for option in plain):
            continue
        kept = {key: value for key, value in plain[0].items() if key != "default"}
        found.append({"name": name, "in": "query", "required": name in required, "schema": kept})
    return found
