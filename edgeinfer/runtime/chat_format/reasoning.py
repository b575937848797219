"""Parse reasoning spans, `<think>…</think>` and their kin, into events of their own.

Only the beginning of an answer can open a span: later its marker is text. Some templates open the
span in the prompt; the answer then begins inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.runtime.chat_format.tool_call_formats import could_become, hold_back
from edgeinfer.runtime.chat_format.tool_call_parser import CallParser
from edgeinfer.runtime.events import Parsed, ReasoningDelta, TextDelta


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """A pair of markers. `plain` begins an answer without a span, and is no part of it."""

    open: str
    close: str
    plain: str = ""


THINK = ReasoningSpan("<think>", "</think>")
#: Tried in this order against a template's source; the first also counts where it says nothing.
SPANS = (
    THINK,
    ReasoningSpan("<thinking>", "</thinking>"),
    ReasoningSpan("[THINK]", "[/THINK]"),
    ReasoningSpan("<seed:think>", "</seed:think>"),
    ReasoningSpan("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningSpan("<reasoning>", "</reasoning>"),
    ReasoningSpan(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        plain="<|channel|>final<|message|>",
    ),
)


def detect(template: str) -> tuple[ReasoningSpan, bool]:
    """Return (span, whether the template has it); `<think>` if it shows none."""
    for span in SPANS:
        first = span.close.partition("<|start|>")[0]
        if span.close in template or (span.open in template and first in template):
            return span, True
    if "<|channel|>" in template and "analysis" in template:
        return SPANS[-1], True
    return THINK, False


def is_open(prompt: str, span: ReasoningSpan) -> bool:
    """Return whether the prompt ends inside a span, white space aside."""
    return prompt.rstrip().endswith(span.open)


class ReasoningParser:
    """Split off a span, and feed the rest to `inner` (None: it is text).

    Used from the decode loop's thread alone; never raises on model output. `special_tokens`: whether
    `feed` needs control tokens as text.
    """

    def __init__(
        self,
        span: ReasoningSpan,
        inner: CallParser | None,
        *,
        opened: bool,
        special_tokens: bool = False,
    ) -> None:
        self._span, self._inner = span, inner
        self._step = self._inside if opened else self._start
        self._held = ""
        self._space = ""
        self._said = False
        self.special_tokens = special_tokens or (inner is not None and inner.special_tokens)

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends inside the span."""
        return self._step == self._inside

    @property
    def n_broken_calls(self) -> int:
        return self._inner.n_broken_calls if self._inner is not None else 0

    @property
    def is_holding(self) -> bool:
        """True if the end of the text could still become a marker of the span."""
        return bool(self._held)

    def feed(self, text: str) -> Sequence[Parsed]:
        """Return the events certain after `text`."""
        if self._step == self._after_all:
            return self._after_all(text)
        held, self._held = self._held + text, ""
        return self._step(held)

    def finish(self) -> Sequence[Parsed]:
        """Return what was held back, at the end of the generation."""
        held, self._held = self._held, ""
        if self._step == self._inside:
            return self._reason(held)
        events = list(self._after_all(held)) if self._step == self._start else []
        return [*events, *(self._inner.finish() if self._inner else ())]

    def _start(self, text: str) -> Sequence[Parsed]:
        begun = text.lstrip()
        if begun.startswith(self._span.open):
            self._step = self._inside
            return self._inside(begun[len(self._span.open) :])
        if not begun or could_become(begun, (self._span.open, self._span.plain)):
            self._held = text
            return ()
        self._step = self._after_all
        if self._span.plain and begun.startswith(self._span.plain):
            text = begun[len(self._span.plain) :]
        return self._after_all(text)

    def _inside(self, text: str) -> Sequence[Parsed]:
        head, closed, rest = text.partition(self._span.close)
        if closed:
            self._step = self._closed
            return [*self._reason(head), *self._closed(rest)]
        certain, self._held = hold_back(text, (self._span.close,))
        return self._reason(certain)

    def _closed(self, text: str) -> Sequence[Parsed]:
        """White space between the span and the answer belongs to neither."""
        begun = text.lstrip()
        if not begun:
            return ()
        self._step = self._after_all
        return self._after_all(begun)

    def _after_all(self, text: str) -> Sequence[Parsed]:
        if self._inner is not None:
            return self._inner.feed(text)
        return [TextDelta(text)] if text else ()

    def _reason(self, text: str) -> list[Parsed]:
        """Drop white space around the span; inside it waits for more text."""
        text = self._space + text
        if not self._said:
            text = text.lstrip()
        begun = text.rstrip()
        self._space = text[len(begun) :]
        if not begun:
            return []
        self._said = True
        return [ReasoningDelta(begun)]
