"""A request's body or query as its wire type."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from edgeinfer.server.core.exchange import Exchange, exchange_of
from edgeinfer.server.core.problems import Problem, from_validation
from edgeinfer.server.core.reading import Reading

#: Bodies that are walked on the event loop at most: 64 KiB take about a millisecond.
_INLINE_BYTES = 64 << 10
#: They switch on what is not here, or what is here anyway.
_BETA_HEADERS = ("anthropic-beta", "openai-beta")

T = TypeVar("T", bound=msgspec.Struct)


async def read_body(request: Request) -> bytes:
    """Read the body. Raises Problem 413 once too long, 400 when the client leaves."""
    limit = exchange_of(request).endpoint.limits.max_body_bytes
    declared = request.headers.get("content-length", "0")
    too_long = Problem(
        413,
        f"The body is longer than {limit} bytes.",
        code="request_too_large",
        headers={"connection": "close"},
    )
    if declared.isdigit() and int(declared) > limit:
        raise too_long
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_long
            parts.append(part)
    except ClientDisconnect:
        raise Problem(400, "The client left.", code="client_disconnected") from None
    return b"".join(parts)


_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


async def _checked(request: Request) -> bytes:
    if exchange_of(request).dialect.checks_body_type:
        _check_type(request)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "The body must not be compressed.", code="unsupported_media_type")
    raw = await read_body(request)
    exchange_of(request).body = raw
    return raw


async def decode_list(request: Request, kind: type[T]) -> list[T]:
    """The body as a list of `kind`. Raises Problem 400 naming the field, 413, 415."""
    raw = await _checked(request)
    try:
        with _json_only():
            return msgspec.json.decode(raw, type=list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise from_validation(error) from None


async def decode(request: Request, kind: type[T]) -> T:
    """The body as `kind`. Raises Problem 400 naming the field, 413, 415."""
    raw = await _checked(request)
    exchange = exchange_of(request)
    exchange.ignore([name for name in _BETA_HEADERS if name in request.headers])
    value = _as_it_stands(raw, kind)
    if value is None and len(raw) > _INLINE_BYTES:
        value = await exchange.endpoint.in_thread(_read, exchange, raw, kind)
    elif value is None:
        value = _read(exchange, raw, kind)
    exchange.body = value
    return value


def _check_type(request: Request) -> None:
    declared = request.headers.get("content-type", "application/json")
    content_type = declared.partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        said = "The body must be application/json: send the header `content-type: application/json`."
        raise Problem(415, said, code="unsupported_media_type")


def _as_it_stands(raw: bytes, kind: type[T]) -> T | None:
    decoder = _decoders.get(kind)
    if decoder is None:  # 0.1 ms each, at first use
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        with _json_only():
            value: T = decoder.decode(raw)
    except msgspec.ValidationError:
        return None
    return value


def _read(exchange: Exchange, raw: bytes, kind: type[T]) -> T:
    reading = Reading(refuse_unknown=exchange.endpoint.refuse_unknown)
    try:
        with _json_only():
            value = reading.read(msgspec.json.decode(raw), kind)
    except msgspec.ValidationError as error:
        raise from_validation(*_located(error, raw)) from None
    exchange.ignore(reading.ignored)
    return value


def _located(error: msgspec.ValidationError, raw: bytes) -> tuple[msgspec.ValidationError, str]:
    """Name the field whose number is out of range; "" if the body is no object."""
    with contextlib.suppress(msgspec.ValidationError):
        for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            try:
                msgspec.json.decode(value)
            except msgspec.ValidationError as found:
                return found, name
    return error, ""


@contextlib.contextmanager
def _json_only() -> Iterator[None]:
    """Raise Problem for what is no JSON; what is JSON of another type is left to the caller."""
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


def decode_query(request: Request, kind: type[T]) -> T:
    """The query string as `kind`; numbers are read from their text. Raises Problem 400."""
    exchange = exchange_of(request)
    exchange.body = request.url.query.encode()
    pairs = request.query_params.multi_items()
    fields: dict[str, str] = {}
    for name, text in pairs:
        if name in fields:
            raise Problem(400, f"'{name}' is given twice.", param=name, code="invalid_value")
        fields[name] = text
    reading = Reading(refuse_unknown=exchange.endpoint.refuse_unknown, strict=False)
    value = reading.read(fields, kind)
    exchange.ignore(reading.ignored)
    exchange.body = value
    return value
