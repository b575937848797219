"""A model's vocabulary: convert text to tokens and back. Thread-safe."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.normalizing import NORMALIZER_KEY, normalize_text

#: Size (bytes) of the buffer for a token's text. A longer text takes a second call.
_PIECE_BYTES = 512
#: Attributes of control tokens. Text is converted to a control token only with `parse_special`.
_CONTROL = L.LLAMA_TOKEN_ATTR_CONTROL | L.LLAMA_TOKEN_ATTR_UNKNOWN


class FimTokens(NamedTuple):
    """Tokens that precede the prefix, the suffix and the middle in a fill-in-the-middle prompt.

    `repo` precedes a repository's name, `file` a file's name; -1 if the model has no such token.
    """

    prefix: int
    suffix: int
    middle: int
    repo: int
    file: int


class Vocab:
    """The vocabulary of a loaded `model` (llama.cpp's pointer), which must outlive this object."""

    def __init__(self, model: Any) -> None:
        self.pointer = L.llama_model_get_vocab(model)
        self.n_vocab: int = L.llama_vocab_n_tokens(self.pointer)
        self.bos: int = L.llama_vocab_bos(self.pointer)
        self.eos: int = L.llama_vocab_eos(self.pointer)
        self.sep: int = L.llama_vocab_sep(self.pointer)
        self.adds_bos: bool = L.llama_vocab_get_add_bos(self.pointer)
        self.kind: int = L.llama_vocab_type(self.pointer)
        self._normalizer = _read_normalizer(model)
        self._pieces: dict[int, bytes] = {}
        self._special_pieces: dict[int, bytes] = {}

    @cached_property
    def eos_tokens(self) -> tuple[int, ...]:
        """All end-of-generation tokens; the first access takes 80 ms for 262,144 tokens."""
        ends = [t for t in range(self.n_vocab) if L.llama_vocab_is_eog(self.pointer, t)]
        first = [t for t in (self.eos, L.llama_vocab_eot(self.pointer)) if t in ends]
        return tuple(dict.fromkeys(first + ends))

    @cached_property
    def fim(self) -> FimTokens | None:
        """Tokens of fill-in-the-middle prompts, None if the model has none."""
        tokens = FimTokens(
            prefix=L.llama_vocab_fim_pre(self.pointer),
            suffix=L.llama_vocab_fim_suf(self.pointer),
            middle=L.llama_vocab_fim_mid(self.pointer),
            repo=L.llama_vocab_fim_rep(self.pointer),
            file=L.llama_vocab_fim_sep(self.pointer),
        )
        return tokens if min(tokens.prefix, tokens.suffix, tokens.middle) >= 0 else None

    def is_eos(self, token: int) -> bool:
        return bool(L.llama_vocab_is_eog(self.pointer, token))

    def is_control(self, token: int) -> bool:
        return bool(L.llama_vocab_is_control(self.pointer, token))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return a token's text as UTF-8 bytes, which may end inside a character.

        The text of a control token is empty unless `special`. Raises IndexError for an unknown token.
        """
        pieces = self._special_pieces if special else self._pieces
        if token not in pieces:
            if not 0 <= token < self.n_vocab:
                raise IndexError(f"token {token} is not in the vocabulary (0 to {self.n_vocab - 1})")
            args, flags = (self.pointer, token), (0, special)
            pieces[token] = _fill(ctypes.c_char, _PIECE_BYTES, L.llama_token_to_piece, args, flags)
        return pieces[token]

    def marked_pieces(self) -> Iterator[bytes]:
        """Yield each token's bytes for llguidance; for a control token, 0xFF and the token's name."""
        size = 4096
        buffer = ctypes.create_string_buffer(size)
        for token in range(self.n_vocab):
            n = L.llama_token_to_piece(self.pointer, token, buffer, size, 0, False)
            if n > 0 and not L.llama_vocab_is_control(self.pointer, token):
                yield ctypes.string_at(buffer, n)
                continue
            n = L.llama_token_to_piece(self.pointer, token, buffer, size, 0, True)
            yield b"\xff" + (ctypes.string_at(buffer, n) if n > 0 else b"<[%d]>" % token)

    @property
    def tokenize_address(self) -> int:
        """Address of the function llama_tokenize, which llguidance calls."""
        return ctypes.cast(L._lib.llama_tokenize, ctypes.c_void_p).value or 0

    def text(self, token: int) -> str:
        """Return a token's text, also of a control token; "" for an unknown token."""
        if not 0 <= token < self.n_vocab:
            return ""
        return self.piece(token, special=True).decode("utf-8", "replace")

    def raw_text(self, token: int) -> bytes:
        """Return a token as it is written in the model's file, to compare vocabularies."""
        return bytes(L.llama_vocab_get_text(self.pointer, token))

    def control_tokens(self) -> dict[str, int]:
        """Return the ids of all control tokens by their texts. Takes 60 ms for 262,144 tokens."""
        pointer, attributes = self.pointer, L.llama_vocab_get_attr
        tokens = [t for t in range(self.n_vocab) if attributes(pointer, t) & _CONTROL]
        return {self.raw_text(t).decode("utf-8", "replace"): t for t in tokens}

    def strips_left(self, token: int) -> bool:
        return bool(L.llama_vocab_get_attr(self.pointer, token) & L.LLAMA_TOKEN_ATTR_LSTRIP)

    def strips_right(self, token: int) -> bool:
        return bool(L.llama_vocab_get_attr(self.pointer, token) & L.LLAMA_TOKEN_ATTR_RSTRIP)

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Convert text to tokens.

        With `parse_special`, texts such as `<|im_end|>` become control tokens. With `add_special`, BOS
        and EOS are added if the model wants them.
        """
        data = normalize_text(text, self._normalizer).encode("utf-8", "replace")
        args, flags = (self.pointer, data, len(data)), (add_special, parse_special)
        tokens: list[int] = _fill(L.llama_token, len(data) // 2 + 16, L.llama_tokenize, args, flags)
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the text of `tokens`, with control tokens. Raises IndexError for an unknown token."""
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise IndexError(f"token {token} is not in the vocabulary (0 to {self.n_vocab - 1})")
        args = (self.pointer, (L.llama_token * len(tokens))(*tokens), len(tokens))
        size = 8 * len(tokens) + 64
        text: bytes = _fill(ctypes.c_char, size, L.llama_detokenize, args, (False, True))
        return text


def _fill(kind: Any, size: int, function: Any, args: tuple[Any, ...], flags: tuple[Any, ...]) -> Any:
    """Return the array that `function` fills: `size` elements, or as many as `function` asks for."""
    while True:
        array = (kind * size)()
        n = function(*args, array, size, *flags)
        if n >= 0:
            return array[:n]
        size = -n


def _read_normalizer(model: Any) -> str:
    buffer = ctypes.create_string_buffer(64)
    length = L.llama_model_meta_val_str(model, NORMALIZER_KEY.encode(), buffer, len(buffer))
    return buffer.value.decode("ascii", "replace") if length > 0 else ""
