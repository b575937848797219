"""JSON schemas drawn from a seed: every keyword that is enforced, nested, none of them impossible."""

import random
from typing import Any

_WORDS = ["name", "age", "tags", "city", "a/b", "über", "x y", 'q"t', "id", "items"]


def schema(seed: int) -> dict[str, Any]:
    """Return the schema of a seed. Texts and lists are kept short, so that a small model ends them."""
    rng = random.Random(seed)
    generated = _object(rng, 2) if rng.random() < 0.7 else _any(rng, 2)
    if rng.random() < 0.3:
        generated = {"$ref": "#/$defs/top", "$defs": {"top": generated}}
    return generated


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _string, _integer, _number, _literal, _flag]
    if depth > 0:
        makers += [_object, _array, _union, _tuple]
    maker = rng.choice(makers)
    return maker(rng, depth - 1)


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randrange(0, 4)
    high = low + rng.randrange(1, 12)
    pattern = rng.choice(["^[a-z]{2,5}$", "^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", "^\\S{1,6}$"])
    rules: list[dict[str, Any]] = [
        {"minLength": low, "maxLength": high},
        {"maxLength": 8},
        {"pattern": pattern},
        {"format": rng.choice(["date", "date-time", "time", "uuid", "ipv4"])},
        {"type": ["string", "null"], "maxLength": 5},
    ]
    return {"type": "string"} | rng.choice(rules)


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    ranges = [
        {"minimum": low, "maximum": low + rng.randrange(0, 500)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 2},
        {"multipleOf": rng.choice([2, 5, 7]), "minimum": 0, "maximum": 1000},
    ]
    return {"type": "integer"} | rng.choice(ranges)


def _number(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randrange(-100, 100)
    ranges = [{"minimum": low, "maximum": low + 1.5}, {"exclusiveMinimum": 0, "maximum": 1}]
    return {"type": "number"} | rng.choice(ranges)


def _literal(rng: random.Random, _depth: int) -> dict[str, Any]:
    values: list[Any] = ["red", "grün", 'a "b"', 3, -1.5, None, True, {"x": [1]}, []]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _flag(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randrange(1, 5))
    drawn: dict[str, Any] = {
        "type": "object",
        "title": "an annotation",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        drawn["patternProperties"] = {"^z[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}}
    return drawn


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(0, 3)
    items = _any(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(0, 3)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    parts = [_any(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    key = rng.choice(["anyOf", "anyOf", "allOf"])
    if key == "allOf":
        return {"allOf": [_object(rng, depth - 1), {"type": "object"}]}
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}


_STRINGS: list[dict[str, Any]] = [
    {"maxLength": 3},
    {"minLength": 2, "maxLength": 2},
    {"pattern": "^a+b?$", "maxLength": 4},
    {"pattern": "x", "maxLength": 3},
    {"format": "date", "minLength": 3},
    {"format": "email", "maxLength": 20},
    {"format": "hostname", "maxLength": 12},
    {"format": "uri", "maxLength": 20},
    {"format": "duration"},
    {"format": "ipv6"},
    {"enum": ["ab", "a", "c"], "minLength": 2},
]
_NUMBERS: list[dict[str, Any]] = [
    {"minimum": -3, "maximum": 3.5},
    {"exclusiveMinimum": -1, "exclusiveMaximum": 2},
    {"multipleOf": 0.5, "minimum": 0, "maximum": 2},
    {"multipleOf": 3, "maximum": 10, "minimum": -10},
]


def wild(seed: int) -> dict[str, Any]:
    """Return a schema of random parts: often contradictory, or beyond what a grammar can express."""
    rng = random.Random(seed)
    return {**_wild(rng, 3), "$defs": {"x": _wild(rng, 0)}}


def _wild(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["type", "enum", "const", "string", "number"]
    if depth > 0:
        kinds += ["array", "object", "anyOf", "oneOf", "allOf", "both", "ref"]
    kind = rng.choice(kinds)
    if kind == "type":
        return {"type": rng.choice(["boolean", "null", "integer", ["boolean", "integer"]])}
    if kind == "enum":
        return {"enum": rng.sample([1, "1", None, True, 1.5, [1], {"a": 1}, "é"], 3)}
    if kind == "const":
        return {"const": rng.choice([1, 0, False, "", {}, [], 1e3, None])}
    if kind == "string":
        return {"type": "string", **rng.choice(_STRINGS)}
    if kind == "number":
        return {"type": rng.choice(["integer", "number"]), **rng.choice(_NUMBERS)}
    if kind == "array":
        fixed = {"prefixItems": [_wild(rng, depth - 1)]} if rng.random() < 0.4 else {}
        return {"type": "array", "maxItems": 3, "items": _wild(rng, depth - 1), **fixed}
    if kind == "both":
        return {**_wild(rng, depth - 1), **_wild(rng, depth - 1)}
    if kind == "ref":
        return {"$ref": "#/$defs/x", **({"maxLength": 2} if rng.random() < 0.3 else {})}
    if kind == "object":
        return _wild_object(rng, depth)
    return {kind: [_wild(rng, depth - 1) for _ in range(2)]}


def _wild_object(rng: random.Random, depth: int) -> dict[str, Any]:
    properties = {name: _wild(rng, depth - 1) for name in rng.sample("abcd", rng.randrange(0, 4))}
    drawn: dict[str, Any] = {"type": "object", "properties": properties}
    drawn["required"] = rng.sample([*sorted(properties), "z"], rng.randrange(0, len(properties) + 1))
    drawn["additionalProperties"] = rng.choice([False, _wild(rng, 0)])
    rules = {"patternProperties": {"^q": _wild(rng, 0)}, "minProperties": 1, "maxProperties": 3}
    for key, value in rules.items():
        if rng.random() < 0.2:
            drawn[key] = value
    return drawn
