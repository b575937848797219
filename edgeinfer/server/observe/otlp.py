"""Spans to a collector: OTLP over HTTP, JSON encoded, in batches, from a thread of its own.

A collector that is slow or away costs spans, never requests: the queue is bounded, and what finds it
full is dropped and counted.

Source: the OpenTelemetry Protocol, "OTLP/HTTP" and "JSON Protobuf Encoding".
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer import __version__
from edgeinfer.server.observe.logs import Log

if TYPE_CHECKING:
    import httpx2

_QUEUE_SPANS = 2048
_BATCH_SPANS = 512
#: How long a batch waits for more spans, a request for its answer, the end for everything.
_DELAY_S = 5.0
_TIMEOUT_S = 10.0
_CLOSE_S = 3.0
#: Pauses before the second and the third try.
_PAUSES_S = (1.0, 2.0)
_AGAIN = (429, 502, 503, 504)

Attribute = str | int | Sequence[str]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A finished span. Ids are hex digits (32 and 16), times are nanoseconds of Unix time."""

    trace_id: str
    span_id: str
    name: str
    start_ns: int
    end_ns: int
    parent_id: str = ""
    is_server: bool = False
    attributes: Mapping[str, Attribute] = {}


class Exporter:
    """Sends spans to `url`. The thread starts with the first span."""

    def __init__(
        self, url: str, headers: Mapping[str, str], resource: Mapping[str, str], log: Log
    ) -> None:
        self._url = url
        self._headers = {**headers, "content-type": "application/json"}
        self._resource = {"attributes": _attributes(resource)}
        self._log = log
        self._queue: queue.Queue[Span | None] = queue.Queue(_QUEUE_SPANS)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_failing = False
        self.dropped_spans = 0

    def add(self, spans: Sequence[Span]) -> None:
        """Queue spans. Never waits; on one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
            self._thread.start()
        for span in spans:
            try:
                self._queue.put_nowait(span)
            except queue.Full:
                self.dropped_spans += 1

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Idempotent."""
        self._stopping.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        import httpx2  # 75–120 ms, on this thread, and only where a collector is configured

        with httpx2.Client(timeout=_TIMEOUT_S, headers=self._headers) as client:
            while not (self._stopping.is_set() and self._queue.empty()):
                spans = self._batch()
                if spans:
                    self._send(client, spans)

    def _batch(self) -> list[Span]:
        first = self._queue.get()
        if first is None:
            return []
        spans = [first]
        deadline = time.monotonic() + _DELAY_S
        while len(spans) < _BATCH_SPANS:
            left_s = 0.0 if self._stopping.is_set() else max(0.0, deadline - time.monotonic())
            try:
                span = self._queue.get(timeout=left_s) if left_s else self._queue.get_nowait()
            except queue.Empty:
                break
            if span is None:
                break
            spans.append(span)
        return spans

    def _send(self, client: httpx2.Client, spans: Sequence[Span]) -> None:
        """Send one batch; a failure is logged once until something gets through again."""
        body = encode(spans, self._resource)
        failure = _post(client, self._url, body)
        for pause_s in _PAUSES_S:
            if failure is None or not failure.may_pass or self._stopping.wait(pause_s):
                break
            failure = _post(client, self._url, body)
        if failure is not None:
            self.dropped_spans += len(spans)
            if not self._is_failing:
                self._log.warning("spans-not-sent", url=self._url, message=failure.message)
        self._is_failing = failure is not None


class _Failure(msgspec.Struct, frozen=True):
    message: str
    may_pass: bool


def _post(client: httpx2.Client, url: str, body: bytes) -> _Failure | None:
    import httpx2

    try:
        status = client.post(url, content=body).status_code
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return _Failure(f"{type(error).__name__}: {error}", may_pass=True)
    return None if status < 300 else _Failure(f"status {status}", may_pass=status in _AGAIN)


def encode(spans: Sequence[Span], resource: Mapping[str, Any]) -> bytes:
    """An ExportTraceServiceRequest as JSON."""
    scope = {"name": "edgeinfer.server", "version": __version__}
    scoped = {"scope": scope, "spans": [_span(span) for span in spans]}
    return msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": [scoped]}]})


def _span(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": 2 if span.is_server else 1,  # SPAN_KIND_SERVER, SPAN_KIND_INTERNAL
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id:
        found["parentSpanId"] = span.parent_id
    return found


def _attributes(given: Mapping[str, Attribute]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in given.items()]


def _value(value: Attribute) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"arrayValue": {"values": [{"stringValue": item} for item in value]}}
