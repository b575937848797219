"""Decides when a step of prefill is given up for a newcomer, and how much work may be lost that way."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from edgeinfer.runtime import libllama
from edgeinfer.runtime.decoding.scheduling.chunks import SHORT_TOKENS

#: Work thrown away is at most this share of the prefill that was done.
_LOST_SHARE = 0.05
_MOST_LOST_S = 1.0
#: A step that will be over so soon (seconds) is waited for, if half of it is done.
_SOON_S = 0.3


class Interruptions:
    """`ask` ends the running llama_decode. One thread begins and ends steps, any may call the rest."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._began: float | None = None
        self._is_early = False
        self._expected_s = 0.0
        self._allowed_s = _MOST_LOST_S

    def begin(self, *, is_early: bool, expected_s: float) -> None:
        """A step of prefill begins; `is_early` when nobody waits for its prompts yet."""
        with self._lock:
            self._began, self._is_early = time.monotonic(), is_early
            self._expected_s = expected_s

    def end(self, *, lost: bool) -> None:
        """The step has ended, or has been given up."""
        with self._lock:
            if self._began is None:
                return
            took_s, self._began = time.monotonic() - self._began, None
            if not self._is_early:
                change_s = -took_s if lost else took_s * _LOST_SHARE
                self._allowed_s = min(_MOST_LOST_S, self._allowed_s + change_s)

    def for_newcomer(self, n_tokens: int) -> None:
        """A request has come that has at most so many tokens to compute."""
        with self._lock:
            if self._began is None:
                return
            lost_s = time.monotonic() - self._began
            is_late = lost_s > max(self._expected_s / 2, self._expected_s - _SOON_S)
            is_worth_it = n_tokens <= SHORT_TOKENS and lost_s <= self._allowed_s and not is_late
            if self._is_early or is_worth_it:
                self._ask()

    def for_cancel(self, cancelled: Sequence[bool]) -> None:
        """Requests of the running step were cancelled, or not."""
        with self._lock:
            if self._began is not None and cancelled and all(cancelled):
                self._ask()


class Abort:
    """Ends a llama_decode early. Any thread may call `ask`, the one that decodes the rest.

    llama.cpp asks a callback before each node of its graph. One in Python would take the interpreter's
    lock thousands of times a step; libc's `strlen` over our buffer needs none: "" goes on, "x" ends.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        strlen = ctypes.CDLL(None).strlen
        self._callback = ctypes.cast(strlen, libllama.lib().ggml_abort_callback)

    def put_on(self, context: Any) -> None:
        """Have the computing of `context` ask."""
        libllama.lib().llama_set_abort_callback(
            context, self._callback, ctypes.cast(self._text, ctypes.c_void_p)
        )

    def ask(self) -> None:
        """End the llama_decode that is running, or the next; it returns 2."""
        self._text[0] = b"x"

    def clear(self) -> None:
        """Let computing go on."""
        self._text[0] = b"\0"
