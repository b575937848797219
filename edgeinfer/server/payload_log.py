"""The opt-in payload log: requests and answers, as JSON lines, rotated by size, secrets cut out, 0600.

Off unless `--payload-log FILE` is given. `Authorization`, keys and anything that looks like one never
reach it; with `redact=True` nothing stays but what `redaction` lets through.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

_KEYS = re.compile(
    r"""
    \b(?: ei-[\w-]{20,} | sk-[\w-]{16,} | hf_\w{16,} | gh[pousr]_\w{20,} | github_pat_\w{20,}
    | glpat-[\w-]{16,} | xox[a-z]-[\w-]{10,} | AIza[\w-]{30,} | AKIA[0-9A-Z]{16}
    | Bearer\s+[\w.~+/-]{16,}
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]* )  # a JSON Web Token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?:password|passwd|secret|api[_-]?key)["']?\s*[=:]\s*["']?[^\s"'&,;]+
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
#: A wire type's value, or the bytes as they came: a body that fits no type.
Content = msgspec.Struct | bytes | None


class PayloadLog:
    """Appends to `path`; beyond `max_bytes` it becomes `path.1`, and so on up to `keep` old files."""

    def __init__(
        self, path: Path, *, max_bytes: int = 64 << 20, keep: int = 4, redact: bool = False
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.keep = keep
        self.redact = redact

    def write(self, facts: dict[str, Any], request: Content, answer: Content) -> None:
        """Append one request; `facts` are written as they are, but for a client's own id where text
        is redacted. Raises OSError.
        """
        if self.redact:
            facts = facts | {"request_id": redacted_id(facts["request_id"])}
        shown = {"request": self._shown(request), "answer": self._shown(answer)}
        line = msgspec.json.encode({"ts": round(time.time(), 3), **facts, **shown})
        self._rotate(len(line) + 1)
        descriptor = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            os.write(descriptor, line + b"\n")
        finally:
            os.close(descriptor)

    def _rotate(self, more_bytes: int) -> None:
        try:
            if self.path.stat().st_size + more_bytes <= self.max_bytes:
                return
        except FileNotFoundError:
            return
        for number in range(self.keep, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)

    def _shown(self, content: Content) -> Any:
        if self.redact:
            return redacted(content)
        if not isinstance(content, bytes):
            return _without_keys(msgspec.to_builtins(content))
        try:
            return _without_keys(msgspec.json.decode(content))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _without_keys(content.decode("utf-8", "replace"))


def _without_keys(value: Any) -> Any:
    """Replace everything that looks like a secret, in field names too."""
    if isinstance(value, str):
        return _KEYS.sub("<redacted>", value)
    if isinstance(value, dict):
        return {_KEYS.sub("<redacted>", str(k)): _without_keys(item) for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_keys(item) for item in value]
    return value


#: `Meta(extra=WORDS)` marks a number that stands for somebody's words, as a token id does.
WORDS = {"words": True}
_ID = re.compile(r"(?:req_)?[0-9a-f-]{16,36}", re.IGNORECASE)


def redacted(value: Any) -> Any:
    """`value`, a wire Struct or part of one, as JSON values. What has no type is a size alone."""
    if isinstance(value, msgspec.Struct):
        return _struct(value)
    return value if value is None else _size(value)


def redacted_id(given: str) -> str:
    """Return a request id that is a UUID or hex digits, as made here; a digest of any other text."""
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
