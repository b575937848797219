"""Between the KV cache's books and the store of computed blocks: finding, fetching, keeping.

Four calls: `match` finds how much of a prompt the store has and begins to read it, `read` puts what has
been read into a sequence, `write` keeps a sequence that has ended, `forget` lets one go unwritten. The
store knows no llama.cpp, and the scheduler no file. One thread.

A block is `block_tokens` long, and shorter than a sliding window: a longer one lacks the cells that the
window hides at its end, which shows only when a later request is cut inside it (decision 080).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from edgeinfer.blocks.format import Block, Header, Kind, pack_tokens, unpack_tokens
from edgeinfer.blocks.names import TAIL_KEY_TOKENS
from edgeinfer.blocks.store import ModelBlocks
from edgeinfer.runtime.decoding.blocks.block_check import BlockCheck
from edgeinfer.runtime.decoding.blocks.restore import Restore
from edgeinfer.runtime.decoding.cache.kvcache import AdapterKey, KvCache, Resident, common_prefix
from edgeinfer.runtime.decoding.cache.states import SequenceStates

#: Tokens of a block where no sliding window asks for fewer.
BLOCK_TOKENS = 256
#: What is computed again in less time than this (seconds) is not written: a file costs as much.
_WORTH_WRITING_S = 0.05
#: Fewer tokens than this are not worth reading.
_WORTH_READING = 32
#: A check is made for a request that gains so many times what the check computes.
_WORTH_CHECKING = 2
#: Beside running streams, copying blocks out takes at most this share of the time.
_WRITE_SHARE = 0.02
#: A full queue of the writer is waited for in pieces of this length (seconds).
_WAIT_S = 0.05


def block_tokens(window: int) -> int:
    """Tokens of a block for a model with this sliding window, 0 for none: a power of two below it."""
    if window <= 0 or window > BLOCK_TOKENS:
        return BLOCK_TOKENS
    return max(1, 1 << ((window - 1).bit_length() - 1))


class BlockCache:
    """`name_adapters` tells sets of LoRA files apart. `check` is this model's, not yet begun."""

    def __init__(
        self,
        *,
        blocks: ModelBlocks,
        states: SequenceStates,
        kv: KvCache,
        block_tokens: int,
        name_adapters: Callable[[AdapterKey], str],
        check: BlockCheck,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._states = states
        self._kv = kv
        self._name_adapters = name_adapters
        self._check = check
        self._pending: deque[Resident] = deque()
        self._queued: set[bytes] = set()
        self._rest_until = 0.0
        self.checked = blocks.read_check()
        #: The process is about to end: what is there is written, and checked by another.
        self.is_leaving = False
        kv.before_drop = self._before_drop

    @property
    def is_refused(self) -> bool:
        """Whether the check found that this model's blocks do not come back as they were."""
        return self.checked not in ("", "exact")

    @property
    def has_work(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._pending)

    # match

    def match(
        self, tokens: list[int], adapters: AdapterKey, salt: str, cached: int, *, is_alone: bool
    ) -> Restore | None:
        """Begin to read what the store has of `tokens` beyond the `cached` that memory has.

        The blocks begin at or before `cached`. None when that is not worth it. A model that has not
        been checked is checked now where much is to be gained and nobody else waits (`is_alone`).
        """
        if self.is_refused or len(tokens) - cached <= _WORTH_READING:
            return None
        size = self.block_tokens
        chain = self._chain(tokens, adapters, salt)
        n_full = next(
            (i for i, name in enumerate(chain[1:]) if not self.blocks.has(name)), len(chain) - 1
        )
        if self._kv.points is not None:
            n_full, tail, n_tail = self._last_point(chain[: n_full + 1], tokens)
            first = 0
        else:
            tail, n_tail = self._tail(chain[n_full], tokens[n_full * size :])
            first = min(cached // size, n_full)
        end = min(n_full * size + n_tail, len(tokens) - 1)
        if end - cached < _WORTH_READING or not self._is_proven(end - cached, is_alone=is_alone):
            return None
        wanted = [*chain[1 + first : 1 + n_full], *([tail] if n_tail else [])]
        self.blocks.touch([*chain[1 : 1 + n_full], tail])
        return Restore(self.blocks.read_ahead(wanted), first * size, end)

    def _last_point(self, chain: list[bytes], tokens: list[int]) -> tuple[int, bytes, int]:
        """The last point of a state that cannot be cut: the whole blocks before it, its name, and its
        own tokens, 0 when there is none.
        """
        size = self.block_tokens
        for i in range(len(chain) - 1, -1, -1):
            rest = tokens[i * size : -1]
            if len(rest) < TAIL_KEY_TOKENS:
                continue
            found = []
            for kind in ("tail", "point"):
                name = self.blocks.names.tail(chain[i], rest, kind)
                header = self.blocks.header(name)
                its = unpack_tokens(header.tokens) if header else []
                if its and common_prefix(its, rest) == len(its):
                    found.append((len(its), name))
            if found:
                n, name = max(found)
                return i, name, n
        return 0, b"", 0

    def _is_proven(self, gain_tokens: int, *, is_alone: bool) -> bool:
        """Whether blocks may be read, after a check if that pays."""
        if not self.checked and is_alone and gain_tokens >= _WORTH_CHECKING * self._check.n_tokens:
            while not self.checked:
                self._go_on_checking()
        return self.checked == "exact"

    def _chain(self, tokens: list[int], adapters: AdapterKey, salt: str) -> list[bytes]:
        """The root, and the name of every whole block."""
        names = self.blocks.names
        root = names.root(salt, self._name_adapters(adapters))
        return [root, *names.chain(root, tokens, self.block_tokens)]

    def _tail(self, parent: bytes, tokens: list[int]) -> tuple[bytes, int]:
        """The unfinished block behind `parent` that begins like `tokens`, and how far it agrees."""
        name = self.blocks.names.tail(parent, tokens)
        header = self.blocks.header(name) if len(tokens) >= TAIL_KEY_TOKENS else None
        return name, common_prefix(unpack_tokens(header.tokens), tokens) if header else 0

    # read

    def read(self, restore: Restore, resident: Resident, tokens: list[int]) -> bool:
        """Put the next block, which is ready, behind what `resident` has. False when it cannot be used,
        or no cells are free: the rest is to be computed.
        """
        block = restore.take()
        at = len(resident.tokens)
        if block is None:
            return False
        its = block.tokens
        n = min(common_prefix(its, tokens[at:]), restore.end - at)
        fits = n > 0 and self._kv.make_room(len(its))
        if not fits or not self._states.write(resident.seq_id, block.parts[0]):
            return False
        self._kv.extend(resident, its)
        if self._kv.points is None:
            return self._kv.truncate(resident, at + n) and n == len(its)
        if not restore.is_over:
            return True
        back = n == len(its) and self._states.write_point(resident.seq_id, block.parts[1])
        self._kv.take_point(resident)
        return back

    def drop_unfinished(self, resident: Resident) -> None:
        """A restore has ended before its last block: a state that cannot be cut is of no use then."""
        if self._kv.points is not None:
            self._kv.truncate(resident, 0)

    # write

    def write(self, resident: Resident, s_per_token: float) -> None:
        """Have what `resident` holds written, if computing it again would take long enough."""
        n = len(resident.tokens)
        if self.is_refused or resident.is_shifted or n < TAIL_KEY_TOKENS:
            return
        if n * s_per_token < _WORTH_WRITING_S:
            return
        if resident not in self._pending:
            self._pending.append(resident)

    def forget(self, resident: Resident) -> None:
        """Do not write `resident`."""
        if resident in self._pending:
            self._pending.remove(resident)

    def work(self, *, is_idle: bool) -> None:
        """Do one piece of what waits: copy a block out, or check this model a little further.

        Beside running streams only now and then. The check waits until nobody runs; what was written
        before is read when it has ended well, and deleted else.
        """
        if not self._pending or (not is_idle and time.monotonic() < self._rest_until):
            return
        if not self.checked and is_idle and not self.is_leaving:
            self._go_on_checking()
            return
        if not self.blocks.writer.has_room:
            if is_idle:
                self.blocks.writer.wait_for_room(_WAIT_S)
            return
        if not self.blocks.can_write:
            self._pending.clear()
            return
        began = time.monotonic()
        if not self._write_one(self._pending[0]):
            self._pending.popleft()
            self._end_pass()
        took_s = time.monotonic() - began
        self._rest_until = began + took_s / _WRITE_SHARE

    def _go_on_checking(self) -> None:
        found = self._check.step()
        if found is None:
            return
        self.checked = found
        self.blocks.note_check(found)
        if self.is_refused:
            self._pending.clear()
            self.blocks.clear()

    def _before_drop(self, resident: Resident) -> None:
        """Write what would be lost, as far as the writer takes it."""
        if resident not in self._pending:
            return
        self._pending.remove(resident)
        while self.blocks.can_write and self.blocks.writer.has_room and self._write_one(resident):
            pass
        self._end_pass()

    def _end_pass(self) -> None:
        """All of a sequence has been handed over. Each block is, once: what a small limit or a full
        disk takes away again is not written for ever.
        """
        if self.blocks.writer.is_idle:
            self._queued.clear()

    def _write_one(self, resident: Resident) -> bool:
        """Write the first block of `resident` that is not there. False when all are."""
        if resident not in self._kv.residents or resident.ghost:
            return False
        missing = next(self._missing(resident), None)
        if missing is None:
            self._note_owner(resident)
            return False
        header, start, superseded = missing
        self._queued.add(header.name + header.tokens)
        parts = self._read_parts(resident, header, start)
        if parts is None:
            return False
        sizes = tuple(len(part) for part in parts)
        self.blocks.write(Block(msgspec.structs.replace(header, sizes=sizes), parts))
        if superseded is not None:
            self.blocks.writer.put(lambda: self.blocks.remove(superseded))
        return True

    def _read_parts(
        self, resident: Resident, header: Header, start: int
    ) -> tuple[memoryview, ...] | None:
        """The state of a block, and where it ends at a point, the state there; None when llama.cpp does
        not have it whole.
        """
        end = start + len(unpack_tokens(header.tokens))
        state = self._states.read(resident.seq_id, start, end)
        if state is None or self._kv.points is None or header.kind == "full":
            return None if state is None else (state,)
        point = next((point for point in resident.points if point.n_tokens == end), None)
        return None if point is None else (state, point.state)

    def _missing(self, resident: Resident) -> Iterator[tuple[Header, int, bytes | None]]:
        """The blocks of `resident` that are not in the store, with their first positions and the tail
        that each takes the place of.
        """
        size, tokens = self.block_tokens, resident.tokens
        names = self.blocks.names
        chain = self._chain(tokens, resident.adapters, resident.salt)
        for i, (parent, name) in enumerate(itertools.pairwise(chain)):
            part = tokens[i * size : (i + 1) * size]
            header = Header("full", name, parent, names.identity, pack_tokens(part), ())
            if not self._is_queued(header) and not self.blocks.has(name):
                tail, n = self._tail(parent, part)
                yield header, i * size, tail if n else None
        if self._kv.points is not None:
            yield from self._missing_points(resident, chain)
            return
        start = (len(chain) - 1) * size
        rest = tokens[start:]
        if resident.active or len(rest) < TAIL_KEY_TOKENS:
            return
        tail, n = self._tail(chain[-1], rest)
        header = Header("tail", tail, chain[-1], names.identity, pack_tokens(rest), ())
        if n < len(rest) and not self._is_queued(header):
            yield header, start, None

    def _missing_points(
        self, resident: Resident, chain: list[bytes]
    ) -> Iterator[tuple[Header, int, bytes | None]]:
        """The points of a state that cannot be cut: the one at its end, and those before it."""
        size, tokens = self.block_tokens, resident.tokens
        names = self.blocks.names
        for point in resident.points:
            i = point.n_tokens // size
            rest = tokens[i * size : point.n_tokens]
            if resident.active or len(rest) < TAIL_KEY_TOKENS:
                continue
            kind: Kind = "tail" if point.n_tokens == len(tokens) else "point"
            name = names.tail(chain[i], rest, kind)
            header = Header(kind, name, chain[i], names.identity, pack_tokens(rest), ())
            there = None if self._is_queued(header) else self.blocks.header(name)
            if not self._is_queued(header) and (there is None or there.tokens != header.tokens):
                yield header, i * size, None

    def _is_queued(self, header: Header) -> bool:
        """Whether the writer has been given this block lately."""
        return header.name + header.tokens in self._queued

    def _note_owner(self, resident: Resident) -> None:
        """Note whose the blocks are, and that the beginning was used last, once all are written."""
        chain = self._chain(resident.tokens, resident.adapters, resident.salt)
        rest = resident.tokens[(len(chain) - 1) * self.block_tokens :]
        conversation = resident.conversation

        def note() -> None:  # the tail, for one, is there only now
            tail, n = self._tail(chain[-1], rest)
            kept = [*chain[1:], *([tail] if n else [])]
            self.blocks.touch(kept)
            if conversation:
                self.blocks.own(conversation, kept)

        self.blocks.writer.put(note)

    def close(self, timeout_s: float) -> bool:
        """Write what waits; False when that took longer."""
        self._kv.before_drop = lambda resident: None
        return self.blocks.close(timeout_s)
