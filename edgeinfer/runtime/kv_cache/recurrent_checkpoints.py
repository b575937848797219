"""Points that the sequences of recurrent and hybrid models can go back to.

Their state cannot be cut. A copy of its recurrent part, taken at some length, takes a sequence back to
that length: then an edited message, another answer to the same question, or a template that leaves out
earlier reasoning computes what is new and not the whole conversation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

#: All points together take at most so much memory; the oldest go first.
_MOST_BYTES = 512 << 20
#: While a prompt is computed a point is taken about every so many tokens.
EVERY_TOKENS = 2048
#: Fewer tokens are computed again: a step of its own for the last one would cost as much.
SHORT = 32


def tokens_to_next(n_past: int, n_tokens: int) -> int:
    """How many tokens a step may compute of a prompt of `n_tokens`, `n_past` of which are done, to end
    where a point is taken: the same question asked again begins to differ behind all but its last
    token.
    """
    to_end = n_tokens - 1 - n_past
    if n_tokens - n_past < SHORT or to_end <= 0:
        return n_tokens - n_past
    return min(to_end, EVERY_TOKENS - n_past % EVERY_TOKENS)


def is_worth_a_point(n_past: int, n_tokens: int) -> bool:
    """Whether a point is taken here."""
    return n_past == n_tokens - 1 or n_past % EVERY_TOKENS == 0


class PointStates(Protocol):
    """llama.cpp's side: the recurrent state of a sequence as bytes, and back."""

    def read_point(self, seq_id: int) -> memoryview | None: ...

    def write_point(self, seq_id: int, state: memoryview) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """The recurrent state behind the first `n_tokens` of a sequence."""

    n_tokens: int
    state: memoryview


class Points:
    """Points by sequence of tokens, within a bound. One thread."""

    def __init__(self, states: PointStates, most_bytes: int = _MOST_BYTES) -> None:
        self._states, self._most_bytes = states, most_bytes
        self._lists: deque[tuple[list[Point], Point]] = deque()
        self._bytes = 0

    def take(self, points: list[Point], seq_id: int, n_tokens: int) -> None:
        """Add a point where `seq_id` is now, `n_tokens` long; nothing when there is one already."""
        if not n_tokens or any(point.n_tokens == n_tokens for point in points):
            return
        state = self._states.read_point(seq_id)
        if state is not None:
            self.keep(points, Point(n_tokens, state))

    def keep(self, points: list[Point], point: Point) -> None:
        """Add a point to a sequence's; the oldest of all go where there are too many."""
        points.append(point)
        self._lists.append((points, point))
        self._bytes += len(point.state)
        while self._bytes > self._most_bytes:
            kept_in, oldest = self._lists.popleft()
            self._bytes -= len(oldest.state)
            if oldest in kept_in:
                kept_in.remove(oldest)

    def forget(self, points: list[Point], n_tokens: int = 0) -> None:
        """Drop those of a sequence's points that are behind its first `n_tokens`."""
        gone = [point for point in points if point.n_tokens > n_tokens]
        self._bytes -= sum(len(point.state) for point in gone)
        self._lists = deque(e for e in self._lists if e[0] is not points or e[1] not in gone)
        points[:] = [point for point in points if point not in gone]

    def best(self, points: list[Point], n_tokens: int) -> Point | None:
        """The last point within the first `n_tokens`."""
        within = [point for point in points if point.n_tokens <= n_tokens]
        return max(within, key=lambda point: point.n_tokens, default=None)

    def go_back(self, seq_id: int, point: Point) -> bool:
        """Give `seq_id` the state of a point."""
        return self._states.write_point(seq_id, point.state)
