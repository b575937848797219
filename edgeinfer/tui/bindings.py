"""Every key of the chat: an id to rebind it by (`[chat.keys]`), what it does, and why.

Help and settings read this.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from textual.binding import Binding

Where = Literal["chat", "composer", "turn", "models", "sessions"]


class Key(NamedTuple):
    """One binding.

    `keys` are comma-separated; `priority` takes the key even where a text field has the focus.
    """

    id: str
    keys: str
    action: str
    label: str
    tooltip: str
    where: Where
    priority: bool = False


KEYS: tuple[Key, ...] = (
    Key(
        "send", "enter", "send", "Send", "Send what is typed, or take the chosen completion", "composer"
    ),
    Key(
        "newline",
        "ctrl+j,shift+enter,alt+enter",
        "newline",
        "New line",
        "Go on in a new line",
        "composer",
    ),
    Key("complete", "tab", "complete", "Complete", "Take the chosen completion", "composer"),
    Key("undo", "ctrl+underscore", "undo", "Undo", "Undo the last change of the text", "composer"),
    Key(
        "editor",
        "ctrl+o",
        "slash('editor')",
        "Editor",
        "Write in your $VISUAL or $EDITOR",
        "chat",
        True,
    ),
    Key(
        "stop",
        "escape",
        "stop",
        "Stop",
        "Stop the answer; what is there is kept. Closes lists, leaves a chosen turn",
        "chat",
    ),
    Key(
        "copy-or-quit",
        "ctrl+c",
        "interrupt",
        "Copy, stop, quit",
        "Copy what is marked; else stop; twice: quit",
        "chat",
        True,
    ),
    Key(
        "regenerate",
        "ctrl+r",
        "slash('regen')",
        "Regenerate",
        "Answer once more; the answers so far are kept",
        "chat",
        True,
    ),
    Key(
        "continue",
        "ctrl+g",
        "slash('continue')",
        "Go on",
        "Go on with an answer that was cut",
        "chat",
        True,
    ),
    Key(
        "previous", "alt+left", "slash('prev')", "Previous", "Show the alternative before", "chat", True
    ),
    Key("next", "alt+right", "slash('next')", "Next", "Show the next alternative", "chat", True),
    Key("copy-answer", "ctrl+y", "slash('copy')", "Copy answer", "Copy the last answer", "chat", True),
    Key(
        "copy-code",
        "ctrl+b",
        "slash('copy code')",
        "Copy code",
        "Copy the last answer's last code block",
        "chat",
        True,
    ),
    Key(
        "fold",
        "ctrl+t",
        "slash('reasoning')",
        "Thoughts",
        "Unfold or fold the model's reasoning",
        "chat",
        True,
    ),
    Key(
        "turn-up",
        "ctrl+up,alt+up",
        "walk(-1)",
        "Turn up",
        "Choose the turn before, to edit, copy or fork",
        "chat",
        True,
    ),
    Key(
        "turn-down",
        "ctrl+down,alt+down",
        "walk(1)",
        "Turn down",
        "Choose the next turn, or go back to typing",
        "chat",
        True,
    ),
    Key("scroll-up", "pageup", "scroll(-1)", "Scroll up", "One screen up", "chat", True),
    Key("scroll-down", "pagedown", "scroll(1)", "Scroll down", "One screen down", "chat", True),
    Key("scroll-home", "ctrl+home", "scroll(-9)", "Top", "To the first turn", "chat", True),
    Key("scroll-end", "ctrl+end", "scroll(9)", "Bottom", "To the tail, and follow it", "chat", True),
    Key("new", "ctrl+n", "slash('new')", "New", "Begin a new conversation", "chat", True),
    Key("help", "f1", "slash('help')", "Help", "What can be typed and pressed", "chat", True),
    Key("models", "f2", "slash('model')", "Models", "Pick, pull or warm a model", "chat", True),
    Key(
        "sessions",
        "f3,ctrl+l",
        "slash('sessions')",
        "Sessions",
        "List and search conversations",
        "chat",
        True,
    ),
    Key(
        "settings",
        "f4",
        "slash('settings')",
        "Settings",
        "Theme, sampling, prompts, keys",
        "chat",
        True,
    ),
    Key("suspend", "ctrl+z", "suspend", "Suspend", "Back to the shell; `fg` returns", "chat", True),
    Key("quit", "ctrl+q", "slash('quit')", "Quit", "Leave; everything is stored", "chat", True),
    Key(
        "turn-edit",
        "enter,e",
        "turn('edit')",
        "Edit",
        "Edit this question and ask again; the old branch is kept",
        "turn",
    ),
    Key("turn-copy", "c", "turn('copy')", "Copy", "Copy this turn", "turn"),
    Key(
        "turn-code",
        "y",
        "turn('code')",
        "Copy code",
        "Copy this turn's code, block after block",
        "turn",
    ),
    Key(
        "turn-fork",
        "f",
        "turn('fork')",
        "Fork",
        "Copy the conversation up to here into one of its own",
        "turn",
    ),
    Key("turn-fold", "space", "turn('fold')", "Unfold", "Unfold or fold", "turn"),
    Key("turn-previous", "left", "turn('prev')", "Previous", "The alternative before", "turn"),
    Key("turn-next", "right", "turn('next')", "Next", "The next alternative", "turn"),
    Key(
        "model-warm",
        "ctrl+w",
        "warm",
        "Warm",
        "Build a snapshot, so that it starts in a tenth of a second",
        "models",
        True,
    ),
    Key(
        "model-cancel",
        "ctrl+x",
        "cancel",
        "Cancel",
        "Stop the pull; what was fetched is kept",
        "models",
        True,
    ),
    Key("session-rename", "ctrl+r", "rename", "Rename", "Give it another title", "sessions"),
    Key("session-delete", "ctrl+d", "delete", "Delete", "Delete it; undo brings it back", "sessions"),
    Key("session-undo", "ctrl+u", "undelete", "Undo", "Bring back what was deleted last", "sessions"),
    Key("session-export", "ctrl+e", "export", "Export", "Write it to a Markdown file", "sessions"),
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
