"""Tokenize a rendered prompt so that control tokens come only from the template.

`<|im_end|>` in a message, a tool's result or a document is text. `guard` marks such spellings before
the template is rendered; `tokenize` reads parts with marks without special tokens. A prompt without
marks is tokenized as a whole, as llama.cpp does.
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

#: Mark after the first character of a guarded spelling. It is a noncharacter, which no text contains.
MARK = "\ufdd0"
#: The mark as JSON and Python write it, for templates that escape non-ASCII characters.
_ESCAPED = "\\ufdd0"
#: Length (characters) of the prefixes with which spellings are looked up.
_PREFIX = 3
#: An escaped character of JSON, after an even number of backslashes.
_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\u([0-9a-fA-F]{4})")
_SPACE = " \t\n\v\f\r"


class ControlTokens:
    """A vocabulary's control tokens. Any thread."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    @cached_property
    def _tokens(self) -> dict[str, int]:
        return {text: t for text, t in self._vocab.control_tokens().items() if len(text) > 1}

    @cached_property
    def _spellings(self) -> frozenset[str]:
        """Spellings in lower case, because a template may change the case of a text."""
        return frozenset(text.lower() for text in self._tokens)

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(text) for text in self._tokens}, reverse=True)

    @cached_property
    def _prefix(self) -> re.Pattern[str]:
        prefixes = sorted({text[:_PREFIX].lower() for text in self._tokens})
        return re.compile(f"(?={'|'.join(map(re.escape, prefixes)) or '(?!)'})", re.IGNORECASE)

    def load(self) -> None:
        """Read the vocabulary now, not at the first prompt."""
        self.guard("")

    def guard(self, text: str, markers: tuple[str, ...] = ()) -> str:
        """Mark every spelling of a control token in `text`, except the `markers`."""
        pieces = []
        last = 0
        for prefix in self._prefix.finditer(text):
            check_deadline()
            start = prefix.start()
            is_spelling = any(text[start : start + n].lower() in self._spellings for n in self._lengths)
            if is_spelling and not text.startswith(markers, start):
                pieces.append(text[last : start + 1])
                last = start + 1
        return MARK.join([*pieces, text[last:]]) if pieces else text

    def guard_request(self, request: GenerateRequest, markers: tuple[str, ...]) -> GenerateRequest:
        """Guard all text of `request` that the template renders; `markers` in an answer stay."""
        tools = msgspec.to_builtins(request.tools)
        try:
            return msgspec.structs.replace(
                request,
                messages=tuple(self._message(message, markers) for message in request.messages),
                tools=msgspec.convert(self._guard_all(tools), tuple[Tool, ...]),
                template_options=self._guard_all(request.template_options),
            )
        except RecursionError as error:
            raise InvalidRequestError("a tool or an option is nested too deeply") from error

    def _message(self, message: Message, markers: tuple[str, ...]) -> Message:
        return msgspec.structs.replace(
            message,
            content=self.guard(message.content, markers if message.role == "assistant" else ()),
            reasoning=self.guard(message.reasoning),
            name=self.guard(message.name),
            tool_call_id=self.guard(message.tool_call_id),
            tool_calls=tuple(self._call(call) for call in message.tool_calls),
        )

    def _call(self, call: ToolCall) -> ToolCall:
        r"""Guard a call. Its JSON may spell `<` as `\u003c`: a template that parses it sees `<`."""
        arguments = self.guard(call.arguments)
        plain = self.guard(_ESCAPE.sub(_unescape, call.arguments))
        if plain.count(MARK) > arguments.count(MARK):
            arguments = plain
        return msgspec.structs.replace(
            call, id=self.guard(call.id), name=self.guard(call.name), arguments=arguments
        )

    def _guard_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, (list, tuple)):
            return [self._guard_all(element) for element in value]
        if isinstance(value, dict):
            return {self._guard_all(key): self._guard_all(element) for key, element in value.items()}
        return value

    def tokenize(self, prompt: str) -> list[int]:
        """Tokenize a rendered prompt; marked spellings are text."""
        prompt = prompt.replace(_ESCAPED, MARK)
        if MARK not in prompt:
            return self._vocab.tokenize(prompt, parse_special=True)
        tokens: list[int] = []
        tail_start, before = 0, -1
        for start, text_end, after in self._stretches(prompt):
            if MARK in prompt[start:text_end]:
                text = self._strip(remove_marks(prompt[start:text_end]), before, after)
                tokens += self._vocab.tokenize(prompt[tail_start:start], parse_special=True)
                tokens += self._vocab.tokenize(text)
                tail_start = text_end
            before = after
        return tokens + self._vocab.tokenize(prompt[tail_start:], parse_special=True)

    def _stretches(self, prompt: str) -> Iterator[tuple[int, int, int]]:
        """Yield each text between control tokens: start, end, the control token after it or -1."""
        last = 0
        for prefix in self._prefix.finditer(prompt):
            check_deadline()
            start = prefix.start()
            spellings = (prompt[start : start + n] for n in self._lengths)
            spelling = next((text for text in spellings if text in self._tokens), "")
            if spelling and start >= last:
                yield last, start, self._tokens[spelling]
                last = start + len(spelling)
        yield last, len(prompt), -1

    def _strip(self, text: str, before: int, after: int) -> str:
        if before >= 0 and self._vocab.strips_right(before):
            text = text.lstrip(_SPACE)
        return text.rstrip(_SPACE) if after >= 0 and self._vocab.strips_left(after) else text


def _unescape(escape: re.Match[str]) -> str:
    character = chr(int(escape[2], 16))
    return escape[1] + character if character.isprintable() and character not in '"\\' else escape[0]


def remove_marks(prompt: str) -> str:
    """Remove the guard marks from a rendered prompt."""
    return prompt.replace(_ESCAPED, "").replace(MARK, "")
