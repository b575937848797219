"""Grammars that make a model write well-formed tool calls, in the notation that it was trained on.

The arguments follow the tool's JSON schema. Markers that are control tokens appear in the grammar as
token ids, others as text. At most MAX_CALLS calls are allowed, because small models do not stop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer.errors import InvalidRequestError, UnsupportedConstraintError
from edgeinfer.runtime.chat_format.parameters import json_text, parameter_kinds, property_schemas
from edgeinfer.runtime.chat_format.tool_call_formats import ToolFormat
from edgeinfer.runtime.requests import Tool, limit_preparation
from edgeinfer.runtime.sampling.grammar import Lark, check_schema, inline_schema, quote
from edgeinfer.runtime.sampling.schema_overlaps import MAX_DEPTH

if TYPE_CHECKING:
    from edgeinfer.runtime.llama.vocab import Vocab

MAX_CALLS = 8
_ANY = "/(?s:.*)/"
#: Matches what may be a control token: `<tool_call>`, `[TOOL_CALLS]`.
_MARKER = re.compile(r"(<[^<>\n]+>|\[[A-Z_]+\])")


def marker(text: str, vocab: Vocab) -> str:
    """Return a marker in the grammar's syntax: `<[151657]>` for a control token, otherwise a string."""
    token = control_token(text, vocab)
    return quote(text) if token is None else f"<[{token}]>"


def control_token(text: str, vocab: Vocab) -> int | None:
    """Return the id of the control token `text`; None if the text is not one."""
    tokens = vocab.tokenize(text, parse_special=True)
    return tokens[0] if len(tokens) == 1 and vocab.is_control(tokens[0]) else None


def needs_special(form: ToolFormat, vocab: Vocab) -> bool:
    """Return whether some markers are control tokens, so that the parser needs their texts."""
    texts = (*form.begin[:1], form.opening, form.call, form.separator, form.closing)
    markers = [piece for text in texts for piece in _MARKER.split(text) if piece]
    return any(control_token(piece, vocab) is not None for piece in markers)


def _terms(text: str, vocab: Vocab) -> str:
    """Write `text` in Lark's syntax: markers that are control tokens by their ids, the rest quoted."""
    return " ".join(marker(piece, vocab) for piece in _MARKER.split(text) if piece)


def required_calls(form: ToolFormat, tools: Sequence[Tool], vocab: Vocab, *, several: bool) -> Lark:
    """Return the grammar of an answer that is calls of `tools`: one, or with `several` up to MAX_CALLS.

    Raises UnsupportedConstraintError if a tool's schema cannot be enforced.
    """
    body = _section(form, vocab, several=several and form.parallel)
    opening = _terms(form.opening, vocab)
    return Lark("\n".join([f"start: {opening} {body}", *_calls(form, tools, vocab)]))


def text_or_calls(
    form: ToolFormat, tools: Sequence[Tool], vocab: Vocab, *, several: bool
) -> Lark | None:
    """Return the grammar of free text, in which a call's marker must begin a well-formed call.

    With `several`, up to MAX_CALLS calls may follow. Returns None if the format does not require a
    marker, or allows Python calls. Raises UnsupportedConstraintError as `required_calls` does.
    """
    if form.bare or not form.begin or form.inner == "python":
        return None
    begin = form.begin[0]
    opening = _terms(form.opening.removeprefix(begin), vocab)
    body = f"{opening} {_section(form, vocab, several=several and form.parallel)}"
    if control_token(begin, vocab) is None:
        head = [f"calls: begun {body}", f"begun[lazy]: TEXT {quote(begin)}"]
    else:
        head = [f"calls: TEXT {marker(begin, vocab)} {body}"]
    rules = ["start: calls | TEXT", *head, f"TEXT: {_ANY}", *_calls(form, tools, vocab)]
    return Lark("\n".join(rules))


def _section(form: ToolFormat, vocab: Vocab, *, several: bool) -> str:
    """Return the grammar of calls and the closing marker; `several` bare calls must be in a list."""
    more = f" ({_terms(form.separator, vocab)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    if form.bare:
        return f'(call | "[" call{more} "]")' if several else "call"
    return f"call{more} {_terms(form.closing, vocab)}"


def _calls(form: ToolFormat, tools: Sequence[Tool], vocab: Vocab) -> list[str]:
    rules = ["call: " + " | ".join(f"call{i}" for i in range(len(tools)))]
    if form.inner == "xml":
        rules += _XML_VALUE
    for i, tool in enumerate(tools):
        if form.inner == "xml":
            rules += _xml_call(i, tool)
            continue
        before, after = (_terms(text, vocab) for text in _around_arguments(form, tool.name))
        rules += [
            f"call{i}: {before} args{i} {after}",
            f"args{i}: {inline_schema(arguments_schema(tool))}",
        ]
    return rules


def _around_arguments(form: ToolFormat, name: str) -> tuple[str, str]:
    """Return the texts of a call before and after its arguments."""
    written = name if form.named else quote(name)[1:-1]
    before, _, after = form.call.partition("$arguments")
    return before.replace("$name", written), after


#: Grammar rules for the value of a text parameter. The text may contain XML calls itself, so the rules
#: pair each `<parameter=` in the text with a `</parameter>`.
_XML_VALUE = (
    "xvalue: xend | xopen xvalue xvalue",
    'xend[lazy]: /(?s:.*)/ "\\n</parameter>\\n"',
    'xopen[lazy]: /(?s:.*)/ "<parameter="',
)


def _xml_call(i: int, tool: Tool) -> list[str]:
    """Return the rules of the call of tool `i`, with its parameters in the schema's order."""
    schema = arguments_schema(tool)
    required = schema.get("required")
    rules, terms = [], []
    for n, key in enumerate(property_schemas(schema)):
        is_required = isinstance(required, list) and key in required
        terms.append(f"x{i}p{n}" if is_required else f"x{i}p{n}?")
        opening = quote(f"<parameter={key}>\n")
        rules.append(f"x{i}p{n}: {opening} {_xml_value(schema, key)}")
    if not terms and schema != _EMPTY:
        terms = [f"x{i}any*"]
        rules.append(f'x{i}any: "<parameter=" /[^<>\\n]{{1,64}}/ ">\\n" xvalue')
    head = quote(f"<function={tool.name}>\n")
    return [f'call{i}: {head} {" ".join(terms)} "</function>"', *rules]


def _xml_value(schema: dict[str, Any], key: str) -> str:
    closing = quote("\n</parameter>\n")
    parts = property_schemas(schema)[key]
    kinds = parameter_kinds(schema, key)
    if "string" not in kinds:
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        json_schema = {**shared, **parts[0]} if len(parts) == 1 else {}
        try:
            return f"{inline_schema(check_schema(json_schema))} {closing}"
        except UnsupportedConstraintError:
            return f"{inline_schema({'type': sorted(kinds)})} {closing}"
    options = parts[0].get("enum") if isinstance(parts[0], dict) else None
    if isinstance(options, list) and options and all(isinstance(option, str) for option in options):
        return f"({' | '.join(map(quote, options))}) {closing}"
    return "xvalue"


def _xml_function(name: str, arguments: str) -> str:
    try:
        members = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeEncodeError):
        members = {"arguments": arguments}
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json_text(value)}\n</parameter>\n"
        for key, value in members.items()
    )
    return f"<function={name}>\n{parameters}</function>"


def write_call(form: ToolFormat, name: str, arguments: str) -> str:
    """Return a call in the model's notation, for prompts. `arguments` is JSON."""
    if form.inner == "xml":
        call = _xml_function(name, arguments)
    else:
        call = arguments.join(_around_arguments(form, name))
    return f"{form.opening}{call}{form.closing}"


_EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
#: Keywords of JSON Schema by which an object may have properties that `properties` does not list.
_JOINING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")
#: Maximum number of optional arguments in an example if no argument is required.
_SHOWN = 3


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, in which objects allow only the properties they name.

    Otherwise small models would add properties. A property is named by `properties` or by `required`.
    An object schema in which the tool sets `additionalProperties` keeps its value.
    """
    schema = {"type": "object", **tool.parameters}
    if set(schema) <= {"type", "description", "title", "$schema"} and schema["type"] == "object":
        return _EMPTY
    closed = _close(schema, 0, joined=False)
    return closed if isinstance(closed, dict) else schema


@lru_cache(maxsize=512)
def _fault_of(parameters: bytes, salt: str) -> tuple[str, str] | None:
    try:
        check_schema(arguments_schema(Tool(name="", parameters=msgspec.json.decode(parameters))))
    except UnsupportedConstraintError as error:
        return error.param or "#", error.message
    return None


def schema_fault(tool: Tool, salt: str) -> tuple[str, str] | None:
    """Return the JSON pointer of the part of a tool's schema that cannot be enforced, and the reason;
    None if the whole schema can be enforced.

    Results are cached per `salt`, so that timing does not reveal another client's schemas.
    """
    types = tool.parameters.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        return "#/type", "arguments must be an object"
    return _fault_of(msgspec.json.encode(tool.parameters), salt)


def describe_loose(tool: Tool) -> str:
    """Return a warning for users that a tool's schema is not enforced, and why; "" if there is none."""
    try:
        with limit_preparation():
            fault = schema_fault(tool, "")
    except InvalidRequestError as error:
        fault = "#", error.message
    return f"{tool.name}: the model may write other arguments: {fault[1]}" if fault else ""


def _close(schema: Any, depth: int, *, joined: bool) -> Any:
    """Forbid properties that an object schema does not list, unless it is one of several in `allOf`."""
    if isinstance(schema, list):
        return [_close(operand, depth, joined=joined) for operand in schema]
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    closed = dict(schema)
    inner_depth = depth + 1
    is_joined = joined or "properties" in schema
    for key, operand in schema.items():
        if key in ("anyOf", "oneOf"):
            closed[key] = _close(operand, inner_depth, joined=is_joined)
        elif key == "allOf":
            is_single = isinstance(operand, list) and len(operand) == 1
            closed[key] = _close(operand, inner_depth, joined=is_joined or not is_single)
        elif key in ("properties", "patternProperties") and isinstance(operand, dict):
            closed[key] = {n: _close(inner, inner_depth, joined=False) for n, inner in operand.items()}
        elif key in ("$defs", "definitions") and isinstance(operand, dict):
            shared = _joins(schema, 0)
            closed[key] = {n: _close(inner, inner_depth, joined=shared) for n, inner in operand.items()}
        elif key in ("items", "prefixItems", "additionalProperties"):
            closed[key] = _close(operand, inner_depth, joined=False)
    if not joined and _is_plain_object(schema):
        closed["additionalProperties"] = False
        needed = schema.get("required")
        names = [name for name in needed if isinstance(name, str)] if isinstance(needed, list) else []
        closed["properties"] = {**{name: {} for name in names}, **closed["properties"]}
    return closed


def _is_plain_object(schema: Mapping[str, Any]) -> bool:
    return (
        isinstance(schema.get("properties"), dict)
        and "additionalProperties" not in schema
        and not any(key in schema for key in _JOINING)
    )


def _joins(schema: Any, depth: int) -> bool:
    if isinstance(schema, list):
        return any(_joins(operand, depth + 1) for operand in schema)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return False
    together = schema.get("allOf")
    if isinstance(together, list) and len(together) > 1:
        return True
    if "$ref" in schema and "properties" in schema:
        return True
    return any(_joins(operand, depth + 1) for operand in schema.values())


def example(tool: Tool) -> dict[str, Any]:
    """Return example arguments for a tool: placeholders, without nested objects."""
    schema = arguments_schema(tool)
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    required = schema.get("required")
    needed = [name for name in properties if isinstance(required, list) and name in required]
    return {name: _placeholder(properties[name], name) for name in needed or list(properties)[:_SHOWN]}


def _placeholder(schema: Any, name: str) -> Any:
    schema = schema if isinstance(schema, dict) else {}
    options, kind = schema.get("enum"), schema.get("type")
    if isinstance(options, list) and options:
        return options[0]
    first_kind = str(kind[0] if isinstance(kind, list) and kind else kind)
    by_kind = {"integer": 1, "number": 1.5, "boolean": True, "array": [f"<{name}>"], "object": {}}
    return by_kind.get(first_kind, f"<{name}>")
