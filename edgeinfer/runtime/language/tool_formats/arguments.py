"""A tool's arguments: the schema they follow, and an example of them for a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.runtime.language.schema_check import MAX_DEPTH, resolve
from edgeinfer.runtime.requests import Tool, check_deadline

_EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
#: Keywords beside which an object's own properties are not all that it may have.
_JOINING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")
#: An example shows so many arguments that need not be given, where none has to be.
_SHOWN = 3
_SHOWN_DEPTH = 6


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object; a tool without one takes none.

    Objects are closed unless they say otherwise: a small model that may add members does. A name that
    is required is a member, also where nothing else is said of it.
    """
    schema = {"type": "object", **tool.parameters}
    if set(schema) <= {"type", "description", "title", "$schema"} and schema["type"] == "object":
        return _EMPTY
    closed = _closed(schema, 0, joined=False)
    return closed if isinstance(closed, dict) else schema


def _closed(schema: Any, depth: int, *, joined: bool) -> Any:
    """`joined`: another schema has a say in the same object, so this one must not close it."""
    if isinstance(schema, list):
        return [_closed(part, depth, joined=joined) for part in schema]
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    made = dict(schema)
    below = depth + 1
    beside = joined or "properties" in schema
    for key, part in schema.items():
        if key in ("anyOf", "oneOf"):
            made[key] = _closed(part, below, joined=beside)
        elif key == "allOf":
            alone = isinstance(part, list) and len(part) == 1
            made[key] = _closed(part, below, joined=beside or not alone)
        elif key in ("properties", "patternProperties") and isinstance(part, dict):
            made[key] = {n: _closed(inner, below, joined=False) for n, inner in part.items()}
        elif key in ("$defs", "definitions") and isinstance(part, dict):
            shared = _joins(schema, 0)
            made[key] = {n: _closed(inner, below, joined=shared) for n, inner in part.items()}
        elif key in ("items", "prefixItems", "additionalProperties"):
            made[key] = _closed(part, below, joined=False)
    if not joined and _is_plain_object(schema):
        made["additionalProperties"] = False
        needed = schema.get("required")
        names = [name for name in needed if isinstance(name, str)] if isinstance(needed, list) else []
        made["properties"] = {**{name: {} for name in names}, **made["properties"]}
    return made


def _is_plain_object(schema: Mapping[str, Any]) -> bool:
    return (
        isinstance(schema.get("properties"), dict)
        and "additionalProperties" not in schema
        and not any(key in schema for key in _JOINING)
    )


def _joins(schema: Any, depth: int) -> bool:
    if isinstance(schema, list):
        return any(_joins(part, depth + 1) for part in schema)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return False
    together = schema.get("allOf")
    if isinstance(together, list) and len(together) > 1:
        return True
    if "$ref" in schema and "properties" in schema:
        return True
    return any(_joins(part, depth + 1) for part in schema.values())


def example(tool: Tool) -> Any:
    """Arguments as a call of this tool could have them: names of its own, values that are no answer."""
    schema = arguments_schema(tool)
    return _example(schema, schema, "value", 0)


def _example(root: dict[str, Any], schema: Any, name: str, depth: int) -> Any:
    check_deadline()
    if not isinstance(schema, dict) or depth > _SHOWN_DEPTH:
        return f"<{name}>"
    if isinstance(schema.get("$ref"), str):
        return _example(root, resolve(root, schema["$ref"]), name, depth + 1)
    for key in ("enum", "examples", "anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            is_value = key in ("enum", "examples")
            return options[0] if is_value else _example(root, options[0], name, depth + 1)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0] if kind else "string"
    if kind == "object":
        return _example_object(root, schema, depth)
    if kind == "array":
        return [_example(root, schema.get("items"), name, depth + 1)]
    return {"integer": 1, "number": 1.5, "boolean": True, "null": None}.get(kind, f"<{name}>")


def _example_object(root: dict[str, Any], schema: dict[str, Any], depth: int) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    required = schema.get("required")
    needed = [name for name in properties if isinstance(required, list) and name in required]
    return {
        name: _example(root, properties[name], name, depth + 1)
        for name in needed or list(properties)[:_SHOWN]
    }
