"""The seam between scheduler and chat format: a prepared request, and parsers of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edgeinfer.runtime.events import ReasoningDelta, TextDelta, ToolCallDelta
from edgeinfer.runtime.requests import Constraint

if TYPE_CHECKING:
    from edgeinfer.runtime.llama.vocab import Vocab
    from edgeinfer.runtime.sampling.grammar import Lark

Parsed = TextDelta | ReasoningDelta | ToolCallDelta


class StreamParser(Protocol):
    """Turn one generation's text into events: tool calls, reasoning.

    Used from the decode loop's thread alone; never raises on model output.
    """

    @property
    def special_tokens(self) -> bool:
        """True if `feed` needs control tokens as text, for markers of calls or reasoning."""

    def feed(self, text: str) -> Sequence[Parsed]:
        """Return the events certain after `text`; hold back what could still become a marker."""

    def finish(self) -> Sequence[Parsed]:
        """Return what was held back, at the end of the generation."""


class AnswerParser(StreamParser, Protocol):
    """Parse a whole answer, which may begin with reasoning."""

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside a reasoning span."""

    @property
    def is_holding(self) -> bool:
        """True if the end of the text could still become a marker of the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request with messages, ready for the engine.

    `prompt` is tokenized by `ChatFormat.tokenize`. `constraint` replaces the request's: it is set if a
    tool call is required, or if the request's waits for a reasoning span. `stop` adds to the request's.
    `parser` is None if the text needs none. `reasoning_close` ends a reasoning span.
    """

    prompt: str
    parser: AnswerParser | None = None
    constraint: Constraint | Lark | None = None
    reasoning_close: str = ""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What a model's file says about its chat format; `template` may be "".

    `named_templates`: further ones by name (`tool_use`, …). `add_bos`: the model wants BOS before the
    prompt (`llama_vocab_get_add_bos`); it is added if the template leaves it out. `guard_content`:
    control tokens come from the template alone.
    """

    template: str
    named_templates: dict[str, str]
    architecture: str
    name: str
    bos_text: str
    eos_text: str
    vocab: Vocab
    add_bos: bool = False
    guard_content: bool = True
