"""The tables of functions that ggml's CPU buffers begin with, for what ggml has no option for.

Which entry is which is found by trying: one counts only when ggml's public function calls what was put
there. So nothing here depends on how a version of ggml orders them, and where an entry is not found,
ggml's own function stays. Decision 082.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

Pointer = ctypes.c_void_p
#: Entries at the beginning of a buffer type and of a buffer, at most.
TYPE_ENTRIES, BUFFER_ENTRIES = 6, 12


def table(address: int, length: int) -> Any:
    """The `length` pointers at `address`, to be read and written."""
    return (Pointer * length).from_address(address)


def find_entry(entries: Any, kind: Any, call: Callable[[], object]) -> int | None:
    """The number of the entry that `call` goes through; None when it goes through none.

    `kind` is the ctypes prototype of the function.
    """
    seen: list[bool] = []

    def note(*_: object) -> None:
        seen.append(True)

    probe = kind(note)
    for number in range(len(entries)):
        with replaced(entries, number, probe):
            call()
        if seen:
            return number
    return None


@contextlib.contextmanager
def replaced(entries: Any, number: int, function: Any) -> Iterator[None]:
    """Have `function`, of ctypes, in an entry's place during the block."""
    before = entries[number]
    entries[number] = ctypes.cast(function, Pointer).value
    try:
        yield
    finally:
        entries[number] = before
