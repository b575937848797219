"""Says which rows of a batch belong to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeinfer.runtime.decoding.sequences.sequence import Sequence


@dataclass(slots=True)
class Part:
    """A sequence's share of a batch: its tokens, guesses at their end included, and the first row that
    has logits.
    """

    seq: Sequence
    row: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    has_output: bool = True
    is_prefill: bool = False
