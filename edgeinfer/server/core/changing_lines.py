"""Text that agents change in every request or session, and write where every prompt begins.

What is computed for a prompt is found again by whoever begins alike. A line that changes at the very
beginning makes every session a stranger; so such lines are left out where they tell the model nothing,
and else moved behind what sessions share. Each rule has a name, and can be switched off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import msgspec

from edgeinfer.config import SettledLine
from edgeinfer.runtime.requests import Message

#: (what stays, what was found); the second is "" when nothing was.
Split = tuple[str, str]
_BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
_CLOCK = re.compile(
    r"^(?:the )?current (?:date and )?time(?: is\b|:).*?\d\d?:\d\d.*\n?", re.MULTILINE | re.IGNORECASE
)


def _line(pattern: re.Pattern[str]) -> Callable[[str], Split]:
    """Find all lines that match."""

    def split(text: str) -> Split:
        found = "".join(pattern.findall(text))
        return (pattern.sub("", text), found) if found else (text, "")

    return split


#: Lines, or the beginnings of lines, that name a project's folder: of pi, Claude Code, and qwen-code.
_FOLDERS = re.compile(
    r"^(?:Current working directory: .*\n?"
    r"| - (?:Primary working directory|Is a git repository): .*\n?"
    r"|You have a persistent file-based memory at `[^`\n]+`\."
    r"(?: This directory already exists[^\n)]*\)\.)? ?"
    r"|- PROJECT memory [^`\n]*`[^`\n]+`\n?"
    r"|## /\S*/memory/MEMORY\.md\n?)",
    re.MULTILINE,
)


def _environment(text: str) -> Split:
    """Find the first `<env>` block, and lines. The block's ends are looked for once: a regular
    expression would go through a hostile text again and again.
    """
    found = "".join(f"{line.strip()}\n" for line in _FOLDERS.findall(text))
    text = _FOLDERS.sub("", text) if found else text
    begin = text.find("<env>")
    end = text.find("</env>", begin)
    if begin < 0 or end < 0:
        return text, found
    end += len("</env>")
    return text[:begin] + text[end:].removeprefix("\n"), f"{found}{text[begin:end]}\n"


def _none(text: str) -> Split:
    """Find nothing: the rule is about turns."""
    return text, ""


class Rule(NamedTuple):
    """What is looked for in the turns of the system before anybody spoke, and where it goes."""

    name: SettledLine
    about: str
    split: Callable[[str], Split]
    to: Literal["nowhere", "system turn", "first user turn", "last turn"]


RULES = (
    Rule(
        "standing",
        "a system turn behind the first user turn, before any answer: Claude Code's agents and skills",
        _none,
        "system turn",
    ),
    Rule(
        "billing-header",
        "`x-anthropic-billing-header: …` of Claude Code, which is for a bill and not for a model",
        _line(_BILLING),
        "nowhere",
    ),
    Rule(
        "environment",
        "an `<env>` block (folder, platform, date) of opencode, and lines of others that name a folder",
        _environment,
        "first user turn",
    ),
    Rule(
        "clock",
        "a line `Current time is 12:34 …`, as home automation and chat fronts write it",
        _line(_CLOCK),
        "last turn",
    ),
)
NAMES = tuple(rule.name for rule in RULES)


def settle(
    turns: Sequence[Message], wanted: Collection[SettledLine] = NAMES
) -> tuple[tuple[Message, ...], tuple[SettledLine, ...]]:
    """Apply the `wanted` rules: the turns as they are computed, and the names of the rules that found
    something. What has no turn to go to stays where it is.
    """
    n_system = next(
        (i for i, t in enumerate(turns) if t.role not in ("system", "developer")), len(turns)
    )
    system, others = list(turns[:n_system]), list(turns[n_system:])
    applied: list[SettledLine] = []
    if "standing" in wanted and _bring_forward(system, others):
        applied.append("standing")
    for rule in RULES:
        if rule.name in wanted and _apply(rule, system, others):
            applied.append(rule.name)
    return (*(turn for turn in system if turn.content), *others), tuple(applied)


def _bring_forward(system: list[Message], others: list[Message]) -> bool:
    """Put system turns behind the first words of a person into the system turn before; whether there
    were any.
    """
    end = next((i for i, t in enumerate(others) if t.role in ("assistant", "tool")), len(others))
    standing = [turn for turn in others[:end] if turn.role in ("system", "developer")]
    if not standing or not system:
        return False
    others[:end] = [turn for turn in others[:end] if turn.role == "user"]
    system[-1] = _saying(system[-1], "\n\n".join(turn.content for turn in (system[-1], *standing)))
    return True


def _apply(rule: Rule, system: list[Message], others: list[Message]) -> bool:
    """Apply one rule in place; whether it found anything."""
    split = [rule.split(turn.content) for turn in system]
    moved = "".join(found for _, found in split)
    target = _target(rule, others)
    if not moved or target is None:
        return False
    system[:] = [_saying(turn, rest) for turn, (rest, _) in zip(system, split, strict=True)]
    if rule.to != "nowhere":
        others[target] = _saying(others[target], f"{others[target].content}\n\n{moved.rstrip()}")
    return True


def _target(rule: Rule, others: Sequence[Message]) -> int | None:
    """The turn of `others` that takes what is moved; None where there is none."""
    if rule.to == "nowhere":
        return 0
    if rule.to == "first user turn":
        return next((i for i, turn in enumerate(others) if turn.role == "user"), None)
    asks = bool(others) and others[-1].role in ("user", "tool")
    return len(others) - 1 if asks else None


def _saying(turn: Message, content: str) -> Message:
    return msgspec.structs.replace(turn, content=content)
