"""The `Engine` that is several copies of one model.

A request goes to the copy that has read its beginning, unless others have much less to do, else to
the one with the least. What a copy has not begun moves to another when there is one more, or when
that copy ends; what it has begun ends with it, and nothing else does. `minding.Minder` starts,
replaces and ends copies.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from edgeinfer import beginnings
from edgeinfer.errors import EngineClosedError, EngineError
from edgeinfer.runtime.generation import EventStream
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import Adapter, CopiesInfo, CopyInfo, EngineInfo, EngineMetrics
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool
from edgeinfer.workers.copies.ticket import Ticket

T = TypeVar("T")


class CopiesEngine:
    """Copies behind the interface of one. `minding.Minder` adds them."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._changed = threading.Condition()
        self._changing_adapters = threading.Lock()
        self._copies: list[Copy] = []
        self._ticket_copies: dict[Ticket, Copy] = {}
        self._readers = beginnings.Readers()
        self._numbers = 0
        self._gone = EngineMetrics()
        self._movers = ThreadPoolExecutor(4, "copies")
        self._is_closed = False
        self.crashed_total = 0
        #: Says why those that run are so many; this and the next two are set by whoever minds them.
        self.describe: Callable[[tuple[CopyInfo, ...]], CopiesInfo]
        #: Called when a copy's process has ended, from any thread.
        self.on_death: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None

    # --- the engine

    @property
    def is_open(self) -> bool:
        """Whether there are copies, or will be."""
        return not self._is_closed

    def health(self) -> str:
        """See `Engine.health`: a replica that fails is replaced by another."""
        return ""

    @property
    def info(self) -> EngineInfo:
        """One copy's, with the sequences of all."""
        return self._info

    def submit(self, request: GenerateRequest) -> EventStream:
        """Validate in a copy and queue there; see `Engine.submit`. Waits while no copy runs."""
        ticket = Ticket(request, self._ended, self._move)
        self._place(ticket)
        return ticket.stream

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        return self._ask(
            lambda engine: engine.tokenize(text, add_special=add_special, parse_special=parse_special)
        )

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return self._ask(lambda engine: engine.detokenize(tokens))

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: dict[str, Any] | None = None,
    ) -> str:
        return self._ask(lambda engine: engine.apply_template(messages, tools, options))

    def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: dict[str, Any] | None = None,
    ) -> list[int]:
        return self._ask(lambda engine: engine.tokenize_chat(messages, tools, options))

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        return self._ask(lambda engine: engine.embed(texts))

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        return self._ask(lambda engine: engine.rerank(query, documents))

    def begun_with(self, agent: str, salt: str = "") -> list[int]:
        return self._ask(lambda engine: engine.begun_with(agent, salt))

    def use_adapters(self, wanted: Sequence[Adapter]) -> tuple[Adapter, ...]:
        """See `Engine.use_adapters`: in every copy, and in each that comes."""
        with self._changing_adapters:
            before = self._info.lora
            try:
                self._use_adapters(wanted)
            except EngineError:
                self._use_adapters(before)
                raise
            with self._changed:
                self._info = msgspec.structs.replace(self._info, lora=tuple(wanted))
            return self._info.lora

    def _use_adapters(self, wanted: Sequence[Adapter]) -> None:
        for copy in self.usable:
            with contextlib.suppress(EngineClosedError):  # it has ended
                copy.engine.use_adapters(wanted)

    def metrics(self) -> EngineMetrics:
        """Sums over all copies, those that have ended included."""
        return EngineMetrics.sum([self._gone, *(now for _, now in self._asked())])

    def copies(self) -> CopiesInfo:
        """See `HasCopies`."""
        running = tuple(
            CopyInfo(
                number=copy.number,
                how=copy.how,
                n_threads=copy.n_threads,
                inside=copy.inside,
                completion_tokens_total=now.completion_tokens_total,
            )
            for copy, now in self._asked()
            if not copy.is_leaving
        )
        return self.describe(running)

    def _asked(self) -> Iterator[tuple[Copy, EngineMetrics]]:
        with self._changed:
            copies = list(self._copies)
        for copy in copies:
            with contextlib.suppress(EngineClosedError):  # it has ended
                yield copy, copy.engine.metrics()

    def close(self) -> None:
        """End every copy, and wait until each has written what it has computed. Idempotent."""
        with self._changed:
            self._is_closed = True
            copies, self._copies = self._copies, []
            self._changed.notify_all()
        self.on_close()
        with ThreadPoolExecutor(len(copies) or 1) as closers:
            list(closers.map(lambda copy: copy.engine.close(), copies))
        self._movers.shutdown(wait=False)

    # --- the copies

    @property
    def usable(self) -> list[Copy]:
        """Those that are given requests, the oldest first."""
        with self._changed:
            return [copy for copy in self._copies if copy.is_usable]

    @property
    def is_shrinking(self) -> bool:
        """Whether one ends with what it has begun."""
        with self._changed:
            return any(copy.is_leaving for copy in self._copies)

    @property
    def waiting(self) -> list[Ticket]:
        """Requests that no copy has begun, the oldest first."""
        with self._changed:
            tickets = list(self._ticket_copies)
        return [ticket for ticket in tickets if ticket.is_waiting]

    def add(self, copy: Copy) -> None:
        """Give requests to one more from now on, those that wait elsewhere first.

        Raises EngineClosedError after `close`, and what `use_adapters` raises.
        """
        with self._changing_adapters:
            if copy.engine.info.lora != self._info.lora:
                copy.engine.use_adapters(self._info.lora)
            self._append(copy)
        self._even_out(copy)

    def _append(self, copy: Copy) -> None:
        with self._changed:
            if self._is_closed:
                raise EngineClosedError("the engine is closed")
            self._numbers += 1
            copy.number = self._numbers
            self._copies.append(copy)
            self._count_slots()
            self._changed.notify_all()

    def retire(self, copy: Copy) -> None:
        """Give it nothing more; it ends with what it has begun."""
        with self._changed:
            copy.is_leaving = True
            self._count_slots()
            held = list(copy.tickets)
        for ticket in held:
            if ticket.withdraw():
                self._movers.submit(self._place_again, ticket)
        self._end_if_done(copy)

    def bury(self) -> int:
        """Forget the copies whose process has ended; how many that were."""
        with self._changed:
            dead = [copy for copy in self._copies if not copy.engine.is_open and not copy.is_leaving]
            for copy in dead:
                self._copies.remove(copy)
            self.crashed_total += len(dead)
            self._count_slots()
            self._changed.notify_all()
        return len(dead)

    def give_up(self) -> None:
        """No copy runs and none will come: requests that wait are told."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._movers.shutdown(wait=False)

    def _count_slots(self) -> None:
        usable = sum(copy.is_usable for copy in self._copies)
        parallel = max((c.engine.info.n_parallel for c in self._copies), default=0)
        if usable:
            self._info = msgspec.structs.replace(self._info, n_parallel=parallel * usable)

    # --- requests

    def _place(self, ticket: Ticket) -> None:
        """Find a copy that takes it. Raises what `submit` of a copy raises."""
        while True:
            copy = self._enter(ticket)
            try:
                source = copy.engine.submit(ticket.request)
            except EngineClosedError:
                self._leave(ticket)
                self.on_death()
            except BaseException:
                self._leave(ticket)
                raise
            else:
                ticket.follow(source)
                return

    def _place_again(self, ticket: Ticket) -> None:
        self._leave(ticket)
        try:
            self._place(ticket)
        except EngineError as error:
            ticket.fail(error)

    def _move(self, ticket: Ticket) -> None:
        """Its copy ended before it had begun it. Called on the thread that reads from that copy."""
        self.on_death()
        try:
            self._movers.submit(self._place_again, ticket)
        except RuntimeError:  # all copies are closed
            ticket.fail(_closed())

    def _enter(self, ticket: Ticket) -> Copy:
        with self._changed:
            while not (usable := [copy for copy in self._copies if copy.is_usable]):
                if self._is_closed:
                    raise _closed()
                self._changed.wait()
            copy = self._choose(ticket, usable)
            copy.tickets.add(ticket)
            self._ticket_copies[ticket] = copy
            self._readers.note(ticket.beginnings, copy.number)
        return copy

    def _choose(self, ticket: Ticket, usable: list[Copy]) -> Copy:
        """Prefer the reader of its beginning, up to half a copy's sequences more than the least has."""
        least = min(usable, key=lambda copy: copy.inside)
        by_number = {copy.number: copy for copy in usable}
        reader = by_number.get(self._readers.find(ticket.beginnings, by_number))
        if reader is None or reader.inside - least.inside > reader.engine.info.n_parallel // 2:
            return least
        return reader

    def _leave(self, ticket: Ticket) -> Copy | None:
        with self._changed:
            copy = self._ticket_copies.pop(ticket, None)
            if copy is not None:
                copy.tickets.discard(ticket)
        return copy

    def _ended(self, ticket: Ticket) -> None:
        copy = self._leave(ticket)
        if copy is None:
            return
        if not copy.engine.is_open:
            self.on_death()
        elif copy.is_leaving:
            self._end_if_done(copy)

    def _even_out(self, newcomer: Copy) -> None:
        """Move what waits to a new copy, the latest first, until it has its share."""
        share = len(self.waiting) // max(1, len(self.usable))
        for ticket in reversed(self.waiting):
            if newcomer.inside >= max(share, newcomer.engine.info.n_parallel):
                return
            if ticket.withdraw():
                self._place_again(ticket)

    def _end_if_done(self, copy: Copy) -> None:
        with self._changed:
            if copy.inside or copy not in self._copies:
                return
            self._copies.remove(copy)
        self._movers.submit(self._end, copy)

    def _end(self, copy: Copy) -> None:
        with contextlib.suppress(EngineClosedError):  # it ended by itself
            last = msgspec.structs.replace(copy.engine.metrics(), kv_used_tokens=0, kv_total_tokens=0)
            self._gone = EngineMetrics.sum([self._gone, last])
        copy.engine.close()

    def _ask(self, call: Callable[[CopyEngine], T]) -> T:
        """Call on the copy with the least to do; on another where that one has ended."""
        while True:
            with self._changed:
                while not (usable := [copy for copy in self._copies if copy.is_usable]):
                    if self._is_closed:
                        raise _closed()
                    self._changed.wait()
                copy = min(usable, key=lambda copy: copy.inside)
                copy.calls += 1
            try:
                return call(copy.engine)
            except EngineClosedError:
                self.on_death()
            finally:
                with self._changed:
                    copy.calls -= 1
                if copy.is_leaving:
                    self._end_if_done(copy)


def _closed() -> EngineClosedError:
    return EngineClosedError("no copy of the model runs", hint="ask again: it is started anew")


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
