"""Read one tool call: a JSON object character by character, or a block in Python or XML notation.

The object reader follows nesting, strings and escapes alone; a real parser judges the whole. It fails
at the first key that no call has, so that an answer in JSON is not held back. Python, as Gemma writes
in a tool_code block, is never run. XML is `<function=NAME><parameter=KEY>VALUE</parameter></function>`;
a value is text if the tool's schema wants a string, else JSON.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", "function", *ARGUMENT_KEYS)
#: What JSON has outside of strings, brackets aside.
_OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")
#: The longest call, characters; a longer one is text.
MAX_CALL = 1_000_000


class ObjectReader:
    """Read one object. `whole`: it is the arguments themselves, and the name is known already."""

    def __init__(self, name: str = "", *, whole: bool = False) -> None:
        self.name = name
        self.raw = ""
        self.done = False
        self.failed = False
        self.args_start = 0 if whole else -1
        self.args_end = -1
        self._depth = 0
        #: Depth of the object with the name: calls come as `{"function": {…}}` too.
        self._call_depth = -1 if whole else 1
        self._args_depth = 0
        self._in_string = False
        self._escaped = False
        self._string_start = 0
        self._key: str | None = None
        self._at = 0

    def feed(self, text: str) -> int:
        """Take characters up to the object's end; return how many. Sets `done` or `failed`."""
        base = len(self.raw)
        self.raw += text
        for i, c in enumerate(text):
            self._at = base + i
            if self._in_string:
                self._string_character(c)
            else:
                self._structure(c)
            if self.done or self.failed:
                self.raw = self.raw[: self._at + 1]
                return i + 1
        self.failed = self.failed or len(self.raw) > MAX_CALL
        return len(text)

    def _string_character(self, c: str) -> None:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._in_string = False
            self._string_ended()

    def _string_ended(self) -> None:
        if self._depth != self._call_depth:
            return
        text = _decoded(self.raw[self._string_start : self._at + 1])
        if self._key is None:
            if text not in _KEYS:
                self.failed = True
            self._key = text if isinstance(text, str) else ""
        elif self._key == "name":
            self.name = text if isinstance(text, str) else ""

    def _structure(self, c: str) -> None:
        if self._depth == 0 and c != "{":
            self.failed = True
        elif c == '"':
            self._string_start = self._at
            self._in_string = True
        elif c in "{[":
            self._opened(c)
        elif c in "}]":
            self._closed()
        elif c == "," and self._depth == self._call_depth:
            self._key = None
        elif c not in _OUTSIDE_STRINGS:
            self.failed = True

    def _opened(self, c: str) -> None:
        if self._depth == self._call_depth and c == "{":
            if self._key in ARGUMENT_KEYS and self.args_start < 0:
                self.args_start, self._args_depth = self._at, self._depth
            elif self._key == "function" and self._call_depth == 1:
                self._call_depth, self._key = 2, None
        self._depth += 1

    def _closed(self) -> None:
        self._depth -= 1
        if self.args_start >= 0 and self.args_end < 0 and self._depth == self._args_depth:
            self.args_end = self._at + 1
        self.done = self._depth <= 0

    def arguments(self) -> str | None:
        """Return the arguments as JSON text, once `done`; None if this is no call."""
        call = _decoded(self.raw)
        if not isinstance(call, dict):
            return None
        if self.args_start >= 0:
            return self.raw[self.args_start : self.args_end]
        return _loose_arguments(call.get("function", call))


def _decoded(text: str, otherwise: Any = None) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return otherwise


def _loose_arguments(call: Any) -> str | None:
    """Return arguments that are missing, or an object in a string, as some models write it."""
    if not isinstance(call, dict):
        return None
    value: Any = next((call[key] for key in ARGUMENT_KEYS if key in call), {})
    if isinstance(value, str):
        return value if isinstance(_decoded(value), dict) else None
    return "{}" if value in ({}, None) else None


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
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]  # Gemma likes to print what it calls
    if not isinstance(node, ast.Call) or node.args or None in [k.arg for k in node.keywords]:
        raise ValueError("not a call with keyword arguments")
    name = ast.unparse(node.func)
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return name, json.dumps(arguments, ensure_ascii=False)


def xml_calls(text: str, tools: Tools) -> list[tuple[str, str]] | None:
    """Parse (name, arguments as JSON) of every call; None if the text is anything else."""
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
    return text if kind == "string" else _decoded(text, otherwise=text)
