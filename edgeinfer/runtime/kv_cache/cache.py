"""Bookkeeping of the KV cache: the tokens and cells of each sequence id, eviction, and prefix matches.

llama.cpp's cache is unified: all sequences share its cells, and copying a prefix to another sequence id
costs a bit per cell. llama.cpp cannot say which cells are free, so this module accounts for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from edgeinfer.runtime.events import Divergence, TokenLogprobs
from edgeinfer.runtime.kv_cache.recurrent_checkpoints import Point, Points

#: Stamps of the adapters' files, and scales, that a sequence was computed with; another set's cells are
#: of no use.
AdapterKey = tuple[tuple[str, float], ...]

_BLOCK = 64
#: Ghosts are dropped once they hold so many cells, of a small cache an eighth: attention walks over
#: them.
_GHOST_CELLS = 512
_GHOST_SHARE = 8
#: While so many sequences run, idle ones below so many tokens may hold so many cells together: every
#: step of every stream walks over them, and they are soon computed again (decision 056).
_MANY = 3
_SHORT = 192
_SHORT_CELLS = 384


def common_prefix(a: Sequence[int], b: Sequence[int], start: int = 0) -> int:
    """Length of the longest common prefix of two lists, known to agree before `start`."""
    n = min(len(a), len(b))
    i = start
    while i + _BLOCK <= n and a[i : i + _BLOCK] == b[i : i + _BLOCK]:
        i += _BLOCK
    while i < n and a[i] == b[i]:
        i += 1
    return i


class Memory(Protocol):
    """llama.cpp's side of the cache."""

    def remove(self, seq_id: int, start: int, end: int) -> bool:
        """Remove positions [start, end) (end -1: to the last); False when a part cannot be removed."""

    def copy(self, source: int, target: int, end: int) -> None:
        """Let `target` share positions [0, end) of `source`."""

    def shift(self, seq_id: int, start: int, delta: int) -> None:
        """Add `delta` to the positions from `start` on."""

    def first(self, seq_id: int) -> int:
        """The first position that every layer still has, -1 for none."""


@dataclass(slots=True, eq=False)
class Resident:
    """The tokens one sequence id has in the cache; their `cells` may be those of several residents.

    A `ghost` is of no use to anybody and only waits to be dropped at a moment when that moves nobody's
    next cell. Requests with another `salt` cannot use it, and no other request one that `is_private`.
    `conversation` is whose it was last.
    One that was shifted has keys that were turned, or brought from another context, not computed where
    they are. Of its tokens the first `n_unchanged` have stood since whoever writes them last looked;
    those from `memory_only_from` on are not to be written. One `is_read_ahead` waits for a request
    that is yet to come. `logprobs[i]` is of token `i + 1`, with `n_top` alternatives each.
    """

    seq_id: int
    adapters: AdapterKey
    salt: str = ""
    conversation: str = ""
    is_shifted: bool = False
    n_unchanged: int = 0
    memory_only_from: int | None = None
    points: list[Point] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    active: bool = True
    pinned: bool = False
    is_private: bool = False
    is_read_ahead: bool = False
    ghost: bool = False
    used_at: int = 0
    n_top: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def serves(self, adapters: AdapterKey, salt: str) -> bool:
        """Whether a new request with `adapters` and `salt` may use, and learn of, these tokens."""
        is_shared = self.pinned or self.salt == salt
        return is_shared and self.adapters == adapters and not (self.ghost or self.is_private)


class KvCache:
    """The books of a unified cache of `n_cells` cells and `n_seq_max` sequence ids. One thread.

    `whole_only`: the model's state cannot be cut (recurrent, hybrid), so a resident is reused whole, or
    up to one of its `points`. `window`: positions that layers with a sliding window see, 0 without such
    layers. `before_drop` is told of each resident that is about to be forgotten.
    """

    def __init__(
        self, memory: Memory, *, n_cells: int, n_seq_max: int, whole_only: bool = False, window: int = 0
    ) -> None:
        self._memory = memory
        self.n_cells = n_cells
        self._whole_only = whole_only
        self._window = window
        self.points: Points | None = None
        self.before_drop: Callable[[Resident], None] = lambda resident: None
        self._ids = list(range(n_seq_max - 1, -1, -1))
        self._free = list(range(n_cells - 1, -1, -1))
        self._shares = [0] * n_cells
        self._clock = 0
        self._ghosts_allowed = min(_GHOST_CELLS, n_cells // _GHOST_SHARE)
        self.residents: list[Resident] = []

    @property
    def pinned_cells(self) -> int:
        """Cells of pinned prompts: the first ones, and what comes after them lies behind."""
        return len({cell for r in self.residents if r.pinned for cell in r.cells})

    @property
    def used_cells(self) -> int:
        return self.n_cells - len(self._free)

    @property
    def free_cells(self) -> int:
        return len(self._free)

    def match(
        self, tokens: Sequence[int], adapters: AdapterKey, salt: str = "", *, n_top: int | None = None
    ) -> tuple[Resident | None, int]:
        """The resident that shares the longest prefix with `tokens`, and how much of it can be used.

        At least one token of `tokens` is always left to compute, because its logits are wanted; with
        `n_top`, the logits behind each token whose successor has no cached log-probabilities.
        """
        best, length = None, 0
        limit = len(tokens) - 1
        for resident in self.residents:
            if not resident.serves(adapters, salt):
                continue
            shared = common_prefix(resident.tokens, tokens)
            if n_top is not None:
                known = len(resident.logprobs) if resident.n_top == n_top else 0
                shared = min(known, max(0, shared - 1))
            n = self._usable(resident, min(shared, limit))
            if n > length or (
                n == length and n and best is not None and best.active and not resident.active
            ):
                best, length = resident, n
        return best, length

    def _usable(self, resident: Resident, n: int) -> int:
        """How many of `n` tokens are usable: cells that a sliding window has passed may be others'."""
        if self._whole_only and n < len(resident.tokens):
            point = self.points.best(resident.points, n) if self.points is not None else None
            return point.n_tokens if point is not None else 0
        lost = self._window and self._memory.first(resident.seq_id) > max(0, n - self._window)
        return 0 if lost else n

    def claim(
        self,
        tokens: Sequence[int],
        adapters: AdapterKey,
        salt: str = "",
        *,
        reuse: bool = True,
        n_top: int | None = None,
    ) -> Resident | None:
        """A resident with the longest cached prefix of `tokens`; None when every id is active."""
        source, n = self.match(tokens, adapters, salt, n_top=n_top) if reuse else (None, 0)
        if source is not None and not source.active and not source.pinned and n == len(source.tokens):
            source.active = True  # the next turn of the same conversation: go on in place
            return source
        if not self._ids and not self._evict_one(keep=source):
            if source is None or source.active or source.pinned or not self.truncate(source, n):
                return None
            source.active = True
            return source
        resident = Resident(self._ids.pop(), adapters, salt)
        self.residents.append(resident)
        if source is not None and n:
            self._share(source, resident, n)
        return resident

    def _share(self, source: Resident, target: Resident, n: int) -> None:
        self._memory.copy(source.seq_id, target.seq_id, -1 if n == len(source.tokens) else n)
        if self.points is not None and n < len(source.tokens):
            point = self.points.best(source.points, n)
            if point is None or not self.points.go_back(target.seq_id, point):
                self._memory.remove(target.seq_id, -1, -1)
                return
            self.points.keep(target.points, point)
        target.is_shifted = source.is_shifted
        if source.memory_only_from is not None and source.memory_only_from < n:
            target.memory_only_from = source.memory_only_from
        target.n_top, target.logprobs = source.n_top, source.logprobs[:n]
        target.tokens = source.tokens[:n]
        target.cells = source.cells[:n]
        for cell in target.cells:
            self._shares[cell] += 1

    def extend(self, resident: Resident, tokens: Sequence[int]) -> None:
        """Note that `tokens` were computed and stored behind what `resident` has."""
        for _ in tokens:
            cell = self._free.pop()
            self._shares[cell] = 1
            resident.cells.append(cell)
        resident.tokens.extend(tokens)

    def truncate(self, resident: Resident, n: int) -> bool:
        """Keep the first `n` tokens. False, and all dropped, when the model's state cannot be cut."""
        if n == len(resident.tokens):
            return True
        cut = self._go_back(resident, n) and self._memory.remove(resident.seq_id, n, -1)
        if not cut:
            self._memory.remove(resident.seq_id, -1, -1)
            n = 0
        self._give_back(resident.cells[n:])
        del resident.tokens[n:], resident.cells[n:]
        resident.n_unchanged = min(resident.n_unchanged, n)
        resident.logprobs = resident.logprobs[: max(0, n - 1)]
        if resident.memory_only_from is not None:
            resident.memory_only_from = min(resident.memory_only_from, n)
        if self.points is not None:
            self.points.forget(resident.points, n)
        return cut

    def _go_back(self, resident: Resident, n: int) -> bool:
        """Give a state that cannot be cut the one of the point at `n`. False when there is none."""
        if not (self._whole_only and n):
            return True
        point = self.points.best(resident.points, n) if self.points is not None else None
        if self.points is None or point is None or point.n_tokens != n:
            return False
        return self.points.go_back(resident.seq_id, point)

    def keep_in_memory(self, resident: Resident) -> None:
        """Let nothing be written of what comes behind the tokens that are there."""
        if resident.memory_only_from is None:
            resident.memory_only_from = len(resident.tokens)

    def take_point(self, resident: Resident) -> None:
        """Note where `resident` is, so that a state that cannot be cut can come back to here."""
        if self.points is not None:
            self.points.take(resident.points, resident.seq_id, len(resident.tokens))

    def remove_behind(self, resident: Resident) -> None:
        """Remove what llama.cpp may have behind the tokens that are noted."""
        self._memory.remove(resident.seq_id, len(resident.tokens), -1)

    def clear_cells(self, resident: Resident) -> None:
        """Empty the cells of a resident in llama.cpp, to be written again: its books stay."""
        self._memory.remove(resident.seq_id, -1, -1)

    def _give_back(self, cells: Iterable[int]) -> None:
        for cell in cells:
            self._shares[cell] -= 1
            if not self._shares[cell]:
                self._free.append(cell)

    def shift(self, resident: Resident, keep: int, drop: int) -> bool:
        """Drop `drop` tokens behind the first `keep`. False when others share the moved cells."""
        if self._whole_only or any(self._shares[cell] > 1 for cell in resident.cells[keep:]):
            return False
        if not self._memory.remove(resident.seq_id, keep, keep + drop):
            return False
        self._memory.shift(resident.seq_id, keep + drop, -drop)
        resident.is_shifted = True
        resident.logprobs = []
        self._give_back(resident.cells[keep : keep + drop])
        del resident.tokens[keep : keep + drop], resident.cells[keep : keep + drop]
        resident.n_unchanged = min(resident.n_unchanged, keep)
        return True

    def release(self, resident: Resident, *, keep: bool) -> None:
        """The sequence has ended; if `keep`, its tokens stay for a request that begins like them.

        What is not kept becomes a ghost while others run. llama.cpp would fill freed cells at once,
        with tokens that come before older ones of their sequence then, and attention that sums in
        another order rounds otherwise: an answer would depend on who ended beside it.
        """
        self._clock += 1
        resident.active, resident.used_at = False, self._clock
        resident.ghost = not keep or not resident.tokens
        resident.logprobs = resident.logprobs[: max(0, len(resident.tokens) - 1)]
        self._retire_short()
        ghosts = [r for r in self.residents if r.ghost]
        if (
            not any(r.active for r in self.residents)
            or sum(len(r.cells) for r in ghosts) > self._ghosts_allowed
        ):
            for ghost in ghosts:
                self.drop(ghost)

    def _retire_short(self) -> None:
        if sum(r.active for r in self.residents) < _MANY:
            return
        idle = [
            r
            for r in self.residents
            if not (r.active or r.pinned or r.ghost) and len(r.tokens) < _SHORT
        ]
        left = _SHORT_CELLS
        for resident in sorted(idle, key=lambda r: -r.used_at):
            left -= len(resident.cells)
            resident.ghost = left < 0

    def drop(self, resident: Resident) -> None:
        """Forget a resident and free what it shares with nobody."""
        if not resident.ghost:
            self.before_drop(resident)
        self._memory.remove(resident.seq_id, -1, -1)
        self._give_back(resident.cells)
        if self.points is not None:
            self.points.forget(resident.points)
        resident.tokens, resident.cells = [], []
        resident.active = False
        self.residents.remove(resident)
        self._ids.append(resident.seq_id)

    def drop_idle(self, *, pinned: bool = False) -> None:
        """Forget everything that no sequence uses; pinned residents too, if asked."""
        for resident in [r for r in self.residents if not r.active and (pinned or not r.pinned)]:
            self.drop(resident)

    def make_room(self, n: int) -> bool:
        """Evict, least recently used first, pinned last, until `n` cells are free; False if too few."""
        while len(self._free) < n:
            if not self._evict_one():
                return False
        return True

    def _evict_one(self, keep: Resident | None = None) -> bool:
        idle = [r for r in self.residents if not r.active and r is not keep]
        if not idle:
            return False
        self.drop(min(idle, key=lambda r: (r.pinned, not r.ghost, r.used_at)))
        return True


#: Tokens of text on each side.
_AROUND = 12


@dataclass(frozen=True, slots=True)
class Closest:
    """What memory has closest to a prompt: `n` tokens agree, and `there` is what it goes on with."""

    n: int = 0
    there: tuple[int, ...] = ()


def closest(
    residents: Iterable[Resident], tokens: Sequence[int], adapters: AdapterKey, salt: str
) -> Closest:
    """Find what agrees longest with `tokens` among what its request may see.

    A pinned prompt is shared with every client, but its text is shown to none.
    """
    best = Closest()
    for resident in residents:
        if not resident.serves(adapters, salt):
            continue
        n = common_prefix(resident.tokens, tokens)
        if n > best.n:
            there = () if resident.pinned else tuple(resident.tokens[n : n + _AROUND])
            best = Closest(n, there)
    return best


def describe_divergence(
    prompt: Sequence[int], found: Closest, cached: int, detokenize: Callable[[Sequence[int]], bytes]
) -> Divergence:
    """Describe where `prompt`, of which `cached` tokens were remembered, goes a way of its own."""
    at = max(found.n, cached)
    if at >= len(prompt) - 1:
        return Divergence(n_tokens=len(prompt), cause="none")
    there = found.there if at == found.n else ()
    cause: Literal["text", "end", "nothing"] = "text" if there else "end"
    if not at:
        cause = "nothing"

    def text(tokens: Sequence[int]) -> str:
        return detokenize(tokens).decode("utf-8", "replace")

    return Divergence(
        n_tokens=at,
        cause=cause,
        before=text(prompt[max(0, at - _AROUND) : at]),
        here=text(prompt[at : at + _AROUND]),
        there=text(there),
    )
