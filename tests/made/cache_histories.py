"""Random histories of a KV cache, and a memory that counts cells by itself."""

import math
import random

from edgeinfer.runtime.kv_cache import CachedSequence, KvCache, common_prefix
from edgeinfer.runtime.prompt_tokens import PromptTokens, row_tokens

#: A position, and which of the rows there: with M-RoPE those of a picture share positions.
Place = tuple[int, int]


class CountingMemory:
    """Keeps which positions each sequence has in which physical cell, as llama.cpp's unified cache
    does.
    """

    def __init__(self, *, supports_truncation: bool = True) -> None:
        self.sequences: dict[int, dict[Place, object]] = {}
        self._supports_truncation = supports_truncation

    def store(self, seq_id: int, start: int, n: int) -> None:
        held = self.sequences.setdefault(seq_id, {})
        for pos in range(start, start + n):
            assert (pos, 0) not in held
            held[pos, 0] = object()

    def remove(self, seq_id: int, start: int, stop: int) -> bool:
        held = self.sequences.get(seq_id, {})
        if not self._supports_truncation and start > 0:
            return False
        low = max(0, start)
        for cell in [p for p in held if p[0] >= low and (stop < 0 or p[0] < stop)]:
            del held[cell]
        return True

    def copy(self, source: int, target: int, stop: int) -> None:
        held = self.sequences[source]
        assert not self.sequences.get(target)
        self.sequences[target] = {p: c for p, c in held.items() if stop < 0 or p[0] < stop}

    def shift(self, seq_id: int, start: int, delta: int) -> None:
        held = self.sequences[seq_id]
        moved = {(pos + delta * (pos >= start), row): c for (pos, row), c in held.items()}
        self.sequences[seq_id] = moved

    @property
    def cells(self) -> int:
        return len({id(c) for held in self.sequences.values() for c in held.values()})


#: Pictures of so many rows; with M-RoPE each takes as many positions as its longer side has rows.
_ROWS = (1, 5, 9)


class Histories:
    """Random operations on sequences of tokens and pictures, and the pieces that each sequence id must
    hold after them.
    """

    def __init__(self, seed: int, kind: str, kv: KvCache, memory: CountingMemory) -> None:
        self.rng, self.pieces = random.Random(seed), [[1], [2]]
        for n in _ROWS if kind != "text" else ():
            self.pieces.append(row_tokens(b"%d" % n, n, math.isqrt(n) * (kind == "M-RoPE")))
        self.kv, self.memory = kv, memory
        self.held: dict[int, list[int]] = {}
        self.active: list[CachedSequence] = []

    def act(self) -> None:
        actions = (
            self.claim, self.extend, self.truncate, self.shift, self.release, self.drop, self.resize,
        )  # fmt: skip
        self.rng.choices(actions, (4, 2, 2, 1, 4, 1, 1))[0]()

    def some(self, most: int) -> list[int]:
        return self.rng.choices(range(len(self.pieces)), k=self.rng.randrange(1, most))

    def n_own(self, piece: int) -> int:
        return PromptTokens(self.pieces[piece]).position(len(self.pieces[piece]))

    def compute(self, seq: CachedSequence, pieces: list[int]) -> None:
        """Store pieces behind a sequence, each at positions of its own."""
        held = self.memory.sequences.setdefault(seq.seq_id, {})
        for piece in pieces:
            tokens, n_own = self.pieces[piece], self.n_own(piece)
            start = sum(map(self.n_own, self.held[seq.seq_id]))
            for row in range(len(tokens)):
                held[start + row % n_own, row] = object()
            self.held[seq.seq_id].append(piece)
            self.kv.record_computed(seq, tokens)

    def claim(self) -> None:
        prompt = [*self.some(9), self.rng.randrange(2)]
        tokens = PromptTokens([token for piece in prompt for token in self.pieces[piece]])
        usable = [self.held[c.seq_id] for c in self.kv.cached_sequences]
        shared = max((common_prefix(other, prompt[:-1]) for other in usable), default=0)
        n_shared = sum(len(self.pieces[piece]) for piece in prompt[:shared])
        assert self.kv.match(tokens, ())[1] == n_shared
        seq = self.kv.allocate(tokens, ())
        if seq is None:
            assert len(self.active) == 6
            return
        n_kept = tokens.round_down(common_prefix(seq.tokens, tokens[:-1]))
        assert n_kept == n_shared
        self.kv.truncate(seq, n_kept)
        self.held[seq.seq_id] = prompt[:shared]
        self.active.append(seq)
        if self.kv.make_room(len(tokens) - n_kept):
            self.compute(seq, prompt[shared:])

    def extend(self) -> None:
        pieces = self.some(4)
        if self.active and self.kv.make_room(sum(len(self.pieces[piece]) for piece in pieces)):
            self.compute(self.rng.choice(self.active), pieces)

    def truncate(self) -> None:
        """Truncate a sequence; a cut inside a picture drops the whole picture."""
        if not self.active:
            return
        seq = self.rng.choice(self.active)
        n_tokens = seq.tokens.round_down(self.rng.randrange(len(seq.tokens) + 1))
        self.kv.truncate(seq, n_tokens)
        pieces = self.held[seq.seq_id]
        while sum(len(self.pieces[piece]) for piece in pieces) > n_tokens:
            pieces.pop()

    def shift(self) -> None:
        """Shift a sequence, if it is only text."""
        seq = self.rng.choice(self.active) if self.active else None
        if seq and len(self.pieces) == 2 and len(seq.tokens) > 6 and self.kv.shift(seq, 2, 3):
            del self.held[seq.seq_id][2:5]

    def release(self) -> None:
        if self.active:
            seq = self.active.pop(self.rng.randrange(len(self.active)))
            self.kv.release(seq, keep=self.rng.random() < 0.8)

    def drop(self) -> None:
        self.kv.make_room(self.rng.randrange(300))

    def resize(self) -> None:
        self.kv.resize(self.rng.choice((512, 600)))
        cells = {cell for seq in self.kv.cached_sequences for cell in seq.cells}
        assert cells == set(range(self.kv.used_cells))

    def check(self) -> None:
        """Compare tokens, positions and cells with the pieces."""
        assert self.kv.used_cells == self.memory.cells
        for seq in self.kv.cached_sequences:
            pieces = self.held[seq.seq_id]
            assert seq.tokens == [token for piece in pieces for token in self.pieces[piece]]
            places = self.memory.sequences.get(seq.seq_id, {})
            assert len(places) == len(seq.tokens) == len(seq.cells)
            assert {pos for pos, _ in places} == set(range(sum(map(self.n_own, pieces))))
