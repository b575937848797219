"""Check once per model and build that saving and restoring KV blocks changes no bit.

llama.cpp has many kinds of caches. If saving a part of a cache loses information, the only symptom is
wrong logits. So a small context prefills a random text, saves the cells as blocks, and computes the
next logits twice: after the text, and after truncating the text in the middle. Then the blocks are
restored into an empty cache, and the logits must be bit-identical both times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from edgeinfer.runtime.llama.context import Batch
from edgeinfer.runtime.llama.libllama import decode_error
from edgeinfer.runtime.llama.model import LlamaModel, open_context
from edgeinfer.runtime.llama.state import SequenceStates
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.prefix_cache.kv_block import block_tokens

#: Tokens per step of the round-trip check. An incoming request waits for one step at most.
_CHUNK = 32
#: Tokens of the checked text and of each of its blocks, for models without a sliding window.
_TOKENS = 24
_BLOCK_TOKENS = 8
#: Maximum length (tokens) of the checked text. The text does not fill a sliding window that is longer.
_MOST_TOKENS = 1600
#: Sequence ids of the check's context: one for the text, one as scratch id of `SequenceStates`.
_SEQ_ID = 0
_SCRATCH = 1
_N_SEQ = 2
_TAIL_TOKENS = 3


class RoundtripCheck:
    """Checks once that saving and restoring KV blocks of a model changes no bit.

    The check runs in a small separate context, so that the model's main context is not changed.
    """

    def __init__(self, options: LoadOptions, loaded: LlamaModel) -> None:
        self._loaded, window = loaded, loaded.sliding_window
        self._options = msgspec.structs.replace(options, kv_type=loaded.choices["kv_type"].value)
        self._supports_truncation = loaded.supports_truncation
        self._n_vocab = loaded.vocab.n_vocab
        self._block_tokens = block_tokens(window) if window else _BLOCK_TOKENS
        # the text should be longer than the sliding window, unless that takes too many tokens
        beyond = window + 2 * block_tokens(window) if window else 0
        #: Length of the text (tokens).
        self.n_tokens = max(_TOKENS, beyond) if beyond <= _MOST_TOKENS else 3 * block_tokens(window)
        self._tokens: list[int] = []
        self._truncate_at = self.n_tokens // 2 + 5
        self._steps = self._compare()

    def run(self) -> str:
        """Run the whole check; return "exact", or what failed."""
        while (outcome := self.step()) is None:
            continue
        return outcome

    def step(self) -> str | None:
        """Run the next part; return None if more follow, otherwise "exact" or what failed."""
        return next(self._steps)

    def _compare(self) -> Iterator[str | None]:
        self._tokens = random.Random(7).choices(range(self._n_vocab), k=self.n_tokens)
        context = self._context = open_context(
            self._loaded.model,
            self._options,
            n_cells=self.n_tokens + 2 * _CHUNK,
            n_batch=_CHUNK,
            n_seq_max=_N_SEQ,
            n_threads=self._loaded.n_threads,
            n_outputs=_N_SEQ,
        )
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
        """Prefill `tokens` from position `start` on, a step per iteration; yield None each time."""
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
        """Truncate to the first `n` tokens. For a recurrent model, `checkpoint` is the state there."""
        if checkpoint is not None:
            self._states.restore_checkpoint(_SEQ_ID, checkpoint)
        self._context.remove(_SEQ_ID, n)
