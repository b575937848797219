"""One of the copies of a model: its engine, in another process, and what it has to do."""

from __future__ import annotations

from typing import Protocol

from edgeinfer.runtime.generation import EventStream
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.workers.copies.ticket import Ticket


class CopyEngine(Engine, Protocol):
    """What the engine of a copy does besides."""

    def submit(self, request: GenerateRequest) -> EventStream: ...

    def use_threads(self, n_threads: int) -> None: ...


class Copy:
    """One of them. `how` it came to be: "resumed" or "cold"."""

    def __init__(self, engine: CopyEngine, how: str, n_threads: int) -> None:
        self.engine = engine
        self.how = how
        self.n_threads = n_threads
        self.number = 0
        self.tickets: set[Ticket] = set()
        self.calls = 0
        self.is_leaving = False

    @property
    def inside(self) -> int:
        """Requests that run or wait in it."""
        return len(self.tickets) + self.calls

    @property
    def is_usable(self) -> bool:
        """Whether it may be given requests."""
        return self.engine.is_open and not self.is_leaving
