"""Checkpoints of the recurrent state of sequences whose model does not support truncation.

A checkpoint holds the state at one length, and restores a sequence to it. After an edited message, for
another answer to the same question, or with a template that drops earlier reasoning, the engine then
prefills the new tokens instead of the whole conversation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

#: Memory (bytes) of all checkpoints together.
_MOST_BYTES = 512 << 20
#: Distance (tokens) of checkpoints during prefill.
INTERVAL_TOKENS = 2048
#: Shortest prompt (tokens) with a checkpoint: in a shorter one, the extra step for the last token costs
#: as much as the prefill.
SHORT = 32


def tokens_to_next_checkpoint(n_past: int, n_tokens: int) -> int:
    """Limit a step to end at the next checkpoint of a prompt of `n_tokens`, `n_past` of them computed.

    The last checkpoint lies before the last token: a repeated prompt differs only after it.
    """
    to_end = n_tokens - 1 - n_past
    if n_tokens - n_past < SHORT or to_end <= 0:
        return n_tokens - n_past
    return min(to_end, INTERVAL_TOKENS - n_past % INTERVAL_TOKENS)


def is_checkpoint_position(n_past: int, n_tokens: int) -> bool:
    return n_past == n_tokens - 1 or n_past % INTERVAL_TOKENS == 0


class CheckpointStates(Protocol):
    """llama.cpp's side: the recurrent state of a sequence as bytes, and back."""

    def read_checkpoint(self, seq_id: int) -> memoryview | None: ...

    def write_checkpoint(self, seq_id: int, state: memoryview) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The recurrent state after the first `n_tokens` of a sequence."""

    n_tokens: int
    state: memoryview


class Checkpoints:
    """Checkpoints by sequence, within a bound of memory; the oldest are evicted first. One thread."""

    def __init__(self, states: CheckpointStates, most_bytes: int = _MOST_BYTES) -> None:
        self._states, self._most_bytes = states, most_bytes
        self._lists: deque[tuple[list[Checkpoint], Checkpoint]] = deque()
        self._bytes = 0

    def save(self, checkpoints: list[Checkpoint], seq_id: int, n_tokens: int) -> None:
        """Save a checkpoint of `seq_id` at `n_tokens`; nothing if there is one already."""
        if not n_tokens or any(checkpoint.n_tokens == n_tokens for checkpoint in checkpoints):
            return
        state = self._states.read_checkpoint(seq_id)
        if state is not None:
            self.add(checkpoints, Checkpoint(n_tokens, state))

    def add(self, checkpoints: list[Checkpoint], checkpoint: Checkpoint) -> None:
        """Add a checkpoint to a sequence's, and evict the oldest beyond the bound."""
        checkpoints.append(checkpoint)
        self._lists.append((checkpoints, checkpoint))
        self._bytes += len(checkpoint.state)
        while self._bytes > self._most_bytes:
            kept_in, oldest = self._lists.popleft()
            self._bytes -= len(oldest.state)
            if oldest in kept_in:
                kept_in.remove(oldest)

    def drop_after(self, checkpoints: list[Checkpoint], n_tokens: int = 0) -> None:
        """Drop a sequence's checkpoints beyond its first `n_tokens`."""
        gone = [checkpoint for checkpoint in checkpoints if checkpoint.n_tokens > n_tokens]
        self._bytes -= sum(len(checkpoint.state) for checkpoint in gone)
        self._lists = deque(e for e in self._lists if e[0] is not checkpoints or e[1] not in gone)
        checkpoints[:] = [checkpoint for checkpoint in checkpoints if checkpoint not in gone]

    def latest_before(self, checkpoints: list[Checkpoint], n_tokens: int) -> Checkpoint | None:
        """Find the last checkpoint within the first `n_tokens`."""
        within = [checkpoint for checkpoint in checkpoints if checkpoint.n_tokens <= n_tokens]
        return max(within, key=lambda checkpoint: checkpoint.n_tokens, default=None)

    def restore(self, seq_id: int, checkpoint: Checkpoint) -> bool:
        return self._states.write_checkpoint(seq_id, checkpoint.state)
