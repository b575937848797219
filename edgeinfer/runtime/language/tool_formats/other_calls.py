"""Parse calls that are not JSON: Python, as Gemma writes in a tool_code block (never run), and tags.

With tags, `<function=NAME><parameter=KEY>VALUE</parameter></function>`, a value is text as it stands
where the tool's schema wants a string, else JSON.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

#: The longest block that is parsed, characters.
_MAX_PYTHON = 20_000
#: Schemas of the arguments by the tool's name.
Tools = Mapping[str, Mapping[str, Any]]

_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def python_calls(code: str) -> list[tuple[str, str]] | None:
    """Parse (name, arguments as JSON) of every call; None for anything but literal keywords."""
    if len(code) > _MAX_PYTHON:
        return None
    try:
        tree = ast.parse(code.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_call(node) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and len(node.args) == 1
    ):
        node = node.args[0]  # Gemma likes to print what it calls
    if (
        not isinstance(node, ast.Call)
        or node.args
        or any(keyword.arg is None for keyword in node.keywords)
    ):
        raise ValueError("not a call with keyword arguments")
    name = ast.unparse(node.func)
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return name, json.dumps(arguments, ensure_ascii=False)


def xml_calls(text: str, tools: Tools) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of every call; None when the text is anything else."""
    if _FUNCTION.sub("", text).strip():
        return None
    calls = []
    for name, body in _FUNCTION.findall(text):
        if _PARAMETER.sub("", body).strip():
            return None
        properties = tools.get(name.strip(), {}).get("properties", {})
        arguments = {
            key.strip(): _value(value, properties.get(key.strip()))
            for key, value in _PARAMETER.findall(body)
        }
        calls.append((name.strip(), json.dumps(arguments, ensure_ascii=False)))
    return calls or None


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
