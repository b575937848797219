"""Values checked against schemas, beside jsonschema: whatever the order of their members."""

from __future__ import annotations

import json
import random

import jsonschema
import llguidance
import numpy as np
import pytest
from generated_schemas import schema as generated

from edgeinfer.errors import UnsupportedConstraintError
from edgeinfer.runtime.sampling.grammar import check_schema, schema_grammar
from edgeinfer.runtime.sampling.schema_check import follows


def _drawn(rng: random.Random, schema: dict) -> object:
    """A value of the schema: a walk through its grammar."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), schema_grammar(check_schema(schema)))
    text = bytearray()
    while not matcher.is_stopped() and not (matcher.is_accepting() and rng.random() < 0.3):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        every = np.flatnonzero(bits[32:256]) + 32
        allowed = [token for token in every if token < 128] or list(every)
        ends = [token for token in allowed if chr(token) in '"}],']
        token = int(rng.choice(ends if ends and rng.random() < 0.5 else allowed))
        assert matcher.consume_token(token)
        text.append(token)
    return json.loads(text)


def _shuffled(rng: random.Random, value: object) -> object:
    if isinstance(value, dict):
        return {name: _shuffled(rng, value[name]) for name in rng.sample(list(value), len(value))}
    return [_shuffled(rng, one) for one in value] if isinstance(value, list) else value


def _changed(rng: random.Random, value: object) -> object:
    """The value with something removed, added or replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name, way = rng.choice(list(value)), rng.random()
        if way < 0.3:
            return {other: value[other] for other in value if other != name}
        return {**value, **({"extra": 1} if way < 0.5 else {name: _changed(rng, value[name])})}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    return rng.choice([None, True, 3, -7, 2.5, 4.0, "red", "x", [], {}])


@pytest.mark.parametrize("seed", range(40))
def test_verdicts_are_those_of_jsonschema(seed: int) -> None:
    rng, schema = random.Random(seed), generated(seed)
    oracle = jsonschema.Draft202012Validator(schema)
    value = _drawn(rng, schema)
    for one in (value, _shuffled(rng, value)):
        assert follows(one, schema) is oracle.is_valid(one) is True
    if '"format"' not in json.dumps(schema):  # the oracle takes it for an annotation
        for _ in range(10):
            one = _changed(rng, _shuffled(rng, value))
            assert follows(one, schema) is oracle.is_valid(one)


def test_members_are_found_behind_references_and_alternatives() -> None:
    part = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b", "a"]}
    schema = {"$defs": {"p": part}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/p"}]}
    assert follows({"b": 1, "a": {"z": 1.0}}, schema)
    assert follows(None, schema)
    assert not follows({"b": 1}, schema)
    assert follows({"extra": 1, "a": 1, "b": 2}, part)
    with pytest.raises(UnsupportedConstraintError):
        follows(1, {"$ref": "https://example.org/schema"})
