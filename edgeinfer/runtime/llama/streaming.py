"""Run a model that is larger than memory: its kernels read weights from disk at each step.

native/streaming.cpp reads them. This module starts and stops it, adapts it to the free memory, and
reports failures. A process can stream only one model at a time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from dataclasses import replace

from edgeinfer.errors import DecodeError
from edgeinfer.platform.machine import read_memory
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.mappings import NORMAL, Range, advise, areas
from edgeinfer.runtime.memory_plan import StreamingPlan
from edgeinfer.runtime.options import StreamingStatistics

_log = logging.getLogger("edgeinfer.engine")
#: Codes of native/streaming.cpp below 0; others are an errno.
_WORDS = {-1: "is shorter than when it was loaded", -2: "has been written to since it was loaded"}
#: Interval (s) at which free memory is checked.
_MEMORY_S = 1.0
#: Below the first amount of free memory (bytes), fewer weights are kept in memory; above the second
#: one, more. _STEP_BYTES is the smallest change.
_LEAST_FREE_BYTES, _AMPLE_FREE_BYTES = 48 << 20, 112 << 20
_STEP_BYTES = 16 << 20


class Streaming:
    """The streaming of one model's weights, until `stop`. Used on the decode thread, between steps."""

    def __init__(self, kernels: ctypes.CDLL, paths: tuple[str, ...], plan: StreamingPlan) -> None:
        self._kernels, self._paths = kernels, paths
        self._plan = self._now = plan
        self._looked_at = time.monotonic()

    def check(self) -> None:
        """Raise DecodeError if the last step could not read weights; adapt to the free memory."""
        code = self._kernels.edgeinfer_stream_end()
        if code:
            text = _WORDS.get(code) or f"could not be read: {os.strerror(code)}"
            names = " or ".join(self._paths)
            raise DecodeError(
                f"{names} {text}: its weights are needed while the model runs, so this answer is lost",
                hint="restore the file (`edgeinfer pull` checks it), then start again",
            )
        if time.monotonic() > self._looked_at + _MEMORY_S:
            self._looked_at = time.monotonic()
            self._follow(read_memory().available_bytes)

    def _follow(self, available_bytes: int) -> None:
        """Keep fewer weights in memory if little of it is free, and more if much is.

        Weights may use memory that is planned for the KV cache as long as that does not use it.
        """
        now, held = self._now, self.statistics()
        to_fill = max(0, now.expert_bytes - held.expert_slot_bytes)
        free = available_bytes - held.pinned_bytes - to_fill
        change = min(0, free - _LEAST_FREE_BYTES) or max(0, free - _AMPLE_FREE_BYTES)
        streamed, experts = now.streamed_bytes, now.expert_bytes
        if self._plan.expert_bytes:
            experts = min(self._plan.expert_bytes, max(0, experts + change))
        elif change:
            streamed = max(0, held.streamed_bytes - change)
        if abs(streamed - now.streamed_bytes) + abs(experts - now.expert_bytes) >= _STEP_BYTES:
            self._now = replace(now, streamed_bytes=streamed, expert_bytes=experts)
            self._kernels.edgeinfer_stream_aim(streamed, experts)

    def statistics(self) -> StreamingStatistics:
        numbers = (ctypes.c_double * len(StreamingStatistics.__struct_fields__))()
        self._kernels.edgeinfer_stream_statistics(numbers)
        read_bytes, waited_s, *counts = numbers
        return StreamingStatistics(int(read_bytes), waited_s, *map(int, counts))

    def stop(self) -> None:
        """Stop streaming and free its memory. Idempotent; no step may be running."""
        global _active
        if _active is self:
            self._kernels.edgeinfer_stream_stop()
            _active = None


_active: Streaming | None = None


def check() -> None:
    """Raise DecodeError if the last step could not read weights. Call it after each step."""
    if _active is not None:
        _active.check()


def statistics() -> StreamingStatistics:
    """Return the statistics of streaming in this process, zeros without streaming."""
    return _active.statistics() if _active is not None else StreamingStatistics()


def start(paths: tuple[str, ...], plan: StreamingPlan | None) -> Streaming | None:
    """Stream the weights of a model's files, which are mapped, from the next step on.

    Returns None if that is impossible: there is no plan, edgeinfer's kernels are not in use, another
    model is streamed, or a file or thread cannot be opened. Then Linux reads weights by page faults.
    """
    global _active
    files = [os.path.realpath(path) for path in paths]
    mapped = {area.path: area for area in areas() if area.path in files}
    bases = [mapped[file].low - mapped[file].offset for file in files if file in mapped]
    advise((Range(area.low, area.high) for area in mapped.values()), NORMAL)
    level = libllama.build_info().kernels
    if plan is None or not level or _active is not None or len(bases) < len(files):
        return None
    kernels, size = libllama.own_library(f"kernels-{level}"), ctypes.c_int64
    kernels.edgeinfer_stream_aim.argtypes = [size, size]
    code = kernels.edgeinfer_stream_start(
        len(paths),
        (ctypes.c_char_p * len(paths))(*map(os.fsencode, paths)),
        (ctypes.c_void_p * len(bases))(*bases),
        *map(size, (plan.ring_bytes, plan.expert_bytes, plan.streamed_bytes)),
    )
    if code:
        _log.warning(
            "weights cannot be streamed (%s): Linux reads them by page faults, which is slower",
            os.strerror(code),
        )
        return None
    _active = Streaming(kernels, paths, plan)
    return _active
