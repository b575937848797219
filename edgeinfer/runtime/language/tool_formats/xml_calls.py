"""Read calls written with tags: `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

A value is text as it stands where the tool's schema wants a string, else JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

#: Schemas of the arguments by the tool's name.
Tools = Mapping[str, Mapping[str, Any]]

_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


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
