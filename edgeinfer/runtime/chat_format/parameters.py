"""Types of a tool's parameters by its JSON schema, and conversion of untyped texts to JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from edgeinfer.runtime.sampling.json_schema import target, value_schemas
from edgeinfer.runtime.sampling.schema_overlaps import TYPES, Overlaps, kinds_of

#: Longest value of a tool call's parameter (characters) that is parsed; longer ones are text.
_MAX_LITERAL = 100_000
#: One encoder for all values: creating a JSON encoder takes longer than encoding the text of a token.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def property_schemas(schema: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return each parameter's schemas by name: several if, say, two schemas of `anyOf` define it."""
    root = dict(schema)
    schemas_by_name: dict[str, list[Any]] = {}
    for subschema in value_schemas([root], root):
        members = subschema.get("properties")
        for name, member in members.items() if isinstance(members, dict) else ():
            schemas_by_name.setdefault(name, []).append(member)
    return schemas_by_name


def parameter_kinds(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; all of them if the schema does not say."""
    root = dict(schema)
    overlaps = Overlaps(lambda ref: target(root, ref), lambda subschema: subschema)
    try:
        members = property_schemas(schema).get(name, [])
        kinds = {kind for member in members for kind in overlaps.kinds(member)}
    except (TypeError, AttributeError):  # the schema is invalid
        kinds = set()
    return frozenset(kinds or TYPES)


def typed_value(text: str, kinds: frozenset[str]) -> str:
    """Convert a parameter's text to JSON: `3` is a number if `kinds` has numbers, otherwise a string.

    Python's notation is accepted too: models write `True`, `None` and lists with single quotes.
    """
    bare = text.strip()
    if not bare and "string" not in kinds:
        return ""
    for read in (json.loads, ast.literal_eval) if len(bare) <= _MAX_LITERAL else ():
        try:
            value = read(bare)
            is_whole = isinstance(value, float) and value.is_integer()
            names = {"integer", *kinds_of(value)} if is_whole else set(kinds_of(value))
            if names & kinds - {"string"}:
                return json_text(int(value) if is_whole and "number" not in kinds else value)
        except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
            continue
    return json_text(text)


def json_text(value: Any) -> str:
    """Encode as JSON. Raises ValueError for a value that JSON cannot express."""
    try:
        text = _ENCODER.encode(value)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: only an escape can express it
        return json.dumps(value)
    return text
