"""Metrics, logs and request ids, and the documents about them."""

import io
import json
import re
from datetime import date, timedelta
from pathlib import Path

from fake_engine import DEFAULT_INFO, FakeEngine
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from edgeinfer.runtime.events import Finished, Timings, Usage
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.logs import Log
from edgeinfer.server.metrics import MAX_KEYS, Metrics
from edgeinfer.usage.daily_counts import DriftRecorder, drift_path

DOCS = Path(__file__).parents[3] / "docs"
KEY = "test-key-0123456789abcdef"
SHA = "0123456789abcdef" * 4
USAGE = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
TIMINGS = Timings(queue_ms=1, prefill_ms=20, ttft_ms=21, decode_ms=40)
END = Finished(reason="stop", usage=USAGE, timings=TIMINGS)


def _engine() -> FakeEngine:
    return FakeEngine([["a", "b", "c", END]], info=replace(DEFAULT_INFO, sha256=SHA))


def test_requests_tokens_and_times_are_counted(serve):
    live_server = serve(_engine())
    live_server.chat()
    live_server.chat(stream=True)
    live_server.chat(temperature=99)
    text = live_server.get("/metrics").text
    version = 'model_name="fake",model_version="0123456789ab"'
    for line in (
        f'edgeinfer_requests_total{{key="",{version},route="/v1/chat/completions",status="200"}} 2.0',
        'edgeinfer_requests_total{key="",model_name="",model_version="",route="/v1/chat/completions",status="400"} 1.0',
        f"edgeinfer_prompt_tokens_total{{{version}}} 20.0",
        f"edgeinfer_prompt_tokens_cached_total{{{version}}} 8.0",
        f"edgeinfer_generation_tokens_total{{{version}}} 6.0",
        f"edgeinfer_time_to_first_token_seconds_count{{{version}}} 2.0",
        f"edgeinfer_e2e_request_latency_seconds_count{{{version}}} 2.0",
        f"edgeinfer_inter_token_latency_seconds_count{{{version}}} 4.0",
        f'edgeinfer_request_prefill_time_seconds_bucket{{le="0.025",{version}}} 2.0',
        f'edgeinfer_request_success_total{{finished_reason="stop",{version}}} 2.0',
        f"edgeinfer_num_requests_running{{{version}}} 0.0",
    ):
        assert line in text, line


def test_a_loaded_model_is_counted_with_its_stages():
    metrics = Metrics(lambda: [])
    metrics.model_loaded("m", "resumed", 0.09, {"restore": 70.0})
    text = metrics.exposition().decode()
    assert 'edgeinfer_model_loads_total{how="resumed",model_name="m"} 1.0' in text
    seconds = "edgeinfer_model_load_seconds"
    assert f'{seconds}_bucket{{how="resumed",le="0.075",model_name="m",stage="restore"}} 1.0' in text
    assert f'{seconds}_count{{how="resumed",model_name="m",stage="total"}} 1.0' in text


def test_described_metrics_are_those_of_a_scrape(serve):
    """The documentation's table of metrics is generated from `Metrics.described`."""
    live_server = serve(_engine())
    live_server.chat()
    shown = {}
    for family in text_string_to_metric_families(live_server.get("/metrics").text):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        shown[name] = (family.type, ", ".join(sorted(labels)))
    described = live_server.endpoint.metrics.describe()
    assert set(shown) == {name for name, _, _, _ in described}
    for name, kind, labels, _ in described:
        assert shown[name][0] == kind
        assert shown[name][1] in (labels, "")  # a metric without samples has no labels yet


def test_requests_are_counted_by_key_and_the_number_of_keys_is_bounded(serve):
    live_server = serve(FakeEngine(), keys=[KEY])
    name = Keys([KEY]).name(KEY)
    for _ in range(2):
        live_server.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
    live_server.get("/v1/models")
    scrape = live_server.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    route = 'model_name="",model_version="",route="/v1/models"'
    assert f'edgeinfer_requests_total{{key="{name}",{route},status="200"}} 2.0' in scrape
    assert f'edgeinfer_requests_total{{key="",{route},status="401"}} 1.0' in scrape
    assert KEY not in scrape
    metrics = Metrics(lambda: [])
    for number in range(200):
        metrics.request_ended("/infer", 200, f"{number:08x}", "m", "v")
    text = metrics.exposition().decode()
    assert len(set(re.findall(r'key="([^"]*)"', text))) < MAX_KEYS
    assert re.search(r'key="other",.* 138\.0', text)


def test_drift_has_gauges(serve):
    recorder = DriftRecorder(drift_path(), "fake", "")
    for n in range(14):  # in the last seven days, prompts were twice as long
        counts = [("prompt_tokens", 24 if n < 7 else 20, 30), ("turns", 0, 30)]
        recorder._write(date.today() - timedelta(n), counts)
    scrape = serve(_engine()).client.get("/metrics").text
    assert re.search(r'drift_psi{aggregate="prompt_tokens",model_name="fake",moved="yes"} \d', scrape)
    assert 'drift_psi{aggregate="turns",model_name="fake",moved="no"} 0.0' in scrape


def test_the_dashboard_asks_for_metrics_that_exist(serve):
    live_server = serve(_engine())
    live_server.chat()
    families = list(text_string_to_metric_families(live_server.get("/metrics").text))
    names = {f.name for f in families} | {s.name for f in families for s in f.samples}
    names |= {f"{f.name}_total" for f in families}
    histograms = [f.name for f in families if f.type == "histogram"]
    names |= {name + suffix for name in histograms for suffix in ("_bucket", "_sum", "_count")}
    board = json.loads((DOCS / "grafana/edgeinfer.json").read_text("utf-8"))
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    asked = {name for target in targets for name in re.findall(r"edgeinfer_\w+", target["expr"])}
    assert len(asked) > 10
    assert asked <= names


def test_a_request_id_goes_in_and_out_and_into_the_log(serve, until):
    live_server = serve(FakeEngine())
    answer = live_server.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    answer = live_server.get("/v1/models", headers={"x-request-id": "not ok\t!"})
    new_id = answer.headers["x-request-id"]
    assert re.fullmatch(r"req_[0-9a-f]{24}", new_id)

    def logged_ids():  # a request is logged only after its answer was sent
        return {json.loads(line).get("request_id") for line in live_server.log.getvalue().splitlines()}

    until(lambda: {"mine-1", new_id} <= logged_ids(), "both ids in the log")


def test_log_lines_are_json_with_figures_and_without_words(serve, until):
    live_server = serve(FakeEngine([["a secret answer"]]))
    live_server.chat(messages=[{"role": "user", "content": "a secret question"}])
    until(lambda: '"request"' in live_server.log.getvalue(), "the line, which follows the last byte")
    line = json.loads(live_server.log.getvalue().splitlines()[-1])
    assert (line["route"], line["status"]) == ("/v1/chat/completions", 200)
    assert (line["model"], line["finish"]) == ("fake", "stop")
    assert line["completion_tokens"] == 1
    assert line["ms"] >= line["ttft_ms"] > 0
    assert "secret" not in live_server.log.getvalue()


def test_text_logs_read_as_text_and_off_is_off():
    stream = io.StringIO()
    log = Log("text", stream)
    log.info("ready", model="m", empty="")
    log.error("broken", ValueError("x"))
    assert re.match(r"\d\d:\d\d:\d\d ready model=m\n", stream.getvalue())
    assert "ValueError: x" in stream.getvalue()
    quiet = io.StringIO()
    Log("off", quiet).info("ready")
    assert quiet.getvalue() == ""


def test_a_closed_stderr_does_not_stop_serving():
    stream = io.StringIO()
    stream.close()
    log = Log("json", stream)
    log.info("one")
    log.info("two")
