"""Every key of the chat: its id for `[chat.keys]`, action and reason; help reads this."""

from __future__ import annotations

from typing import Literal, NamedTuple

from textual.binding import Binding

Where = Literal["chat", "composer", "turn", "models", "sessions"]


class Key(NamedTuple):
    """One binding. `keys` are comma-separated; `priority` overrides a focused text field."""

    id: str
    keys: str
    action: str
    label: str
    tooltip: str
    where: Where
    priority: bool = False


#: Per place: id, keys, action, label, tooltip.
_ROWS: dict[Where, tuple[tuple[str, str, str, str, str], ...]] = {
    "composer": (
        ("send", "enter", "send", "Send", "Send what is typed, or take the chosen completion"),
        ("newline", "ctrl+j,shift+enter,alt+enter", "newline", "New line", "Start a new line"),
        ("complete", "tab", "complete", "Complete", "Take the chosen completion"),
        ("undo", "ctrl+underscore", "undo", "Undo", "Undo the last change of the text"),
    ),
    "chat": (
        ("editor", "ctrl+o", "slash('editor')", "Editor", "Write in your $VISUAL or $EDITOR"),
        ("stop", "escape", "stop", "Stop", "Take back what is queued, stop the answer, close a list"),
        (
            "copy-or-quit",
            "ctrl+c",
            "interrupt",
            "Copy or quit",
            "Copy a selection, or stop; twice: quit",
        ),
        (
            "regenerate",
            "ctrl+r",
            "slash('regen')",
            "Regenerate",
            "Answer again; earlier answers are kept",
        ),
        ("continue", "ctrl+g", "slash('continue')", "Continue", "Continue an answer that was cut"),
        ("previous", "alt+left", "slash('prev')", "Previous", "Show the previous alternative"),
        ("next", "alt+right", "slash('next')", "Next", "Show the next alternative"),
        ("copy-answer", "ctrl+y", "slash('copy')", "Copy answer", "Copy the last answer"),
        ("copy-code", "ctrl+b", "slash('copy code')", "Copy code", "Copy the last code block"),
        ("fold", "ctrl+t", "slash('reasoning')", "Thoughts", "Unfold or fold the model's reasoning"),
        ("turn-up", "ctrl+up,alt+up", "walk(-1)", "Turn up", "Choose the previous turn to act on"),
        (
            "turn-down",
            "ctrl+down,alt+down",
            "walk(1)",
            "Turn down",
            "Choose the next turn, or type again",
        ),
        ("scroll-up", "pageup", "scroll(-1)", "Scroll up", "One screen up"),
        ("scroll-down", "pagedown", "scroll(1)", "Scroll down", "One screen down"),
        ("scroll-home", "ctrl+home", "scroll(-9)", "Top", "To the first turn"),
        ("scroll-end", "ctrl+end", "scroll(9)", "Bottom", "To the tail, and follow it"),
        ("new", "ctrl+n", "slash('new')", "New", "Begin a new conversation"),
        ("help", "f1", "slash('help')", "Help", "Commands and keys"),
        ("models", "f2", "slash('model')", "Models", "Pick, pull or warm a model"),
        ("sessions", "f3,ctrl+l", "slash('sessions')", "Sessions", "List and search conversations"),
        ("suspend", "ctrl+z", "suspend", "Suspend", "Back to the shell; `fg` returns"),
        ("quit", "ctrl+q", "slash('quit')", "Quit", "Leave; everything is stored"),
    ),
    "turn": (
        ("turn-edit", "enter,e", "turn('edit')", "Edit", "Edit the question and ask again"),
        ("turn-copy", "c", "turn('copy')", "Copy", "Copy this turn"),
        ("turn-code", "y", "turn('code')", "Copy code", "Copy this turn's code, block after block"),
        ("turn-fork", "f", "turn('fork')", "Fork", "Copy the conversation up to here"),
        ("turn-fold", "space", "turn('fold')", "Unfold", "Unfold or fold"),
        ("turn-previous", "left", "turn('prev')", "Previous", "The previous alternative"),
        ("turn-next", "right", "turn('next')", "Next", "The next alternative"),
    ),
    "models": (
        ("model-warm", "ctrl+w", "warm", "Warm", "Build a snapshot, for a start in 0.1 s"),
        ("model-cancel", "ctrl+x", "cancel", "Cancel", "Stop the pull; what was fetched is kept"),
    ),
    "sessions": (
        ("session-rename", "ctrl+r", "rename", "Rename", "Give it another title"),
        ("session-delete", "ctrl+d", "delete", "Delete", "Delete it; undo brings it back"),
        ("session-undo", "ctrl+u", "undelete", "Undo", "Bring back what was deleted last"),
        ("session-export", "ctrl+e", "export", "Export", "Write it to a Markdown file"),
    ),
}
#: Places whose keys go before a text field's, but for Esc.
_PRIOR: tuple[Where, ...] = ("chat", "models", "sessions")
KEYS = tuple(
    Key(*row, where, where in _PRIOR and row[0] != "stop")
    for where, rows in _ROWS.items()
    for row in rows
)

BY_ID = {key.id: key for key in KEYS}

HEADINGS: dict[Where, str] = {
    "composer": "While typing",
    "chat": "Everywhere",
    "turn": "On a chosen turn",
    "models": "In the model picker",
    "sessions": "In the list of conversations",
}


def bindings(where: Where) -> list[Binding]:
    """The bindings of one place, as Textual takes them."""
    return [
        Binding(k.keys, k.action, k.label, show=False, priority=k.priority, tooltip=k.tooltip, id=k.id)
        for k in KEYS
        if k.where == where
    ]


def shown(keys: str) -> str:
    """Keys as a person reads them: `ctrl+j,shift+enter` → `Ctrl+J, Shift+Enter`."""
    names = {"escape": "Esc", "pageup": "PgUp", "pagedown": "PgDn", "underscore": "_"}
    return ", ".join(
        "+".join(names.get(p, p.capitalize()) for p in key.strip().split("+"))
        for key in keys.split(",")
    )
