"""Reasoning spans, `<think>…</think>` and their kin.

Only the beginning of an answer can open a span: later its marker is text. Some templates open the
span in the prompt; the answer then begins inside it. `answer_parser` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass


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
