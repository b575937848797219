"""Use private names of Textual and Rich, in one place.

The names were checked in the versions below; `tests/tui/test_textual_internals.py` tries every name,
and fails if another version is installed.
"""

from __future__ import annotations

from typing import Any

from rich._wrap import divide_line
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.cache import LRUCache
from textual.css.model import RuleSet

__all__ = ["METHODS", "READ_IN", "ParsedStyles", "XTermParser", "divide_line", "keymap", "use_parsed"]

#: Versions in which these names were checked.
READ_IN = {"textual": "8.2", "rich": "15.0"}

#: Private methods that our subclasses override or call, by Textual class.
METHODS: dict[str, tuple[str, ...]] = {
    "textual.app:App": ("_handle_exception", "_fatal_error", "_close_messages_no_wait"),
    "textual.widgets:TextArea": ("_on_key", "_toggle_cursor_blink_visible"),
    "textual.drivers.linux_driver:LinuxDriver": (
        "_get_terminal_size",
        "_sigtstp_application",
        "_request_terminal_sync_mode_support",
        "_query_in_band_window_resize",
    ),
}

#: Parsed style sheets by their text.
ParsedStyles = LRUCache[tuple[Any, ...], list[RuleSet]]


def keymap(app: App[Any]) -> dict[str, str]:
    """Return the user's own keys by binding id."""
    return dict(app._keymap)


def use_parsed(app: App[Any], parsed: ParsedStyles) -> None:
    """Let `app` look up style sheets in `parsed`, and add those that it parses."""
    app.stylesheet._parse_cache = parsed
