"""An idle app costs nothing: after `idle_release_s` without work it gives llama.cpp's clean pages back.

They stay in the page cache, or on the disk; the next request takes them again as it touches them. What
was written since the resume, the KV cache, is not dropped but paged out where there is swap.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from edgeinfer.errors import EngineClosedError
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.llama.mappings import Range
from edgeinfer.snapshots.restore import residency


class IdleWatch:
    """Watch one engine from a thread; `release` runs between two decode steps."""

    def __init__(self, engine: Engine, idle_s: float, release: Callable[[], Any]) -> None:
        self._engine = engine
        self._idle_s = idle_s
        self._release = release
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="idle", daemon=True).start()

    def stop(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        with contextlib.suppress(EngineClosedError):  # unloaded: the next load has a watch of its own
            self._release_when_idle()

    def _release_when_idle(self) -> None:
        seen = self._activity()
        idle_s = 0.0
        released = False
        step_s = max(0.05, min(5.0, self._idle_s / 4))
        while not self._closed.wait(step_s):
            now = self._activity()
            if now != seen or now[0]:
                seen = now
                idle_s = 0.0
                released = False
                continue
            idle_s += step_s
            if idle_s >= self._idle_s and not released:
                self._release()
                released = True

    def _activity(self) -> tuple[int, int, int]:
        metrics = self._engine.metrics()
        return metrics.running + metrics.queued, metrics.requests_total, metrics.prompt_tokens_total


def give_back(buffers: list[Range]) -> int:
    """Give back the buffers and the model's file; the bytes dropped from this process."""
    residency.give_back_shared()
    return residency.give_back(buffers)
