"""Convert sampled tokens to events: whole characters, stop strings, log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from edgeinfer.runtime.chat_format.answer_parser import AnswerParser
from edgeinfer.runtime.chat_format.tool_call_formats import hold_back
from edgeinfer.runtime.events import Parsed, ReasoningDelta, TextDelta, TokenLogprobs, ToolCallDelta

if TYPE_CHECKING:
    from edgeinfer.runtime.llama.vocab import Vocab


class Detokenizer:
    """Converts the tokens of one answer to events. Used on the decode thread."""

    def __init__(self, vocab: Vocab, stops: Sequence[str], parser: AnswerParser | None) -> None:
        self._vocab, self._parser = vocab, parser
        self._text = TextStream(stops)
        self._special = parser is not None and parser.special_tokens
        self._logprobs: list[TokenLogprobs] = []
        self.has_tool_calls = False
        self.reasoning_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        return self._text.stopped_by

    @property
    def is_reasoning(self) -> bool:
        """Return whether the text so far ends inside the reasoning."""
        return self._parser is not None and self._parser.is_reasoning

    @property
    def n_broken_calls(self) -> int:
        """Number of tool calls that could not be parsed, although they began with a marker."""
        return self._parser.n_broken_calls if self._parser is not None else 0

    @property
    def is_holding(self) -> bool:
        """Return whether text is held back until a character, marker or stop string is complete."""
        return self._text.is_holding or (self._parser is not None and self._parser.is_holding)

    def feed(self, token: int, logprobs: TokenLogprobs | None = None) -> list[Parsed]:
        """Add a token; return the events that are ready."""
        if logprobs is not None:
            self.hold_logprobs(logprobs)
        events = self._parse(self._text.feed(self._vocab.piece(token, special=self._special)))
        self.reasoning_tokens += bool(events) and isinstance(events[0], ReasoningDelta)
        return self._with_logprobs(events)

    def hold_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Add a token's log-probabilities to the next event with text."""
        self._logprobs.append(logprobs)

    def finish(self, *, cut: bool = False) -> list[Parsed]:
        """Return the last events. `cut`: a limit ended the answer, perhaps inside a tool call."""
        events = self._parse(self._text.finish())
        if self._parser is not None:
            events += self._note_calls(self._parser.finish(cut=cut))
        if self._logprobs and not events and self.stopped_by is None:
            events = [TextDelta("")]
        return self._with_logprobs(events)

    def _parse(self, text: str) -> list[Parsed]:
        if not text:
            return []
        return [TextDelta(text)] if self._parser is None else self._note_calls(self._parser.feed(text))

    def _note_calls(self, events: Sequence[Parsed]) -> list[Parsed]:
        self.has_tool_calls |= any(isinstance(event, ToolCallDelta) for event in events)
        return list(events)

    def _with_logprobs(self, events: list[Parsed]) -> list[Parsed]:
        if not self._logprobs:
            return events
        for i, event in enumerate(events):
            if isinstance(event, TextDelta | ReasoningDelta):
                events[i] = msgspec.structs.replace(event, logprobs=tuple(self._logprobs))
                self._logprobs = []
                break
        return events


class TextStream:
    """Decodes the UTF-8 bytes of one answer to text, which ends before the first stop string."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped_by: str | None = None

    def feed(self, data: bytes) -> str:
        """Add bytes; return the text that is ready: without an incomplete character or stop string."""
        if self.stopped_by is not None:
            return ""
        text = self._decoder.decode(data)
        return self._release(self._held + text) if self._stops else text

    def finish(self) -> str:
        """Return the text that was held back, without an incomplete character."""
        held, self._held = self._held, ""
        return "" if self.stopped_by is not None else held

    @property
    def is_holding(self) -> bool:
        """Return whether an incomplete character or the possible start of a stop string is held."""
        return bool(self._held) or bool(self._decoder.getstate()[0])

    def _release(self, text: str) -> str:
        hits = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if hits:
            position, self.stopped_by = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return text[:position]
        certain, self._held = hold_back(text, self._stops)
        return certain


class ReasoningBudget:
    """Limits the reasoning of one answer to `n_tokens`; `close` are the tokens of the end marker.

    `opened`: the prompt ends with the opening marker, so the answer begins inside the reasoning.
    """

    def __init__(self, n_tokens: int, close: Sequence[int], *, opened: bool) -> None:
        self._n_tokens = n_tokens
        self.close = close
        self._was_inside = opened
        self._n = 0

    def is_spent(self, detokenizer: Detokenizer) -> bool:
        """Return whether to end the reasoning now. Call this once after each sampled token.

        False while an incomplete character or a possible marker is held back, even beyond the budget.
        """
        is_inside = detokenizer.is_reasoning
        self._n += self._was_inside and is_inside  # the token of the opening marker does not count
        self._was_inside = is_inside
        return is_inside and self._n >= self._n_tokens and not detokenizer.is_holding
