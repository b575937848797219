"""Changing which models are here: done by whoever runs the endpoint, where that is allowed."""

from __future__ import annotations

import threading
from typing import Protocol

from edgeinfer.catalog.progress import OnProgress


class Shelf(Protocol):
    """Every call blocks, and raises what the command of its kind raises."""

    def pull(self, text: str, report: OnProgress, cancel: threading.Event) -> None:
        """Fetch what a name or a source means."""

    def create(self, name: str, path: str, report: OnProgress, cancel: threading.Event) -> None:
        """Name a GGUF file of this machine, which stays where it is."""

    def copy(self, source: str, name: str) -> None:
        """Give a model another name beside its own."""

    def remove(self, name: str) -> None:
        """Remove a model with its snapshots and what it has read."""
