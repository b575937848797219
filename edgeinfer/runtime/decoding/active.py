"""The context that decodes: another may take its place between two steps."""

from __future__ import annotations

from typing import Any

from edgeinfer.runtime.loading.cell_memory import NO_CELLS, CellMemory


class ActiveContext:
    """llama.cpp's pointers of one context, for whoever would otherwise keep them. One thread.

    `cells`: where its KV cache lies; `adapters`: its model's LoRA adapters by their files' stamps.
    """

    __slots__ = ("adapters", "cells", "context", "memory")

    def __init__(self, context: Any, memory: Any = None, cells: CellMemory = NO_CELLS) -> None:
        self.context = context
        self.memory = memory
        self.cells = cells
        self.adapters: dict[str, Any] = {}

    def become(self, other: ActiveContext) -> None:
        """Be another context from now on."""
        self.context, self.memory = other.context, other.memory
        self.cells, self.adapters = other.cells, other.adapters
