"""Rewrite a JSON schema so that llguidance, the grammar engine, can enforce it: `normalise`.

llguidance does not know `not`, `if` and dependencies, so they are rewritten as alternatives; a `oneOf`
is rewritten as an `anyOf` of schemas that exclude each other. Annotations and unknown formats are
ignored.

A schema that cannot be enforced is refused, with the JSON pointer of the offending keyword:
`#/properties/age/minimum`.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import quote, unquote

from edgeinfer.errors import UnsupportedConstraintError
from edgeinfer.runtime.requests import check_deadline
from edgeinfer.runtime.sampling import patterns
from edgeinfer.runtime.sampling.schema_overlaps import (
    MAX_DEPTH,
    TYPES,
    Overlaps,
    kinds_of,
    listed_values,
)

MAX_NODES = 20_000
#: Time limit (s) of the search for the part of a schema that cannot be enforced.
LOCATE_S = 5.0

#: Values of `format` that are enforced. JSON Schema allows implementations to ignore others.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
#: Keywords that `alternatives` replaces by schemas of equal meaning without these keywords.
_REWRITTEN = ("not", "if", "dependencies", "dependentRequired", "dependentSchemas")
_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "additionalItems")
#: Keywords without effect on validation.
_ANNOTATIONS = (
    *("title", "description", "default", "examples", "example", "$comment", "$id", "id", "$anchor"),
    *("$defs", "definitions", "deprecated", "readOnly", "writeOnly", "then", "else"),
)
_DRAFT_4 = "http://json-schema.org/draft-04/schema"


def schema_error(pointer: str, reason: str) -> UnsupportedConstraintError:
    """Return the error for the keyword at the JSON pointer `pointer`."""
    message = f"the schema cannot be enforced at {pointer}: {reason}"
    return UnsupportedConstraintError(message, param=pointer, hint="change this part of the schema")


def _child_pointer(pointer: str, key: str | int) -> str:
    escaped = str(key).replace("~", "~0").replace("/", "~1")
    return f"{pointer}/{escaped}"


def target(root: dict[str, Any], ref: Any) -> Any:
    """Return the schema to which a `$ref` refers; None if it is not in `root`."""
    pointer = str(ref).removeprefix(str(root.get("$id", "")).rstrip("#"))
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    node: Any = root
    for step in pointer.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        parts = {str(i): element for i, element in enumerate(node)} if isinstance(node, list) else node
        node = parts.get(name) if isinstance(parts, dict) else None
    return node


def _children(schema: dict[str, Any], pointer: str, root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (JSON pointer, schema) for each direct subschema, and for the target of a `$ref`."""
    for key, subschema in schema.items():
        key_pointer = _child_pointer(pointer, key)
        if key in _MAPS and isinstance(subschema, dict):
            yield from ((_child_pointer(key_pointer, name), sub) for name, sub in subschema.items())
        elif key in (*_LISTS, "items") and isinstance(subschema, list):
            yield from ((_child_pointer(key_pointer, i), sub) for i, sub in enumerate(subschema))
        elif key in _ONE:
            yield key_pointer, subschema
        elif key == "$ref" and target(root, subschema) is not None:
            yield f"#{unquote(subschema.partition('#')[2])}", target(root, subschema)


class _Normaliser:
    """Rewrites the schema `root` in place, with all subschemas and targets of references."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self._visited: dict[int, tuple[dict[str, Any], str]] = {}
        self._waiting: list[tuple[Any, str, int]] = [(root, "#", 0)]
        self._has_inner_id = False
        if not str(root.get("$schema", "")).startswith(_DRAFT_4):
            root.pop("$schema", None)
        root.pop("x-guidance", None)

    def rewrite(self) -> None:
        while self._waiting:
            self._visit(*self._waiting.pop())
        overlaps = Overlaps(self._target, self._define)
        for schema, pointer in reversed(self._visited.values()):  # inner schemas first
            _replace_one_of(schema, pointer, overlaps)

    def _target(self, ref: str) -> Any:
        schema = None if self._has_inner_id else target(self.root, ref)
        return True if schema is None else schema

    def _define(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Add `schema` to `$defs`, and return a reference to it."""
        definitions = self.root.setdefault("$defs", {})
        name = f"one of {len(definitions)}"
        definitions[name] = schema
        return {"$ref": f"#/$defs/{quote(name)}"}

    def _visit(self, schema: Any, pointer: str, depth: int) -> None:
        check_deadline()
        if depth > MAX_DEPTH:
            raise schema_error(pointer, f"it has more than {MAX_DEPTH} levels")
        if len(self._visited) > MAX_NODES:
            raise schema_error(pointer, f"it has more than {MAX_NODES} subschemas")
        if not isinstance(schema, dict) or id(schema) in self._visited:
            return
        self._visited[id(schema)] = schema, pointer
        self._has_inner_id |= "$id" in schema and schema is not self.root
        if schema.get("format") not in FORMATS:
            schema.pop("format", None)
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        for key in _REWRITTEN:
            rewritten = list(alternatives(key, schema)) if key in schema else [None]
            if None not in rewritten:  # otherwise llguidance will refuse the keyword
                del schema[key]
                schema["allOf"] = [*schema.get("allOf", ()), *rewritten]
        for key in ("then", "else"):
            schema.pop(key, None)
        _drop_known_type(schema, self._target)
        _clamp(schema)
        _rewrite_names(schema, self._target)
        _rewrite_patterns(schema, pointer)
        _check_count(schema, pointer)
        for part_pointer, subschema in _children(schema, pointer, self.root):
            is_new = part_pointer.startswith(f"{pointer}/")
            self._waiting.append((subschema, part_pointer, depth + 1 if is_new else 0))


#: Largest bounds of numbers that llguidance accepts.
_MOST = {"integer": 1 << 62, "number": 1e18}


def _clamp(schema: dict[str, Any]) -> None:
    """Limit bounds to those that llguidance accepts; larger numbers are then not generated."""
    bound = _MOST["integer" if schema.get("type") == "integer" else "number"]
    for key in ("minimum", "exclusiveMinimum"):
        if isinstance(schema.get(key), (int, float)):
            schema[key] = max(schema[key], -bound)
    for key in ("maximum", "exclusiveMaximum"):
        if isinstance(schema.get(key), (int, float)):
            schema[key] = min(schema[key], bound)


def _drop_known_type(schema: dict[str, Any], target_of: Callable[[Any], Any]) -> None:
    """Drop a `type` that the `$ref` next to it implies: llguidance refuses both in recursion."""
    referred = target_of(schema["$ref"]) if "type" in schema and "$ref" in schema else None
    if isinstance(referred, dict) and referred.get("type") == schema["type"]:
        del schema["type"]


def _rewrite_names(schema: dict[str, Any], target_of: Callable[[Any], Any]) -> None:
    """Replace `propertyNames` by `properties` and `patternProperties` with the same meaning."""
    names = schema.get("propertyNames")
    if isinstance(names, dict) and set(names) - set(_ANNOTATIONS) == {"$ref"}:
        names = target_of(names["$ref"])
    if not isinstance(names, dict):
        if names is True:
            del schema["propertyNames"]
        return
    rules = {key: rule for key, rule in names.items() if key not in _ANNOTATIONS}
    if "pattern" in rules:
        rules.pop("format", None)
    if rules.pop("type", "string") != "string" or (rules and "patternProperties" in schema):
        return
    members, additional = schema.get("properties", {}), schema.get("additionalProperties", True)
    values = listed_values(rules)
    if values is not None and len(rules) == 1:
        named = {name: additional for name in values if isinstance(name, str)}
        named_members = {name: members.get(name, additional) for name in named}
        schema["properties"] = {**dict.fromkeys(members, False), **named_members}
    elif set(rules) == {"pattern"} or (rules and set(rules) <= {"minLength", "maxLength"}):
        low, high = rules.get("minLength", 0), rules.get("maxLength", "")
        pattern = rules.get("pattern", f"^[\\s\\S]{{{low},{high}}}$")
        try:
            is_named = {name: re.search(pattern, name) is not None for name in members}
        except re.error:
            return
        schema["patternProperties"] = {pattern: additional}
        schema["properties"] = {name: is_named[name] and members[name] for name in members}
    elif rules:
        return
    del schema["propertyNames"]
    if rules:
        schema["additionalProperties"] = False


def _rewrite_patterns(schema: dict[str, Any], pointer: str) -> None:
    """Rewrite regular expressions that llguidance does not support or matches too widely."""
    pattern = schema.get("pattern")
    try:
        parts = patterns.enforceable(pattern) if isinstance(pattern, str) else None
        if parts:
            schema["pattern"], *more = parts
            if more:
                schema["allOf"] = [*schema.get("allOf", ()), *({"pattern": p} for p in more)]
        elif "pattern" in schema and "format" in schema:
            del schema["pattern"]  # the `format`, which is enforced, usually means the same (zod)
        members = schema.get("patternProperties")
        if isinstance(members, dict):
            schema["patternProperties"] = {patterns.narrow(k): s for k, s in members.items()}
    except ValueError as error:
        raise schema_error(_child_pointer(pointer, "pattern"), str(error)) from error


def _check_count(schema: dict[str, Any], pointer: str) -> None:
    """Refuse a `minProperties` that repeated names could satisfy, which a grammar cannot forbid."""
    minimum, required = schema.get("minProperties"), schema.get("required")
    certain = len(set(map(str, required))) if isinstance(required, list) else 0
    is_open = "patternProperties" in schema or schema.get("additionalProperties", True) is not False
    if is_open and isinstance(minimum, int) and minimum > max(1, certain):
        keyword_pointer = _child_pointer(pointer, "minProperties")
        problem = "it exceeds the number of `required` names; add `additionalProperties: false`"
        raise schema_error(keyword_pointer, problem)


def alternatives(key: str, schema: dict[str, Any]) -> Iterator[Any]:
    """Yield schemas that together replace the keyword `key` of `schema`.

    None stands for a schema that llguidance cannot enforce.
    """
    operand = schema[key]
    if key == "not":
        yield negate(operand)
    elif key == "if":
        unless = _otherwise(operand, schema)
        then = {"allOf": [operand, schema.get("then", True)]}
        otherwise = {"allOf": [unless, schema.get("else", True)]}
        yield None if unless is None else {"anyOf": [then, otherwise]}
    elif not isinstance(operand, dict):
        yield None
    else:
        for name, implied in operand.items():
            then = {"required": implied} if isinstance(implied, list) else implied
            yield {"anyOf": [{"properties": {name: False}}, then]}


def _otherwise(condition: Any, schema: dict[str, Any]) -> Any:
    """Return the negation of `condition`, an `if`; None if it cannot be expressed.

    If a property must have certain values, the negation has the other values that `schema` allows.
    """
    unless = negate(condition)
    if not isinstance(condition, dict) or unless is False:
        return unless
    members, outer = condition.get("properties"), schema.get("properties")
    options = [] if unless is None else [unless]
    if isinstance(members, dict) and isinstance(outer, dict):
        for name, member in members.items():
            values, allowed = listed_values(member), listed_values(outer.get(name)) or []
            remaining = [value for value in allowed if value not in (values or ())]
            if values is not None and remaining:
                other = {"properties": {name: {"enum": remaining}}}
                options.append({"type": "object", "required": [name], **other})
    return {"anyOf": options} if options else None


def negate(schema: Any, depth: int = 0) -> Any:
    """Return a schema that allows only values which `schema` forbids; None if none can be expressed.

    The result need not allow all such values: it is an `anyOf` of the negations of the keywords.
    """
    check_deadline()
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    negations: list[Any] = []
    for key, operand in schema.items():
        parts = operand if isinstance(operand, list) else [operand]
        if key == "type":
            other_types = [kind for kind in TYPES if kind not in parts]
            if {"integer", "number"} & set(parts):
                other_types = [kind for kind in other_types if kind not in ("integer", "number")]
            negations.append({"type": other_types} if other_types else False)
        elif key == "required":
            names = [name for name in parts if isinstance(name, str)]
            negations += [{"type": "object", "properties": {name: False}} for name in names]
        elif key == "properties" and isinstance(operand, dict):
            for name, inner in operand.items():
                other = negate(inner, depth + 1)
                has_other = {"type": "object", "required": [name], "properties": {name: other}}
                negations.append(other and has_other)
        elif key == "allOf":
            negations += [negate(inner, depth + 1) for inner in parts]
        elif key == "anyOf":
            opposites = [negate(inner, depth + 1) for inner in parts]
            negations.append(None if None in opposites else {"allOf": opposites})
        elif key == "not":
            negations.append(operand)
        elif key in ("const", "enum"):
            kinds = {kind for value in listed_values({key: operand}) or () for kind in kinds_of(value)}
            other_types = [kind for kind in TYPES if kind not in kinds]
            negations.append({"type": other_types} if other_types else None)
        elif key not in _ANNOTATIONS:
            negations.append(None)
    alternatives_of_keys = [negation for negation in negations if negation not in (None, False)]
    if alternatives_of_keys:
        return {"anyOf": alternatives_of_keys}
    return None if None in negations else False


def _replace_one_of(schema: dict[str, Any], pointer: str, overlaps: Overlaps) -> None:
    """Replace a `oneOf`, in place, by an `anyOf` of schemas that exclude each other."""
    if isinstance(schema.get("oneOf"), list):
        outer = {"type": schema["type"]} if "type" in schema else {}
        typed_parts = [
            {**outer, **p} if isinstance(p, dict) and "$ref" not in p else p for p in schema["oneOf"]
        ]
        parts = overlaps.exclusive(typed_parts)
        if isinstance(parts, tuple):
            raise schema_error(
                _child_pointer(pointer, "oneOf"),
                f"schemas {parts[0]} and {parts[1]} may both match a value, which no grammar prevents; "
                "give each a required property with a different `const`, or use `anyOf`",
            )
        del schema["oneOf"]
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": parts}]
        else:
            schema["anyOf"] = parts


def normalise(schema: Any) -> dict[str, Any]:
    """Return a copy of the schema, rewritten so that llguidance can enforce it.

    Raises UnsupportedConstraintError, whose `param` is the JSON pointer of the keyword at fault.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise schema_error(
            "#", "a schema must be an object" if schema is not False else "no value satisfies it"
        )
    try:
        normaliser = _Normaliser(copy.deepcopy(schema))
        normaliser.rewrite()
    except RecursionError:
        raise schema_error("#", f"it has more than {MAX_DEPTH} levels") from None
    except (TypeError, AttributeError) as error:  # keywords' values were not checked before
        raise schema_error("#", f"a keyword has a value of a wrong type ({error})") from error
    return normaliser.root


def _move(schema: Any) -> Any:
    """Return a copy of a schema, with references that are valid at `#/$defs/root`."""
    if isinstance(schema, list):
        return [_move(subschema) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    copied = {key: _move(subschema) for key, subschema in schema.items()}
    reference = copied.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        copied["$ref"] = f"#/$defs/root{reference[1:]}"
    return copied


def locate(
    root: dict[str, Any], complaint: Callable[[dict[str, Any]], str], seconds: float = LOCATE_S
) -> tuple[str, str]:
    """Return the JSON pointer and the error of the innermost subschema that fails to compile.

    `complaint` returns the error of compiling a schema, "" if there is none. If the search takes longer
    than `seconds`, the result is "#" (the whole schema) and the error of `root`.
    """
    deadline = time.monotonic() + seconds
    draft = {"$schema": root["$schema"]} if "$schema" in root else {}
    moved = {key: node for key, node in _move(root).items() if key not in ("$schema", "$id")}
    whole = complaint(root)
    pointer, message = "#", whole
    seen = {pointer}
    children = _children(root, pointer, root)
    while next_child := next(children, None):
        if time.monotonic() > deadline:
            return "#", whole
        child, node = next_child
        if child not in seen and node is not False:
            seen.add(child)
            reference = {"$ref": f"#/$defs/root{quote(child[1:])}"}
            fault = complaint({**draft, **reference, "$defs": {"root": moved}})
            if fault:
                pointer, message = child, fault
                children = _children(node, pointer, root) if isinstance(node, dict) else iter(())
    return pointer, message


def value_schemas(schemas: Iterable[Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `schemas`, and those that `$ref`, `allOf`, `if` and so on apply to the same value."""
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
