"""The help screen writes itself: from the table of commands and the table of keys."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edgeinfer.chat import slash
from edgeinfer.tui.bindings import HEADINGS, KEYS, Key, shown


class HelpScreen(ModalScreen[None]):
    """Everything that can be typed and pressed, or one command."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,f1", "dismiss", "Leave", show=False),
    ]

    def __init__(self, command: str = "") -> None:
        super().__init__()
        self._command = command

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = "Help"
            sheet.border_subtitle = "↑↓ scroll · Esc leaves"
            with VerticalScroll() as scroll:
                yield Static(help_content(self._command, dict(self.app._keymap)))
            scroll.can_focus = True

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def help_content(command: str, keymap: dict[str, str]) -> Content:
    """Commands and keys; `keymap` holds the keys the user has bound otherwise. One command alone when it is named."""
    commands = [c for c in slash.COMMANDS if not command or command in (c.name, *c.aliases)] or list(slash.COMMANDS)
    usage = [f"/{c.name} {c.argument}".rstrip() for c in commands]
    width = max(22, *map(len, usage))
    rows: list[Content | tuple[str, str] | str] = [("Commands\n", "bold $primary")]
    for line, entry in zip(usage, commands, strict=True):
        also = f" (also /{', /'.join(entry.aliases)})" if entry.aliases else ""
        rows += [(f"  {line.ljust(width)}  ", "$accent"), entry.summary, (f"{also}\n", "dim")]
    if len(commands) == 1:
        return Content.assemble(*rows)
    rows += [(f"  {'@PATH'.ljust(width)}  ", "$accent"), "attach a text file, anywhere in a question\n"]
    for where, heading in HEADINGS.items():
        rows.append((f"\n{heading}\n", "bold $primary"))
        for key in (k for k in KEYS if k.where == where):
            rows += _key(key, keymap, width)
    rows.append(("\nKeys are rebound in Settings (F4), or under [chat.keys] in config.toml by their names.", "dim"))
    return Content.assemble(*rows)


def _key(key: Key, keymap: dict[str, str], width: int) -> list[tuple[str, str] | str]:
    return [
        (f"  {shown(keymap.get(key.id, key.keys)).ljust(width)}  ", "$accent"),
        key.tooltip,
        (f"  {key.id}\n", "dim"),
    ]
