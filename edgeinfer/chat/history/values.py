"""Conversations as plain values, and functions on the tree of a conversation's turns.

Editing a question or regenerating an answer adds a sibling in the tree; nothing is overwritten.
`Conversation.head_id` is the last turn of the open branch, which `branch_to` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from edgeinfer.tools.tool_use import ToolUse
from edgeinfer.units import format_cost

Role = Literal["user", "assistant"]

#: Status of a turn. "streaming" is stored while a process writes the turn; if the process has died,
#: readers get "interrupted".
Status = Literal["complete", "stopped", "length", "failed", "streaming", "interrupted"]

#: Statuses of an answer that `/continue` can continue.
CONTINUABLE: frozenset[Status] = frozenset({"stopped", "length", "failed", "interrupted"})


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """An attached file: `text` with its number of `tokens` (0: not counted), or a picture's `data`."""

    name: str
    text: str = ""
    tokens: int = 0
    data: bytes = b""

    @property
    def is_picture(self) -> bool:
        return bool(self.data)


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of an answer. `seconds` is the total time; `n_ctx` is the context's size (tokens).

    Of the `prompt_tokens`, `cached_tokens` came from the prefix cache, which saved about `saved_s`
    seconds. `ttft_ms` is the time to the first token.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    ttft_ms: float = 0.0
    tokens_per_s: float = 0.0
    n_ctx: int = 0
    seconds: float = 0.0
    saved_s: float = 0.0

    @property
    def cost(self) -> str:
        """Time and savings: `3.2 s; 12,300 cached tokens saved about 4 min 10 s`; "" if unknown."""
        if not self.seconds:
            return ""
        return format_cost(self.seconds, self.cached_tokens, self.saved_s)

    @property
    def context_tokens(self) -> int:
        """Number of tokens in the context after this answer."""
        return self.prompt_tokens + self.completion_tokens


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A question or an answer. `parent_id` is the id of the previous turn, None for the first.

    If `cut_summary` is not None, the model gets this summary instead of the earlier turns. An answer
    with tool `calls` is followed by another answer, which the model writes with the calls' results.
    """

    id: int = 0
    conversation_id: int = 0
    parent_id: int | None = None
    role: Role = "user"
    content: str = ""
    reasoning: str = ""
    attachments: tuple[Attachment, ...] = ()
    calls: tuple[ToolUse, ...] = ()
    status: Status = "complete"
    error: str = ""
    model: str = ""
    stats: Stats = Stats()
    cut_summary: str | None = None
    created_ms: int = 0

    @property
    def failed_without_text(self) -> bool:
        """Return whether this is an answer that failed before its first token."""
        return self.role == "assistant" and self.status == "failed" and not (self.content or self.calls)

    @property
    def waits_for_results(self) -> bool:
        """Return whether a tool call of this answer has no result yet."""
        return any(use.status == "pending" for use in self.calls)

    @property
    def context_full(self) -> bool:
        """Return whether this answer was cut off because the context was full."""
        n_ctx = self.stats.n_ctx
        return self.status == "length" and 0 < n_ctx <= self.stats.context_tokens + 1

    @property
    def cut_off_note(self) -> str:
        """Why this answer ended early, and what to type next; "" if it is complete or failed."""
        if self.status == "stopped" and self.error:
            return f"{self.error}; stopped · /regen tries again"
        at_limit = f"stopped at {self.stats.completion_tokens:,} tokens"
        reason = {
            "length": "cut off: the context is full" if self.context_full else at_limit,
            "stopped": "stopped",
            "interrupted": "interrupted",
        }.get(self.status)
        return f"{reason} · /continue continues it" if reason else ""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation. `sampling` has the options that the user set; `draft` is text not yet sent.

    `head_id` is the last turn of the open branch. `tools`: whether tools are on (web page only).
    """

    id: int = 0
    title: str = ""
    model: str = ""
    system_prompt: str = ""
    sampling: dict[str, float | int | None] = {}
    head_id: int | None = None
    draft: str = ""
    tools: bool = False
    created_ms: int = 0
    updated_ms: int = 0

    @property
    def owner(self) -> str:
        """Name of the conversation in the prefix cache, `chat-12`; "" if it is not stored."""
        return f"chat-{self.id}" if self.id else ""


class Summary(msgspec.Struct, frozen=True):
    """A conversation in a list. `turns` counts questions; `snippet` is text around found words."""

    id: int
    title: str
    model: str
    turns: int
    updated_ms: int
    snippet: str = ""

    @property
    def length(self) -> str:
        """Number of questions: `1 question`, `12 questions`."""
        return f"{self.turns:,} question{'s' * (self.turns != 1)}"


Turns = Mapping[int, Turn]


def branch_to(turns: Turns, head_id: int | None) -> list[Turn]:
    """Return the turns of a branch, from the first to `head_id`; an empty list for None."""
    walked: list[Turn] = []
    turn = turns.get(head_id) if head_id is not None else None
    while turn is not None:
        walked.append(turn)
        turn = turns.get(turn.parent_id) if turn.parent_id is not None else None
    walked.reverse()
    return walked


def siblings(turns: Turns, turn_id: int) -> list[Turn]:
    """Return the alternatives of a turn (same parent, same role), including the turn, oldest first."""
    turn = turns[turn_id]
    same_parent = (t for t in turns.values() if t.parent_id == turn.parent_id)
    return sorted((t for t in same_parent if t.role == turn.role), key=lambda t: t.id)


def newest_leaf(turns: Turns, turn_id: int) -> int:
    """Return the id of the last turn of the newest branch that contains `turn_id`."""
    children: dict[int, int] = {}
    for turn in turns.values():
        if turn.parent_id is not None:
            children[turn.parent_id] = max(turn.id, children.get(turn.parent_id, 0))
    leaf = turn_id
    while leaf in children:
        leaf = children[leaf]
    return leaf


def sent_part(branch: list[Turn]) -> tuple[str, list[Turn]]:
    """Return the summary of dropped turns ("" for none), and the turns that requests contain."""
    for index in range(len(branch) - 1, -1, -1):
        summary = branch[index].cut_summary
        if summary is not None:
            return summary, branch[index:]
    return "", branch
