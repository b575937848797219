"""JSON schemas drawn from a seed: every keyword that is enforced, nested, none of them impossible."""

import random
from typing import Any

_WORDS = ["name", "age", "tags", "city", "a/b", "über", "x y", 'q"t', "id", "items"]


def schema(seed: int) -> dict[str, Any]:
    """The schema of this seed. Texts and lists are kept short, so that a small model ends them."""
    rng = random.Random(seed)
    made = _object(rng, 2) if rng.random() < 0.7 else _any(rng, 2)
    if rng.random() < 0.3:
        made = {"$ref": "#/$defs/top", "$defs": {"top": made}}
    return made


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _string, _integer, _number, _literal, _flag]
    if depth > 0:
        makers += [_object, _array, _union, _tuple]
    maker = rng.choice(makers)
    return maker(rng, depth - 1)


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randrange(0, 4)
    return rng.choice(
        [
            {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 12)},
            {"type": "string", "maxLength": 8},
            {
                "type": "string",
                "pattern": rng.choice(["^[a-z]{2,5}$", "^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", "^\\S{1,6}$"]),
            },
            {"type": "string", "format": rng.choice(["date", "date-time", "time", "uuid", "ipv4"])},
            {"type": ["string", "null"], "maxLength": 5},
        ]
    )


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 500)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 2},
            {"type": "integer", "multipleOf": rng.choice([2, 5, 7]), "minimum": 0, "maximum": 1000},
        ]
    )


def _number(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randrange(-100, 100)
    return rng.choice(
        [{"type": "number", "minimum": low, "maximum": low + 1.5}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}]
    )


def _literal(rng: random.Random, _depth: int) -> dict[str, Any]:
    values: list[Any] = ["red", "grün", 'a "b"', 3, -1.5, None, True, {"x": [1]}, []]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _flag(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randrange(1, 5))
    made: dict[str, Any] = {
        "type": "object",
        "title": "an annotation",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        made["patternProperties"] = {"^z[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}}
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(0, 3)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(0, 3)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [_any(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    key = rng.choice(["anyOf", "anyOf", "allOf"])
    if key == "allOf":
        return {"allOf": [_object(rng, depth - 1), {"type": "object"}]}
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
