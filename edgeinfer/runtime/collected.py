"""The parts of an answer, collected from the events of a generation: for every front."""

from __future__ import annotations

from edgeinfer.runtime.events import (
    Event,
    Finished,
    Progress,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
)


class CollectedCall:
    """A tool call being put together."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self._fragments: list[str] = []

    def add(self, delta: ToolCallDelta) -> None:
        """Add a fragment; the first one carries `id` and `name`."""
        self.id = self.id or delta.id
        self.name = self.name or delta.name
        self._fragments.append(delta.arguments)

    @property
    def arguments(self) -> str:
        """The arguments so far: JSON once the generation has ended."""
        return "".join(self._fragments)


class Collected:
    """What a generation has said. `end` is its last event, `progress` its last prefill report."""

    def __init__(self, text: str = "", reasoning: str = "") -> None:
        self._text = [text]
        self._reasoning = [reasoning]
        self.calls: dict[int, CollectedCall] = {}
        self.logprobs: list[TokenLogprobs] = []
        self.prompt: PromptLogprobs | None = None
        self.progress: Progress | None = None
        self.end: Finished | None = None

    def add(self, event: Event) -> None:
        """Add one event of the generation."""
        match event:
            case TextDelta():
                self._text.append(event.text)
                self.logprobs += event.logprobs
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case ToolCallDelta():
                self.calls.setdefault(event.index, CollectedCall()).add(event)
            case PromptLogprobs():
                self.prompt = event
            case Progress():
                self.progress = event
            case Finished():
                self.end = event

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far, without its markers."""
        return "".join(self._reasoning)

    @property
    def finished(self) -> Finished:
        """The end. Only asked for after the iteration has ended."""
        assert self.end is not None
        return self.end
