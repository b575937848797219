"""Ends a llama_decode early: a long prompt's step, when somebody comes who has less to compute.

llama.cpp asks a callback before each node of its graph. One in Python would take the interpreter's lock
thousands of times a step; libc's `strlen` over a buffer of ours needs none: "" goes on, "x" ends.
"""

from __future__ import annotations

import ctypes
from typing import Any

from edgeinfer.runtime import libllama


class Abort:
    """The switch of the contexts it is put on. Any thread may call `ask`, the one that decodes the
    rest.
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
