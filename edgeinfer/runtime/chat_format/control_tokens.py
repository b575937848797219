"""Tokenize a rendered prompt so that control tokens come only from the template.

`<|im_end|>` in a message, a tool's result or a document must stay text. So before the template is
rendered, `escape` inserts MARK after the first character of each such text, and doubles each MARK that
the messages contain. `tokenize` removes the marks, and parses no special tokens in texts that had
marks. A prompt without marks is tokenized as a whole, as llama.cpp does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool, ToolCall, check_deadline

if TYPE_CHECKING:
    from edgeinfer.runtime.llama.vocab import Vocab

#: Inserted into each control token of a message, so that the token stays text: `<|im_end|>` becomes
#: `<`, MARK, `|im_end|>`. MARK is a Unicode noncharacter.
MARK = "\ufdd0"
#: MARK as templates write it that encode messages as ASCII-only JSON. If a client's message contains
#: these six characters, they are escaped like a control token.
_MARK_IN_JSON = "\\ufdd0"
_MARKS = re.compile(f"{MARK}({MARK}?)")
#: A regex searches messages for this many first characters of control tokens; only at a match are whole
#: tokens compared.
_PREFIX = 3
#: Matches a `\\uXXXX` of JSON whose backslash is not escaped itself.
_JSON_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\u([0-9a-fA-F]{4})")
_SPACE = " \t\n\v\f\r"


class ControlTokens:
    """Escapes the texts of a vocabulary's control tokens, and tokenizes prompts. Thread-safe."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    @cached_property
    def _tokens(self) -> dict[str, int]:
        return {text: t for text, t in self._vocab.control_tokens().items() if len(text) > 1}

    @cached_property
    def _spellings(self) -> frozenset[str]:
        """Texts to escape, in lower case, because a template may change the case."""
        return frozenset(text.lower() for text in (*self._tokens, _MARK_IN_JSON))

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(text) for text in self._spellings}, reverse=True)

    @cached_property
    def _prefix(self) -> re.Pattern[str]:
        prefixes = sorted({text[:_PREFIX] for text in self._spellings})
        return re.compile(f"(?={'|'.join(map(re.escape, prefixes))})", re.IGNORECASE)

    def load(self) -> None:
        """Read the vocabulary now, not at the first prompt."""
        self.escape("")

    def escape(self, text: str, markers: tuple[str, ...] = ()) -> str:
        """Return `text` with the character MARK after the first character of each control token.

        `tokenize` then treats them as text. Control tokens that begin with one of `markers` are not
        changed.
        """
        text = text.replace(MARK, MARK * 2)
        pieces = []
        piece_start = 0
        for prefix in self._prefix.finditer(text):
            check_deadline()
            start = prefix.start()
            is_spelling = any(text[start : start + n].lower() in self._spellings for n in self._lengths)
            if is_spelling and not text.startswith(markers, start):
                pieces.append(text[piece_start : start + 1])
                piece_start = start + 1
        return MARK.join([*pieces, text[piece_start:]]) if pieces else text

    def escape_request(self, request: GenerateRequest, markers: tuple[str, ...]) -> GenerateRequest:
        """Return the request with escaped messages, tools and template options.

        `markers` (of the reasoning) are not escaped in the assistant's messages. Raises
        InvalidRequestError if a tool or a template option is nested too deeply.
        """
        field = "tools"
        try:
            escaped = self._escape_all(msgspec.to_builtins(request.tools))
            tools = msgspec.convert(escaped, tuple[Tool, ...])
            field = "template_options"
            options = self._escape_all(request.template_options)
        except RecursionError as error:
            problem = f"{field}: objects and lists are nested too deeply"
            hint = "send values with fewer levels of objects and lists"
            raise InvalidRequestError(problem, param=field, hint=hint) from error
        return msgspec.structs.replace(
            request,
            messages=tuple(self._message(message, markers) for message in request.messages),
            tools=tools,
            template_options=options,
        )

    def _message(self, message: Message, markers: tuple[str, ...]) -> Message:
        return msgspec.structs.replace(
            message,
            content=self.escape(message.content, markers if message.role == "assistant" else ()),
            reasoning=self.escape(message.reasoning),
            name=self.escape(message.name),
            tool_call_id=self.escape(message.tool_call_id),
            tool_calls=tuple(self._escape_call(call) for call in message.tool_calls),
        )

    def _escape_call(self, call: ToolCall) -> ToolCall:
        r"""Escape a tool call. Its JSON may write `<` as `\u003c`, which templates decode."""
        arguments = self.escape(_JSON_ESCAPE.sub(_decode_mark, call.arguments))
        plain = self.escape(_JSON_ESCAPE.sub(_unescape, call.arguments))
        if plain.count(MARK) > arguments.count(MARK):
            arguments = plain
        return msgspec.structs.replace(
            call, id=self.escape(call.id), name=self.escape(call.name), arguments=arguments
        )

    def _escape_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, (list, tuple)):
            return [self._escape_all(element) for element in value]
        if isinstance(value, dict):
            return {self._escape_all(key): self._escape_all(element) for key, element in value.items()}
        return value

    def tokenize(self, prompt: str) -> list[int]:
        """Tokenize a rendered prompt; escaped control tokens become text."""
        prompt = prompt.replace(_MARK_IN_JSON, MARK)
        if MARK not in prompt:
            return self._vocab.tokenize(prompt, parse_special=True)
        tokens: list[int] = []
        tail_start, previous_token = 0, -1
        for start, text_end, next_token in self._split_at_control_tokens(prompt):
            if MARK in prompt[start:text_end]:
                text = self._strip(remove_marks(prompt[start:text_end]), previous_token, next_token)
                tokens += self._vocab.tokenize(prompt[tail_start:start], parse_special=True)
                tokens += self._vocab.tokenize(text)
                tail_start = text_end
            previous_token = next_token
        return tokens + self._vocab.tokenize(prompt[tail_start:], parse_special=True)

    def _split_at_control_tokens(self, prompt: str) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, next control token) of each text between control tokens; -1 at the end."""
        text_start = 0
        for prefix in self._prefix.finditer(prompt):
            check_deadline()
            start = prefix.start()
            spellings = (prompt[start : start + n] for n in self._lengths)
            spelling = next((text for text in spellings if text in self._tokens), "")
            if spelling and start >= text_start:
                yield text_start, start, self._tokens[spelling]
                text_start = start + len(spelling)
        yield text_start, len(prompt), -1

    def _strip(self, text: str, previous_token: int, next_token: int) -> str:
        if previous_token >= 0 and self._vocab.strips_right(previous_token):
            text = text.lstrip(_SPACE)
        return text.rstrip(_SPACE) if next_token >= 0 and self._vocab.strips_left(next_token) else text


def _unescape(escape: re.Match[str]) -> str:
    character = chr(int(escape[2], 16))
    is_plain = (character.isprintable() and character not in '"\\') or character == MARK
    return escape[1] + character if is_plain else escape[0]


def _decode_mark(escape: re.Match[str]) -> str:
    return escape[1] + MARK if chr(int(escape[2], 16)) == MARK else escape[0]


def remove_marks(prompt: str) -> str:
    """Return a rendered prompt as the model reads it, without the marks that `escape` inserted."""
    return _MARKS.sub(r"\1", prompt.replace(_MARK_IN_JSON, MARK))
