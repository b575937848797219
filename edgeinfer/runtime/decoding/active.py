"""The context that decodes: another may take its place between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeinfer.runtime.loading.mappings import Range


class ActiveContext:
    """llama.cpp's pointers of one context, for whoever would otherwise keep them. One thread.

    `cells` is where its KV cache lies, as far as its pages can be given back; `adapters` are the LoRA
    adapters of its model by the stamps of their files.
    """

    __slots__ = ("adapters", "cells", "context", "memory")

    def __init__(self, context: Any, memory: Any = None, cells: Sequence[Range] = ()) -> None:
        self.context = context
        self.memory = memory
        self.cells = tuple(cells)
        self.adapters: dict[str, Any] = {}

    def become(self, other: ActiveContext) -> None:
        """Be another context from now on."""
        self.context, self.memory = other.context, other.memory
        self.cells, self.adapters = other.cells, other.adapters
