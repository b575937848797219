"""Traces of requests and starts as OTLP JSON in a file."""

import json
import os

import pytest
from fake_engine import FakeEngine

from edgeinfer.runtime.events import Finished, Timings, Usage
from edgeinfer.server.tracing import Span, generation_spans, start_spans, write

PARTS = ["load", "tokenize", "queue", "prefill", "decode"]
TIMINGS = Timings(queue_ms=1, prefill_ms=2, ttft_ms=4, decode_ms=8)
END = Finished(reason="stop", usage=Usage(prompt_tokens=5, cached_tokens=3), timings=TIMINGS)
BODY = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 4}


def spans(path):
    """Return the spans of each trace in the file, the root first."""
    lines = [json.loads(line)["resourceSpans"] for line in path.read_text().splitlines()]
    return [resource["scopeSpans"][0]["spans"] for [resource] in lines]


def request_spans(path, until):
    """Return the spans of the only request, which follow those of the start."""
    until(lambda: path.exists() and path.read_bytes().count(b"\n") == 2, "the traces are written")
    return spans(path)[1]


def milliseconds(span):
    return (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e6


@pytest.mark.parametrize("stream", [False, True])
def test_request_is_a_trace_below_the_client_s_without_its_text(serve, tmp_path, until, stream):
    path = tmp_path / "traces.jsonl"
    live_server = serve(FakeEngine([["Hel", "lo", END]]), traces=str(path))
    trace, parent = "ab" * 16, "cd" * 8
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    live_server.post("/v1/chat/completions", BODY | {"stream": stream}, headers=headers).read()
    root, *parts = request_spans(path, until)
    assert [span["name"] for span in (root, *parts)] == ["POST /v1/chat/completions", *PARTS]
    assert {span["traceId"] for span in (root, *parts)} == {trace}
    assert {span["parentSpanId"] for span in parts} == {root["spanId"]}
    assert root["parentSpanId"] == parent
    assert [round(milliseconds(span)) for span in parts[-3:]] == [1, 3, 8]
    facts = {fact["key"]: next(iter(fact["value"].values())) for fact in root["attributes"]}
    assert (facts["http.response.status_code"], facts["gen_ai.usage.input_tokens"]) == ("200", "5")
    assert facts["edgeinfer.cached_tokens"] == "3"
    assert "secret" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_refused_request_with_a_wrong_traceparent_is_a_new_trace(serve, tmp_path, until):
    path = tmp_path / "traces.jsonl"
    live_server = serve(traces=str(path))
    headers = {"traceparent": "00-zz-1"}
    assert live_server.post("/v1/chat/completions", {}, headers=headers).status_code == 400
    [root] = request_spans(path, until)
    assert (len(root["traceId"]), root["parentSpanId"]) == (32, "")


@pytest.mark.parametrize("name", ["missing/traces", "pipe", "read pipe"])
def test_file_that_cannot_be_written_ends_traces_and_no_request(serve, tmp_path, until, name):
    for pipe in ("pipe", "read pipe"):
        os.mkfifo(tmp_path / pipe)
    reader = os.open(tmp_path / "read pipe", os.O_RDONLY | os.O_NONBLOCK)
    live_server = serve(FakeEngine([["Hel", END], ["lo", END]]), traces=str(tmp_path / name))
    for _ in range(2):
        assert live_server.post("/v1/chat/completions", BODY).status_code == 200
        until(lambda: "traces-ended" in live_server.log.getvalue(), "the log tells it")
    assert live_server.log.getvalue().count("traces-ended") == 1
    os.close(reader)


def test_start_is_divided_into_its_stages(tmp_path):
    names = ("launcher", "restore", "running", "request", "load", "ready")
    stages = dict(zip(names, (5.0, 9.0, 60.0, 61.0, 70.0, 90.0), strict=True))
    stage_spans = start_spans(stages, "resumed")
    assert [span.name for span in stage_spans] == ["launcher", "resume", "running", "request", "load"]
    assert stage_spans[1].ended_s - stage_spans[1].began_s == pytest.approx(0.051)
    assert stage_spans[-1].ended_s - stage_spans[0].began_s == pytest.approx(0.085)
    assert start_spans({}, "cold") == []
    root_span = Span("start", stage_spans[0].began_s, stage_spans[-1].ended_s)
    write(str(tmp_path / "t"), root_span, stage_spans, {})
    [[root, *_]] = spans(tmp_path / "t")
    assert milliseconds(root) == pytest.approx(85, abs=0.01)


def test_span_of_decoding_is_empty_after_prefill_only():
    parts = generation_spans(0.0, Timings(queue_ms=1, prefill_ms=2))
    assert [span.name for span in parts] == PARTS[1:]
    assert parts[-1].ended_s == parts[-1].began_s
    assert parts[2].ended_s - parts[2].began_s == pytest.approx(0.002)
