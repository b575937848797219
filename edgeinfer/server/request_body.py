"""Read a request's body or query, and decode it as a wire type (a subclass of `Wire`)."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect

from edgeinfer.config.load_options import LOAD_OPTIONS
from edgeinfer.server import problems
from edgeinfer.server.context import RequestContext
from edgeinfer.server.problems import Problem
from edgeinfer.server.wire_types import Wire

#: Largest body (bytes) that is decoded on the event loop: 64 KiB take about 1 ms.
_INLINE_BYTES = 64 << 10
#: Headers that switch on beta features of the original APIs. `x-edgeinfer-ignored` names them.
_BETA_HEADERS = ("anthropic-beta", "openai-beta")

T = TypeVar("T")


async def read_body(context: RequestContext) -> bytes:
    """Read the request's body.

    Raises Problem 413 if it is too long, 400 if the client disconnects, and 429 or 503 if the bodies of
    all running requests are too large together.
    """
    limit = context.endpoint.limits.max_body_bytes
    if context.operation is not None and context.operation.max_body_bytes:
        limit = min(limit, context.operation.max_body_bytes)
    declared = context.headers.get("content-length", "0")
    message, headers = f"The body is longer than {limit} bytes.", {"connection": "close"}
    too_long = Problem(413, message, code="request_too_large", headers=headers)
    if declared.isdigit() and int(declared) > limit:
        raise too_long
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in context.request.stream():
            size += len(chunk)
            if size > limit:
                raise too_long
            context.hold(len(chunk))
            chunks.append(chunk)
    except ClientDisconnect:
        raise Problem(400, "The client disconnected.", code="client_disconnected") from None
    return b"".join(chunks)


#: Matches an integer that may not fit into 64 bits. Only a body with a match is checked for such
#: integers.
_LONG_INTEGER = re.compile(rb"[0-9]{19}")
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


async def decode(context: RequestContext, kind: type[T]) -> T:
    """Decode the body as `kind`. Raises Problem 400 or 415, and what `read_body` raises."""
    headers = context.headers
    if context.dialect.checks_body_type:
        _check_type(headers.get("content-type", "application/json"))
    if headers.get("content-encoding", "identity").lower() != "identity":
        message = "The body must not be compressed: leave out the header `content-encoding`."
        raise Problem(415, message, code="unsupported_media_type")
    raw = context.body
    if raw is None:
        raw = context.body = await read_body(context)
    context.ignore([name for name in _BETA_HEADERS if name in headers])
    value = await _decode(context, raw, kind)
    if _LONG_INTEGER.search(raw):
        _check_integers(value)
    return value


async def _decode(context: RequestContext, raw: bytes, kind: type[T]) -> T:
    value = _decode_strictly(raw, kind)
    if value is not None:
        return value
    if len(raw) > _INLINE_BYTES:
        return await context.endpoint.in_thread(_decode_leniently, context, raw, kind)
    return _decode_leniently(context, raw, kind)


def _check_integers(value: object) -> None:
    """Raise Problem for an integer beyond 64 bits, which messages to workers (msgpack) cannot have."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        message = "The body has an integer beyond 64 bits: send at most 18 digits, or a float (1e20)."
        raise Problem(400, message, code="invalid_value") from None


def _check_type(declared: str) -> None:
    content_type = declared.partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        message = "The body must be application/json: send the header `content-type: application/json`."
        raise Problem(415, message, code="unsupported_media_type")


def _decode_strictly(raw: bytes, kind: type[T]) -> T | None:
    decoder = _decoders.get(kind)
    if decoder is None:  # cached: creating a decoder takes 0.1 ms
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        with _json_only():
            value: T = decoder.decode(raw)
    except msgspec.ValidationError:
        return None
    return value


def _decode_leniently(context: RequestContext, raw: bytes, kind: type[T]) -> T:
    decoder = LenientDecoder()
    try:
        with _json_only():
            value = decoder.read(msgspec.json.decode(raw), kind)
    except msgspec.ValidationError as error:
        raise problems.from_validation(*_locate(error, raw)) from None
    context.ignore(decoder.ignored_fields)
    return value


def _locate(error: msgspec.ValidationError, raw: bytes) -> tuple[msgspec.ValidationError, str]:
    """Find the top-level field of `raw` that cannot be decoded as any type (a number out of range).

    Return the field's error and name; `error` and "" if there is no such field.
    """
    with contextlib.suppress(msgspec.ValidationError):
        for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            try:
                msgspec.json.decode(value)
            except msgspec.ValidationError as field_error:
                return field_error, name
    return error, ""


@contextlib.contextmanager
def _json_only() -> Iterator[None]:
    """Convert errors of a body that is not JSON to Problem; let ValidationError (valid JSON) pass."""
    try:
        yield
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise Problem(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except UnicodeDecodeError:
        raise Problem(400, "The body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise Problem(400, "The body is nested too deeply.", code="invalid_json") from None


def decode_query(context: RequestContext, kind: type[T]) -> T:
    """Decode the query string as `kind`, converting text to numbers. Raises Problem 400."""
    fields: dict[str, str] = {}
    for name, text in context.request.query_params.multi_items():
        if name in fields:
            raise Problem(400, f"'{name}' is given twice.", param=name, code="invalid_value")
        fields[name] = text
    context.body = context.body or msgspec.json.encode(fields)
    decoder = LenientDecoder(strict=False)
    value = decoder.read(fields, kind)
    context.ignore(decoder.ignored_fields)
    return value


_UNBOUNDED = 1 << 62
#: Maximum number of ignored fields whose names are collected for the response header.
_MAX_IGNORED = 32
#: Unsupported fields in which 0 means "off" or "default", so that 0 may be ignored. In other fields 0
#: has a meaning (`prompt_logprobs`: only the chosen tokens; `gpu_layers`: no layers).
_ZERO_IS_OFF = {"min_tokens", "dynatemp_range", "xtc_probability", "width", "height", "steps"}
_ZERO_IS_OFF |= {name for o in LOAD_OPTIONS if o.default == 0 for name in (o.field, o.key)}
_INDEX = re.compile(r"\[\d+\]")
_NAME = re.compile(r"[^\w.\[\]=:+-]", re.ASCII)


class LenientDecoder:
    """Converts JSON to a wire type; ignores unknown fields and collects all errors.

    Create one for each request. After `read`, `ignored_fields` has the names of ignored fields.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self._strict = strict
        self._ignored: dict[str, None] = {}
        self._problems: list[Problem] = []

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Ignored fields, each once, without indexes: `messages[].cache_control`."""
        return tuple(self._ignored)

    def read(self, raw: Any, kind: type[T]) -> T:
        """Convert decoded JSON to `kind`. Raises a Problem that names all invalid fields."""
        annotation: Any = kind
        value = self._value(_plan(annotation), raw, "")
        if self._problems:
            raise problems.merge(self._problems)
        try:
            return msgspec.convert(value, kind, strict=self._strict)
        except msgspec.ValidationError as error:
            raise problems.from_validation(error) from None

    def _ignore(self, path: str) -> None:
        if len(self._ignored) < _MAX_IGNORED:
            self._ignored.setdefault(_NAME.sub("?", _INDEX.sub("[]", path))[:96])

    def _value(self, plan: _Plan, value: Any, path: str) -> Any:
        if plan.objects and isinstance(value, dict):
            return self._tagged_object(plan, value, path)
        if plan.item is not None and isinstance(value, list) and len(value) <= plan.most:
            return self._items(plan.item, value, path)
        if plan.is_text and isinstance(value, str):
            return value
        try:
            msgspec.convert(value, plan.kind, strict=self._strict)
        except msgspec.ValidationError as error:
            if isinstance(value, float) and value.is_integer():  # Lua and spreadsheets send 5.0 for 5
                return self._value(plan, int(value), path)
            self._problems.append(problems.from_validation(error, path))
        return value

    def _items(self, plan: _Plan, items: list[Any], path: str) -> list[Any]:
        values = []
        for number, item in enumerate(items):
            inner_path = f"{path}[{number}]"
            other = _other_type(plan, item, plan.dropped)
            if other is None:
                values.append(self._value(plan, item, inner_path))
            else:
                self._ignore(f"{inner_path}={other}")
        return values

    def _tagged_object(self, plan: _Plan, value: dict[str, Any], path: str) -> Any:
        if not plan.tag_field:
            return self._object(plan.objects[""], value, path)
        tag = value.get(plan.tag_field, plan.default_tag)
        if isinstance(tag, str) and tag in plan.objects:
            return self._object(plan.objects[tag], value, path) | {plan.tag_field: tag}
        tag_path = f"{path}.{plan.tag_field}" if path else plan.tag_field
        other = _other_type(plan, value, tuple(plan.other_types))
        if plan.tag_field not in value:
            problem = problems.missing(tag_path)
        elif other is not None:
            message = f"'{other}' is not supported here: {_reason(plan.other_types, other)}."
            problem = Problem(400, message, param=tag_path, code="unsupported_value")
        else:
            tags = ", ".join(f"'{name}'" for name in plan.objects)
            message = f"Invalid '{tag_path}': Invalid value {_quote(tag)}; supported are {tags}."
            problem = Problem(400, message, param=tag_path, code="invalid_value")
        self._problems.append(problem)
        return value

    def _object(self, kind: type[Wire], value: dict[str, Any], path: str) -> dict[str, Any]:
        declared = declaration_of(kind)
        values: dict[str, Any] = {}
        for name, inner in value.items():
            inner_path = f"{path}.{name}" if path else str(name)
            field = declared.fields.get(name)
            if field is None:
                if name != declared.tag_field:
                    self._unknown_or_refused(declared, name, inner, inner_path)
            elif inner is None and not (field.required or field.nullable):
                continue
            else:
                values[name] = self._value(field.plan, inner, inner_path)
        absent = [name for name in declared.required if name not in value]
        self._problems += [problems.missing(f"{path}.{name}" if path else name) for name in absent]
        return values

    def _unknown_or_refused(self, declared: _Declaration, name: str, value: Any, path: str) -> None:
        is_zero = value == 0 and value is not False
        if not value and (not is_zero or name in _ZERO_IS_OFF):  # null, false, "", [] mean: not used
            return
        if name in declared.refused:
            self._problems.append(problems.unsupported(path, declared.refused[name]))
        elif option_note := problems.load_option_hint(path):
            message = f"Unknown or unsupported parameter: '{path}'{option_note}."
            self._problems.append(Problem(400, message, param=path, code="unknown_parameter"))
        else:
            self._ignore(path)


class _Plan(NamedTuple):
    """How `LenientDecoder` decodes a field.

    `kind` is the field's annotation. `objects` maps values of `tag_field` ("" for an untagged type) to
    the wire types that the field may have. `item` is the plan for the elements of a list of at most
    `most` elements. Tags in `other_types` are refused with a reason; tags in `dropped` are ignored.
    """

    kind: Any
    objects: Mapping[str, type[Wire]] = {}
    tag_field: str = ""
    default_tag: str | None = None
    other_types: Mapping[str, str] = {}
    dropped: tuple[str, ...] = ()
    item: _Plan | None = None
    most: int = 0
    is_text: bool = False


class _Field(NamedTuple):
    plan: _Plan
    required: bool
    nullable: bool


class _Declaration(NamedTuple):
    fields: Mapping[str, _Field]
    required: tuple[str, ...]
    tag_field: str | None
    refused: Mapping[str, str]


@cache
def _plan(kind: Any) -> _Plan:
    alternatives = _alternatives(inspect.type_info(kind))
    structs = [member.cls for member in alternatives if isinstance(member, inspect.StructType)]
    objects = [struct for struct in structs if issubclass(struct, Wire)]
    item: _Plan | None = None
    most = 0
    for member in alternatives:
        if isinstance(member, inspect.ListType):
            items = _alternatives(member.item_type)
            if any(isinstance(kind, inspect.StructType) for kind in items):
                kinds = [kind.cls if isinstance(kind, inspect.StructType) else str for kind in items]
                item = _plan(functools.reduce(operator.or_, kinds))
                most = member.max_length or _UNBOUNDED
    return _Plan(
        kind=kind,
        objects={_tag(struct): struct for struct in objects},
        tag_field=objects[0].__struct_config__.tag_field or "" if objects else "",
        default_tag=next((_tag(struct) for struct in objects if struct.is_untagged_form), None),
        other_types={name: reason for struct in objects for name, reason in struct.other_types.items()},
        dropped=tuple(name for struct in objects for name in struct.dropped_types),
        item=item,
        most=most,
        is_text=inspect.StrType() in alternatives,
    )


@cache
def declaration_of(kind: type[Wire]) -> _Declaration:
    """Return the accepted and refused fields of a wire type, with those of its base classes."""
    fields = {}
    for field in msgspec.structs.fields(kind):
        nullable = inspect.NoneType() in _alternatives(inspect.type_info(field.type))
        fields[field.encode_name] = _Field(_plan(field.type), field.required, nullable)
    bases = [base for base in reversed(kind.__mro__) if issubclass(base, Wire)]
    return _Declaration(
        fields=fields,
        required=tuple(name for name, field in fields.items() if field.required),
        tag_field=kind.__struct_config__.tag_field,
        refused={name: reason for base in bases for name, reason in base.refused.items()},
    )


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """List the members of a union; [kind] for another type. `Annotated[T, …]` counts as `T`."""
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [inner for member in kind.types for inner in _alternatives(member)]
    return [kind]


def _tag(kind: type[Wire]) -> str:
    return str(kind.__struct_config__.tag or "")


def _other_type(plan: _Plan, value: Any, names: tuple[str, ...]) -> str | None:
    if not isinstance(value, dict) or not plan.tag_field:
        return None
    tag = value.get(plan.tag_field)
    if not isinstance(tag, str) or tag in plan.objects:
        return None
    return tag if tag.startswith(names) else None


def _reason(other_types: Mapping[str, str], tag: str) -> str:
    return other_types[max((name for name in other_types if tag.startswith(name)), key=len)]


def _quote(value: Any) -> str:
    return f"'{value[:64]}'" if isinstance(value, str) else str(value)[:64]
