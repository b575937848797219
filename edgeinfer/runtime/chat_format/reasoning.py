"""Reasoning spans, such as `<think>…</think>`.

Only the beginning of an answer can open a span; later its marker is text. Some templates open the span
in the prompt, so that the answer begins inside it. `answer_parser` reads the spans.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """A pair of markers. `plain` is a marker that begins answers without a span; it is removed."""

    open: str
    close: str
    plain: str = ""


THINK = ReasoningSpan("<think>", "</think>")
#: Searched in a template's source in this order; the first is also the default.
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
    """Return the span, and whether the template contains it; by default `<think>`."""
    for span in SPANS:
        first = span.close.partition("<|start|>")[0]
        if span.close in template or (span.open in template and first in template):
            return span, True
    if "<|channel|>" in template and "analysis" in template:
        return SPANS[-1], True
    return THINK, False


def is_open(prompt: str, span: ReasoningSpan) -> bool:
    """Return whether the prompt ends inside a span, ignoring white space."""
    return prompt.rstrip().endswith(span.open)
