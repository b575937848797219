"""Use what Textual and Rich offer only under private names, in one place.

Read in the versions below; `tests/tui/test_textual_internals.py` tries every name, and fails when
another version is installed than was read.
"""

from __future__ import annotations

from typing import Any

from rich._wrap import divide_line
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.cache import LRUCache
from textual.css.model import RuleSet

__all__ = ["METHODS", "READ_IN", "ParsedStyles", "XTermParser", "divide_line", "keymap", "use_parsed"]

#: Versions in which these names were read.
READ_IN = {"textual": "8.2", "rich": "15.0"}

#: Private methods that our subclasses replace or call, by Textual's class.
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

#: Style sheets by their text, as Textual's parser leaves them.
ParsedStyles = LRUCache[tuple[Any, ...], list[RuleSet]]


def keymap(app: App[Any]) -> dict[str, str]:
    """Return the user's own keys, by the id of the binding."""
    return dict(app._keymap)


def use_parsed(app: App[Any], parsed: ParsedStyles) -> None:
    """Let `app` look up style sheets in `parsed`, and add to it what it parses."""
    app.stylesheet._parse_cache = parsed
