"""Markers around a model's reasoning, such as `<think>…</think>`.

Reasoning is recognized only at the beginning of an answer; later, a marker is text. Some templates end
the prompt with the opening marker, so that the answer begins inside the reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The markers before (`open`) and after (`close`) a model's reasoning.

    `plain` is the marker that begins an answer without reasoning; "" if the model writes none.
    """

    open: str
    close: str
    plain: str = ""


THINK = ReasoningSpan("<think>", "</think>")
#: All known pairs of markers around reasoning. A chat template is searched for them in this order.
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
    """Return the markers in a template's source and True, or `<think>` and False if there are none."""
    for span in SPANS:
        first = span.close.partition("<|start|>")[0]
        if span.close in template or (span.open in template and first in template):
            return span, True
    if "<|channel|>" in template and "analysis" in template:
        return SPANS[-1], True
    return THINK, False


def is_open(prompt: str, span: ReasoningSpan) -> bool:
    """Return whether the prompt ends with the opening marker: the answer begins with reasoning."""
    return prompt.rstrip().endswith(span.open)
