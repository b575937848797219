"""The notations in which model families write tool calls, for the parser and the grammar.

Sources: the models' own chat templates and cards. hermes: Hermes 2 Pro and 3, Qwen 2.5 and 3, SmolLM3.
llama: Llama 3.1 and 3.2. mistral: 7B v0.3 and Nemo (a list), Small 3.2 and Devstral (name and
arguments). phi: Phi-4-mini. gemma: Google's guide to function calling with Gemma 3, which has no tokens
for it. deepseek: R1 and its distillations. qwen-xml: Qwen3-Coder and 3.5. lfm: LFM2 and 2.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

#: JSON schemas of the tools' arguments, by tool name.
Tools = Mapping[str, Mapping[str, Any]]
#: Longest name of a tool or parameter (characters), and longest text between a tool's name and its
#: arguments in a call.
MAX_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model family writes tool calls: `[TOOL_CALLS][{"name": …, "arguments": …}]`.

    The texts, in order: `begin[0]`, `head`, the calls with `separator` between them, `tail`, `end`.

    - begin: the markers that the parser accepts before calls; grammars write only the first.
    - call: the notation of one call; `$name` and `$arguments` stand for its values.
    - skip: texts that the parser ignores between calls.
    - named: the name precedes the JSON, and ends before one of `name_ends`.
    - bare: a call may also be the whole answer, without markers.
    - inner: the notation that the parser accepts in addition to JSON.
    - parallel: an answer may have several calls. short_ids: their ids have nine characters.
    """

    name: str
    begin: tuple[str, ...] = ()
    end: str = ""
    head: str = "["
    call: str = '{"name": "$name", "arguments": $arguments}'
    separator: str = ", "
    tail: str = "]"
    skip: tuple[str, ...] = ()
    named: bool = False
    name_ends: tuple[str, ...] = ()
    bare: bool = False
    inner: Literal["json", "python", "xml"] = "json"
    parallel: bool = True
    short_ids: bool = False

    @property
    def opening(self) -> str:
        """Text that precedes the first call; "" if the format is `bare`."""
        return "" if self.bare else self.begin[0] + self.head

    @property
    def closing(self) -> str:
        """Text that follows the last call; "" if the format is `bare`."""
        return "" if self.bare else self.tail + self.end

    @property
    def literals(self) -> frozenset[str]:
        """Texts that the parser ignores between calls: `skip`, `begin` and `end`."""
        return frozenset((*self.skip, *self.begin, self.end)) - {""}


_WITH_PARAMETERS = '{"name": "$name", "parameters": $arguments}'
HERMES = ToolFormat(
    name="hermes",
    begin=("<tool_call>",),
    end="</tool_call>",
    head="\n",
    separator="\n</tool_call>\n<tool_call>\n",
    tail="\n",
)
LLAMA = ToolFormat(
    name="llama",
    begin=("<|python_tag|>",),
    call=_WITH_PARAMETERS,
    skip=(";",),
    bare=True,
    parallel=False,
)
MISTRAL_LIST = ToolFormat(name="mistral", begin=("[TOOL_CALLS]",), short_ids=True)
MISTRAL_NAMED = ToolFormat(
    name="mistral-args",
    begin=("[TOOL_CALLS]",),
    head="",
    call="$name[ARGS]$arguments",
    separator="[TOOL_CALLS]",
    tail="",
    named=True,
    name_ends=("[CALL_ID]", "[ARGS]", "{"),
    short_ids=True,
)
PHI = ToolFormat(name="phi", begin=("<|tool_call|>", "functools"), end="<|/tool_call|>")
GEMMA = ToolFormat(
    name="gemma",
    begin=("```tool_code", "```tool_call", "```json"),
    end="```",
    call=_WITH_PARAMETERS,
    bare=True,
    inner="python",
)
DEEPSEEK = ToolFormat(
    name="deepseek",
    begin=("<｜tool▁calls▁begin｜>",),
    end="<｜tool▁calls▁end｜>",
    head="<｜tool▁call▁begin｜>",
    call="function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    separator="\n<｜tool▁call▁begin｜>",
    tail="",
    named=True,
    name_ends=("\n",),
    skip=("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "```json", "```", "<｜tool▁call▁end｜>"),
)
QWEN_XML = replace(HERMES, name="qwen-xml", begin=("<tool_call>", "<function="), inner="xml")
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

#: Texts in a chat template, and the format of tool calls that they show. The first row whose texts are
#: all in the template counts.
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
    """Return the format of a model's tool calls (GENERIC if none is recognized), and the reason."""
    for signs, family in _SIGNS:
        if all(sign in template for sign in signs):
            return family, f"the chat template has {signs[0]}"
    if architecture.startswith("gemma"):
        return GEMMA, f"the architecture is {architecture}"
    if "mistral" in name.lower():
        return MISTRAL_LIST, "the model's name contains mistral"
    return GENERIC, "the chat template shows no notation for calls"


def hold_back(text: str, markers: Sequence[str]) -> tuple[str, str]:
    """Split off the end of `text` if that may be the beginning of a marker: ("so ", "<tool_")."""
    n_held = max((len(marker) for marker in markers), default=1) - 1
    first_characters = {marker[:1] for marker in markers}
    for start in range(max(0, len(text) - n_held), len(text)):
        if text[start] in first_characters and could_become(text[start:], markers):
            return text[:start], text[start:]
    return text, ""


def split_at_marker(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Split `text` at its first marker: (text before, marker, text after).

    Without a marker: (text before, "", end of `text`); the end is "" unless it may begin a marker.
    """
    places = [(start, -len(marker)) for marker in markers if (start := text.find(marker)) >= 0]
    if not places:
        before, held = hold_back(text, markers)
        return before, "", held
    start, length = min(places)
    return text[:start], text[start : start - length], text[start - length :]


def could_become(text: str, literals: Sequence[str]) -> bool:
    """Return whether `text` is the incomplete beginning of one of the literals."""
    return any(len(literal) > len(text) and literal.startswith(text) for literal in literals)
