"""Checkpoints of the recurrent state, for models whose sequences cannot be truncated.

A checkpoint is the recurrent state after the first n tokens of a sequence; restoring it truncates the
sequence to n tokens. If a prompt shares only a part of a cached sequence (an edited message, another
answer to the same question), the engine prefills the tokens after a checkpoint, not the whole prompt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

#: Maximum memory (bytes) of all checkpoints.
_MOST_BYTES = 512 << 20
#: Distance (tokens) between checkpoints during prefill.
INTERVAL_TOKENS = 2048
#: Fewer tokens than this are prefilled without a checkpoint, which would cost one more step.
SHORT = 32


def tokens_to_next_checkpoint(n_past: int, n_tokens: int) -> int:
    """Return how many tokens a step may prefill at most, so that it ends at the next checkpoint.

    The prompt has `n_tokens`, of which `n_past` are prefilled. The last checkpoint is one token before
    the prompt's end: a repeated prompt must compute its last token again, for the logits.
    """
    to_end = n_tokens - 1 - n_past
    if n_tokens - n_past < SHORT or to_end <= 0:
        return n_tokens - n_past
    return min(to_end, INTERVAL_TOKENS - n_past % INTERVAL_TOKENS)


def is_checkpoint_position(n_past: int, n_tokens: int) -> bool:
    return n_past == n_tokens - 1 or n_past % INTERVAL_TOKENS == 0


class CheckpointStates(Protocol):
    """Saves and restores the recurrent state of a sequence id in llama.cpp, as bytes."""

    def save_checkpoint(self, seq_id: int) -> memoryview | None: ...

    def restore_checkpoint(self, seq_id: int, state: memoryview) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The recurrent state after the first `n_tokens` of a sequence."""

    n_tokens: int
    state: memoryview


class Checkpoints:
    """Saves checkpoints into the lists of their sequences, within a memory limit. Not thread-safe."""

    def __init__(self, states: CheckpointStates, most_bytes: int = _MOST_BYTES) -> None:
        self._states, self._most_bytes = states, most_bytes
        self._oldest_first: deque[tuple[list[Checkpoint], Checkpoint]] = deque()
        self._bytes = 0

    def save(self, checkpoints: list[Checkpoint], seq_id: int, n_tokens: int) -> None:
        """Save the state of `seq_id` into its list `checkpoints`, if the list does not have it yet.

        `n_tokens` is the present length of the sequence.
        """
        if not n_tokens or any(checkpoint.n_tokens == n_tokens for checkpoint in checkpoints):
            return
        state = self._states.save_checkpoint(seq_id)
        if state is not None:
            self.add(checkpoints, Checkpoint(n_tokens, state))

    def add(self, checkpoints: list[Checkpoint], checkpoint: Checkpoint) -> None:
        """Add a checkpoint to its sequence's list.

        Above the memory limit, the oldest checkpoints of all sequences are dropped.
        """
        checkpoints.append(checkpoint)
        self._oldest_first.append((checkpoints, checkpoint))
        self._bytes += len(checkpoint.state)
        while self._bytes > self._most_bytes:
            oldest_list, oldest = self._oldest_first.popleft()
            self._bytes -= len(oldest.state)
            if oldest in oldest_list:
                oldest_list.remove(oldest)

    def drop_after(self, checkpoints: list[Checkpoint], n_tokens: int = 0) -> None:
        """Drop the checkpoints of a sequence that are after its first `n_tokens`."""
        dropped = [checkpoint for checkpoint in checkpoints if checkpoint.n_tokens > n_tokens]
        self._bytes -= sum(len(checkpoint.state) for checkpoint in dropped)
        self._oldest_first = deque(
            e for e in self._oldest_first if e[0] is not checkpoints or e[1] not in dropped
        )
        checkpoints[:] = [checkpoint for checkpoint in checkpoints if checkpoint not in dropped]

    def latest_before(self, checkpoints: list[Checkpoint], n_tokens: int) -> Checkpoint | None:
        """Return the last checkpoint within the first `n_tokens`, None if there is none."""
        within = [checkpoint for checkpoint in checkpoints if checkpoint.n_tokens <= n_tokens]
        return max(within, key=lambda checkpoint: checkpoint.n_tokens, default=None)

    def restore(self, seq_id: int, checkpoint: Checkpoint) -> bool:
        return self._states.restore_checkpoint(seq_id, checkpoint.state)
