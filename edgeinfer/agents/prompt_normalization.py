"""Text that agents change in every request or session, and write where every prompt begins.

What is computed for a prompt is found again by whoever begins alike. A line that changes at the very
beginning makes every session a stranger; so such lines are left out where they tell the model nothing,
and else moved behind what sessions share. Each rule has a name, and can be switched off.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import msgspec

from edgeinfer.config.config_file import SettledLine
from edgeinfer.runtime.requests import Message

#: (what stays, what was found); the second is "" when nothing was.
Split = tuple[str, str]
_BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
_CLOCK = re.compile(
    r"^(?:the )?current (?:date and )?time(?: is\b|:).*?\d\d?:\d\d.*\n?", re.MULTILINE | re.IGNORECASE
)


def _line(pattern: re.Pattern[str]) -> Callable[[str], Split]:
    def split(text: str) -> Split:
        found = "".join(f"{line.strip()}\n" for line in pattern.findall(text))
        return (pattern.sub("", text), found) if found else (text, "")

    return split


#: A line that is a day: of Claude Code, opencode, and pi.
_DAY = re.compile(
    r"^[ \t]*(?:today's date(?: is|:)|current date:) (?=.*\d\d)[\w ,./-]{6,40}(?:\n|\Z)",
    re.MULTILINE | re.IGNORECASE,
)
#: Lines, or the beginnings of lines, that name a project's folder: of pi, Claude Code, opencode, and
#: qwen-code.
_FOLDERS = re.compile(
    r"^(?:Current working directory: .*\n?"
    r"| - (?:Primary working directory|Is a git repository): .*\n?"
    r"|  (?:Working directory|Workspace root folder|Is directory a git repo): .*\n?"
    r"|You have a persistent file-based memory at `[^`\n]+`\. ?"
    r"|- PROJECT memory [^`\n]*`[^`\n]+`\n?"
    r"|## /\S*/memory/MEMORY\.md\n?)",
    re.MULTILINE,
)
#: What clients write before a person's words, in the same turn.
_REMINDER = ("<system-reminder>", "</system-reminder>")
#: Reminders that are remembered, and the longest (characters).
_REMEMBERED = 256
_REMINDER_MOST = 16_384
#: Codex's turn about the folder, and the parts of it that name one.
_CONTEXT = "<environment_context>"
_CWD = re.compile(r"^ *<cwd>.*</cwd>\n", re.MULTILINE)
_ROOTS = ("<workspace_roots>", "</workspace_roots>")
#: goose's note about the moment, the folder and its tasks, which it puts elsewhere in each request.
_NOTE = re.compile(r"\n*<info-msg>\nIt is currently .*?</info-msg>\n*", re.DOTALL)


def _none(text: str) -> Split:
    """Find nothing: the rule is about turns."""
    return text, ""


class Rule(NamedTuple):
    """What is looked for in the turns of the system before anybody spoke, and where it goes."""

    name: SettledLine
    about: str
    split: Callable[[str], Split]
    to: Literal["nowhere", "system turn", "first user turn", "last turn", "where it was"]


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
    Rule("day", "a line `Today's date is …` or `Current date: …`", _line(_DAY), "first user turn"),
    Rule(
        "environment",
        "lines that name a project's folder; in Codex's turn about it, the parts that do go last",
        _line(_FOLDERS),
        "first user turn",
    ),
    Rule(
        "clock",
        "a line `Current time is 12:34 …`, as home automation and chat fronts write it",
        _line(_CLOCK),
        "last turn",
    ),
    Rule(
        "note",
        "goose's `<info-msg>` about the moment and the folder, of which each request has one",
        _none,
        "last turn",
    ),
    Rule(
        "reminder",
        "opencode's `<system-reminder>` about its mode, which moves to the newest user turn",
        _none,
        "where it was",
    ),
)
NAMES = tuple(rule.name for rule in RULES)


class Reminders:
    """Remembers which user turns ended with a reminder, to put it back where a client leaves it out.

    opencode's plan mode adds one to the newest user turn and takes it from the one before, which would
    be computed again with all behind it. Only if the newest user turn has one, others are put back.
    """

    def __init__(self) -> None:
        self._by_conversation: OrderedDict[bytes, str] = OrderedDict()

    def restore(self, turns: Sequence[Message], owner: str) -> tuple[Message, ...]:
        """Return the turns with the reminders that they had; `owner`'s stay among its own requests."""
        users = [turn for turn in turns if turn.role == "user"]
        if not users or not _reminder(users[-1]):
            return tuple(turns)
        seen = hashlib.blake2b(owner.encode(), digest_size=16)
        restored = []
        for turn in turns:
            reminder = _reminder(turn)
            plain = _saying(turn, turn.content.removesuffix(reminder))
            if turn.role not in ("system", "developer"):
                seen.update(msgspec.json.encode(plain))
            if reminder:
                self._note(seen.digest(), reminder)
            elif turn.role == "user":
                reminder = self._by_conversation.get(seen.digest(), "")
            restored.append(_saying(plain, plain.content + reminder))
        return tuple(restored)

    def _note(self, conversation: bytes, reminder: str) -> None:
        self._by_conversation[conversation] = reminder
        self._by_conversation.move_to_end(conversation)
        if len(self._by_conversation) > _REMEMBERED:
            self._by_conversation.popitem(last=False)


def _reminder(turn: Message) -> str:
    """The reminder at the end of a user turn, behind a person's words."""
    at = turn.content.rfind(_REMINDER[0])
    is_last = turn.role == "user" and turn.content.rstrip().endswith(_REMINDER[1])
    return turn.content[at:] if is_last and at > 0 and len(turn.content) - at <= _REMINDER_MOST else ""


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
    ahead: list[str] = []
    for rule in RULES:
        if rule.name in wanted and _apply(rule, system, others, ahead):
            applied.append(rule.name)
    if ahead:
        _put_ahead(others, "".join(ahead))
    if "environment" in wanted and _folders_last(others) and "environment" not in applied:
        applied.append("environment")
    if "note" in wanted and _note_last(others):
        applied.append("note")
    return (*(turn for turn in system if turn.content), *others), tuple(applied)


def _bring_forward(system: list[Message], others: list[Message]) -> bool:
    """Merge system turns before the first answer into the system turn; return whether any moved."""
    end = next((i for i, t in enumerate(others) if t.role in ("assistant", "tool")), len(others))
    standing = [turn for turn in others[:end] if turn.role in ("system", "developer")]
    if not standing or not system:
        return False
    others[:end] = [turn for turn in others[:end] if turn.role == "user"]
    system[-1] = _saying(system[-1], "\n\n".join(turn.content for turn in (system[-1], *standing)))
    return True


def _apply(rule: Rule, system: list[Message], others: list[Message], ahead: list[str]) -> bool:
    """Apply one rule in place, text for the first user turn to `ahead`; return whether it matched."""
    split = [rule.split(turn.content) for turn in system]
    found = "".join(one for _, one in split)
    target = _target(rule, others)
    if not found or target is None:
        return False
    system[:] = [_saying(turn, rest) for turn, (rest, _) in zip(system, split, strict=True)]
    if rule.to == "first user turn":
        ahead.append(found)
    elif rule.to == "last turn":
        others[target] = _saying(others[target], f"{others[target].content}\n\n{found.rstrip()}")
    return True


def _put_ahead(others: list[Message], found: str) -> None:
    """Put lines before what a person says first: that is new each time, the lines less so."""
    place = next(i for i, turn in enumerate(others) if turn.role == "user")
    text = others[place].content
    at = 0
    while text.startswith(_REMINDER[0], at) and (end := text.find(_REMINDER[1], at)) >= 0:
        at = end + len(_REMINDER[1])
        while text.startswith("\n", at):
            at += 1
    others[place] = _saying(others[place], f"{text[:at]}{found}\n{text[at:]}")


def _folders_last(others: list[Message]) -> bool:
    place = next((i for i, t in enumerate(others) if t.content.startswith(_CONTEXT)), None)
    if place is None or any(turn.role != "user" for turn in others[: place + 1]):
        return False
    text = others[place].content
    for name in _CWD.findall(text)[:1]:
        text = _later(text, text.find(name), name, f"</{_CONTEXT[1:]}")
    begin = text.find(_ROOTS[0])
    end = text.find(_ROOTS[1], begin)
    if 0 <= begin < end:
        text = _later(text, begin, text[begin : end + len(_ROOTS[1])], "</filesystem>")
    is_other = text != others[place].content
    others[place] = _saying(others[place], text)
    return is_other


def _note_last(others: list[Message]) -> bool:
    found = ""
    settled = []
    for turn in others:
        if turn.role == "user" and (notes := _NOTE.findall(turn.content)):
            found = notes[-1].strip()
            said = _NOTE.sub("\n", turn.content).strip("\n")
            settled += [_saying(turn, said)] if said else []
        else:
            settled.append(turn)
    if not found or not settled or settled[-1].role not in ("user", "tool"):
        return False
    others[:] = [*settled[:-1], _saying(settled[-1], f"{settled[-1].content}\n\n{found}")]
    return True


def _later(text: str, at: int, part: str, before: str) -> str:
    """`text` with the `part` that stands at `at` moved to where `before` begins, if that comes."""
    end = text.find(before, at)
    return text if end < 0 else text[:at] + text[at + len(part) : end] + part + text[end:]


def _target(rule: Rule, others: Sequence[Message]) -> int | None:
    if rule.to == "nowhere":
        return 0
    if rule.to == "first user turn":
        return next((i for i, turn in enumerate(others) if turn.role == "user"), None)
    asks = bool(others) and others[-1].role in ("user", "tool")
    return len(others) - 1 if asks else None


def _saying(turn: Message, content: str) -> Message:
    return msgspec.structs.replace(turn, content=content)
