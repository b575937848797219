"""What passes between the decode loop and the room that knows a model's language.

`dialogue.py` makes a `Prepared` of a request with messages; `constraints.py` compiles its constraint.
"""

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
    """Turns one generation's text into events: calls, reasoning.

    Used from the decode loop's thread alone; never raises on model output.
    """

    @property
    def special_tokens(self) -> bool:
        """Whether `feed` needs control tokens as text, for marks of calls or reasoning."""

    def feed(self, text: str) -> Sequence[Parsed]:
        """Events that are certain after `text`; what could still become a marker is held back."""

    def finish(self) -> Sequence[Parsed]:
        """What was held back, at the end of the generation."""


class AnswerParser(StreamParser, Protocol):
    """Reads a whole answer, which may begin with reasoning."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside of a reasoning span."""

    @property
    def is_holding(self) -> bool:
        """Whether the end of the text could still become a marker of the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request made with messages, ready for the engine.

    `prompt` is tokenized by `Conversations.tokenize`, with none added. `constraint` is set when a tool
    call is required, or when the request's has to wait for a reasoning span; it then replaces the
    request's. `stop` are strings the format adds to the request's. `parser` is None when the text needs
    none. `reasoning_close` is the marker that ends a reasoning span.
    """

    prompt: str
    parser: AnswerParser | None = None
    constraint: Constraint | Lark | None = None
    reasoning_close: str = ""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What the engine knows of a model for its conversations; `template` may be "".

    `named_templates` are the file's further ones (`tool_use`, …) by name. `add_bos`: the model wants
    BOS before everything (`llama_vocab_get_add_bos`); it is put before a prompt whose template leaves
    it out. `guard_content`: control tokens come from the template alone.
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
