"""Normalize coding agents' prompts, so that sessions share a longer cached prefix; predict the prefix.

Agents write lines that change with each request or session (date, working directory, billing header)
before instructions and tools. The shared prefix ends at the first such line. So lines that are useless
to the model are dropped, and the others are moved after the shared prefix. The config key
`normalize-prompts` switches rules off by name. Prompts of other clients are not changed.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Collection, Sequence
from datetime import date
from typing import Literal, NamedTuple

import msgspec

from edgeinfer.agents.known_agents import agent_of
from edgeinfer.config.config_file import PromptRule
from edgeinfer.runtime.requests import Message

Turns = tuple[Message, ...]


def _lines(*patterns: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:{'|'.join(patterns)})", re.MULTILINE)


class Rule(NamedTuple):
    """A rule of prompt normalization: text of system turns that matches `pattern` is moved or dropped.

    `to` says where the text goes. A rule without a pattern has a function in this module instead.
    """

    name: PromptRule
    description: str
    to: Literal["dropped", "system turn", "first user turn", "last turn", "where it was"]
    pattern: re.Pattern[str] | None = None


RULES = (
    Rule(
        "standing",
        "a system turn after the first user turn, before any answer: Claude Code's agents and skills",
        "system turn",
    ),
    Rule(
        "billing-header",
        "`x-anthropic-billing-header: …` of Claude Code, which only a billing system needs",
        "dropped",
        _lines(r"x-anthropic-billing-header:.*\n?"),
    ),
    Rule(
        "day",
        "a line `Today's date is …` or `Current date: …`",
        "first user turn",
        _lines(r"[ \t]*(?i:today's date(?: is|:)|current date:) (?=.*\d\d)[\w ,./-]{6,40}(?:\n|\Z)"),
    ),
    Rule(
        "environment",
        "lines that name a project's folder; in Codex's turn about it, such parts move to the end",
        "first user turn",
        _lines(  # lines as pi, Claude Code, opencode and qwen-code write them
            r"Current working directory: .*\n?",
            r" - (?:Primary working directory|Is a git repository): .*\n?",
            r"  (?:Working directory|Workspace root folder|Is directory a git repo): .*\n?",
            r"You have a persistent file-based memory at `[^`\n]+`\. ?",
            r"- PROJECT memory [^`\n]*`[^`\n]+`\n?",
            r"## /\S*/memory/MEMORY\.md\n?",
        ),
    ),
    Rule("note", "goose's `<info-msg>` with time and folder, one per request", "last turn"),
    Rule(
        "reminder",
        "opencode's `<system-reminder>` about its mode, which moves to the newest user turn",
        "where it was",
    ),
)
NAMES = tuple(rule.name for rule in RULES)

#: Tags around a reminder, i.e. a text that an agent adds to the user's text.
_REMINDER = ("<system-reminder>", "</system-reminder>")
#: Maximum number of stored reminders, and maximum number of characters of each.
_MAX_REMINDERS = 256
_MAX_REMINDER_LENGTH = 16_384
#: Tag with which Codex's user turn about its environment begins, and the elements in it that name
#: folders.
_CONTEXT = "<environment_context>"
_CWD = re.compile(r"^ *<cwd>.*</cwd>\n", re.MULTILINE)
_ROOTS = ("<workspace_roots>", "</workspace_roots>")
#: Matches goose's note about time, folder and tasks. Each request has the note at another position.
_NOTE = re.compile(r"\n*<info-msg>\nIt is currently .*?</info-msg>\n*", re.DOTALL)


class PromptNormalizer:
    """Applies the rules with the names in `rules` to the requests of one endpoint."""

    def __init__(self, rules: Collection[PromptRule] = NAMES) -> None:
        self.rules = tuple(rules)
        self._reminders = Reminders()

    def normalize(
        self, turns: Sequence[Message], user_agent: str, *, cache_salt: str | None = None
    ) -> tuple[Turns, tuple[PromptRule, ...]]:
        """Return the normalized turns, and the names of the rules that changed them.

        Requests of an unknown `user_agent` are not changed. A reminder that a client has removed
        is restored if an earlier request with the same `cache_salt` had it; none is restored if
        `cache_salt` is None, i.e. if the request stores no prefix.
        """
        if not agent_of(user_agent):
            return tuple(turns), ()
        normalized, applied = normalize(turns, self.rules)
        if cache_salt is None or "reminder" not in self.rules:
            return normalized, applied
        restored = self._reminders.restore(normalized, cache_salt)
        return restored, (*applied, "reminder") if restored != normalized else applied


class Reminders:
    """Restores reminders (`<system-reminder>` texts) that a client has removed from earlier turns.

    opencode's plan mode adds a reminder to the newest user turn, and removes the previous turn's. As a
    result, the previous turn and all later ones would be prefilled again. Reminders are restored only
    while the newest user turn has one.
    """

    def __init__(self) -> None:
        self._by_conversation: OrderedDict[bytes, str] = OrderedDict()

    def restore(self, turns: Sequence[Message], cache_salt: str) -> Turns:
        """Return the turns, with the reminders that earlier requests with this `cache_salt` had."""
        users = [turn for turn in turns if turn.role == "user"]
        if not users or not _reminder(users[-1]):
            return tuple(turns)
        conversation = hashlib.blake2b(cache_salt.encode(), digest_size=16)
        restored = []
        for turn in turns:
            reminder = _reminder(turn)
            plain = _with_content(turn, turn.content.removesuffix(reminder))
            if not _is_system(turn):
                conversation.update(msgspec.json.encode(plain))
            if reminder:
                self._note(conversation.digest(), reminder)
            elif turn.role == "user":
                reminder = self._by_conversation.get(conversation.digest(), "")
            restored.append(_with_content(plain, plain.content + reminder))
        return tuple(restored)

    def _note(self, conversation: bytes, reminder: str) -> None:
        self._by_conversation[conversation] = reminder
        self._by_conversation.move_to_end(conversation)
        if len(self._by_conversation) > _MAX_REMINDERS:
            self._by_conversation.popitem(last=False)


def _reminder(turn: Message) -> str:
    """Return the reminder at the end of a user turn (not one at its beginning); "" for none."""
    start = turn.content.rfind(_REMINDER[0])
    is_last = turn.role == "user" and turn.content.rstrip().endswith(_REMINDER[1])
    is_short = len(turn.content) - start <= _MAX_REMINDER_LENGTH
    return turn.content[start:] if is_last and start > 0 and is_short else ""


def normalize(
    turns: Sequence[Message], rules: Collection[PromptRule] = NAMES
) -> tuple[Turns, tuple[PromptRule, ...]]:
    """Apply the rules; return the new turns, and the names of the rules that changed a turn."""
    system = list(itertools.takewhile(_is_system, turns))
    messages = list(turns[len(system) :])
    applied: list[PromptRule] = []
    if "standing" in rules and _merge_standing(system, messages):
        applied.append("standing")
    moved = ""
    has_user = any(turn.role == "user" for turn in messages)
    for rule in RULES:
        if rule.pattern is None or rule.name not in rules or not (has_user or rule.to == "dropped"):
            continue
        if lines := _cut_lines(rule.pattern, system):
            applied.append(rule.name)
            moved += lines if rule.to == "first user turn" else ""
    if moved:
        _put_before_question(messages, moved)
    if "environment" in rules and _put_folders_last(messages):
        applied.append("environment")
    if "note" in rules and _put_note_last(messages):
        applied.append("note")
    turns = (*(turn for turn in system if turn.content), *messages)
    return turns, tuple(dict.fromkeys(applied))


def _is_system(turn: Message) -> bool:
    return turn.role in ("system", "developer")


def _merge_standing(system: list[Message], messages: list[Message]) -> bool:
    """Move system turns before the first answer to the end of `system`; return whether any moved."""
    before = list(itertools.takewhile(lambda turn: turn.role not in ("assistant", "tool"), messages))
    standing = list(filter(_is_system, before))
    if not standing or not system:
        return False
    messages[: len(before)] = [turn for turn in before if turn.role == "user"]
    merged = "\n\n".join(turn.content for turn in (system[-1], *standing))
    system[-1] = _with_content(system[-1], merged)
    return True


def _cut_lines(pattern: re.Pattern[str], system: list[Message]) -> str:
    """Remove matching lines from the system turns, in place; return them, one per line."""
    cut_lines = [line.strip() for turn in system for line in pattern.findall(turn.content)]
    system[:] = [_with_content(turn, pattern.sub("", turn.content)) for turn in system]
    return "".join(f"{line}\n" for line in cut_lines)


def _put_before_question(messages: list[Message], lines: str) -> None:
    """Put lines before the user's first text, but after the reminders that precede it."""
    index = next(i for i, turn in enumerate(messages) if turn.role == "user")
    text = messages[index].content
    position = 0
    while (
        text.startswith(_REMINDER[0], position)
        and (reminder_end := text.find(_REMINDER[1], position)) >= 0
    ):
        position = reminder_end + len(_REMINDER[1])
        while text.startswith("\n", position):
            position += 1
    messages[index] = _with_content(messages[index], f"{text[:position]}{lines}\n{text[position:]}")


def _put_folders_last(messages: list[Message]) -> bool:
    """In Codex's turn about its environment, move folders to the end; return whether any moved."""
    index = next((i for i, t in enumerate(messages) if t.content.startswith(_CONTEXT)), None)
    if index is None or any(turn.role != "user" for turn in messages[: index + 1]):
        return False
    text = messages[index].content
    for name in _CWD.findall(text)[:1]:
        text = _move(text, text.find(name), name, f"</{_CONTEXT[1:]}")
    begin = text.find(_ROOTS[0])
    roots_end = text.find(_ROOTS[1], begin)
    if 0 <= begin < roots_end:
        text = _move(text, begin, text[begin : roots_end + len(_ROOTS[1])], "</filesystem>")
    is_changed = text != messages[index].content
    messages[index] = _with_content(messages[index], text)
    return is_changed


def _put_note_last(messages: list[Message]) -> bool:
    """Move the latest of goose's notes to the end, remove earlier ones; return whether any existed."""
    note = ""
    remaining = []
    for turn in messages:
        if turn.role == "user" and (notes := _NOTE.findall(turn.content)):
            note = notes[-1].strip()
            content = _NOTE.sub("\n", turn.content).strip("\n")
            remaining += [_with_content(turn, content)] if content else []
        else:
            remaining.append(turn)
    if not note or not remaining or remaining[-1].role not in ("user", "tool"):
        return False
    messages[:] = [*remaining[:-1], _with_content(remaining[-1], f"{remaining[-1].content}\n\n{note}")]
    return True


def _move(text: str, position: int, section: str, before: str) -> str:
    """Move `section` (at `position`) to just before the next occurrence of `before`, if any."""
    target = text.find(before, position)
    if target < 0:
        return text
    return text[:position] + text[position + len(section) : target] + section + text[target:]


def _with_content(turn: Message, content: str) -> Message:
    return msgspec.structs.replace(turn, content=content)


_FOLDER = re.compile(r"[Ww]orking directory: (/[^\n]*)|<cwd>(/[^<\n]*)</cwd>")
_DAY_LINE = re.compile(r"(?:[Tt]oday's date(?: is|:)|[Cc]urrent date:|<current_date>)[^\n]*")
_GIT = re.compile(r"((?:Is a git repository|Is directory a git repo): )(true|false|yes|no)\b")
#: Matches each character of a project's path that agents replace by `-` in the name of the project's
#: memory folder.
_NOT_IN_SLUG = re.compile(r"[^A-Za-z0-9]")
#: Maximum length (characters) of markup between the last line that names the folder and user text.
_MARKUP = 80


def predict_prefix(text: str, folder: str, day: date, *, is_repository: bool) -> str:
    """Return the first lines of the next session's prompt, predicted from `text`, an earlier prompt.

    Only the folder, the day, and whether the folder is a git repository are replaced; a `text` that
    names no folder is returned unchanged. `launch` prefills the prediction while the agent starts.
    Without this, a new session of Codex with a 4B model takes at least three times as long to its first
    token (decision 087). If the prediction is wrong, the prompt is prefilled from the difference on.
    """
    folders = _FOLDER.findall(text)
    if not folders:
        return text
    before = "".join(folders[-1]).strip()
    text = _DAY_LINE.sub(lambda line: _with_day(line[0], day), text)
    answers = {"true": "true", "false": "true", "yes": "yes", "no": "yes"}
    if not is_repository:
        answers = {"true": "false", "false": "false", "yes": "no", "no": "no"}
    text = _GIT.sub(lambda line: line[1] + answers[line[2]], text)
    for old_name, new in ((before, folder), (_slug(before), _slug(folder))):
        text = text.replace(old_name, new)
    return text[: _end_of_lines(text, (folder, _slug(folder)))]


def _slug(folder: str) -> str:
    return _NOT_IN_SLUG.sub("-", folder)


def _with_day(line: str, day: date) -> str:
    for pattern, day_text in (
        (r"20\d\d-\d\d-\d\d", day.isoformat()),
        (r"[A-Z][a-z][a-z] [A-Z][a-z][a-z] \d\d 20\d\d", f"{day:%a %b %d %Y}"),
        (r"[A-Z][a-z]+day, [A-Z][a-z]+ \d{1,2}, 20\d\d", f"{day:%A, %B} {day.day}, {day.year}"),
    ):
        line = re.sub(pattern, day_text, line)
    return line


def _end_of_lines(text: str, names: tuple[str, ...]) -> int:
    """Return the position after the last line with one of `names`, and after the markup below it."""
    last = max(text.rfind(name) + len(name) for name in names)
    last = max([last, *(match.end() for match in _GIT.finditer(text))])
    line_end = text.find("\n", last) + 1 or len(text)
    return line_end + 1 if text.startswith("\n", line_end) else line_end + _MARKUP
