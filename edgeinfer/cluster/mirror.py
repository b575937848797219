"""The metrics of a replica's endpoint among Ray's own, where whoever watches the cluster looks.

By Serve's interface for an application's metrics (https://docs.ray.io/en/latest/serve/monitoring.html).
"""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from ray.serve import metrics


class Mirror:
    """Shows what was scraped last. Ray puts `ray_` before names, and adds deployment and replica."""

    def __init__(self) -> None:
        self._gauges: dict[str, metrics.Gauge] = {}

    def show(self, text: str) -> None:
        """Show every series of Prometheus text as a gauge; of counters and histograms they are sums."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    gauge = metrics.Gauge(sample.name, family.documentation, tuple(sample.labels))
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, tags=dict(sample.labels))
