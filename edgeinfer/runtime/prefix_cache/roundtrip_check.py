"""Check once per model and build that saving and restoring KV blocks changes no bit.

llama.cpp has many kinds of caches. If one loses information when a part of it is saved, the only
symptom is wrong logits. So a small context prefills a random text, saves it as blocks, and computes the
next logits: after the text, and after a truncation in its middle. Then the blocks are restored into an
empty cache, and both logits must be bit-identical.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import EngineError
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.libllama import decode_error
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.prefix_cache.block_folder import BlockFolder

#: Tokens per step of the check. A request waits for one step at most.
_CHUNK = 32
#: Tokens of the text, and per block, for models without a sliding window.
_TOKENS = 24
_BLOCK_TOKENS = 8
#: Most tokens of the text. A longer sliding window is not filled.
_MOST_TOKENS = 1600
#: Sequence id of the text, scratch id for `SequenceStates`, number of ids.
_SEQ_ID = 0
_SCRATCH = 1
_N_SEQ = 2
_TAIL_TOKENS = 3


def text_tokens(window: int, block_tokens: int) -> int:
    """Return the length of the text (tokens): longer than a sliding window, unless that is too long."""
    beyond = window + 2 * block_tokens if window else 0
    return max(_TOKENS, beyond) if beyond <= _MOST_TOKENS else 3 * block_tokens


class RoundtripCheck:
    """Runs one check. `make_context(n_cells, n_seq_max)` makes a small context of the model."""

    def __init__(
        self,
        make_context: Callable[[int, int], LlamaContext],
        n_vocab: int,
        window: int,
        block_tokens: int,
        *,
        supports_truncation: bool = True,
    ) -> None:
        self._supports_truncation = supports_truncation
        self._make_context, self._n_vocab = make_context, n_vocab
        self._block_tokens = min(block_tokens, _BLOCK_TOKENS) if not window else block_tokens
        self.n_tokens = text_tokens(window, block_tokens)
        self._tokens: list[int] = []
        self._truncate_at = self.n_tokens // 2 + 5
        self._steps = self._compare()

    def step(self) -> str | None:
        """Run the next part; return None if more follow, otherwise "exact" or what failed."""
        return next(self._steps)

    def _compare(self) -> Iterator[str | None]:
        self._tokens = random.Random(7).choices(range(self._n_vocab), k=self.n_tokens)
        context = self._context = self._make_context(self.n_tokens + 2 * _CHUNK, _N_SEQ)
        try:
            self._batch = Batch.of(context, max_outputs=1)
            self._states = states = SequenceStates(
                context, _SCRATCH, supports_truncation=self._supports_truncation
            )
            yield from self._prefill(self._tokens[: self._truncate_at], 0)
            checkpoints = [self._checkpoint()]
            yield from self._prefill(self._tokens[self._truncate_at :], self._truncate_at)
            checkpoints.append(self._checkpoint())
            n, size = self.n_tokens, self._block_tokens
            starts = range(0, n, size)
            blocks = [states.save(_SEQ_ID, start, min(n, start + size)) for start in starts]
            expected = self._next_logits(checkpoints)
            yield None
            context.clear(zeros=True)
            if not all(block is not None and states.restore(_SEQ_ID, block) for block in blocks):
                yield "llama.cpp cannot save or restore parts of this model's state"
                return
            self._restore(checkpoints[1], len(self._tokens))
            restored = self._next_logits(checkpoints)
        finally:
            context.free()
        worst = max(float(np.abs(a - b).max()) for a, b in zip(expected, restored, strict=True))
        yield "exact" if worst == 0 else f"after a restore the next logits differ by {worst:.3g}"

    def _next_logits(self, checkpoints: list[memoryview | None]) -> list[npt.NDArray[np.float32]]:
        """Return the logits after the whole text, and after truncating and extending it."""
        after_text = self._logits(self._tokens[:1], len(self._tokens))
        self._restore(checkpoints[0], self._truncate_at)
        tail = self._tokens[-_TAIL_TOKENS:]
        return [after_text, self._logits(tail, self._truncate_at)]

    def _prefill(self, tokens: list[int], start: int) -> Iterator[str | None]:
        """Prefill `tokens` from position `start` on, a step per iteration. The last has logits."""
        for offset in range(0, len(tokens), _CHUNK):
            chunk = tokens[offset : offset + _CHUNK]
            self._batch.clear()
            self._batch.add(chunk, start + offset, _SEQ_ID, outputs=int(offset + _CHUNK >= len(tokens)))
            if code := self._batch.decode(self._context):
                raise decode_error(code, f"{len(chunk)} tokens of the round-trip check")
            yield None

    def _logits(self, tokens: list[int], start: int) -> npt.NDArray[np.float32]:
        """Compute `tokens` from position `start` on; return the logits after them: float32[n_vocab]."""
        for _ in self._prefill(tokens, start):
            continue
        return self._context.logits(len(tokens) - 1, self._n_vocab).copy()

    def _checkpoint(self) -> memoryview | None:
        return None if self._supports_truncation else self._states.save_checkpoint(_SEQ_ID)

    def _restore(self, checkpoint: memoryview | None, n: int) -> None:
        """Truncate to the first `n` tokens; a recurrent state is restored from their checkpoint."""
        if checkpoint is not None:
            self._states.restore_checkpoint(_SEQ_ID, checkpoint)
        self._context.remove(_SEQ_ID, n)


class RoundtripVerdict:
    """Runs a model's check once and stores its `outcome`: "" before, "exact", or what failed."""

    def __init__(self, folder: BlockFolder, check: RoundtripCheck) -> None:
        self._folder, self._check = folder, check
        self.n_tokens = check.n_tokens
        self.outcome = folder.read_check()

    @property
    def is_refused(self) -> bool:
        return self.outcome not in ("", "exact")

    def step(self) -> None:
        """Run the next part of the check. If it fails, delete all blocks.

        If it cannot be computed (no memory), only this process does without the cache.
        """
        try:
            outcome = self._check.step()
        except EngineError as error:
            self.outcome = f"the check failed: {error}"
            return
        if outcome is None:
            return
        self.outcome = outcome
        self._folder.save_check(outcome)
        if self.is_refused:
            self._folder.clear()
