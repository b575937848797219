"""Embeddings and reranking. They use a second context over the same weights, created at the first use.

Each text of a batch has a sequence id. llama.cpp pools the token embeddings of a text as the model's
file says (mean, cls, last), otherwise by their mean. Batches run on the decode thread, between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from edgeinfer.errors import ContextLengthError, InvalidRequestError
from edgeinfer.runtime.chat_format.control_tokens import ControlTokens
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.libllama import L, decode_error
from edgeinfer.runtime.llama.model import LlamaModel, open_context
from edgeinfer.runtime.options import Chosen, LoadOptions
from edgeinfer.runtime.requests import check_length

Call = Callable[[Callable[[], Any]], Any]

_MEAN, _RANK = 1, 4
_MAX_SEQUENCES = 32
_MIN_TOKENS, _MAX_TOKENS = 512, 2048
#: Maximum bytes of logits per batch: llama.cpp computes logits of every token even for embeddings.
_LOGITS_BYTES = 256 << 20
_CHOOSE = "choose {}: `edgeinfer list`"


class Embedder:
    """Embeds and reranks texts. Thread-safe. `call` runs a function on the decode thread."""

    def __init__(self, loaded: LlamaModel, options: LoadOptions, call: Call) -> None:
        self._loaded = loaded
        self._options = options
        self._call = call
        self._control = ControlTokens(loaded.vocab)
        pooling = model_pooling(loaded.meta)
        self.can_rerank = pooling == _RANK
        self.can_embed = not self.can_rerank
        self.pooling = (
            Chosen(pooling, "the model's own")
            if pooling
            else Chosen(_MEAN, "the model specifies no pooling: mean")
        )
        by_logits = _LOGITS_BYTES // (4 * loaded.vocab.n_vocab)
        n_tokens = min(loaded.n_ctx_train, max(_MIN_TOKENS, min(_MAX_TOKENS, by_logits)))
        # llama.cpp aborts unless the batch size is a multiple of the number of sequences
        self.max_tokens = max(1, n_tokens // _MAX_SEQUENCES) * _MAX_SEQUENCES
        self._context: LlamaContext | None = None
        self._batch: Batch | None = None

    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        """Return a vector per text, normalized to the Euclidean length 1.

        Raises InvalidRequestError for a text without tokens, an unknown token or a reranker, and
        ContextLengthError for a text of more than `max_tokens`.
        """
        if not self.can_embed:
            problem = "this model is a reranker, not an embedding model"
            raise InvalidRequestError(problem, param="model", hint=_CHOOSE.format("an embedding model"))
        inputs = [self._tokens(text, i) for i, text in enumerate(texts)]
        vectors = self._run(inputs, self._loaded.n_embd)
        return [_normalize(v) for v in vectors]

    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        """Return a score per document, higher for a better match.

        Raises InvalidRequestError if the model is not a reranker, ContextLengthError if `query` and a
        document together exceed `max_tokens`.
        """
        if not self.can_rerank:
            problem = "this model is not a reranker"
            raise InvalidRequestError(problem, param="model", hint=_CHOOSE.format("a reranker"))
        inputs = [
            self._check_length(self._pair(query, document), i, "documents")
            for i, document in enumerate(documents)
        ]
        return [float(v[0]) for v in self._run(inputs, max(1, self._loaded.n_classes))]

    def _tokens(self, text: str | Sequence[int], index: int) -> list[int]:
        vocab = self._loaded.vocab
        if isinstance(text, str):
            check_length(len(text), self.max_tokens, "input")
            tokens = vocab.tokenize(text, add_special=True)
        else:
            tokens = list(text)
            if unknown := [t for t in tokens if not 0 <= t < vocab.n_vocab]:
                problem = f"input[{index}]: {unknown[0]} is not a token of this model"
                hint = f"send tokens from 0 to {vocab.n_vocab - 1}, or text"
                raise InvalidRequestError(problem, param="input", hint=hint)
        return self._check_length(tokens, index, "input")

    def _check_length(self, tokens: list[int], index: int, param: str) -> list[int]:
        if not tokens:
            problem, hint = f"{param}[{index}] is empty", "leave out empty texts"
            raise InvalidRequestError(problem, param=param, hint=hint)
        if len(tokens) > self.max_tokens:
            raise ContextLengthError(
                f"{param}[{index}] has {len(tokens)} tokens; this model accepts at most "
                f"{self.max_tokens} per text",
                param=param,
                n_tokens=len(tokens),
                n_ctx=self.max_tokens,
                hint="split the text into shorter ones",
            )
        return tokens

    def _pair(self, query: str, document: str) -> list[int]:
        """Tokenize both texts in the model's template, otherwise as BOS query EOS SEP document EOS.

        In WordPiece vocabularies, EOS and SEP are one token, and BERT expects one between the texts.
        """
        vocab = self._loaded.vocab
        template = self._loaded.chat_template("rerank")
        if template:
            text = template.replace("{query}", self._control.escape(query))
            text = text.replace("{document}", self._control.escape(document))
            return self._control.tokenize(text)
        is_word_piece = vocab.kind == L.LLAMA_VOCAB_TYPE_WPM
        middle = [vocab.sep] if is_word_piece else [vocab.eos, vocab.sep]
        last_token = vocab.sep if is_word_piece else vocab.eos
        parts = [vocab.bos, *vocab.tokenize(query), *middle, *vocab.tokenize(document), last_token]
        return [t for t in parts if t >= 0]

    def _run(self, inputs: list[list[int]], width: int) -> list[np.ndarray[Any, Any]]:
        vectors: list[np.ndarray[Any, Any]] = []
        for group in self._groups(inputs):
            vectors += self._call(partial(self._one_batch, group, width))
        return vectors

    def _groups(self, inputs: list[list[int]]) -> Iterator[list[list[int]]]:
        group: list[list[int]] = []
        for tokens in inputs:
            if group and (
                len(group) == _MAX_SEQUENCES or sum(map(len, group)) + len(tokens) > self.max_tokens
            ):
                yield group
                group = []
            group.append(tokens)
        if group:
            yield group

    def _one_batch(self, group: list[list[int]], width: int) -> list[np.ndarray[Any, Any]]:
        if self._context is None or self._batch is None:
            self._context, self._batch = self._open()
        self._batch.clear()
        for i, tokens in enumerate(group):
            self._batch.add(tokens, 0, i, outputs=len(tokens))
        self._context.clear()
        code = self._batch.decode(self._context)
        if code:
            raise decode_error(code, f"{self._batch.n_tokens} tokens to embed")
        return [self._context.embedding(i, width) for i in range(len(group))]

    def _open(self) -> tuple[LlamaContext, Batch]:
        n = self.max_tokens
        context = open_context(
            self._loaded.model,
            self._options,
            n_cells=n,
            n_batch=n,
            n_seq_max=_MAX_SEQUENCES,
            n_threads=self._loaded.n_threads,
            pooling=self.pooling.value,
        )
        return context, Batch.of(context, max_outputs=n)

    def warm_up(self) -> None:
        """Embed or rank a short text, which creates the context."""
        if self.can_rerank:
            self.rerank("warm", ["up"])
        else:
            self.embed(["warm up"])

    def set_threads(self, n: int) -> None:
        if self._context is not None:
            self._context.set_threads(n)

    def close(self) -> None:
        """Free the context. Idempotent. No embedding may be running."""
        if self._context is not None:
            self._context.free()
            self._context = self._batch = None


def model_pooling(meta: dict[str, str]) -> int:
    """Return the pooling type (llama.cpp's number) from the file's metadata; 0 if there is none."""
    arch = meta.get("general.architecture", "")
    value = meta.get(f"{arch}.pooling_type", "0")
    return int(value) if value.isdigit() else 0


def _normalize(vector: np.ndarray[Any, Any]) -> list[float]:
    length = float(np.linalg.norm(vector))
    return [float(x) for x in (vector / length if length > 0 else vector)]
