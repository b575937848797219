"""Between the KV cache's books and the store of computed blocks: finding and fetching.

Two calls: `match` finds how much of a prompt the store has and begins to read it, `read` puts what has
been read into a sequence; `writing` keeps those that have ended. The store knows no llama.cpp, and the
scheduler no file. One thread.

A block is `block_tokens` long, and shorter than a sliding window: a longer one lacks the cells that the
window hides at its end, which shows only when a later request is cut inside it (decision 080).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from edgeinfer.runtime.kv_cache.cache import AdapterKey, KvCache, Resident, common_prefix
from edgeinfer.runtime.llama.context import ActiveContext
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.prefix_cache.format import Block
from edgeinfer.runtime.prefix_cache.keys import BlockNames
from edgeinfer.runtime.prefix_cache.roundtrip_check import BlockCheck, Proof
from edgeinfer.runtime.prefix_cache.store import ModelBlocks
from edgeinfer.runtime.prefix_cache.writer import BlockWriting
from edgeinfer.runtime.requests import GenerateRequest

#: Tokens of a block where no sliding window asks for fewer.
BLOCK_TOKENS = 256
#: Fewer tokens than this are not worth reading.
_WORTH_READING = 32
#: A check is made for a request that gains so many times what the check computes.
_WORTH_CHECKING = 2
#: A block is waited for at least so long (seconds) before computing it is thought to be faster.
_PATIENCE_S = 0.05


def block_tokens(window: int) -> int:
    """Tokens of a block for a model with this sliding window, 0 for none: a power of two below it."""
    if window <= 0 or window > BLOCK_TOKENS:
        return BLOCK_TOKENS
    return max(1, 1 << ((window - 1).bit_length() - 1))


class BlockCache:
    """`active` is where blocks are put back; `check` is this model's, not yet begun."""

    def __init__(
        self,
        *,
        blocks: ModelBlocks,
        states: SequenceStates,
        active: ActiveContext,
        kv: KvCache,
        block_tokens: int,
        check: BlockCheck,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._states, self._active = states, active
        self._kv = kv
        self.names = BlockNames(blocks, block_tokens)
        self.proof = Proof(blocks, check)
        self.writing = BlockWriting(
            blocks=blocks, states=states, kv=kv, names=self.names, proof=self.proof
        )

    # match

    def match(
        self, tokens: list[int], adapters: AdapterKey, salt: str, cached: int, *, is_alone: bool
    ) -> Restore | None:
        """Begin to read what the store has of `tokens` beyond the `cached` that memory has.

        The blocks begin at or before `cached`. None when that is not worth it. A model that has not
        been checked is checked now where much is to be gained and nobody else waits (`is_alone`).
        """
        if self.proof.is_refused or len(tokens) - cached <= _WORTH_READING:
            return None
        size = self.block_tokens
        chain = self.names.chain(tokens, adapters, salt)
        n_full = next(
            (i for i, name in enumerate(chain[1:]) if not self.blocks.has(name)), len(chain) - 1
        )
        if self._kv.points is not None:
            n_full, tail, n_tail = self._last_point(chain[: n_full + 1], tokens)
            first = 0
        else:
            rest = tokens[n_full * size :]
            tail, n_tail = max(
                self.names.tail(chain[n_full], rest),
                self.names.straddling(chain[n_full], rest),
                key=lambda found: found[1],
            )
            first = min(cached // size, n_full)
        end = min(n_full * size + n_tail, len(tokens) - 1)
        if end - cached < _WORTH_READING or not self._is_proven(end - cached, is_alone=is_alone):
            return None
        wanted = [*chain[1 + first : 1 + n_full], *([tail] if n_tail else [])]
        self.blocks.touch([*chain[1 : 1 + n_full], tail])
        make_room = self._populating(first * size)
        return Restore(self.blocks.read_ahead(wanted, make_room), first * size, end)

    def _populating(self, start: int) -> Callable[[int], None]:
        """Has the kernel give the cells' memory as each block is read, unless file pages become it."""
        at, size = self._kv.used_cells, self.block_tokens
        cells = self._active.cells
        if cells.can_be_pages_of(at - start - self._kv.pinned_cells):
            return lambda i: None
        return lambda i: cells.populate(at + i * size, at + (i + 1) * size)

    def _last_point(self, chain: list[bytes], tokens: list[int]) -> tuple[int, bytes, int]:
        """The last point: the whole blocks before it, its name, and its own tokens, 0 for none."""
        size = self.block_tokens
        for i in range(len(chain) - 1, -1, -1):
            end = min((i + 1) * size, len(tokens) - 1)
            name, n = self.names.last_point(chain[i], tokens[i * size : end])
            if n:
                return i, name, n
        return 0, b"", 0

    def _is_proven(self, gain_tokens: int, *, is_alone: bool) -> bool:
        if is_alone and gain_tokens >= _WORTH_CHECKING * self.proof.n_tokens:
            while not self.proof.found:
                self.proof.go_on()
        return self.proof.found == "exact"

    @property
    def keeps(self) -> bool:
        """Whether what is written now comes back as it was."""
        return self.proof.found == "exact" and self.blocks.can_write

    def can_come_back(self, resident: Resident) -> bool:
        """Whether the store has, or takes at once, a conversation that nobody expects in memory."""
        if resident.active or resident.pinned or resident.is_read_ahead:
            return False
        if len(resident.cells) < self.block_tokens:
            return False
        return self.keeps and self.writing.takes(resident)

    def keep_preamble(self, request: GenerateRequest, tokens: list[int], adapters: AdapterKey) -> None:
        """Note how a session of an agent begins; the blocks themselves are written as all are."""
        if request.preamble and not self.proof.is_refused:
            names = self.names.chain(tokens, adapters, request.cache_salt)[1:]
            self.blocks.keep(request.preamble, names, request.cache_salt)

    # read

    def read(self, restore: Restore, resident: Resident, tokens: list[int]) -> bool:
        """Put the next block, which is ready, behind `resident`. False: the rest is to be computed."""
        block = restore.take()
        at = len(resident.tokens)
        if block is None:
            return False
        its = block.tokens
        n = min(common_prefix(its, tokens[at:]), restore.end - at)
        fits = n > 0 and self._kv.make_room(len(its))
        if not fits or not self._states.write(resident.seq_id, block.states[0]):
            return False
        self._kv.extend(resident, its)
        if self._kv.points is None:
            return self._kv.truncate(resident, at + n) and n == len(its)
        if not restore.is_over:
            return True
        back = n == len(its) and self._states.write_point(resident.seq_id, block.states[1].joined())
        self._kv.take_point(resident)
        return back

    def drop_unfinished(self, resident: Resident) -> None:
        """A restore has ended before its last block: a state that cannot be cut is of no use then."""
        if self._kv.points is not None:
            self._kv.truncate(resident, 0)

    def close(self, timeout_s: float) -> bool:
        """Write what waits; False when that took longer."""
        self._kv.before_drop = lambda resident: None
        return self.blocks.close(timeout_s)


@dataclass(slots=True, eq=False)
class Restore:
    """Blocks from `start` on, of which the tokens up to `end` are wanted.

    `futures` are the blocks, in order; None stands for one that cannot be used. `cached` tokens had
    been in memory.
    """

    futures: Sequence[Future[Block | None]]
    start: int
    end: int
    done: int = 0
    cached: int = 0
    has_ended_well: bool = False
    waits_since: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether all blocks are back."""
        return self.done == len(self.futures)

    @property
    def is_ready(self) -> bool:
        """Whether the next block has been read."""
        return self.futures[self.done].done()

    def take(self) -> Block | None:
        """The next block, which is ready; None when it cannot be used."""
        block = self.futures[self.done].result()
        self.done += 1
        self.waits_since = time.monotonic()
        return block

    def is_too_slow(self, compute_s: float) -> bool:
        """Whether the next block is missing and computing it (seconds) is faster than waiting on."""
        if self.is_ready:
            return False  # not the disk was slow, but this thread
        return time.monotonic() - self.waits_since > max(_PATIENCE_S, compute_s)

    def wait(self, timeout_s: float) -> None:
        """Wait for the next block."""
        wait([self.futures[self.done]], timeout_s)

    def cancel(self) -> None:
        """Read no more."""
        for future in self.futures[self.done :]:
            future.cancel()
