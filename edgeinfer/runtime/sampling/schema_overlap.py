"""Make the parts of a `oneOf` exclude each other, for a grammar engine that knows `anyOf` alone.

Schemas are normalised ones. Every answer errs on the side of "may both be true".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from edgeinfer.runtime.requests import check_deadline

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_DEPTH = 64


class Overlaps:
    """Compare the schemas of one document; caches every pair.

    `target` returns what a `$ref` names, True if it is unknown; `define` names a schema and returns a
    reference to it.
    """

    def __init__(
        self, target: Callable[[Any], Any], define: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self._find, self._define = target, define
        self._pairs: dict[tuple[int, int], bool] = {}
        self._kinds: dict[str, set[str]] = {}
        self._narrow: list[Any] = []  # kept alive: pairs go by identity

    def exclusive(self, parts: list[Any]) -> list[Any] | tuple[int, int]:
        """Return `parts`, each narrowed to exclude all others; or two of them that both may be true."""
        made = []
        for i, part in enumerate(parts):
            narrowed = part
            for j, other in enumerate(parts):
                if i != j and not self.disjoint(narrowed, other):
                    narrowed = self._narrowed(narrowed, other)
                    if narrowed is None:
                        return min(i, j), max(i, j)
                    self._narrow.append(narrowed)
            if narrowed is not part and self._followed(part) is not part:
                # what narrows a definition may stand inside of it: a circle needs a name to go by
                narrowed = self._define(narrowed)
            made.append(narrowed)
        return made

    def _narrowed(self, part: Any, other: Any) -> dict[str, Any] | None:
        """Narrow `part` by a name that `other` requires, or by one that `other` forbids."""
        schema = self._followed(part)
        if not isinstance(schema, dict) or "object" not in self.kinds(schema):
            return None
        own, names = set(self._required(schema, set())), schema.get("properties", {})
        absent = [name for name in self._required(other, set()) if name not in own]
        if absent:
            name = min(absent, key=lambda name: name in names)
            return {**schema, "type": "object", "properties": {**names, name: False}}
        rest = self._followed(other)
        for name, value in names.items():
            if isinstance(rest, dict) and value is not False and _member(rest, name) is False:
                return {**schema, "type": "object", "required": [*schema.get("required", ()), name]}
        return None

    def _followed(self, schema: Any) -> Any:
        """Return what a bare reference names, but for a `oneOf`, which may lead back here."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or set(schema) != {"$ref"}:
                break
            target = self._target(schema)
            if isinstance(target, dict) and "oneOf" in target:
                break
            schema = target
        return schema

    def _target(self, schema: dict[str, Any]) -> Any:
        return self._find(schema["$ref"])

    def _required(self, schema: Any, seen: set[int]) -> Iterator[str]:
        if isinstance(schema, dict) and id(schema) not in seen and len(seen) < _MAX_DEPTH:
            seen.add(id(schema))
            yield from schema.get("required", ())
            if "$ref" in schema:
                yield from self._required(self._target(schema), seen)
            for part in schema.get("allOf", ()):
                yield from self._required(part, seen)

    def kinds(self, schema: Any, depth: int = 0) -> set[str]:
        """Return the types that a document may have, "integer" beside "number"."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return set() if schema is False else set(TYPES)
        check_deadline()
        named = schema.get("type", TYPES)
        found = {named} if isinstance(named, str) else set(named)
        found |= {"integer"} if "number" in found else set()
        values = _values(schema)
        if values is not None:
            found &= {kind for value in values for kind in _kinds_of(value)}
        if "$ref" in schema:
            name = schema["$ref"]
            if name not in self._kinds:
                self._kinds[name] = set(TYPES)  # while they are being found out
                self._kinds[name] = self.kinds(self._target(schema), depth + 1)
            found &= self._kinds[name]
        if "anyOf" in schema:
            found &= {kind for part in schema["anyOf"] for kind in self.kinds(part, depth + 1)}
        return found

    def disjoint(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Return whether no document satisfies both."""
        if a is False or b is False:
            return True
        if a is True or b is True or depth > _MAX_DEPTH:
            return False
        check_deadline()
        pair = (id(a), id(b))
        if pair not in self._pairs:
            self._pairs[pair] = False  # while it is being found out
            self._pairs[pair] = self._disjoint(a, b, depth + 1)
        return self._pairs[pair]

    def _disjoint(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        shared = self.kinds(a) & self.kinds(b)
        if all(self._apart(kind, a, b, depth) for kind in shared):
            return True
        for one, other in ((a, b), (b, a)):
            if "$ref" in one and self.disjoint(self._target(one), other, depth):
                return True
            if any(self.disjoint(part, other, depth) for part in one.get("allOf", ())):
                return True
            for key in ("anyOf", "oneOf"):
                if key in one and all(self.disjoint(part, other, depth) for part in one[key]):
                    return True
        return False

    def _apart(self, kind: str, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        of_a, of_b = _values(a), _values(b)
        if of_a is not None and of_b is not None:
            return not any(value in of_b for value in of_a)
        if kind == "object":
            names = dict.fromkeys((*a.get("required", ()), *b.get("required", ())))
            return any(self.disjoint(_member(a, name), _member(b, name), depth) for name in names)
        return False


def _kinds_of(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool) or value is None:
        return ("null",) if value is None else ("boolean",)
    if isinstance(value, (int, float)):
        return ("integer", "number")
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return (names[type(value)],)


def _values(schema: dict[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _member(schema: dict[str, Any], name: str) -> Any:
    """Return the schema of a member; True where patterns decide."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)
