"""Copies what sequences hold out to the store of computed blocks, a block at a time, between steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from edgeinfer.runtime.kv_cache.cache import KvCache, Resident
from edgeinfer.runtime.kv_cache.sequence_state import State, whole
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.prefix_cache.format import Block, Header, Kind, pack_tokens, unpack_tokens
from edgeinfer.runtime.prefix_cache.keys import TAIL_KEY_TOKENS, BlockNames
from edgeinfer.runtime.prefix_cache.roundtrip_check import Proof
from edgeinfer.runtime.prefix_cache.store import ModelBlocks

#: What is computed again in less time than this (seconds) is not written: a file costs as much.
_WORTH_WRITING_S = 0.05
#: Beside running streams, copying blocks out takes at most this share of the time.
_WRITE_SHARE = 0.02
#: A full queue of the writer is waited for in pieces of this length (seconds).
_WAIT_S = 0.05

#: A block to be written: what it says of itself, its first position, and the tail whose place it takes.
_Missing = tuple[Header, int, bytes | None]


@dataclass(slots=True, eq=False)
class _Pass:
    """`chain` names a sequence's root and whole blocks; the first `n_seen` need no more looking at."""

    chain: list[bytes]
    n_seen: int = 0
    conversations: set[str] = field(default_factory=set)


class BlockWriting:
    """Writes what sequences that have ended leave in `kv`, once this model is proven. One thread."""

    def __init__(
        self,
        *,
        blocks: ModelBlocks,
        states: SequenceStates,
        kv: KvCache,
        names: BlockNames,
        proof: Proof,
    ) -> None:
        self._blocks, self._states = blocks, states
        self._kv, self._names = kv, names
        self._proof = proof
        self._passes: dict[Resident, _Pass] = {}
        self._queued: set[bytes] = set()
        self._rest_until = 0.0
        #: The process is about to end: what is there is written, and checked by another.
        self.is_leaving = False
        kv.before_drop = self._before_drop

    @property
    def has_work(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._passes)

    def add(self, resident: Resident, s_per_token: float) -> None:
        """Have what `resident` holds written, if computing it again would take long enough."""
        n = len(resident.tokens)
        if self._proof.is_refused or resident.is_shifted or n < TAIL_KEY_TOKENS:
            return
        if n * s_per_token < _WORTH_WRITING_S:
            return
        found = self._passes.get(resident)
        if found is None:
            if self._blocks.writer.is_idle:
                self._queued.clear()  # what was forgotten meanwhile is written again
            root = self._names.root(resident.adapters, resident.salt)
            found = self._passes[resident] = _Pass([root])
            resident.n_unchanged = 0
        if resident.conversation:
            found.conversations.add(resident.conversation)

    def takes(self, resident: Resident) -> bool:
        """Whether all of `resident` may be written, and would be if it went now."""
        if resident.is_shifted or resident.memory_only_from is not None:
            return False
        return resident not in self._passes or self._blocks.writer.has_room

    def work(self, *, is_idle: bool) -> None:
        """Do one piece of what waits: copy a block out, or check this model a little further.

        Beside running streams only now and then. The check waits until nobody runs; what was written
        before is read when it has ended well, and deleted else.
        """
        if not self._passes or (not is_idle and time.monotonic() < self._rest_until):
            return
        if not self._proof.found and is_idle and not self.is_leaving:
            self._proof.go_on()
            return
        if not self._blocks.writer.has_room:
            if is_idle:
                self._blocks.writer.wait_for_room(_WAIT_S)
            return
        if self._proof.is_refused or not self._blocks.can_write:
            self._passes.clear()
            return
        began = time.monotonic()
        resident = next(iter(self._passes))
        if not self._write_one(resident, self._passes[resident]):
            del self._passes[resident]
        took_s = time.monotonic() - began
        self._rest_until = began + took_s / _WRITE_SHARE

    def _before_drop(self, resident: Resident) -> None:
        found = self._passes.pop(resident, None)
        if found is None:
            return
        while self._blocks.can_write and self._blocks.writer.has_room:
            if not self._write_one(resident, found):
                break

    def _write_one(self, resident: Resident, found: _Pass) -> bool:
        """Write the first block of `resident` that is not there. False when all are."""
        if self._proof.is_refused or resident.is_shifted:
            return False
        if resident not in self._kv.residents or resident.ghost:
            return False
        missing = next(self._missing(resident, found), None)
        if missing is None:
            self._note_owners(resident, found)
            return False
        header, start, superseded = missing
        self._queued.add(header.name + header.tokens)
        states = self._read_states(resident, header, start)
        if states is None:
            return False
        # first: a killed process leaves no block without owner
        for conversation in found.conversations:
            self._blocks.own(conversation, [header.name])
        self._blocks.write(Block(header, states))
        if superseded is not None:
            self._blocks.writer.put(lambda: self._blocks.remove(superseded))
        return True

    def _read_states(self, resident: Resident, header: Header, start: int) -> tuple[State, ...] | None:
        """A block's state, and that at its end point; None when llama.cpp does not have it whole."""
        end = start + len(unpack_tokens(header.tokens))
        state = self._states.read(resident.seq_id, start, end, self._kv.pinned_cells)
        if state is None or self._kv.points is None or header.kind == "full":
            return None if state is None else (state,)
        point = next((point for point in resident.points if point.n_tokens == end), None)
        return None if point is None else (state, whole(point.state))

    def _missing(self, resident: Resident, found: _Pass) -> Iterator[_Missing]:
        tokens = _writable(resident)
        self._name(resident, tokens, found)
        yield from self._missing_whole(tokens, found)
        if self._kv.points is not None:
            yield from self._missing_points(resident, tokens, found.chain)
        elif not resident.active:
            yield from self._missing_tail(tokens, found.chain)

    def _name(self, resident: Resident, tokens: list[int], found: _Pass) -> None:
        """Name the blocks that came since the last look, and again those whose tokens have changed."""
        n_same = resident.n_unchanged // self._names.block_tokens
        del found.chain[n_same + 1 :]
        found.n_seen = min(found.n_seen, n_same)
        self._names.extend(found.chain, tokens)
        resident.n_unchanged = len(resident.tokens)

    def _missing_whole(self, tokens: list[int], found: _Pass) -> Iterator[_Missing]:
        size, chain = self._names.block_tokens, found.chain
        for i in range(found.n_seen, len(chain) - 1):
            found.n_seen = i + 1
            if self._blocks.has(chain[i + 1]):
                continue
            part = tokens[i * size : (i + 1) * size]
            header = self._header("full", chain[i + 1], chain[i], part)
            if not self._is_queued(header):
                yield header, i * size, self._names.superseded(chain[i], part, header.name)

    def _missing_tail(self, tokens: list[int], chain: list[bytes]) -> Iterator[_Missing]:
        start = (len(chain) - 1) * self._names.block_tokens
        rest = tokens[start:]
        if not rest:
            return
        _, n = self._names.tail(chain[-1], rest)
        header = self._header("tail", self._blocks.names.tail(chain[-1], rest), chain[-1], rest)
        if n < len(rest) and not self._is_queued(header):
            yield header, start, self._names.superseded(chain[-1], rest, header.name)

    def _missing_points(
        self, resident: Resident, tokens: list[int], chain: list[bytes]
    ) -> Iterator[_Missing]:
        if resident.active:
            return
        size, names = self._names.block_tokens, self._blocks.names
        found: dict[bytes, tuple[Header, int]] = {}
        for n_tokens in sorted(p.n_tokens for p in resident.points if p.n_tokens <= len(tokens)):
            i = n_tokens // size
            rest = tokens[i * size : n_tokens]
            if len(rest) < TAIL_KEY_TOKENS:
                continue
            if n_tokens == len(tokens):
                header = self._header("tail", names.tail(chain[i], rest), chain[i], rest)
            else:
                header = self._header("point", names.point(chain[i], rest), chain[i], rest)
            found[header.name] = header, i * size
        for header, start in found.values():
            if self._is_queued(header):
                continue
            there = self._blocks.header(header.name)
            if there is None or there.tokens != header.tokens:
                yield header, start, None

    def _header(self, kind: Kind, name: bytes, parent: bytes, tokens: list[int]) -> Header:
        return Header(kind, name, parent, self._blocks.names.identity, pack_tokens(tokens), ())

    def _is_queued(self, header: Header) -> bool:
        return header.name + header.tokens in self._queued

    def _note_owners(self, resident: Resident, found: _Pass) -> None:
        """Note that the beginning was used last, and whose blocks they are that others had written."""
        chain, conversations = found.chain, found.conversations
        rest = _writable(resident)[(len(chain) - 1) * self._names.block_tokens :]

        def note() -> None:  # the tail, for one, is there only now
            tail, n = self._names.tail(chain[-1], rest)
            kept = [*chain[1:], *([tail] if n else [])]
            self._blocks.touch(kept)
            for conversation in conversations:
                self._blocks.own(conversation, kept)

        self._blocks.writer.put(note)


def _writable(resident: Resident) -> list[int]:
    end = resident.memory_only_from
    return resident.tokens if end is None else resident.tokens[:end]
