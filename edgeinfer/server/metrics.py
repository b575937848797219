"""Prometheus metrics with vLLM's and llama.cpp's names, prefixed by `edgeinfer_`.

Each endpoint has its own registry. Requests and loads are counted as they end; the engines' values
(queue length, KV cache usage) are read at each scrape. docs/guides/operating.md has a table of all
metrics, generated from `Metrics.described`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from edgeinfer.errors import EdgeInferError, StoreError
from edgeinfer.platform.machine import resident_bytes
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.interface import Engine, HasReplicas
from edgeinfer.usage.daily_counts import drift_path
from edgeinfer.usage.drift import compare_weeks

#: Bucket bounds (s): from a resumed small model (15 ms) to a cold 7B with a long prompt (minutes).
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 40, 80, 160)
_TOKEN_MS = (2, 5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2500, 5000)
TOKEN_BUCKETS = tuple(ms / 1000 for ms in _TOKEN_MS)
_E2E_SHORT = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5)
E2E_BUCKETS = (*_E2E_SHORT, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
LOAD_BUCKETS = (0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_MODEL = ("model_name", "model_version")
#: How long (s) the value of the metric `drift_psi` is cached. Comparing the last seven days with the
#: seven days before them takes about 20 ms.
_DRIFT_S = 300.0
#: Maximum number of values of the label `key`, including "" (no key) and "other" (all further keys).
MAX_KEYS = 64


#: Gauges that are read from the engines at each scrape: name → (field of EngineMetrics, help).
_GAUGES = {
    "num_requests_running": ("running", "Generations being decoded."),
    "num_requests_waiting": ("queued", "Generations in the queue."),
    "weights_pinned_bytes": ("pinned_bytes", "Weights in memory, of models larger than memory."),
    "weights_streamed_bytes": ("streamed_bytes", "Weights read from the disk at each step."),
    "expert_slot_bytes": ("expert_slot_bytes", "Experts in memory, of models larger than memory."),
}
#: Counters that are read at each scrape. They start at 0 when a model is loaded again.
_COUNTERS = {
    "weights_read_bytes": ("streamed_bytes_total", "Weights read again after they left memory."),
    "weights_wait_seconds": ("streaming_wait_seconds_total", "Time threads waited for the disk."),
    "weights_moved": ("moved_weights_total", "Weights that left memory to make room for others."),
    "engine_steps": ("steps_total", "llama_decode calls since the engine started."),
    "spec_decode_num_draft_tokens": ("draft_tokens_total", "Draft tokens proposed."),
    "spec_decode_num_accepted_tokens": ("draft_accepted_total", "Draft tokens accepted."),
}


class Metrics:
    """The Prometheus metrics of one endpoint."""

    def __init__(self, engines: Callable[[], list[tuple[str, Engine]]]) -> None:
        # otherwise prometheus_client adds a second series, "…_created", to each counter and histogram
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._keys = {"", "other"}
        self._count_requests()
        self._count_generations()
        self._count_loads()
        self._engines = _EngineCollector(engines)
        self.registry.register(self._engines)

    def _counter(self, name: str, text: str, labels: Sequence[str] = _MODEL) -> Counter:
        return Counter(f"edgeinfer_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = _MODEL
    ) -> Histogram:
        return Histogram(f"edgeinfer_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _count_requests(self) -> None:
        text = "Requests by route, outcome and API key (8 hex digits of its digest)."
        self.requests = self._counter("requests", text, ("route", "status", "key", *_MODEL))
        text = "From the request's arrival to its first token."
        self.ttft = self._histogram("time_to_first_token_seconds", text, TTFT_BUCKETS)
        text = "Time between two events of one answer, as sent."
        self.between_tokens = self._histogram("inter_token_latency_seconds", text, TOKEN_BUCKETS)
        text = "From the request's arrival to its last byte."
        self.e2e = self._histogram("e2e_request_latency_seconds", text, E2E_BUCKETS)

    def _count_generations(self) -> None:
        text = "Time a request waited in the queue."
        self.queue_time = self._histogram("request_queue_time_seconds", text, TTFT_BUCKETS)
        text = "Time spent on prefilling the prompt."
        self.prefill_time = self._histogram("request_prefill_time_seconds", text, TTFT_BUCKETS)
        text = "Time spent on decoding the answer."
        self.decode_time = self._histogram("request_decode_time_seconds", text, E2E_BUCKETS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        text = "Prompt tokens found in the prefix cache, in memory or on the disk."
        self.cached_tokens = self._counter("prompt_tokens_cached", text)
        text = "Cached prompt tokens that came from the disk."
        self.cached_disk_tokens = self._counter("prompt_tokens_cached_disk", text)
        self.generated_tokens = self._counter("generation_tokens", "Generated tokens.")
        text = "Generations by how they ended."
        self.finished = self._counter("request_success", text, ("finished_reason", *_MODEL))

    def _count_loads(self) -> None:
        text = "Loads of models: resumed, cold, or held by this process."
        self.loads = self._counter("model_loads", text, ("how", "model_name"))
        text = 'Duration of loading a model by stage; stage "total" is the whole load.'
        labels = ("how", "stage", "model_name")
        self.load_time = self._histogram("model_load_seconds", text, LOAD_BUCKETS, labels)
        text = "Running requests of all routes."
        self.in_flight = Gauge("edgeinfer_http_requests_in_flight", text, registry=self.registry)
        text = "PSI of the last 7 days against the 7 before; `moved`: `edgeinfer drift` reports it."
        labels = ("aggregate", "moved", "model_name")
        self.drift = Gauge("edgeinfer_drift_psi", text, labels, registry=self.registry)
        self._drift_due = 0.0
        self.refused = self._counter("requests_refused", "Requests refused by a limit.", ("limit",))
        text = "Requests that the payload log could not write."
        self.payloads_dropped = self._counter("payload_log_dropped", text, ())
        text = "Requests left out of the payload log because of `x-edgeinfer-no-log`."
        self.payloads_opted_out = self._counter("payload_log_opted_out", text, ())

    def request_ended(self, route: str, status: int, key: str, model: str, version: str) -> None:
        """Count an ended request. After `MAX_KEYS` values of `key`, each new one counts as "other".

        `version` is the beginning of the SHA-256 of the model's file (`EngineInfo.version`).
        """
        if key not in self._keys and len(self._keys) >= MAX_KEYS:
            key = "other"
        self._keys.add(key)
        self.requests.labels(route, str(status), key, model, version).inc()

    def generation_ended(self, model: str, version: str, finished: Finished) -> None:
        """Count an ended generation, with its tokens and times."""
        labels = (model, version)
        self.finished.labels(finished.reason, *labels).inc()
        self.prompt_tokens.labels(*labels).inc(finished.usage.prompt_tokens)
        self.cached_tokens.labels(*labels).inc(finished.usage.cached_tokens)
        self.cached_disk_tokens.labels(*labels).inc(finished.usage.cached_disk_tokens)
        self.generated_tokens.labels(*labels).inc(finished.usage.completion_tokens)
        self.queue_time.labels(*labels).observe(finished.timings.queue_ms / 1000)
        self.prefill_time.labels(*labels).observe(finished.timings.prefill_ms / 1000)
        self.decode_time.labels(*labels).observe(finished.timings.decode_ms / 1000)

    def model_loaded(self, model: str, start: str, seconds: float, stages_ms: dict[str, float]) -> None:
        self.loads.labels(start, model).inc()
        self.load_time.labels(start, "total", model).observe(seconds)
        for stage, stage_ms in stages_ms.items():
            self.load_time.labels(start, stage, model).observe(stage_ms / 1000)

    def describe(self) -> list[tuple[str, str, str, str]]:
        """Return (name, type, labels, help) of every metric, for the documentation."""
        families: list[tuple[Metric, Sequence[str]]] = []
        for metric in vars(self).values():
            if isinstance(metric, MetricWrapperBase):
                families += [(family, metric._labelnames) for family in metric.collect()]
        families += [(family, getattr(family, "_labelnames", ())) for family in self._engines.collect()]
        return [
            (
                f"{family.name}_total" if family.type == "counter" else family.name,
                family.type,
                ", ".join(sorted(labels)),
                family.documentation,
            )
            for family, labels in families
        ]

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format. Blocks while engines answer: use a thread."""
        if time.monotonic() >= self._drift_due:
            self._drift_due = time.monotonic() + _DRIFT_S
            self._compare_weeks()
        return generate_latest(self.registry)

    def _compare_weeks(self) -> None:
        self.drift.clear()
        today = date.today()
        with contextlib.suppress(StoreError):
            for model, changes in compare_weeks(drift_path(), today - timedelta(7), today).items():
                for change in changes:
                    moved = "yes" if change.moved else "no"
                    self.drift.labels(change.aggregate, moved, model).set(change.psi)


class _EngineCollector(Collector):
    def __init__(self, engines: Callable[[], list[tuple[str, Engine]]]) -> None:
        self._engines = engines

    def describe(self) -> Iterator[Metric]:
        """Yield nothing. Without this method, registration would call `collect` (prometheus_client)."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families = {
            field: kind(f"edgeinfer_{name}", text, labels=_MODEL)
            for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS))
            for name, (field, text) in table.items()
        }
        text = "KV cache in use, 0 to 1."
        kv_usage = GaugeMetricFamily("edgeinfer_kv_cache_usage_ratio", text, labels=_MODEL)
        text = "Running replicas of a model."
        running = GaugeMetricFamily("edgeinfer_replicas", text, labels=_MODEL)
        text = "Replicas whose process ended unexpectedly."
        crashed = CounterMetricFamily("edgeinfer_replicas_crashed", text, labels=_MODEL)
        for name, engine in self._engines():
            try:
                now = engine.metrics()
            except EdgeInferError:  # the worker process has died; the next request starts another
                continue
            labels = (name, engine.info.version)
            for field, family in families.items():
                family.add_metric(labels, getattr(now, field))
            kv_usage.add_metric(labels, now.kv_used_tokens / (now.kv_total_tokens or 1))
            if isinstance(engine, HasReplicas):
                replicas = engine.replicas()
                running.add_metric(labels, len(replicas.running))
                crashed.add_metric(labels, replicas.crashed_total)
        yield from (*families.values(), kv_usage, running, crashed)
        text = "Resident memory of the endpoint."
        yield GaugeMetricFamily("edgeinfer_process_resident_memory_bytes", text, resident_bytes())
