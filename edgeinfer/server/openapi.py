"""The OpenAPI 3.1 document, generated from the wire types and the operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edgeinfer import __version__
from edgeinfer.server.dialect import Dialect, Operation
from edgeinfer.server.request_body import declaration_of
from edgeinfer.server.wire_types import Wire

_REF = "#/components/schemas/{name}"
#: Status → description, for errors that every route may return.
_REFUSALS = {
    "400": "The request is invalid; the error names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The Host or the Origin is not allowed.",
    "429": "Too many requests at once for this key; Retry-After says when to try again.",
    "500": "An internal error.",
    "503": "The queue is full, the model is not available, or the endpoint shuts down; "
    "Retry-After says when to try again.",
}
#: Schema of a server-sent event, whose `data` is JSON or `[DONE]`.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_LINES = {"type": "string"}
#: Status → description, for errors that only routes with `Operation.also` return.
_RARE = {
    "409": "No snapshot can be taken here, or the model file has changed; the message says what to do.",
    "507": "The disk is full.",
}
_BODY_REFUSALS = {"413": "The body is too long.", "415": "The body is not application/json."}
#: Values that a refused field may have. Clients that do not use a field may send one of these.
_NOTHING: list[Any] = [None, False, 0, "", [], {}]
#: Response to a client that sends its body too slowly. This response has no body (`guards.protocol`).
_LATE = {"description": "The body did not come in time."}


def document(dialects: Sequence[Dialect]) -> dict[str, Any]:
    """Return the OpenAPI document of these dialects as JSON values."""
    _, components = msgspec.json.schema_components(_types(dialects), ref_template=_REF)
    wire_types = _wire_types()
    for name in components.keys() & wire_types.keys():
        components[name] = _lenient_schema(wire_types[name], components[name], wire_types)
    paths: dict[str, dict[str, Any]] = {}
    for dialect in dialects:
        for operation in dialect.operations:
            described = _operation(operation, dialect)
            paths.setdefault(operation.path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "edgeinfer",
            "version": __version__,
            "description": "The local endpoint of edgeinfer. Fields that are not described are "
            "ignored; the header x-edgeinfer-ignored names them.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _types(dialects: Sequence[Dialect]) -> list[Any]:
    kinds: dict[Any, None] = {}
    for dialect in dialects:
        kinds[dialect.error_type] = None
        for operation in dialect.operations:
            types = (operation.body, operation.reply, *operation.also.values())
            kinds |= dict.fromkeys(filter(None, types))
    return list(kinds)


def _wire_types() -> dict[str, type[Wire]]:
    kinds: list[type[Wire]] = [Wire]
    for kind in kinds:  # the loop also visits the subclasses that it appends
        kinds += kind.__subclasses__()
    return {kind.__name__: kind for kind in kinds}


def _lenient_schema(
    kind: type[Wire], schema: dict[str, Any], kinds: dict[str, type[Wire]]
) -> dict[str, Any]:
    declared = declaration_of(kind)
    fields = dict(schema.get("properties", {}))
    for name, field in fields.items():
        loose = [_allow_dropped_types(field, kinds)]
        if name not in declared.required and name != declared.tag_field:
            loose.append({"type": "null"})
        fields[name] = loose[0] if len(loose) == 1 else {"anyOf": loose}
    for name, reason in declared.refused.items():
        fields[name] = {"enum": _NOTHING, "description": f"Not supported: {reason}."}
    # clients may leave `type` out if objects without `type` are decoded as this kind
    optional = declared.tag_field if kind.is_untagged_form else None
    required = [name for name in schema.get("required", ()) if name != optional]
    # other fields are allowed: they are ignored and named in `x-edgeinfer-ignored`
    return {**schema, "properties": fields, "required": required, "additionalProperties": True}


def _allow_dropped_types(schema: Any, kinds: dict[str, type[Wire]]) -> Any:
    """Return `schema` with lists that also allow objects of `Wire.dropped_types`, which are ignored."""
    if isinstance(schema, list):
        return [_allow_dropped_types(inner, kinds) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    extended = {key: _allow_dropped_types(inner, kinds) for key, inner in schema.items()}
    items = schema.get("items")
    if isinstance(items, dict):
        refs = [option.get("$ref", "") for option in items.get("anyOf", [items])]
        inside = [kinds[name] for ref in refs if (name := ref.rpartition("/")[2]) in kinds]
        dropped = [name for kind in inside for name in kind.dropped_types]
        if dropped:
            extended["items"] = {"anyOf": [items, _other_object(inside, dropped)]}
    return extended


def _other_object(kinds: list[type[Wire]], tag_prefixes: list[str]) -> dict[str, Any]:
    config = kinds[0].__struct_config__
    tags = [kind.__struct_config__.tag for kind in kinds]
    tag_schema = {"type": "string", "pattern": f"^({'|'.join(tag_prefixes)})", "not": {"enum": tags}}
    tag = str(config.tag_field)
    return {"type": "object", "required": [tag], "properties": {tag: tag_schema}}


def _json(*kinds: Any) -> dict[str, Any]:
    schemas, _ = msgspec.json.schema_components(kinds, ref_template=_REF)
    return {"application/json": {"schema": {"anyOf": schemas} if len(schemas) > 1 else schemas[0]}}


def _operation(operation: Operation, dialect: Dialect) -> dict[str, Any]:
    path_name = operation.path.replace("/", "_").replace("{", "").replace("}", "")
    described: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}{path_name}",
        "summary": operation.summary,
        "responses": _responses(operation, dialect),
    }
    parameters = _query_parameters(operation)
    if "{id}" in operation.path:
        schema = {"type": "string", "minLength": 1}
        parameters.append({"name": "id", "in": "path", "required": True, "schema": schema})
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body)}
    return described


def _responses(operation: Operation, dialect: Dialect) -> dict[str, Any]:
    content: dict[str, Any] = {operation.reply_type: {"schema": {"type": "string"}}}
    if operation.reply is not None:
        content = _json(operation.reply)
    if operation.streams:
        lines = _EVENT if dialect.stream_type == "text/event-stream" else _LINES
        content[dialect.stream_type] = {"schema": lines}
    error = dialect.error_type
    descriptions = dict(_REFUSALS)
    if operation.body is not None:
        descriptions |= _BODY_REFUSALS
    names_model = operation.body is not None or operation.query is not None
    if operation.uses_model or names_model or "{id}" in operation.path:
        descriptions["404"] = "No such model."
    descriptions |= {status: _RARE[status] for status in operation.also if status in _RARE}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status, description in sorted(descriptions.items()):
        responses[status] = {"description": description, "content": _json(error)}
    if operation.body is not None:
        responses["408"] = _LATE
    for status, kind in operation.also.items():
        responses[status]["content"] = _json(kind, error)
    return responses


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    """Describe the fields of `Operation.query` as parameters, except lists (only a body has them)."""
    if operation.query is None:
        return []
    schema = msgspec.json.schema_components([operation.query])[1][operation.query.__name__]
    required = set(schema.get("required", ()))
    parameters: list[dict[str, Any]] = []
    for name, field in schema["properties"].items():
        plain = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
        if any(option.get("type") == "array" for option in plain):
            continue
        plain_schema = {key: value for key, value in plain[0].items() if key != "default"}
        is_required = name in required
        described = {"name": name, "in": "query", "required": is_required, "schema": plain_schema}
        parameters.append(described)
    return parameters
