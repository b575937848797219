"""A span for every generation, with queue, prefill and decode inside, when a collector is configured.

The collector is OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or OTEL_EXPORTER_OTLP_ENDPOINT with `/v1/traces`
behind it. Spans are made after the fact from the engine's own timings, so tracing costs nothing per
token. Attributes follow OpenTelemetry's conventions for generative AI; no prompt and no answer is in
them.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from edgeinfer import __version__
from edgeinfer.runtime.events import Finished
from edgeinfer.server.observe.logs import Log
from edgeinfer.server.observe.otlp import Attribute, Exporter, Span

#: W3C Trace Context, version 00 and what later versions keep of it.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1


class Tracer(Protocol):
    """What the endpoint needs of a tracer."""

    def generation(
        self, headers: Mapping[str, str], model: str, route: str, started_ns: int, end: Finished
    ) -> None:
        """Record one generation. `started_ns` is Unix time; `headers` may carry a `traceparent`."""

    def close(self) -> None:
        """Send what is left. Idempotent."""


class NoTracer:
    """Tracing is off."""

    def generation(
        self, headers: Mapping[str, str], model: str, route: str, started_ns: int, end: Finished
    ) -> None:
        return

    def close(self) -> None:
        return


class OtlpTracer:
    """Makes spans and hands them to an exporter."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def generation(
        self, headers: Mapping[str, str], model: str, route: str, started_ns: int, end: Finished
    ) -> None:
        """Record one generation, unless the caller's trace is not sampled."""
        parent = parent_of(headers.get("traceparent", ""))
        if not parent.is_sampled:
            return
        root_id = secrets.token_hex(8)
        spans = []
        timings = end.timings
        at_ns = started_ns
        for name, span_ms in (
            ("queue", timings.queue_ms),
            ("prefill", timings.prefill_ms),
            ("decode", timings.decode_ms),
        ):
            begun_ns = at_ns
            at_ns += int(span_ms * 1e6)
            spans.append(
                Span(
                    trace_id=parent.trace_id,
                    span_id=secrets.token_hex(8),
                    parent_id=root_id,
                    name=name,
                    start_ns=begun_ns,
                    end_ns=at_ns,
                )
            )
        root = Span(
            trace_id=parent.trace_id,
            span_id=root_id,
            parent_id=parent.span_id,
            name=f"generate {model}",
            start_ns=started_ns,
            end_ns=at_ns,
            is_server=True,
            attributes=_attributes(model, route, end),
        )
        self._exporter.add([root, *spans])

    def close(self) -> None:
        self._exporter.close()


def _attributes(model: str, route: str, end: Finished) -> dict[str, Attribute]:
    return {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": end.usage.completion_tokens,
        "gen_ai.response.finish_reasons": (end.reason,),
        "http.route": route,
        "edgeinfer.cached_tokens": end.usage.cached_tokens,
    }


class Parent(NamedTuple):
    """Whose child a span is. Ids are hex digits; `span_id` is "" for the first of its trace."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parent_of(traceparent: str) -> Parent:
    """Read the trace id, the parent span's id and whether to record; a fresh trace without any."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or not found[1].strip("0") or not found[2].strip("0"):
        return Parent(secrets.token_hex(16), "", is_sampled=True)
    return Parent(found[1], found[2], is_sampled=bool(int(found[3], 16) & _SAMPLED))


def tracer_from_environment(log: Log, *, offline: bool = False) -> Tracer:
    """A tracer when a collector is configured and the offline switch is off.

    What cannot be followed is a warning in the log, never an error: tracing is not worth an endpoint.
    """
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or (
        f"{base.rstrip('/')}/v1/traces" if base else ""
    )
    if not url or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return NoTracer()
    if offline:
        log.warning("tracing-off", message="a collector is configured, but the offline switch is on")
        return NoTracer()
    if not _is_http(url):
        log.warning("tracing-off", message=f"{url} is no http or https address")
        return NoTracer()
    headers = _pairs("OTEL_EXPORTER_OTLP_HEADERS") | _pairs("OTEL_EXPORTER_OTLP_TRACES_HEADERS")
    resource = {"service.name": "edgeinfer", "service.version": __version__}
    resource |= _pairs("OTEL_RESOURCE_ATTRIBUTES")
    service = os.environ.get("OTEL_SERVICE_NAME", "")
    if service:
        resource["service.name"] = service
    return OtlpTracer(Exporter(url, headers, resource, log))


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _pairs(name: str) -> dict[str, str]:
    """`a=1,b=2` of an environment variable, percent-decoded; what is no pair is left out."""
    pairs = (pair.partition("=") for pair in os.environ.get(name, "").split(","))
    return {key.strip(): unquote(value.strip()) for key, sign, value in pairs if key.strip() and sign}
