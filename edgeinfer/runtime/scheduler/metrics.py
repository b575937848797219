"""Counters of the decode loop, written by its thread alone and published as one value."""

from __future__ import annotations

from collections import deque

import msgspec

from edgeinfer.runtime.options import EngineMetrics, EngineTotals

#: Latest samples kept of each latency.
_SAMPLES = 1024


def _ring() -> deque[float]:
    return deque(maxlen=_SAMPLES)


class Counters(EngineTotals, kw_only=True):
    """Sums since the engine started, and latencies in milliseconds."""

    ttft_ms: deque[float] = msgspec.field(default_factory=_ring)
    inter_token_ms: deque[float] = msgspec.field(default_factory=_ring)

    def published(self, **others: int) -> EngineMetrics:
        """Return the value to publish, with `others`: the gauges, and the prefix cache's counters."""
        latencies = {"ttft_ms": _copy(self.ttft_ms), "inter_token_ms": _copy(self.inter_token_ms)}
        return EngineMetrics(**msgspec.structs.asdict(self) | latencies | others)


def _copy(ring: deque[float]) -> tuple[float, ...]:
    while True:
        try:
            return tuple(ring)
        except RuntimeError:  # the loop appended meanwhile
            continue
