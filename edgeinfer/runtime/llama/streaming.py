"""Run a model that is larger than memory: its kernels read weights from disk at each step.

native/streaming.cpp reads the weights. This module starts and stops the streaming, adapts it to the
free memory, and reports failures. A process can stream only one model at a time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time

from edgeinfer.errors import DecodeError
from edgeinfer.platform.machine import read_memory
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.mappings import NORMAL, Range, advise, areas
from edgeinfer.runtime.memory_plan import StreamingPlan
from edgeinfer.runtime.options import StreamingStatistics

_log = logging.getLogger("edgeinfer.engine")
#: Error code of native/streaming.cpp → what happened to the file. Codes above 0 are values of errno.
_MESSAGES = {-1: "is shorter than when it was loaded", -2: "has been written to since it was loaded"}
#: Interval (s) at which free memory is checked.
_MEMORY_S = 1.0


class Streaming:
    """Streams a model's weights from disk. Used on the decode thread.

    `owner` is the object that was passed to `start`; `stop` with the same object ends the streaming.
    """

    def __init__(self, owner: object, kernels: ctypes.CDLL, paths: tuple[str, ...]) -> None:
        self.owner = owner
        self.kernels, self._paths = kernels, paths
        self._looked_at = time.monotonic()

    def check(self) -> None:
        """Raise DecodeError if the last step could not read weights.

        Once a second, also adapt the memory for weights to the free memory.
        """
        code = self.kernels.edgeinfer_stream_end()
        if code:
            text = _MESSAGES.get(code) or f"could not be read: {os.strerror(code)}"
            names = " or ".join(self._paths)
            raise DecodeError(
                f"{names} {text}: weights are read from disk while the model runs; this answer is lost",
                hint="restore the file (`edgeinfer pull` checks it), then start again",
            )
        if time.monotonic() > self._looked_at + _MEMORY_S:
            self._looked_at = time.monotonic()
            self.kernels.edgeinfer_stream_follow(ctypes.c_int64(read_memory().available_bytes))


#: The weight streaming of this process, None without one. Its `check` must be called after each step.
active: Streaming | None = None
#: Held while `active` is cleared, and while any thread reads statistics.
_lock = threading.Lock()


def statistics() -> StreamingStatistics:
    """Return the statistics of streaming in this process, zeros without streaming."""
    numbers = (ctypes.c_double * len(StreamingStatistics.__struct_fields__))()
    with _lock:
        if active is None:
            return StreamingStatistics()
        active.kernels.edgeinfer_stream_statistics(numbers)
    read_bytes, waited_s, *counts = numbers
    return StreamingStatistics(int(read_bytes), waited_s, *map(int, counts))


def start(owner: object, paths: tuple[str, ...], plan: StreamingPlan | None) -> None:
    """Stream the weights of a model's files, which are mapped, from the next step on. Idempotent.

    Streaming ends at `stop(owner)`; `owner` is any object. Nothing is streamed without a plan or
    edgeinfer's kernels, while another model is streamed, or after an error, which is logged. Then Linux
    reads the weights by page faults.
    """
    global active
    if active is not None and active.owner is owner:
        return
    files = {os.path.realpath(path) for path in paths}
    # a file is one area of /proc/self/maps, because all of it has equal advice
    mapped = {area.path: area for area in areas() if area.path in files}
    advise([Range(area.low, area.high) for area in mapped.values()], NORMAL)
    level = libllama.build_info().kernels
    if plan is None or not level or active is not None or len(mapped) < len(files):
        return
    kernels, size = libllama.own_library(f"kernels-{level}"), ctypes.c_int64
    bounds = size * 3
    code = kernels.edgeinfer_stream_start(
        len(mapped),
        (ctypes.c_char_p * len(mapped))(*map(os.fsencode, mapped)),
        (bounds * len(mapped))(*(bounds(a.low, a.high, a.offset) for a in mapped.values())),
        *map(size, (plan.slot_bytes, plan.read_bytes)),
    )
    if code:
        _log.warning(
            "weights cannot be streamed (%s): Linux reads them by page faults, which is slower",
            os.strerror(code),
        )
        return
    active = Streaming(owner, kernels, paths)


def stop(owner: object) -> None:
    """Stop streaming for `owner`, and free the memory used. Idempotent; no step may be running."""
    global active
    with _lock:
        if active is None or active.owner is not owner:
            return
        active.kernels.edgeinfer_stream_stop()
        active = None
