"""Check a JSON schema before its grammar is made, refusing by place what cannot be honoured.

Three things: keywords are of the right type (`normalise`), every keyword that restricts is one that the
grammar engine enforces (so that output always validates; annotations are dropped), and some finite
document satisfies the schema (`{"$ref": "#"}` has none). What is left to the grammar engine itself,
which knows more about contradictions, is named by its place with `locate`.

Places are JSON pointers from the schema's root: `#/properties/age/minimum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, unquote

from edgeinfer.errors import UnsupportedConstraintError

MAX_DEPTH = 64
MAX_NODES = 20_000

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
#: The formats that are enforced; any other is an annotation, as JSON Schema has it.
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
#: Keywords that restrict and that no grammar of ours expresses.
REFUSED = """
    not if then else contains minContains maxContains propertyNames $dynamicRef $recursiveRef
    dependencies dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties
""".split()
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "additionalItems")
_DRAFT_4 = "http://json-schema.org/draft-04/schema"


def _refuse(place: str, why: str) -> UnsupportedConstraintError:
    return UnsupportedConstraintError(f"the schema cannot be honoured at {place}: {why}", param=place)


def _step(place: str, key: str | int) -> str:
    escaped = str(key).replace("~", "~0").replace("/", "~1")
    return f"{place}/{escaped}"


class _Normaliser:
    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.nodes = 0
        self.draft_4 = str(root.get("$schema", "")).startswith(_DRAFT_4)

    def schema(self, value: Any, place: str, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise _refuse(place, f"more than {MAX_DEPTH} levels or {MAX_NODES} parts")
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise _refuse(place, f"a schema is an object, not {type(value).__name__}")
        made: dict[str, Any] = {}
        for key, part in value.items():
            if key in REFUSED:
                raise _refuse(_step(place, key), f"`{key}` cannot be enforced token by token")
            kept = self.keyword(key, part, _step(place, key), depth)
            if kept is not None or key == "const":
                made[key] = kept
        self.counted(made, place)
        return made

    def counted(self, made: dict[str, Any], place: str) -> None:
        """JSON lets a name stand twice; an open object could so count more members than it has."""
        wanted, certain = made.get("minProperties", 0), len(set(made.get("required", ())))
        if wanted > max(1, certain) and made.get("additionalProperties", True) is not False:
            raise _refuse(
                _step(place, "minProperties"), "names that are not listed as required cannot be counted"
            )

    def keyword(self, key: str, part: Any, place: str, depth: int) -> Any:
        """The keyword's value as the grammar engine takes it; None when it restricts nothing."""
        if key in _MAPS:
            return self.map(part, place, depth)
        if key in _LISTS or (key == "items" and isinstance(part, list)):
            return self.list(part, place, depth)
        if key in _ONE:
            return self.schema(part, place, depth + 1)
        if key in _NUMBERS:
            return self.number(part, place)
        if key in _COUNTS:
            if isinstance(part, bool) or not isinstance(part, int) or part < 0:
                raise _refuse(place, "it has to be a whole number, 0 or more")
            return part
        check = _CHECKS.get(key)
        return check(self, part, place) if check else None

    def map(self, part: Any, place: str, depth: int) -> dict[str, Any]:
        if not isinstance(part, dict):
            raise _refuse(place, "it has to be an object of schemas")
        return {name: self.schema(sub, _step(place, name), depth + 1) for name, sub in part.items()}

    def list(self, part: Any, place: str, depth: int) -> list[Any]:
        if not isinstance(part, list):
            raise _refuse(place, "it has to be a list of schemas")
        return [self.schema(sub, _step(place, i), depth + 1) for i, sub in enumerate(part)]

    def number(self, part: Any, place: str) -> Any:
        if isinstance(part, bool) and self.draft_4:
            return part  # draft 4's exclusiveMinimum
        if isinstance(part, bool) or not isinstance(part, (int, float)):
            raise _refuse(place, "it has to be a number")
        if place.endswith("/multipleOf") and part <= 0:
            raise _refuse(place, "it has to be greater than 0")
        return part

    def type(self, part: Any, place: str) -> Any:
        names = part if isinstance(part, list) else [part]
        for name in names:
            if name not in TYPES:
                raise _refuse(place, f"no such type: {name!r}")
        if not names:
            raise _refuse(place, "no type is allowed")
        return part

    def enum(self, part: Any, place: str) -> Any:
        if not isinstance(part, list) or not part:
            raise _refuse(place, "it has to be a list of at least one value")
        return part

    def required(self, part: Any, place: str) -> Any:
        if not isinstance(part, list) or not all(isinstance(name, str) for name in part):
            raise _refuse(place, "it has to be a list of names")
        return part

    def pattern(self, part: Any, place: str) -> Any:
        if not isinstance(part, str):
            raise _refuse(place, "it has to be a regular expression")
        return part

    def format(self, part: Any, place: str) -> Any:
        return part if part in FORMATS else None

    def unique(self, part: Any, place: str) -> Any:
        if part:
            raise _refuse(place, "`uniqueItems` cannot be enforced token by token")

    def ref(self, part: Any, place: str) -> Any:
        if not isinstance(part, str) or not (part == "#" or part.startswith("#/")):
            raise _refuse(place, f"only references inside of the schema are followed, not {part!r}")
        if resolve(self.root, part) is None:
            raise _refuse(place, f"nothing is at {part}")
        return part

    def identity(self, part: Any, place: str) -> Any:
        if place != "#/$id":
            raise _refuse(place, "a schema inside of a schema may not have a name of its own")

    def dialect(self, part: Any, place: str) -> Any:
        return part if self.draft_4 else None


_CHECKS: dict[str, Callable[[_Normaliser, Any, str], Any]] = {
    "type": _Normaliser.type,
    "enum": _Normaliser.enum,
    "const": lambda _, part, __: part,
    "required": _Normaliser.required,
    "pattern": _Normaliser.pattern,
    "format": _Normaliser.format,
    "uniqueItems": _Normaliser.unique,
    "$ref": _Normaliser.ref,
    "$id": _Normaliser.identity,
    "$schema": _Normaliser.dialect,
}


def resolve(root: Any, ref: str) -> Any:
    """What a pointer (`#/$defs/a`) names, or None when there is nothing."""
    found: Any = root
    for step in ref.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def normalise(schema: Any) -> dict[str, Any]:
    """Keep what restricts. Raises UnsupportedConstraintError, `param` the place."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refuse("#", "a schema is an object" if schema is not False else "nothing satisfies it")
    made = _Normaliser(schema).schema(schema, "#", 0)
    if not _finite(made, made, frozenset()):
        raise _refuse("#", "no finite document satisfies it")
    return dict(made)


def _finite(root: Any, schema: Any, seen: frozenset[str]) -> bool:
    """Whether some finite document may satisfy `schema` by its references alone."""
    if not isinstance(schema, dict):
        return schema is not False
    if "enum" in schema or "const" in schema:
        return True
    ref = schema.get("$ref")
    if ref is not None and (ref in seen or not _finite(root, resolve(root, ref), seen | {ref})):
        return False
    if not all(_finite(root, part, seen) for part in schema.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_finite(root, part, seen) for part in schema[key]):
            return False
    kinds = schema.get("type", TYPES)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return any(_finite_kind(root, schema, kind, seen) for kind in kinds)


def _finite_kind(root: Any, schema: dict[str, Any], kind: str, seen: frozenset[str]) -> bool:
    if kind == "object":
        properties = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        return all(
            _finite(root, properties.get(name, rest), seen) for name in schema.get("required", ())
        )
    if kind == "array":
        fixed = schema.get("prefixItems", [])
        needed = schema.get("minItems", 0)
        parts = [
            *fixed[:needed],
            *([schema["items"]] if needed > len(fixed) and "items" in schema else []),
        ]
        return all(_finite(root, part, seen) for part in parts)
    return True


def _children(schema: Any, place: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for key, part in schema.items():
        here = _step(place, key)
        if key in ("properties", "patternProperties") and isinstance(part, dict):
            yield from ((_step(here, name), sub) for name, sub in part.items())
        elif key in _LISTS and isinstance(part, list):
            yield from ((_step(here, i), sub) for i, sub in enumerate(part))
        elif key in _ONE and isinstance(part, dict):
            yield here, part
        elif key == "$ref":
            yield part, None


def locate(
    schema: dict[str, Any], complaint: Callable[[dict[str, Any]], str], limit: int = 300
) -> tuple[str, str]:
    """(place, words) of the innermost part of `schema` that `complaint` finds fault with by itself.

    `complaint` compiles a schema and says what is wrong, or "". References keep their meaning.
    """
    moved = _moved(schema)
    place = "#"
    words = complaint(schema)
    tried = 0
    descended = True
    while descended and tried < limit:
        descended = False
        for child, _ in _children(resolve(schema, quote(place, safe="#/~")), place):
            tried += 1
            wrong = (
                complaint({"$defs": {"root": moved}, "$ref": f"#/$defs/root{quote(child[1:])}"})
                if child != place
                else ""
            )
            if wrong and child not in place:
                place = child
                words = wrong
                descended = True
                break
    return place, words


def _moved(value: Any) -> Any:
    """The schema with its references pointing where it will stand: `#/$defs/root`."""
    if isinstance(value, list):
        return [_moved(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        key: f"#/$defs/root{part[1:]}" if key == "$ref" and isinstance(part, str) else _moved(part)
        for key, part in value.items()
    }
