"""Counters of the decode loop, written by its thread alone and read by any as one frozen value."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from edgeinfer.runtime.options import EngineMetrics
from edgeinfer.runtime.prefix_cache.store import Traffic

#: Latest samples kept of each latency.
_SAMPLES = 1024


def _ring() -> deque[float]:
    return deque(maxlen=_SAMPLES)


@dataclass(slots=True)
class Counters:
    """Sums since the engine started. Times in seconds, latencies in milliseconds."""

    requests: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_disk_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    constraint_s: float = 0.0
    python_s: float = 0.0
    steps: int = 0
    draft_tokens: int = 0
    draft_accepted: int = 0
    ttft_ms: deque[float] = field(default_factory=_ring)
    inter_token_ms: deque[float] = field(default_factory=_ring)

    def frozen(
        self, *, queued: int, running: int, kv_used: int, kv_total: int, blocks: Traffic
    ) -> EngineMetrics:
        """The value the fronts publish. `blocks`: what the store of computed blocks counted."""
        return EngineMetrics(
            queued=queued,
            running=running,
            requests_total=self.requests,
            cancelled_total=self.cancelled,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            cached_disk_tokens_total=self.cached_disk_tokens,
            block_bytes_written_total=blocks.bytes_written,
            block_bytes_read_total=blocks.bytes_read,
            blocks_pruned_total=blocks.pruned,
            blocks_damaged_total=blocks.damaged,
            completion_tokens_total=self.completion_tokens,
            prefill_seconds_total=self.prefill_s,
            decode_seconds_total=self.decode_s,
            constraint_seconds_total=self.constraint_s,
            python_seconds_total=self.python_s,
            steps_total=self.steps,
            draft_tokens_total=self.draft_tokens,
            draft_accepted_total=self.draft_accepted,
            kv_used_tokens=kv_used,
            kv_total_tokens=kv_total,
            ttft_ms=_copy(self.ttft_ms),
            inter_token_ms=_copy(self.inter_token_ms),
        )


def _copy(ring: deque[float]) -> tuple[float, ...]:
    while True:
        try:
            return tuple(ring)
        except RuntimeError:  # the loop appended meanwhile
            continue
