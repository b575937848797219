"""Test whether the schemas of a `oneOf` exclude each other, and narrow them until they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from edgeinfer.runtime.requests import check_deadline

MAX_DEPTH = 64
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class Overlaps:
    """Makes subschemas of one JSON schema exclude each other, so that `anyOf` can replace `oneOf`.

    `target` returns the schema to which a `$ref` refers, True (any value) if that schema is unknown.
    `define` adds a schema to `$defs` and returns a reference to that schema.
    """

    def __init__(
        self, target: Callable[[Any], Any], define: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self._target_of, self._define = target, define
        #: Results of `disjoint` by the `id` of both schemas. Both are stored, so that no id is reused.
        self._pairs: dict[tuple[int, int], tuple[bool, Any, Any]] = {}
        self._kinds: dict[str, set[str]] = {}

    def exclusive(self, parts: list[Any]) -> list[Any] | tuple[int, int]:
        """Return the schemas `parts`, narrowed so that no value matches two of them.

        If that is impossible, return the indexes of two schemas that may match the same value.
        """
        narrowed_parts = []
        for i, alternative in enumerate(parts):
            narrowed = alternative
            for j, other in enumerate(parts):
                if i != j and not self.disjoint(narrowed, other):
                    narrowed = self._narrow(narrowed, other)
                    if narrowed is None:
                        return min(i, j), max(i, j)
            if narrowed is not alternative and self._follow(alternative) is not alternative:
                # a reference stays a reference, because the target may contain itself
                narrowed = self._define(narrowed)
            narrowed_parts.append(narrowed)
        return narrowed_parts

    def _narrow(self, alternative: Any, other: Any) -> dict[str, Any] | None:
        """Narrow an object schema so that `other` excludes it; return None if that is impossible.

        A property that `other` requires is forbidden, or one that `other` forbids is required.
        """
        schema = self._follow(alternative)
        if not isinstance(schema, dict) or "object" not in self.kinds(schema):
            return None
        own_required, names = set(self._required_names(schema, set())), schema.get("properties", {})
        absent = [name for name in self._required_names(other, set()) if name not in own_required]
        if absent:
            name = min(absent, key=lambda name: name in names)
            return {**schema, "type": "object", "properties": {**names, name: False}}
        followed = self._follow(other)
        for name, value in names.items():
            if isinstance(followed, dict) and value is not False and _member(followed, name) is False:
                return {**schema, "type": "object", "required": [*schema.get("required", ()), name]}
        return None

    def _follow(self, schema: Any) -> Any:
        """Return the target of a schema that is only a `$ref`, unless the target has a `oneOf`."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or set(schema) != {"$ref"}:
                break
            target = self._target_of(schema["$ref"])
            if isinstance(target, dict) and "oneOf" in target:
                break
            schema = target
        return schema

    def _required_names(self, schema: Any, seen: set[int]) -> Iterator[str]:
        if isinstance(schema, dict) and id(schema) not in seen and len(seen) < MAX_DEPTH:
            seen.add(id(schema))
            yield from schema.get("required", ())
            if "$ref" in schema:
                yield from self._required_names(self._target_of(schema["$ref"]), seen)
            for subschema in schema.get("allOf", ()):
                yield from self._required_names(subschema, seen)

    def kinds(self, schema: Any, depth: int = 0) -> set[str]:
        """Return the JSON types that a schema allows. "number" includes "integer"."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return set() if schema is False else set(TYPES)
        check_deadline()
        named = schema.get("type", TYPES)
        types = {named} if isinstance(named, str) else set(named)
        types |= {"integer"} if "number" in types else set()
        values = listed_values(schema)
        if values is not None:
            types &= {kind for value in values for kind in kinds_of(value)}
        if "$ref" in schema:
            name = schema["$ref"]
            if name not in self._kinds:
                self._kinds[name] = set(TYPES)  # assumed until computed: a schema may contain itself
                self._kinds[name] = self.kinds(self._target_of(schema["$ref"]), depth + 1)
            types &= self._kinds[name]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                types &= {kind for branch in schema[key] for kind in self.kinds(branch, depth + 1)}
        for branch in schema.get("allOf", ()):
            types &= self.kinds(branch, depth + 1)
        return types

    def disjoint(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Return whether no value satisfies both schemas."""
        if a is False or b is False:
            return True
        if a is True or b is True or depth > MAX_DEPTH:
            return False
        check_deadline()
        pair = (id(a), id(b))
        if pair not in self._pairs:
            self._pairs[pair] = False, a, b  # assumed until computed: a schema may contain itself
            self._pairs[pair] = self._disjoint(a, b, depth + 1), a, b
        return self._pairs[pair][0]

    def _disjoint(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        shared = self.kinds(a) & self.kinds(b)
        if all(self._apart(kind, a, b, depth) for kind in shared):
            return True
        for schema, other in ((a, b), (b, a)):
            if "$ref" in schema and self.disjoint(self._target_of(schema["$ref"]), other, depth):
                return True
            if any(self.disjoint(branch, other, depth) for branch in schema.get("allOf", ())):
                return True
            for key in ("anyOf", "oneOf"):
                if key in schema and all(self.disjoint(branch, other, depth) for branch in schema[key]):
                    return True
        return False

    def _apart(self, kind: str, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        of_a, of_b = listed_values(a), listed_values(b)
        if of_a is not None and of_b is not None:
            return not any(value in of_b for value in of_a)
        if kind == "object":
            names = dict.fromkeys((*a.get("required", ()), *b.get("required", ())))
            return any(self.disjoint(_member(a, name), _member(b, name), depth) for name in names)
        return False


def kinds_of(value: Any) -> tuple[str, ...]:
    """Return the JSON types of a value: one, or "integer" and "number" for a number.

    Raises KeyError for a value that is not JSON, such as a set.
    """
    if isinstance(value, bool) or value is None:
        return ("null",) if value is None else ("boolean",)
    if isinstance(value, (int, float)):
        return ("integer", "number")
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return (names[type(value)],)


def listed_values(schema: Any) -> list[Any] | None:
    """Return the values that `const` or `enum` allows, None without these keywords."""
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _member(schema: dict[str, Any], name: str) -> Any:
    """Return the schema of a property; True (any value) if `patternProperties` might apply to it."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)
