"""Read TOML files that users write. Errors name the file, the line, the key and its allowed values."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from edgeinfer.errors import ConfigError

T = TypeVar("T")
#: Path to a value in a file: keys of tables and indexes of lists.
Keys = tuple[str | int, ...]
#: Tables whose values may be secrets, which errors do not show.
_SECRET_TABLES = {"env", "headers"}
#: The search for the line of a mistake parses at most about this many characters, which takes 1 s.
_MAX_SEARCHED_CHARS = 4 << 20
#: Larger numbers are refused: Python cannot write one of 10,000 hexadecimal digits in decimal digits.
_MAX_BITS = 1024
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class TomlFile:
    """A TOML file with its `tables`. Raises ConfigError if `content` is not valid TOML."""

    def __init__(self, path: Path, content: bytes) -> None:
        import tomllib  # slow import (5 ms)

        self.path = path
        hint = "correct the file at this position"
        try:
            self.text = content.decode().replace("\r\n", "\n")
            self.tables = tomllib.loads(self.text)
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{path}: not valid TOML: line {line} is not UTF-8", hint=hint) from error
        except RecursionError as error:
            raise ConfigError(f"{path}: not valid TOML: nested too deeply", hint=hint) from error
        except ValueError as error:  # also a number of more than 4,300 digits
            raise ConfigError(f"{path}: not valid TOML: {error}", hint=hint) from error
        for keys, value in leaves(self.tables):
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                raise ConfigError(f"{self.position(keys)}: {key_name(keys)} is too large", hint=hint)

    def position(self, keys: Keys) -> str:
        """Return `FILE, line N` for the line that sets a key; `FILE` if the line is not found."""
        while keys and isinstance(keys[-1], int):
            keys = keys[:-1]
        lines, n_searched = self.text.split("\n"), 0
        for number in range(len(lines), 0, -1) if keys else ():
            if str(keys[-1]) not in lines[number - 1] or n_searched > _MAX_SEARCHED_CHARS:
                continue
            before = "\n".join(lines[: number - 1])
            n_searched += len(before)
            if _lacks(before, keys):
                # a line that only mentions the key, such as a comment, does not set it
                is_set = not _lacks(f"{before}\n{lines[number - 1]}", keys)
                return f"{self.path}, line {number}" if is_set else str(self.path)
        return str(self.path)


def leaves(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield keys and value of every value in tables and lists that is neither a table nor a list."""
    if not isinstance(value, dict | list):
        yield keys, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(inner, (*keys, key))


def _lacks(text: str, keys: Keys) -> bool:
    """Return whether `text`, the beginning of a file, is valid TOML without the key."""
    import tomllib

    try:
        value: Any = tomllib.loads(text)
        for key in keys:
            value = value[key]
    except ValueError:
        return False
    except (LookupError, TypeError):
        return True
    return False


def convert(
    value: Any,
    kind: type[T],
    position: Callable[[Keys], str],
    *,
    hint: str = "correct or remove this key",
) -> T:
    """Convert a parsed value to `kind`.

    Raises ConfigError about the first mistake. The error's message begins with the text that `position`
    returns for the keys of the mistake: file and line.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        keys, problem = _mistake(value, kind, ()) or ((), str(error))
        raise ConfigError(f"{position(keys)}: {problem}", hint=hint) from error


def _mistake(value: Any, kind: Any, keys: Keys) -> tuple[Keys, str] | None:
    """Return the keys and a description of the first mistake in `value`; None if there is none."""
    if _fits(value, kind):
        return None
    for member in _members(kind):
        if isinstance(value, dict) and msgspec.inspect.is_struct_type(member):
            return _mistake_in_struct(value, member, keys)
        if isinstance(value, dict) and get_origin(member) is dict:
            key_kind, inner = get_args(member)
            for key in value:
                if not _fits(key, key_kind):
                    return _unknown_key((*keys, key), map(str, get_args(key_kind)))
            return _first(_mistake(value[key], inner, (*keys, key)) for key in value)
        if isinstance(value, list) and value and get_origin(member) in (tuple, list):
            inner = get_args(member)[0]
            return _first(_mistake(item, inner, (*keys, i)) for i, item in enumerate(value))
    allowed = _join(_alternatives(msgspec.inspect.type_info(kind)))
    value_text = f" is {_value_text(value)}, but" if _SECRET_TABLES.isdisjoint(keys) else ""
    return keys, f"{key_name(keys)}{value_text} must be {allowed}{_suggestion(value, kind)}"


def _mistake_in_struct(
    table: dict[str, Any], kind: type[msgspec.Struct], keys: Keys
) -> tuple[Keys, str] | None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key in fields:
            if mistake := _mistake(value, fields[key].type, (*keys, key)):
                return mistake
        elif kind.__struct_config__.forbid_unknown_fields:
            return _unknown_key((*keys, key), fields)
    missing = next(name for name, field in fields.items() if field.required and name not in table)
    return keys, f"the key `{missing}` is missing"


def _first(mistakes: Iterable[tuple[Keys, str] | None]) -> tuple[Keys, str] | None:
    return next(filter(None, mistakes), None)


def _unknown_key(keys: Keys, valid: Iterable[str]) -> tuple[Keys, str]:
    names = list(valid)
    near = difflib.get_close_matches(str(keys[-1]), names, n=1)
    step = f"did you mean `{near[0]}`?" if near else f"valid keys: {', '.join(names)}"
    return keys, f"unknown key {key_name(keys)}; {step}"


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _members(kind: Any) -> list[Any]:
    """List the types of a union; `[kind]` for another type. `Annotated[T, …]` counts as `T`."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [inner for member in get_args(kind) for inner in _members(member)]
    return [kind]


def key_name(keys: Keys) -> str:
    """Return a key as users write it: "`load.ctx`", "`scale` in item 2 of `lora`"."""
    if not keys:
        return "the value"
    first = max((i + 1 for i, key in enumerate(keys) if isinstance(key, int)), default=0)
    written = (str(k) if _BARE_KEY.fullmatch(str(k)) else _value_text(str(k)) for k in keys[first:])
    dotted = f"`{'.'.join(written)}`" if keys[first:] else ""
    item = f"item {int(keys[first - 1]) + 1} of {key_name(keys[: first - 1])}" if first else ""
    return " in ".join(filter(None, (dotted, item)))


def _value_text(value: Any) -> str:
    match value:
        case str():
            text = json.dumps(value, ensure_ascii=False)
            return text if len(text) <= 60 else f'{text[:58]}…"'
        case bool():
            return str(value).lower()
        case list():
            return "a list" if value else "an empty list"
        case dict():
            return "a table"
        case None:
            return "null"
    return str(value)


def _alternatives(kind: msgspec.inspect.Type) -> list[str]:
    """List what a key of this type may hold, in words."""
    match kind:
        case msgspec.inspect.Metadata():
            return _alternatives(kind.type)
        case msgspec.inspect.UnionType():
            return [text for member in kind.types for text in _alternatives(member)]
        case msgspec.inspect.LiteralType():
            return [_value_text(value) for value in kind.values]
        case msgspec.inspect.BoolType():
            return ["true", "false"]
        case msgspec.inspect.IntType():
            return [f"a whole number{_range(kind)}"]
        case msgspec.inspect.FloatType():
            return [f"a number{_range(kind)}"]
        case msgspec.inspect.StrType():
            return ["a text in quotes" + " with at least one character" * bool(kind.min_length)]
        case msgspec.inspect.CollectionType():
            item = _join(_alternatives(kind.item_type))
            items = re.sub(r"\ba (text|table|list|(whole )?number)\b", r"\1s", item)
            return [f"a list of {items}" + ", at least one" * bool(kind.min_length)]
        case msgspec.inspect.NoneType():
            return []
    return ["a table"]


def _range(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    if kind.gt is not None:
        return f" above {kind.gt:.10g}" + ("" if kind.le is None else f", at most {kind.le:.10g}")
    if kind.ge is None:
        return ""
    return f" from {kind.ge:.10g} " + ("on" if kind.le is None else f"to {kind.le:.10g}")


def _join(texts: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _suggestion(value: Any, kind: Any) -> str:
    """Return a correction such as `; write 80 without quotes`; "" if none is likely."""
    import tomllib

    if not isinstance(value, str):
        return ""
    if _fits([value], kind):
        return f"; write [{_value_text(value)}]"
    choices = [get_args(member) for member in _members(kind) if get_origin(member) is Literal]
    if near := difflib.get_close_matches(value, chain(*choices), n=1):
        return f'; did you mean "{near[0]}"?'
    try:
        unquoted = tomllib.loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        return ""
    return f"; write {value} without quotes" if _fits(unquoted, kind) else ""
