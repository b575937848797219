"""Check a JSON value against a schema, by the grammar that would enforce it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import llguidance

from edgeinfer.runtime.sampling.grammar import check_schema, schema_grammar
from edgeinfer.runtime.sampling.json_schema import target


def follows(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether `value` follows `schema`, its members in any order.

    Raises UnsupportedConstraintError for a schema that the endpoint would not enforce either.
    """
    matcher = llguidance.LLMatcher(_bytes(), schema_grammar(check_schema(schema)), log_level=0)
    text = json.dumps(_in_order(value, [schema], schema), ensure_ascii=False)
    tokens = _bytes().tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@cache
def _bytes() -> Any:
    return llguidance.LLTokenizer("byte")


def _in_order(value: Any, schemas: list[Any], root: dict[str, Any]) -> Any:
    """Return `value` with the members of its objects where the grammar wants them."""
    parts = list(_alternatives(schemas, root))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [
            _in_order(one, [p for s in parts for p in _of_item(s, n)], root)
            for n, one in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    names = dict.fromkeys(
        n for key in ("properties", "required") for s in parts for n in s.get(key, ())
    )
    ordered = dict.fromkeys([*(n for n in names if n in value), *value])
    return {n: _in_order(value[n], [p for s in parts for p in _of_member(s, n)], root) for n in ordered}


def _alternatives(schemas: Iterable[Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that say something about one value, each once."""
    waiting, seen = list(schemas), set[int]()
    while waiting:
        schema = waiting.pop(0)
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        waiting += [target(root, schema["$ref"])] if "$ref" in schema else []
        for key in ("allOf", "anyOf", "oneOf"):
            waiting += schema.get(key, ())
        waiting += [schema[key] for key in ("if", "then", "else") if key in schema]


def _of_item(schema: dict[str, Any], n: int) -> Iterator[Any]:
    first, items = schema.get("prefixItems", ()), schema.get("items")
    if isinstance(items, list):
        first, items = items, schema.get("additionalItems")
    yield first[n] if n < len(first) else items


def _of_member(schema: dict[str, Any], name: str) -> Iterator[Any]:
    known = schema.get("properties", {})
    yield known[name] if name in known else schema.get("additionalProperties")
    yield from schema.get("patternProperties", {}).values()
