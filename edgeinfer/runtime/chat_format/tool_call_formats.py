"""Tool-call formats of the model families, as data for the parser and the grammar; their markers.

A section is opened by one of `begin` and closed by `end`. It holds calls: JSON objects with a name and
arguments, alone or in a list; or, with `named`, a bare name and the object of arguments. `skip` may
stand between them.

Sources: the models' own chat templates and cards. hermes: Hermes 2 Pro and 3, Qwen 2.5 and 3, SmolLM3.
llama: Llama 3.1 and 3.2. mistral: 7B v0.3 and Nemo (a list), Small 3.2 and Devstral (name and
arguments). phi: Phi-4-mini. gemma: Google's guide to function calling with Gemma 3, which has no tokens
for it. deepseek: R1 and its distillations. qwen-xml: Qwen3-Coder and 3.5. lfm: LFM2 and 2.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: Schemas of the arguments by the tool's name.
Tools = Mapping[str, Mapping[str, Any]]
#: The longest name, and the most that may stand between a name and its arguments, characters.
MAX_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format. `arguments` is the key of a call's arguments.

    `bare`: a call may also be the whole answer, without `begin`. `inner`: a section's other notation
    besides JSON. `short_ids`: call ids have nine characters.
    """

    name: str
    begin: tuple[str, ...] = ()
    end: str = ""
    arguments: str = "arguments"
    skip: tuple[str, ...] = ()
    named: bool = False
    name_ends: tuple[str, ...] = ()
    bare: bool = False
    inner: Literal["json", "python", "xml"] = "json"
    parallel: bool = True
    short_ids: bool = False

    @property
    def literals(self) -> frozenset[str]:
        """Text that is skipped inside a section."""
        return frozenset((*self.skip, *self.begin, self.end)) - {""}


HERMES = ToolFormat(name="hermes", begin=("<tool_call>",), end="</tool_call>")
LLAMA = ToolFormat(
    name="llama",
    begin=("<|python_tag|>",),
    arguments="parameters",
    skip=(";",),
    bare=True,
    parallel=False,
)
MISTRAL_LIST = ToolFormat(name="mistral", begin=("[TOOL_CALLS]",), short_ids=True)
MISTRAL_NAMED = ToolFormat(
    name="mistral-args",
    begin=("[TOOL_CALLS]",),
    named=True,
    name_ends=("[CALL_ID]", "[ARGS]", "{"),
    short_ids=True,
)
PHI = ToolFormat(name="phi", begin=("<|tool_call|>", "functools"), end="<|/tool_call|>")
GEMMA = ToolFormat(
    name="gemma",
    begin=("```tool_code", "```tool_call", "```json"),
    end="```",
    arguments="parameters",
    bare=True,
    inner="python",
)
DEEPSEEK = ToolFormat(
    name="deepseek",
    begin=("<｜tool▁calls▁begin｜>",),
    end="<｜tool▁calls▁end｜>",
    named=True,
    name_ends=("\n",),
    skip=("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "```json", "```", "<｜tool▁call▁end｜>"),
)
QWEN_XML = ToolFormat(
    name="qwen-xml", begin=("<tool_call>", "<function="), end="</tool_call>", inner="xml"
)
LFM = ToolFormat(name="lfm", begin=("<|tool_call_start|>",), end="<|tool_call_end|>", inner="python")
GENERIC = ToolFormat(
    name="generic",
    begin=("<tool_call>", "```json", "```tool_call"),
    end="</tool_call>",
    bare=True,
    inner="python",
)

_ALL = (HERMES, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, PHI, GEMMA, DEEPSEEK, QWEN_XML, LFM, GENERIC)
FAMILIES = {family.name: family for family in _ALL}

#: (what the template's source must hold, the family), tried in order.
_SIGNS = (
    (("<tool_call>", "<function=", "<parameter="), QWEN_XML),
    (("<tool_call>", "</tool_call>"), HERMES),
    (("<|tool_call_start|>",), LFM),
    (("List of tools: ", "<|im_start|>"), LFM),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK),
    (("<|tool|>",), PHI),
    (("<|tool_call|>", "<|/tool_call|>"), PHI),
    (("<|python_tag|>",), LLAMA),
    (("<|start_header_id|>", '"parameters": '), LLAMA),
    (("<start_of_turn>",), GEMMA),
)


def detect(template: str, architecture: str = "", name: str = "") -> tuple[ToolFormat, str]:
    """Return the format and a reason: by template, architecture, else JSON."""
    for signs, family in _SIGNS:
        if all(sign in template for sign in signs):
            return family, f"the chat template has {signs[0]}"
    if architecture.startswith("gemma"):
        return GEMMA, f"the architecture is {architecture}"
    if "mistral" in name.lower():
        return MISTRAL_LIST, "the model's name has mistral"
    return GENERIC, "the chat template shows no notation of its own"


def hold_back(text: str, markers: Sequence[str]) -> tuple[str, str]:
    """Split `text` before its longest end that could begin a marker."""
    longest = max((len(marker) for marker in markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers if len(marker) > size):
            return text[:-size], tail
    return text, ""


def split_at_marker(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Return (text before, marker, text after) of the earliest, then longest, marker.

    Without one, the marker is "", and the text after is what could begin one.
    """
    places = [(at, -len(marker)) for marker in markers if (at := text.find(marker)) >= 0]
    if not places:
        before, rest = hold_back(text, markers)
        return before, "", rest
    at, length = min(places)
    return text[:at], text[at : at - length], text[at - length :]


def could_become(text: str, literals: Sequence[str]) -> bool:
    """Return whether more characters could make `text` one of the literals."""
    return any(len(literal) > len(text) and literal.startswith(text) for literal in literals)
