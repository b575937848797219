"""Write spans of requests and model loads to a file, as OTLP JSON lines for an OpenTelemetry collector.

Prompts and answers are not written. The file is opened for each line: so the file can be rotated, and
a snapshot of the process has no open file. Times are those of time.perf_counter() (s).
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from edgeinfer import __version__
from edgeinfer.platform import disk
from edgeinfer.runtime.events import Timings

_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_SERVER, _INTERNAL = 2, 1


class Span(NamedTuple):
    """A named time interval of a request or of a model load, on the clock time.perf_counter()."""

    name: str
    began_s: float
    ended_s: float


def generation_spans(began_s: float, timings: Timings) -> list[Span]:
    """Return the spans tokenize (from `began_s`), queue, prefill and decode of a generation.

    Call it when the generation ends: `timings` has only durations, and the last span ends now.
    """
    decode = time.perf_counter() - timings.decode_ms / 1000
    prefill = decode - (timings.total_ms - timings.decode_ms - timings.queue_ms) / 1000
    queue = prefill - timings.queue_ms / 1000
    marks = [("tokenize", began_s), ("queue", queue), ("prefill", prefill), ("decode", decode)]
    return _consecutive_spans(marks, decode + timings.decode_ms / 1000)


def start_spans(stages_ms: Mapping[str, float], start: str) -> list[Span]:
    """Return a span for each stage of a process's start. Call it when the process is ready.

    `stages_ms` has the time (ms) from exec to the beginning of each stage, as in `host.ProcessStart`.
    `start` is "resumed" or "cold".
    """
    ended_s, last_ms = time.perf_counter(), max(stages_ms.values(), default=0.0)
    names = {"restore": "resume" if start == "resumed" else "spawn"}
    stages = sorted(stages_ms.items(), key=lambda stage: stage[1])
    marks = [(names.get(name, name), ended_s - (last_ms - ms) / 1000) for name, ms in stages]
    return [span for span in _consecutive_spans(marks, ended_s) if span.name != "ready"]


def _consecutive_spans(marks: list[tuple[str, float]], ended_s: float) -> list[Span]:
    ends = [*(began for _, began in marks[1:]), ended_s]
    pairs = zip(marks, ends, strict=False)  # if `marks` is empty, `ends` has one element
    return [Span(name, began, max(began, end_s)) for (name, began), end_s in pairs]


def write(
    path: str, root: Span, spans: Iterable[Span], attributes: Mapping[str, Any], traceparent: str = ""
) -> None:
    """Append a trace to the file at `path`: `root` with its `attributes`, and `spans` as its children.

    The span in `traceparent` (the client's W3C header) becomes the parent of `root`. Raises OSError.
    """
    parent = _PARENT.fullmatch(traceparent)
    trace, parent_id = parent.groups() if parent else (secrets.token_hex(16), "")
    root_id = secrets.token_hex(8)
    facts = [{"key": key, "value": _value(value)} for key, value in attributes.items()]
    to_unix_s = time.time() - time.perf_counter()
    span_objects = [
        {
            "traceId": trace,
            "spanId": root_id if span is root else secrets.token_hex(8),
            "parentSpanId": parent_id if span is root else root_id,
            "name": span.name,
            "kind": _SERVER if span is root else _INTERNAL,
            "startTimeUnixNano": str(int((span.began_s + to_unix_s) * 1e9)),
            "endTimeUnixNano": str(int((span.ended_s + to_unix_s) * 1e9)),
            "attributes": facts if span is root else [],
        }
        for span in (root, *spans)
    ]
    service = [{"key": "service.name", "value": {"stringValue": "edgeinfer"}}]
    scope = {"scope": {"name": "edgeinfer", "version": __version__}, "spans": span_objects}
    line = {"resourceSpans": [{"resource": {"attributes": service}, "scopeSpans": [scope]}]}
    with open(disk.open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def _value(value: Any) -> dict[str, Any]:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}
