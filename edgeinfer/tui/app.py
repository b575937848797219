"""The Textual app: themes, keys, signals, and the chat as its first screen."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import events, on
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.theme import Theme

from edgeinfer.chat import commands
from edgeinfer.chat.startup import ChatSetup
from edgeinfer.tui.bindings import BY_ID
from edgeinfer.tui.chat_screen import ChatScreen
from edgeinfer.tui.key_order import KeyOrder
from edgeinfer.tui.textual_internals import ParsedStyles, use_parsed

if TYPE_CHECKING:
    from textual.driver import Driver

    from edgeinfer.tui.driver import TerminalDriver

#: Colours in the dark and in the light theme; `border` and `dim` are for frames and scrollbars.
_COLOURS = """
    primary     #7fa8d1  #2c6494
    secondary   #8fb3a0  #477a63
    accent      #d8a65e  #9a5b0c
    warning     #d8a65e  #9a5b0c
    error       #d9807a  #ab3a34
    success     #94b878  #4a7629
    foreground  #d4d7dd  #2a2e36
    background  #15171c  #fbfaf7
    surface     #1b1e25  #f3f1ec
    panel       #22262f  #e9e6df
    border      #4a5568  #a9a598
    dim         #2b303b  #d9d5cb
"""


def _theme(name: str, column: int, *, dark: bool, selection: str) -> Theme:
    rows = (line.split() for line in _COLOURS.strip().splitlines())
    colours: dict[str, Any] = {row[0]: row[column] for row in rows}
    border, dim = colours.pop("border"), colours.pop("dim")
    primary, background = colours["primary"], colours["background"]
    variables = {
        "border": border,
        "border-blurred": dim,
        "footer-key-foreground": primary,
        "input-selection-background": f"{primary} {selection}",
        "scrollbar": dim,
        "scrollbar-hover": border,
        "scrollbar-active": primary,
    }
    for state in ("", "-hover", "-active"):
        variables[f"scrollbar-background{state}"] = background
    return Theme(name=name, dark=dark, variables=variables, **colours)


DARK = _theme("edgeinfer-dark", 1, dark=True, selection="30%")
LIGHT = _theme("edgeinfer-light", 2, dark=False, selection="25%")


#: Parsed style sheets by theme. `rehearsal.rehearse` fills this table before a snapshot, so that the
#: first paint of a resumed process takes 10 ms less.
PARSED: dict[str, ParsedStyles] = {}


class ChatApp(App[None]):
    """A chat on a terminal. `crash` is the unexpected error that ended the app; None without one."""

    TITLE = "edgeinfer"
    CSS_PATH = "chat.tcss"
    COMMAND_PALETTE_BINDING = "ctrl+p"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]  # noqa: RUF012  Textual declares no ClassVar
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "leave", "Quit", show=False, priority=True, id="leave"),
        Binding("ctrl+l", "repaint", "Repaint", show=False, priority=True, id="repaint"),
    ]

    def __init__(self, setup: ChatSetup, driver_class: type[Driver] | None = None) -> None:
        super().__init__(driver_class=driver_class)
        self.crash: Exception | None = None
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self._styled_for = self._set_first_theme(setup.config.theme)
        self.set_keymap({name: keys for name, keys in setup.config.keys.items() if name in BY_ID})
        self.chat = ChatScreen(setup)
        self.key_order = KeyOrder(self, super().on_event)

    def _set_first_theme(self, theme: str) -> str:
        """Set the theme before style sheets are parsed, to parse them once; return the theme's name."""
        name = theme if theme in self.available_themes else DARK.name
        self.set_reactive(App.theme, name)
        self.stylesheet.set_variables(self.get_css_variables())
        if name in PARSED:
            use_parsed(self, PARSED[name])
        return name

    def refresh_css(self, animate: bool = True) -> None:
        """Apply the theme, but not at Textual's first call: the first theme is already applied."""
        if self._styled_for != self.theme:
            self._styled_for = self.theme
            super().refresh_css(animate)

    def get_default_screen(self) -> Screen[object]:
        return self.chat  # type: ignore[return-value]

    async def on_event(self, event: events.Event) -> None:
        """Handle keys and pastes in the order in which they were typed (see `KeyOrder`)."""
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            await self.key_order.add(event)
        else:
            await super().on_event(event)

    def on_ready(self) -> None:
        if not self.is_headless:
            cast("TerminalDriver", self._driver).ready()

    def on_mount(self) -> None:
        self.app_resume_signal.subscribe(self, lambda _: self.action_repaint())
        theme = self.chat.setup.config.theme
        if theme not in self.available_themes:
            problem = f"there is no theme {theme!r} (`chat.theme` in config.toml): `/theme` lists all"
            self.notify(problem, severity="warning", timeout=10)
        if self.is_headless:
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the `/` commands that need no argument, for the command palette."""
        for command in commands.COMMANDS:
            if not command.argument or command.argument.startswith("["):
                title = command.name.replace("-", " ").capitalize()
                yield SystemCommand(
                    title, command.summary, lambda name=command.name: self.chat.run_command(f"/{name}")
                )

    @on(ChatScreen.Left)
    def leave(self) -> None:
        """Store the draft and the partial answer, and end the app."""
        self.chat.leave()
        self.exit()

    def notify(self, message: str, **settings: Any) -> None:
        """Show a message without markup, because it may quote a user, a model or a server."""
        super().notify(message, **settings | {"markup": False})

    def action_repaint(self) -> None:
        """Draw every cell again: after `fg` the terminal is empty, but Textual draws only changes."""
        self.refresh()

    def action_leave(self) -> None:
        self.leave()

    async def action_quit(self) -> None:
        self.leave()

    def on_unmount(self) -> None:
        with contextlib.suppress(Exception):
            self.chat.leave()
        self.chat.loader.close()

    def _handle_exception(self, error: Exception) -> None:
        """Record the error, which the verb `chat` reports once the terminal is restored."""
        self.crash = self.crash or error
        super()._handle_exception(error)

    def _fatal_error(self) -> None:
        """Print a traceback with local variables only if EDGEINFER_DEBUG is set."""
        if os.environ.get("EDGEINFER_DEBUG") == "1":
            super()._fatal_error()
        else:
            self._close_messages_no_wait()
