"""The seam between the decode loop and what a conversation needs: a prompt, a constraint for a required
call, a parser.

`runtime/language/dialogue.py` provides `load_conversations`, over `runtime/language/templates.py`
(prompts), `runtime/tool_formats/` and `runtime/language/reasoning.py` (parsers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgeinfer.runtime.events import ReasoningDelta, TextDelta, ToolCallDelta
from edgeinfer.runtime.language.constraint_api import CompiledConstraint, Lark, VocabView
from edgeinfer.runtime.options import Chosen
from edgeinfer.runtime.requests import Constraint, GenerateRequest

Parsed = TextDelta | ReasoningDelta | ToolCallDelta


class StreamParser(Protocol):
    """Turns one generation's text into events. Used from the decode loop's thread alone; never raises
    on model output.
    """

    @property
    def special_tokens(self) -> bool:
        """Whether control tokens must reach `feed` as text (formats that mark calls or reasoning with
        them).
        """

    def feed(self, text: str) -> Sequence[Parsed]:
        """Events that are certain after `text`; what could still become a marker is held back."""

    def finish(self) -> Sequence[Parsed]:
        """What was held back, at the end of the generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request made with messages, ready for the engine.

    `prompt` is tokenized with special tokens parsed and none added. `constraint` is set when a tool
    call is required, or when the request's has to wait for a reasoning span; it then replaces the
    request's. `stop` are strings the format adds to the request's. `parser` is None when the text needs
    none.
    """

    prompt: str
    parser: StreamParser | None = None
    constraint: Constraint | Lark | CompiledConstraint | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What the engine knows of a model when it asks for its conversations. `template` "" means that it
    has none.

    `named_templates` are the file's further ones (`tool_use`, …) by name. `add_bos`: the model wants
    BOS before everything (`llama_vocab_get_add_bos`); it is put before a prompt whose template leaves
    it out.
    """

    template: str
    named_templates: dict[str, str]
    architecture: str
    name: str
    bos_text: str
    eos_text: str
    vocab: VocabView
    add_bos: bool = False


class Conversations(Protocol):
    """A loaded model's way of talking. Any thread."""

    @property
    def tool_format(self) -> str:
        """The family its calls are parsed as; "" when there is no chat template."""

    @property
    def choices(self) -> dict[str, Chosen]:
        """What was chosen for the template, the tool format and the reasoning span, and why."""

    def prepare(self, request: GenerateRequest) -> Prepared:
        """Apply the template to `request.messages` and `request.tools`. Raises InvalidRequestError."""

    def render(self, request: GenerateRequest) -> str:
        """The prompt alone. Raises InvalidRequestError."""


class LoadConversations(Protocol):
    """`runtime.language.dialogue.load_conversations`: called once a load, on the loading thread."""

    def __call__(self, facts: TemplateFacts) -> Conversations:
        """Raises ModelLoadError when the template does not parse."""
