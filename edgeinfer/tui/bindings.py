"""Every key of the chat with its action; `[chat.keys]` of config.toml and the help use this table."""

from __future__ import annotations

from typing import Literal, NamedTuple

from textual.binding import Binding

Where = Literal["chat", "composer", "turn", "models", "sessions"]


class Key(NamedTuple):
    """A key binding in the part `where` of the chat. Commas separate alternative `keys`.

    `action` is Textual's name of the action. `priority`: the keys also work while a text field has the
    focus.
    """

    id: str
    keys: str
    action: str
    tooltip: str
    where: Where
    priority: bool = False


#: The bindings of each part of the chat: id, keys, action and tooltip.
_ROWS: dict[Where, tuple[tuple[str, str, str, str], ...]] = {
    "composer": (
        ("send", "enter", "send", "Send what is typed, or take the chosen completion"),
        ("newline", "ctrl+j,shift+enter,alt+enter", "newline", "Start a new line"),
        ("complete", "tab", "complete", "Take the chosen completion"),
        ("undo", "ctrl+underscore", "undo", "Undo the last change of the text"),
    ),
    "chat": (
        ("editor", "ctrl+o", "slash('editor')", "Write in your $VISUAL or $EDITOR"),
        ("stop", "escape", "stop", "Edit the queued message, stop the answer, close a list"),
        ("copy-or-quit", "ctrl+c", "interrupt", "Copy a selection, or stop; twice: quit"),
        ("regenerate", "ctrl+r", "slash('regen')", "Answer again; earlier answers are kept"),
        ("continue", "ctrl+g", "slash('continue')", "Continue an answer that was cut"),
        ("previous", "alt+left", "slash('prev')", "Show the previous alternative"),
        ("next", "alt+right", "slash('next')", "Show the next alternative"),
        ("copy-answer", "ctrl+y", "slash('copy')", "Copy the last answer"),
        ("copy-code", "ctrl+b", "slash('copy code')", "Copy the last code block"),
        ("fold", "ctrl+t", "slash('reasoning')", "Unfold or fold the model's reasoning"),
        ("turn-up", "ctrl+up,alt+up", "walk(-1)", "Choose the previous turn to act on"),
        ("turn-down", "ctrl+down,alt+down", "walk(1)", "Choose the next turn, or type again"),
        ("scroll-up", "pageup", "scroll(-1)", "One screen up"),
        ("scroll-down", "pagedown", "scroll(1)", "One screen down"),
        ("scroll-home", "ctrl+home", "scroll(-9)", "To the first turn"),
        ("scroll-end", "ctrl+end", "scroll(9)", "To the tail, and follow it"),
        ("new", "ctrl+n", "slash('new')", "Begin a new conversation"),
        ("help", "f1", "slash('help')", "Commands and keys"),
        ("models", "f2", "slash('model')", "Pick, pull or warm a model"),
        ("sessions", "f3", "slash('sessions')", "List and search conversations"),
        ("repaint", "ctrl+l", "app.repaint", "Draw the whole screen again"),
        ("suspend", "ctrl+z", "suspend", "Back to the shell; `fg` returns"),
        ("quit", "ctrl+q", "slash('quit')", "Leave; everything is stored"),
    ),
    "turn": (
        ("turn-edit", "enter,e", "turn('edit')", "Edit the question and ask again"),
        ("turn-copy", "c", "turn('copy')", "Copy this turn"),
        ("turn-code", "y", "turn('code')", "Copy this turn's code, block after block"),
        ("turn-fork", "f", "turn('fork')", "Copy the conversation up to here"),
        ("turn-fold", "space", "turn('fold')", "Unfold or fold"),
        ("turn-previous", "left", "turn('prev')", "The previous alternative"),
        ("turn-next", "right", "turn('next')", "The next alternative"),
    ),
    "models": (
        ("model-warm", "ctrl+w", "warm", "Build a snapshot, for a start in 0.1 s"),
        ("model-cancel", "ctrl+x", "cancel", "Stop the pull; what was fetched is kept"),
    ),
    "sessions": (
        ("session-delete", "ctrl+d", "delete", "Delete it; undo brings it back"),
        ("session-undo", "ctrl+u", "undelete", "Bring back what was deleted last"),
    ),
}
#: Parts of the chat whose keys, except for Esc, also work while a text field has the focus.
_PRIOR: tuple[Where, ...] = ("chat", "models", "sessions")
_KEY_ROWS = ((where, row) for where, rows in _ROWS.items() for row in rows)
KEYS = tuple(Key(*row, where, where in _PRIOR and row[0] != "stop") for where, row in _KEY_ROWS)

BY_ID = {key.id: key for key in KEYS}

HEADINGS: dict[Where, str] = {
    "composer": "While typing",
    "chat": "Everywhere",
    "turn": "On a chosen turn",
    "models": "In the model picker",
    "sessions": "In the list of conversations",
}


def bindings(where: Where) -> list[Binding]:
    """Return the key bindings of one part of the chat."""
    return [
        Binding(k.keys, k.action, k.tooltip, show=False, priority=k.priority, id=k.id)
        for k in KEYS
        if k.where == where
    ]


def format_keys(keys: str) -> str:
    """Format keys for people: `ctrl+j,shift+enter` → `Ctrl+J, Shift+Enter`."""
    names = {"escape": "Esc", "pageup": "PgUp", "pagedown": "PgDn", "underscore": "_"}
    return ", ".join(
        "+".join(names.get(p, p.capitalize()) for p in key.strip().split("+"))
        for key in keys.split(",")
    )
