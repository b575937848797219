"""Spans at a collector: what a real HTTP server receives, and what a collector that is away costs."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from edgeinfer.runtime.events import Finished, Timings, Usage
from edgeinfer.runtime.fake import FakeEngine
from edgeinfer.server.observe import otlp
from edgeinfer.server.observe.logs import Log
from edgeinfer.server.observe.tracing import NoTracer, OtlpTracer, parent_of, tracer_from_environment

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
END = Finished(
    reason="stop",
    usage=Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3),
    timings=Timings(queue_ms=1, prefill_ms=20, ttft_ms=21, decode_ms=40),
)


class Collector:
    """Takes OTLP over HTTP in JSON. `answers` are statuses to give first, before 200s."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict]] = []
        self.answers: list[int] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                collector.requests.append((self.path, headers, body))
                self.send_response(collector.answers.pop(0) if collector.answers else 200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def spans(self) -> dict[str, dict]:
        """Every span of every accepted request, by name."""
        groups = [group for _, _, body in self.requests for group in body["resourceSpans"]]
        scopes = [scope for group in groups for scope in group["scopeSpans"]]
        return {span["name"]: span for scope in scopes for span in scope["spans"]}


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


def _attributes(of: dict) -> dict[str, object]:
    values = {item["key"]: item["value"] for item in of["attributes"]}
    return {key: next(iter(value.values())) for key, value in values.items()}


def _generation(tracer, traceparent: str = "") -> None:
    tracer.generation({"traceparent": traceparent}, "fake", "/infer", 1_000_000_000, END)


def test_a_generation_reaches_the_collector_as_four_spans(serve, collector, monkeypatch, log):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.url}/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a%20b, x-other=2")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-endpoint")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=no")
    tracer = tracer_from_environment(Log("json", log))
    here = serve(FakeEngine([["a", "b", "c", END]]), tracer=tracer)
    here.client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}]},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
    )
    tracer.close()
    ((path, headers, body),) = collector.requests
    assert path == "/v1/traces"
    assert headers["content-type"] == "application/json"
    assert (headers["x-tenant"], headers["x-other"]) == ("a b", "2")
    resource = _attributes(body["resourceSpans"][0]["resource"])
    assert resource["service.name"] == "my-endpoint"
    assert resource["deployment.environment"] == "test"
    spans = collector.spans()
    assert set(spans) == {"generate fake", "queue", "prefill", "decode"}
    root = spans["generate fake"]
    assert (root["traceId"], root["parentSpanId"], root["kind"]) == (TRACE, PARENT, 2)
    said = _attributes(root)
    assert said["gen_ai.usage.output_tokens"] == "3"
    assert said["http.route"] == "/v1/chat/completions"
    assert said["gen_ai.response.finish_reasons"] == {"values": [{"stringValue": "stop"}]}
    assert {spans[name]["parentSpanId"] for name in ("queue", "prefill", "decode")} == {root["spanId"]}
    assert spans["decode"]["startTimeUnixNano"] == spans["prefill"]["endTimeUnixNano"]
    took = int(spans["decode"]["endTimeUnixNano"]) - int(spans["decode"]["startTimeUnixNano"])
    assert took == 40_000_000


def test_an_address_for_traces_is_used_as_it_is(collector, monkeypatch, log):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/mine")
    tracer = tracer_from_environment(Log("json", log))
    _generation(tracer)
    tracer.close()
    assert [path for path, _, _ in collector.requests] == ["/mine"]
    assert "parentSpanId" not in collector.spans()["generate fake"]


def test_a_collector_that_is_busy_is_asked_again(collector, monkeypatch, log):
    monkeypatch.setattr(otlp, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(otlp, "_DELAY_S", 0.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    collector.answers = [503, 429]
    tracer = tracer_from_environment(Log("json", log))
    _generation(tracer)
    wait = threading.Event()
    while len(collector.requests) < 3:
        wait.wait(0.005)
    tracer.close()
    assert log.getvalue() == ""


def test_a_collector_that_is_away_costs_spans_and_is_said_once(serve, monkeypatch, log):
    monkeypatch.setattr(otlp, "_PAUSES_S", ())
    monkeypatch.setattr(otlp, "_DELAY_S", 0.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracer = tracer_from_environment(Log("json", log))
    here = serve(FakeEngine(), tracer=tracer)
    assert [here.chat().status_code for _ in range(3)] == [200, 200, 200]
    tracer.close()
    assert log.getvalue().count("spans-not-sent") == 1
    assert tracer._exporter.dropped_spans == 12  # type: ignore[attr-defined]


def test_a_full_queue_drops_spans_and_never_waits(monkeypatch, log):
    monkeypatch.setattr(otlp, "_QUEUE_SPANS", 8)
    exporter = otlp.Exporter("http://127.0.0.1:1/v1/traces", {}, {}, Log("json", log))
    exporter._thread = threading.Thread()  # nobody takes anything out
    tracer = OtlpTracer(exporter)
    for _ in range(5):
        _generation(tracer)
    assert exporter.dropped_spans == 12


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "")]
)
def test_tracing_is_off_without_a_word(monkeypatch, log, name, value):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    assert isinstance(tracer_from_environment(Log("json", log)), NoTracer)
    assert log.getvalue() == ""


@pytest.mark.parametrize("url", ["ftp://x", "localhost:4318", "http://[", "http://x:99999"])
def test_an_address_that_is_none_is_a_warning(monkeypatch, log, url):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url)
    assert isinstance(tracer_from_environment(Log("json", log)), NoTracer)
    assert '"level":"warning"' in log.getvalue()


def test_offline_nothing_is_sent(collector, monkeypatch, log):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    tracer = tracer_from_environment(Log("json", log), offline=True)
    _generation(tracer)
    tracer.close()
    assert collector.requests == []
    assert "offline" in log.getvalue()


@pytest.mark.parametrize(
    ("header", "parent", "sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", PARENT, True),
        (f"00-{TRACE}-{PARENT}-00", PARENT, False),
        (f"01-{TRACE}-{PARENT}-03-more", PARENT, True),
        (f"ff-{TRACE}-{PARENT}-01", "", True),
        (f"00-{'0' * 32}-{PARENT}-01", "", True),
        (f"00-{TRACE.upper()}-{PARENT}-01", "", True),
        ("nonsense", "", True),
    ],
)
def test_the_callers_trace_is_gone_on_with(header, parent, sampled):
    trace_id, found, is_sampled = parent_of(header)
    assert (found, is_sampled) == (parent, sampled)
    assert (trace_id == TRACE) == bool(parent)
    assert len(trace_id) == 32


def test_a_trace_that_is_not_sampled_is_not_recorded(collector, monkeypatch, log):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    tracer = tracer_from_environment(Log("json", log))
    _generation(tracer, f"00-{TRACE}-{PARENT}-00")
    tracer.close()
    assert collector.requests == []
