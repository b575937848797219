"""A request or an answer without anybody's words: what its wire type lists stays, all else is a length.

What stays are names of fields, booleans, numbers that stand alone, and words that the type itself
enumerates (a role, a reason). A text, a list of numbers, a token id, an object without a type: each
becomes its size. A new field is redacted until its type says that there is nothing to hide.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

#: `Meta(extra=WORDS)` marks a number that stands for somebody's words, as a token id does.
WORDS = {"words": True}
_ID = re.compile(r"(?:req_)?[0-9a-f-]{16,36}", re.IGNORECASE)


def redacted(value: Any) -> Any:
    """`value`, a wire Struct or part of one, as JSON values. What has no type is a size alone."""
    if isinstance(value, msgspec.Struct):
        return _struct(value)
    return value if value is None else _size(value)


def redacted_id(given: str) -> str:
    """A request's id if it is one of ours, a UUID or hex digits; a digest of any other text."""
    if _ID.fullmatch(given):
        return given
    return f"sha256:{hashlib.sha256(given.encode()).hexdigest()[:16]}"


class _Field(NamedTuple):
    attribute: str
    name: str
    literals: frozenset[str]
    hides_numbers: bool


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[_Field, ...]:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return tuple(
        _Field(
            attribute=field.name,
            name=field.encode_name,
            literals=frozenset(_literals(field.type)),
            hides_numbers=_stands_for_words(field.type),
        )
        for field in described.fields
    )


def _literals(described: inspect.Type) -> list[str]:
    if isinstance(described, inspect.Metadata):
        return _literals(described.type)
    if isinstance(described, inspect.UnionType):
        return [word for inner in described.types for word in _literals(inner)]
    if isinstance(described, inspect.LiteralType):
        return [word for word in described.values if isinstance(word, str)]
    return []


def _stands_for_words(described: inspect.Type) -> bool:
    if isinstance(described, inspect.Metadata):
        return bool((described.extra or {}).get("words")) or _stands_for_words(described.type)
    if isinstance(described, inspect.UnionType):
        return any(_stands_for_words(inner) for inner in described.types)
    return False


def _struct(value: msgspec.Struct) -> dict[str, Any]:
    config = value.__struct_config__
    shown: dict[str, Any] = {}
    if config.tag_field is not None:
        shown[config.tag_field] = config.tag
    for field in _fields(type(value)):
        inner = getattr(value, field.attribute)
        if inner is not None and inner is not msgspec.UNSET:
            shown[field.name] = _value(inner, field)
    return shown


def _value(value: Any, field: _Field) -> Any:
    if isinstance(value, msgspec.Struct):
        return _struct(value)
    if isinstance(value, list) and value and not all(isinstance(i, int | float) for i in value):
        return [_value(item, field) for item in value]
    if isinstance(value, bool) or (isinstance(value, int | float) and not field.hides_numbers):
        return value
    return value if isinstance(value, str) and value in field.literals else _size(value)


def _size(value: Any) -> str:
    if isinstance(value, str):
        return f"<{len(value)} characters>"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict):
        return f"<{len(value)} fields>"
    return f"<{len(value)} numbers>" if isinstance(value, list) else "<a number>"
