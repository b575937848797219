"""A watchdog over event loops: what one callback takes of the processor while nothing else moves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

#: A callback may take so much processor time (s). The promise is 10 ms; this is generous because a
#: shared core and first imports take several times as long.
MOST_S = 0.25

#: Processor time (s) of the collector since the start: pytest's own objects make a collection long.
_collecting_s = 0.0
_collection_began_s = 0.0
_watched: dict[asyncio.AbstractEventLoop, list[tuple[float, str]]] = {}
_run = asyncio.Handle._run


def _count_collection(phase: str, _info: dict[str, int]) -> None:
    global _collecting_s, _collection_began_s
    if phase == "start":
        _collection_began_s = time.thread_time()
    else:
        _collecting_s += time.thread_time() - _collection_began_s


gc.callbacks.append(_count_collection)


def _timed_run(self: Any) -> None:
    slow = _watched.get(self._loop)
    if slow is None:
        _run(self)
        return
    collecting_s = _collecting_s
    began_s = time.thread_time()  # not wall time: on a busy machine the thread waits for its turn
    _run(self)
    taken_s = time.thread_time() - began_s - (_collecting_s - collecting_s)
    if taken_s > MOST_S:
        slow.append((taken_s, _name(self)))


def _name(handle: Any) -> str:
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        frames = []
        while coroutine is not None:
            frames.append(getattr(coroutine, "__qualname__", repr(coroutine)))
            coroutine = getattr(coroutine, "cr_await", None)
        return " > ".join(frames)
    return repr(callback)


@contextlib.contextmanager
def watch_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Raise AssertionError at the end, naming each callback of `loop` that held it too long."""
    asyncio.Handle._run = _timed_run  # type: ignore[method-assign]
    slow = _watched[loop] = []
    try:
        yield
    finally:
        del _watched[loop]
    held = "; ".join(f"{name} held the event loop for {taken_s:.2f} s" for taken_s, name in slow)
    assert not slow, held
