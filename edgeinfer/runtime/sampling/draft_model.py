"""A draft model for speculative decoding: all but making and freeing it is for the decode thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from edgeinfer.errors import ModelLoadError
from edgeinfer.runtime.kv_cache.cache import common_prefix
from edgeinfer.runtime.llama.context import Batch
from edgeinfer.runtime.llama.model import LlamaModel, free_model, open_context, open_model
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.sampling.speculative import Acceptance

#: Draft tokens less likely than this by the draft model are not worth a row in the batch.
_MIN_PROBABILITY = 0.4
#: llama.cpp pads vocabularies: this many unused tokens at the end may differ.
_MAX_PADDING = 128
#: Acceptance rate assumed at the start.
_START = 0.8


class DraftModel:
    """A draft model for `main`. Raises ModelLoadError, also for another vocabulary."""

    def __init__(self, paths: tuple[str, ...], options: LoadOptions, main: LlamaModel) -> None:
        self._model = open_model(paths, msgspec.structs.replace(options, kv_type="f16"))
        try:
            self._vocab = Vocab(self._model)
            check_same_vocabulary(main.vocab, self._vocab)
            self._active = open_context(
                self._model,
                options,
                n_cells=main.n_cells,
                n_batch=main.n_batch,
                n_seq_max=main.n_parallel,
                n_threads=main.n_threads,
                n_outputs=main.n_parallel,
            )
        except BaseException:
            free_model(self._model)
            raise
        self._batch = Batch(
            capacity=main.n_batch,
            max_outputs=1,
            n_vocab=self._vocab.n_vocab,
            n_seq_max=main.n_parallel,
            n_cells=main.n_cells,
        )
        self._n_vocab = min(main.vocab.n_vocab, self._vocab.n_vocab)
        self._free = list(range(main.n_parallel))
        self._held: dict[int, list[int]] = {}
        self.acceptance = Acceptance(_START)
        #: What a draft token costs (seconds): a running mean, next to nothing before the first.
        self.s_per_token = 1e-6

    def drafter(self) -> ModelDrafter:
        return ModelDrafter(self)

    def take(self) -> int | None:
        """Reserve a sequence id, None if all are in use."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._held[slot] = []
        return slot

    def give_back(self, slot: int) -> None:
        self._active.remove(slot)
        del self._held[slot]
        self._free.append(slot)

    def draft(self, slot: int, tokens: Sequence[int], limit: int) -> list[int]:
        """Return up to `limit` draft tokens after `tokens`, while the model is confident enough."""
        if max(tokens[-limit:]) >= self._n_vocab or not self._catch_up(slot, tokens):
            return []
        drafts: list[int] = []
        while True:
            logits = self._active.logits(self._batch.n_tokens - 1, self._vocab.n_vocab)
            best = int(logits.argmax())
            unsure = float(np.exp(logits - logits[best]).sum()) > 1.0 / _MIN_PROBABILITY
            if unsure or best >= self._n_vocab or self._vocab.is_eos(best):
                return drafts
            drafts.append(best)
            if len(drafts) == limit or not self._compute(slot, [best]):
                return drafts

    def _catch_up(self, slot: int, tokens: Sequence[int]) -> bool:
        held = self._held[slot]
        n = min(common_prefix(held, tokens), len(tokens) - 1)
        self._active.remove(slot, n)
        del held[n:]
        while len(held) < len(tokens):
            if not self._compute(slot, list(tokens[len(held) : len(held) + self._batch.capacity])):
                return False
        return True

    def _compute(self, slot: int, tokens: list[int]) -> bool:
        held = self._held[slot]
        self._batch.clear()
        self._batch.add(tokens, len(held), slot, outputs=1)
        if self._batch.decode(self._active):
            self._forget_all()  # no cells left, or worse: start again, a draft is never needed
            return False
        held += tokens
        return True

    def _forget_all(self) -> None:
        self._active.clear()
        for held in self._held.values():
            held.clear()

    def park(self) -> None:
        self._forget_all()

    def set_threads(self, n: int) -> None:
        self._active.set_threads(n)

    def close(self) -> None:
        """Free model and context. Idempotent."""
        if self._model:
            self._active.free()
            free_model(self._model)
            self._model = None


class ModelDrafter:
    """One request's use of a draft model."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._slot: int | None = None

    @property
    def acceptance(self) -> Acceptance:
        return self._model.acceptance

    @property
    def s_per_token(self) -> float:
        return self._model.s_per_token

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return draft tokens, none if every sequence of the draft model is taken."""
        is_first = self._slot is None
        self._slot = self._model.take() if self._slot is None else self._slot
        if self._slot is None:
            return []
        began = time.perf_counter()
        drafts = self._model.draft(self._slot, tokens, limit)
        if not is_first:  # which computes the whole prompt, once
            took_s = (time.perf_counter() - began) / max(1, len(drafts))
            self._model.s_per_token += 0.1 * (took_s - self._model.s_per_token)
        return drafts

    def close(self) -> None:
        """Free the sequence id. Idempotent."""
        if self._slot is not None:
            self._model.give_back(self._slot)
            self._slot = None


def check_same_vocabulary(main: Vocab, draft: Vocab) -> None:
    """Compare two vocabularies. Raises ModelLoadError, naming the first difference."""
    differs = ""
    if main.kind != draft.kind or abs(main.n_vocab - draft.n_vocab) > _MAX_PADDING:
        differs = f"{draft.n_vocab} tokens instead of {main.n_vocab}"
    elif (main.bos, main.eos, main.adds_bos) != (draft.bos, draft.eos, draft.adds_bos):
        differs = "other BOS and EOS tokens"
    else:
        for token in range(min(main.n_vocab, draft.n_vocab)):
            if main.raw_text(token) != draft.raw_text(token):
                differs = f"token {token} differs"
                break
    if differs:
        raise ModelLoadError(
            f"the draft model has another vocabulary: {differs}",
            hint="take a smaller model of the same family, or load without: --draft none",
        )
