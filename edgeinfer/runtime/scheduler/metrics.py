"""Counters of the decode loop, written by its thread alone and read by any as one frozen value."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

from edgeinfer.runtime.options import EngineMetrics

#: Latest samples kept of each latency.
_SAMPLES = 1024


def _ring() -> deque[float]:
    return deque(maxlen=_SAMPLES)


@dataclass(slots=True)
class Counters:
    """Sums since the engine started, named as in `EngineMetrics`, and latencies in milliseconds."""

    requests_total: int = 0
    cancelled_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    cached_disk_tokens_total: int = 0
    completion_tokens_total: int = 0
    prefill_seconds_total: float = 0.0
    decode_seconds_total: float = 0.0
    constraint_seconds_total: float = 0.0
    python_seconds_total: float = 0.0
    steps_total: int = 0
    draft_tokens_total: int = 0
    draft_accepted_total: int = 0
    ttft_ms: deque[float] = field(default_factory=_ring)
    inter_token_ms: deque[float] = field(default_factory=_ring)

    def frozen(self, **others: int) -> EngineMetrics:
        """Return the value to publish, with `others`: the gauges, and the prefix cache's counters."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)} | others
        for name in ("ttft_ms", "inter_token_ms"):
            values[name] = _copy(values[name])
        return EngineMetrics(**values)


def _copy(ring: deque[float]) -> tuple[float, ...]:
    while True:
        try:
            return tuple(ring)
        except RuntimeError:  # the loop appended meanwhile
            continue
