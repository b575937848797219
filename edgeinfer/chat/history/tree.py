"""Pure functions over the tree of a conversation's turns: paths, siblings, the leaf of a branch."""

from __future__ import annotations

from collections.abc import Mapping

from edgeinfer.chat.history.values import Turn

Turns = Mapping[int, Turn]


def path(turns: Turns, head_id: int | None) -> list[Turn]:
    """The turns from the first to `head_id`; empty when there is none."""
    walked: list[Turn] = []
    at = turns.get(head_id) if head_id is not None else None
    while at is not None:
        walked.append(at)
        at = turns.get(at.parent_id) if at.parent_id is not None else None
    walked.reverse()
    return walked


def siblings(turns: Turns, turn_id: int) -> list[Turn]:
    """The alternatives of a turn, itself among them, oldest first."""
    turn = turns[turn_id]
    return sorted(
        (t for t in turns.values() if t.parent_id == turn.parent_id and t.role == turn.role),
        key=lambda t: t.id,
    )


def leaf(turns: Turns, turn_id: int) -> int:
    """The newest end of the branches that go through `turn_id`: what was last seen there."""
    children: dict[int, int] = {}
    for turn in turns.values():
        if turn.parent_id is not None:
            children[turn.parent_id] = max(turn.id, children.get(turn.parent_id, 0))
    at = turn_id
    while at in children:
        at = children[at]
    return at


def sent(turns_of_path: list[Turn]) -> tuple[str, list[Turn]]:
    """Return the summary of what was cut off ("" when nothing was), and the turns after the cut."""
    for index in range(len(turns_of_path) - 1, -1, -1):
        summary = turns_of_path[index].cut_summary
        if summary is not None:
            return summary, turns_of_path[index:]
    return "", turns_of_path
