"""What a tool's arguments may be: objects are closed unless they say otherwise, and shown by name."""

import pytest

from edgeinfer.runtime.chat_format.tool_call_grammar import arguments_schema, example
from edgeinfer.runtime.requests import Tool
from edgeinfer.runtime.sampling.grammar import check_schema

TEXT = {"type": "string"}
CLOSED = {"additionalProperties": False}


def _schema_of(**schema):
    return arguments_schema(Tool(name="f", parameters=schema))


def test_arguments_object_is_closed_unless_it_says_otherwise():
    inner = {"type": "object", "properties": {"b": TEXT}}
    schema = _schema_of(properties={"a": inner, "list": {"type": "array", "items": inner}})
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"] == inner | CLOSED
    assert schema["properties"]["list"]["items"] == inner | CLOSED
    for said in (True, False, TEXT):
        schema = _schema_of(properties={"a": inner | {"additionalProperties": said}})
        inner_schema = schema["properties"]["a"]
        assert inner_schema["additionalProperties"] == said


def test_map_stays_open_and_tool_without_parameters_takes_none():
    assert _schema_of(properties={"env": {"type": "object"}})["properties"]["env"] == {"type": "object"}
    for schema in ({}, {"type": "object"}, {"type": "object", "properties": {}}):
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        assert arguments_schema(Tool(name="f", parameters=schema)) == nothing


def test_required_name_is_a_member_without_a_schema_of_its_own():
    schema = _schema_of(properties={"a": TEXT}, required=["a", "b"])
    assert set(schema["properties"]) == {"a", "b"}
    check_schema(schema)


def test_schemas_of_a_shared_object_stay_open():
    """Closed, neither would allow what the other asks for."""
    first = {"type": "object", "properties": {"a": TEXT}}
    two = {"type": "object", "properties": {"b": TEXT}}
    both = _schema_of(properties={"x": {"allOf": [first, two]}})["properties"]["x"]
    assert both == {"allOf": [first, two]}
    single = _schema_of(properties={"x": {"allOf": [first]}})["properties"]["x"]
    assert single == {"allOf": [first | CLOSED]}
    either = _schema_of(properties={"x": {"anyOf": [first, two]}})["properties"]["x"]
    assert either == {"anyOf": [first | CLOSED, two | CLOSED]}
    joined_schema = _schema_of(properties={"a": TEXT}, anyOf=[two])
    assert "additionalProperties" not in joined_schema
    assert joined_schema["anyOf"] == [two]
    base = {"$defs": {"base": first}, "properties": {"x": {"allOf": [{"$ref": "#/$defs/base"}, two]}}}
    assert _schema_of(**base)["$defs"]["base"] == first
    plain = {"$defs": {"base": first}, "properties": {"x": {"$ref": "#/$defs/base"}}}
    assert _schema_of(**plain)["$defs"]["base"] == first | CLOSED


def test_deep_schema_is_left_to_the_check():
    deep: dict[str, object] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    assert _schema_of(properties={"a": deep})["additionalProperties"] is False


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        (
            {"properties": {"city": TEXT, "days": {"type": "integer"}}, "required": ["city"]},
            {"city": "<city>"},
        ),
        ({"properties": {"unit": {"enum": ["C", "F"]}}}, {"unit": "C"}),
        ({"properties": {"tags": {"type": "array", "items": TEXT}}}, {"tags": ["<tags>"]}),
        ({"properties": {"on": {"type": ["boolean", "null"]}}}, {"on": True}),
        ({"properties": {"x": {"$ref": "#"}}}, {"x": "<x>"}),
        ({}, {}),
    ],
)
def test_example_call_uses_the_tools_own_names(schema, shown):
    assert example(Tool(name="f", parameters=schema)) == shown
