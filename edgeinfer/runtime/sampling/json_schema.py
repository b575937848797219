"""Normalise a JSON schema before its grammar is made; refuse, by place, what cannot be enforced.

Every keyword that restricts is one that the grammar engine enforces, so that output always validates,
and some finite document satisfies the schema (`{"$ref": "#"}` has none). Annotations are dropped, the
targets of `$ref` move to `$defs`, and `not`, `if` and dependencies become alternatives. Contradictions
are found by the grammar engine, and their place by `locate`.

Places are JSON pointers from the schema's root: `#/properties/age/minimum`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote, urljoin

from edgeinfer.errors import UnsupportedConstraintError
from edgeinfer.runtime.requests import check_deadline
from edgeinfer.runtime.sampling.schema_overlap import TYPES, Overlaps

MAX_DEPTH = 64
MAX_NODES = 20_000
#: Seconds that finding the innermost place may take.
LOCATE_S = 5.0

#: The formats that are enforced; any other is an annotation, as JSON Schema has it.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
#: Keywords that restrict, and that no in-tree grammar expresses.
REFUSED = """
    contains minContains maxContains propertyNames $dynamicRef $recursiveRef
    unevaluatedItems unevaluatedProperties
""".split()
#: Keywords that become alternatives.
_REWRITTEN = ("not", "if", "dependencies", "dependentRequired", "dependentSchemas")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "additionalItems")
_DRAFT_4 = "http://json-schema.org/draft-04/schema"


def _refuse(place: str, why: str) -> UnsupportedConstraintError:
    return UnsupportedConstraintError(f"the schema cannot be enforced at {place}: {why}", param=place)


def _step(place: str, key: str | int) -> str:
    escaped = str(key).replace("~", "~0").replace("/", "~1")
    return f"{place}/{escaped}"


class _References:
    """Resolve a `$ref`: a pointer, an anchor or a part with an `$id`, in the same document."""

    def __init__(self, root: dict[str, Any], *, draft_4: bool) -> None:
        self._named: dict[str, tuple[Any, str]] = {"": (root, "#")}
        self._bases: dict[int, str] = {}
        waiting: list[tuple[Any, str, str]] = [(root, "#", "")]
        while waiting:
            value, place, base = waiting.pop()
            if isinstance(value, dict):
                name = value.get("$id", value.get("id") if draft_4 else None)
                if isinstance(name, str):
                    uri = _joined(base, name)
                    base = base if name.startswith("#") else uri.removesuffix("#")
                    self._named.setdefault(uri.removesuffix("#"), (value, place))
                if isinstance(value.get("$anchor"), str):
                    self._named.setdefault(f"{base}#{value['$anchor']}", (value, place))
                self._bases[id(value)] = base
            waiting.extend((part, _step(place, key), base) for key, part in _parts(value))

    def find(self, ref: str, holder: dict[str, Any]) -> tuple[Any, str] | None:
        """Return (schema, place) for the `$ref` of `holder`."""
        uri = _joined(self._bases.get(id(holder), ""), ref)
        whole, _, pointer = uri.partition("#")
        if pointer and not pointer.startswith("/"):
            return self._named.get(uri)
        found, place = self._named.get(whole, (None, ""))
        for step in pointer.split("/")[1:]:
            name = _unescaped(step)
            found, place = _part(found, name), _step(place, name)
        return None if found is None else (found, place)


def _joined(base: str, ref: str) -> str:
    try:
        return base + ref if ref.startswith("#") else urljoin(base, ref)
    except ValueError:  # no URI
        return ref


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from ((str(i), part) for i, part in enumerate(value))


def _part(value: Any, name: str) -> Any:
    if isinstance(value, list):
        at = int(name) if name.isdecimal() and len(name) < 9 else len(value)
        return value[at] if at < len(value) else None
    return value.get(name) if isinstance(value, dict) else None


def _unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")


def _name(place: str) -> str:
    return place.encode("utf-8", "surrogatepass").hex()


def _place(name: str) -> str:
    return bytes.fromhex(name.partition("-")[0]).decode("utf-8", "surrogatepass")


def with_places(text: str) -> str:
    """Replace names that `normalise` gave in `text` by the places they stand for."""
    return re.sub(
        r"[^\s'\"]*#?/\$defs/((?:[0-9a-f]{2})+)(?:-\d+)*", lambda found: _place(found[1]), text
    )


class _Normaliser:
    def __init__(self, root: dict[str, Any]) -> None:
        self.nodes = 0
        self.draft_4 = str(root.get("$schema", "")).startswith(_DRAFT_4)
        self.references = _References(root, draft_4=self.draft_4)
        #: What references name; None until it is its turn.
        self.definitions: dict[str, Any] = {}
        self.waiting: list[tuple[Any, str]] = []

    def whole(self, root: dict[str, Any]) -> dict[str, Any]:
        """Normalise `root`, then its references, one after another: a chain may be long."""
        made: dict[str, Any] = self.schema(root, "#", 0)
        while self.waiting:
            value, place = self.waiting.pop()
            self.definitions[_name(place)] = self.schema(value, place, 0)
        overlaps = Overlaps(self.definitions)
        for name, part in list(self.definitions.items()):
            _replace_one_of(part, _place(name), overlaps)
        _replace_one_of(made, "#", overlaps)
        return {**made, "$defs": self.definitions} if self.definitions else made

    def schema(self, value: Any, place: str, depth: int) -> Any:
        self.nodes += 1
        check_deadline()
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise _refuse(place, f"more than {MAX_DEPTH} levels or {MAX_NODES} parts")
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise _refuse(place, f"a schema is an object, not {type(value).__name__}")
        made: dict[str, Any] = {}
        for key, part in value.items():
            here = _step(place, key)
            if key in REFUSED:
                raise _refuse(here, f"`{key}` cannot be enforced token by token")
            if key == "$ref":
                made[key] = self.reference(part, value, here)
                continue
            kept = self.keyword(key, part, here, depth)
            if kept is not None or key == "const":
                made[key] = kept
        for key in _REWRITTEN:
            if key in value:
                made["allOf"] = [*made.get("allOf", ()), *self.rewritten(key, value, place, depth)]
        self.counted(made, place)
        return made

    def reference(self, ref: Any, holder: dict[str, Any], place: str) -> str:
        found = self.references.find(ref, holder) if isinstance(ref, str) else None
        if found is None:
            raise _refuse(place, f"the schema has no {ref!r}, and other documents are not read")
        name = _name(found[1])
        if name not in self.definitions:
            self.definitions[name] = None
            self.waiting.append(found)
        return f"#/$defs/{name}"

    def rewritten(self, key: str, value: dict[str, Any], place: str, depth: int) -> list[Any]:
        """Return schemas that together mean the keyword."""
        here = _step(place, key)
        wanted = list(alternatives(key, value))
        if None in wanted:
            raise _refuse(here, f"this `{key}` cannot be enforced token by token")
        return [self.schema(part, here, depth + 1) for part in wanted]

    def counted(self, made: dict[str, Any], place: str) -> None:
        """Refuse counts of open objects: JSON lets a name stand twice, which would count as two."""
        wanted, certain = made.get("minProperties", 0), len(set(made.get("required", ())))
        is_open = "patternProperties" in made or made.get("additionalProperties", True) is not False
        if wanted > max(1, certain) and is_open:
            raise _refuse(
                _step(place, "minProperties"), "properties beyond the required ones cannot be counted"
            )

    def keyword(self, key: str, part: Any, place: str, depth: int) -> Any:
        """Return the keyword's value for the grammar engine; None if it restricts nothing."""
        if key in _MAPS:
            return self.map(part, place, depth)
        if key in _LISTS or (key == "items" and isinstance(part, list)):
            return self.list(part, place, depth)
        if key in _ONE:
            return self.schema(part, place, depth + 1)
        if key in _PLAIN:
            is_valid, rule = _PLAIN[key]
            if not is_valid(part):
                raise _refuse(place, f"it must be {rule}")
            return part
        if key in _NUMBERS:
            return self.number(part, place)
        if key == "type":
            return self.type(part, place)
        if key == "uniqueItems" and part:
            raise _refuse(place, "`uniqueItems` cannot be enforced token by token")
        is_kept = key == "const" or (key == "format" and part in FORMATS)
        return part if is_kept or (key == "$schema" and self.draft_4) else None

    def map(self, part: Any, place: str, depth: int) -> dict[str, Any]:
        if not isinstance(part, dict):
            raise _refuse(place, "it must be an object of schemas")
        return {name: self.schema(sub, _step(place, name), depth + 1) for name, sub in part.items()}

    def list(self, part: Any, place: str, depth: int) -> list[Any]:
        if not isinstance(part, list):
            raise _refuse(place, "it must be a list of schemas")
        return [self.schema(sub, _step(place, i), depth + 1) for i, sub in enumerate(part)]

    def number(self, part: Any, place: str) -> Any:
        if isinstance(part, bool) and self.draft_4:
            return part  # draft 4's exclusiveMinimum
        if isinstance(part, bool) or not isinstance(part, (int, float)):
            raise _refuse(place, "it must be a number")
        if place.endswith("/multipleOf") and part <= 0:
            raise _refuse(place, "it must be greater than 0")
        return part

    def type(self, part: Any, place: str) -> Any:
        names = part if isinstance(part, list) else [part]
        for name in names:
            if name not in TYPES:
                raise _refuse(place, f"no such type: {name!r}")
        if not names:
            raise _refuse(place, "no type is allowed")
        return part


#: Keywords whose value is kept as it is: (test, what it has to be).
_PLAIN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "enum": (lambda part: isinstance(part, list) and bool(part), "a list of at least one value"),
    "required": (
        lambda part: isinstance(part, list) and all(isinstance(name, str) for name in part),
        "a list of names",
    ),
    "pattern": (lambda part: isinstance(part, str), "a regular expression"),
    **dict.fromkeys(
        _COUNTS,
        (
            lambda part: isinstance(part, int) and not isinstance(part, bool) and part >= 0,
            "a whole number, 0 or more",
        ),
    ),
}


def alternatives(key: str, value: dict[str, Any]) -> Iterator[Any]:
    """Yield schemas that together mean `value[key]`; None for what no schema says."""
    part = value[key]
    if key == "not":
        yield negated(part)
    elif key == "if":
        unless = negated(part)
        then = {"allOf": [part, value.get("then", True)]}
        otherwise = {"allOf": [unless, value.get("else", True)]}
        yield None if unless is None else {"anyOf": [then, otherwise]}
    elif not isinstance(part, dict):
        yield None
    else:
        for name, wanted in part.items():
            then = {"required": wanted} if isinstance(wanted, list) else wanted
            yield {"anyOf": [{"properties": {name: False}}, then]}


def negated(schema: Any, depth: int = 0) -> Any:
    """Return a schema of documents that `schema` forbids, maybe not of all; None if it has none.

    `not` of several keywords is one of their opposites: those that have one are enough.
    """
    check_deadline()
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    made: list[Any] = []
    for key, part in schema.items():
        parts = part if isinstance(part, list) else [part]
        if key == "type":
            left = [kind for kind in TYPES if kind not in parts]
            if {"integer", "number"} & set(parts):
                left = [kind for kind in left if kind not in ("integer", "number")]
            made.append({"type": left} if left else False)
        elif key == "required":
            names = [name for name in parts if isinstance(name, str)]
            made += [{"type": "object", "properties": {name: False}} for name in names]
        elif key == "properties" and isinstance(part, dict):
            for name, inner in part.items():
                other = negated(inner, depth + 1)
                has_other = {"type": "object", "required": [name], "properties": {name: other}}
                made.append(other and has_other)
        elif key == "allOf":
            made += [negated(inner, depth + 1) for inner in parts]
        elif key == "anyOf":
            opposites = [negated(inner, depth + 1) for inner in parts]
            made.append(None if None in opposites else {"allOf": opposites})
        elif key == "not":
            made.append(part)
        elif key in _RESTRICTING:
            made.append(None)
    known = [part for part in made if part is not None and part is not False]
    if known:
        return {"anyOf": known}
    return None if None in made else False


_RESTRICTING = {*_NUMBERS, *_MAPS, *_LISTS, *_ONE, *REFUSED, *_REWRITTEN, *_PLAIN}
_RESTRICTING |= {"const", "format", "uniqueItems", "$schema", "$ref"}


def _replace_one_of(schema: Any, place: str, overlaps: Overlaps) -> None:
    """Replace each `oneOf` by an `anyOf` of parts that exclude each other, in place.

    A `type` beside references that say as much goes: the engine follows no circle beside a keyword.
    """
    if not isinstance(schema, dict):
        return
    for child, part in _children(schema, place, {}):
        _replace_one_of(part, child, overlaps)
    if "oneOf" in schema:
        outer = {"type": schema["type"]} if "type" in schema else {}
        own = [
            {**outer, **p} if isinstance(p, dict) and "$ref" not in p else p for p in schema["oneOf"]
        ]
        parts = overlaps.exclusive(own)
        if isinstance(parts, tuple):
            raise _refuse(
                _step(place, "oneOf"),
                f"its parts {parts[0]} and {parts[1]} may both be true, which no grammar rules out; "
                "give each a required property with a `const` of its own, or use `anyOf`",
            )
        del schema["oneOf"]
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": parts}]
        else:
            schema["anyOf"] = parts
    if overlaps.has_idle_type(schema):
        del schema["type"]


def normalise(schema: Any) -> dict[str, Any]:
    """Return the schema's restrictions. Raises UnsupportedConstraintError, `param` the place."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refuse(
            "#", "a schema is an object" if schema is not False else "no document satisfies it"
        )
    made = _Normaliser(schema).whole(schema)
    if not _has_finite(made, made.get("$defs", {})):
        raise _refuse("#", "no finite document satisfies it")
    return made


def _has_finite(schema: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """Return whether a finite document may satisfy `schema`, by its references alone.

    A least fixpoint: what is known to be finite only grows. Definitions stand in the order in which
    they were found, so that backwards few rounds do.
    """
    finite: set[str] = set()
    n_known = -1
    while n_known < len(finite):
        n_known = len(finite)
        for name in reversed(definitions):
            if name not in finite and _finite(definitions[name], finite):
                finite.add(name)
    return _finite(schema, finite)


def _finite(schema: Any, finite: set[str]) -> bool:
    check_deadline()
    if not isinstance(schema, dict):
        return schema is not False
    if "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in finite:
        return False
    if not all(_finite(part, finite) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_finite(part, finite) for part in schema["anyOf"]):
        return False
    kinds = schema.get("type", TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return any(_finite_kind(schema, kind, finite) for kind in kinds)


def _finite_kind(schema: dict[str, Any], kind: str, finite: set[str]) -> bool:
    if kind == "object":
        properties = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        return all(_finite(properties.get(name, rest), finite) for name in schema.get("required", ()))
    if kind == "array":
        fixed = schema.get("prefixItems", [])
        needed = schema.get("minItems", 0)
        parts = [
            *fixed[:needed],
            *([schema["items"]] if needed > len(fixed) and "items" in schema else []),
        ]
        return all(_finite(part, finite) for part in parts)
    return True


def _children(
    schema: dict[str, Any], place: str, definitions: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, part in schema.items():
        here = _step(place, key)
        parts: Any = ()
        if key in _MAPS or key in _LISTS or (key == "items" and isinstance(part, list)):
            parts = ((_step(here, name), sub) for name, sub in _parts(part))
        elif key in _ONE:
            parts = ((here, part),)
        elif key == "$ref" and definitions:
            name = part.rpartition("/")[2]
            parts = ((_place(name), definitions[name]),)
        yield from ((where, sub) for where, sub in parts if isinstance(sub, dict))


def locate(
    schema: dict[str, Any], complaint: Callable[[dict[str, Any]], str], seconds: float = LOCATE_S
) -> tuple[str, str]:
    """Return (place, complaint) of the innermost part of `schema` that fails by itself.

    `complaint` compiles a schema and returns its error, or "". The root, if `seconds` do not suffice.
    """
    definitions = schema.get("$defs", {})
    end = time.monotonic() + seconds
    whole = complaint(schema)
    place, words = "#", whole
    seen = {place}
    children = _children(schema, place, definitions)
    while found := next(children, None):
        if time.monotonic() > end:
            return "#", whole
        child, part = found
        if child not in seen:
            seen.add(child)
            wrong = complaint({**part, "$defs": definitions})
            if wrong:
                place, words = child, wrong
                children = _children(part, place, definitions)
    return place, words
