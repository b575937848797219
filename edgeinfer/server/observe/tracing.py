"""OpenTelemetry spans (queue, prefill, decode) when the extra is installed and an endpoint is
configured; else nothing.

The extra is `edgeinfer[tracing]`; the endpoint is OTEL_EXPORTER_OTLP_ENDPOINT or
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT. Spans are made after the fact from the engine's own timings, so
tracing costs nothing per token. Attributes follow OpenTelemetry's conventions for generative AI; no
prompt and no answer is in them.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

from edgeinfer.errors import ServeError
from edgeinfer.runtime.events import Finished


class Tracer(Protocol):
    """What the endpoint needs of a tracer."""

    def generation(
        self, headers: dict[str, str], model: str, route: str, started_ns: int, end: Finished
    ) -> None:
        """Record one generation. `started_ns` is Unix time; `headers` may carry a `traceparent`."""

    def close(self) -> None:
        """Send what is left. Idempotent."""


class NoTracer:
    """Tracing is off."""

    def generation(
        self, headers: dict[str, str], model: str, route: str, started_ns: int, end: Finished
    ) -> None:
        return

    def close(self) -> None:
        return


class OtelTracer:
    """Spans through an OpenTelemetry tracer provider."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("edgeinfer.server")

    def generation(
        self, headers: dict[str, str], model: str, route: str, started_ns: int, end: Finished
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        usage, timings = end.usage, end.timings
        root = self._tracer.start_span(
            f"generate {model}",
            context=parent,
            start_time=started_ns,
            attributes={
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.response.finish_reasons": (end.reason,),
                "http.route": route,
                "edgeinfer.cached_tokens": usage.cached_tokens,
            },
        )
        inside = trace.set_span_in_context(root)
        at_ns = started_ns
        for name, span_ms in (
            ("queue", timings.queue_ms),
            ("prefill", timings.prefill_ms),
            ("decode", timings.decode_ms),
        ):
            span = self._tracer.start_span(name, context=inside, start_time=at_ns)
            at_ns += int(span_ms * 1e6)
            span.end(end_time=at_ns)
        root.end(end_time=at_ns)

    def close(self) -> None:
        self._provider.shutdown()


def tracer_from_environment() -> Tracer:
    """A tracer when an endpoint is configured. Raises ServeError when one is and the extra is
    missing.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(
        os.environ.get(name) for name in names
    ):
        return NoTracer()
    try:  # 120–200 ms, and only where tracing is configured
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ServeError(
            f"tracing is configured but {error.name} is not installed",
            hint="pip install 'edgeinfer[tracing]', or unset OTEL_EXPORTER_OTLP_ENDPOINT",
        ) from error
    service = os.environ.get("OTEL_SERVICE_NAME", "edgeinfer")
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracer(provider)
