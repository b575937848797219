"""The private names of Textual and Rich that the app uses.

`tests/tui/test_textual_internals.py` tries each name, and each method that our subclasses override. The
test fails if another version of Textual or Rich is installed than the one that was checked.
"""

from __future__ import annotations

from typing import Any

from rich._wrap import divide_line
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.cache import LRUCache
from textual.css.model import RuleSet

__all__ = ["ParsedStyles", "XTermParser", "divide_line", "keymap", "use_parsed"]

#: Cache of parsed style sheets, by the text of the sheet.
ParsedStyles = LRUCache[tuple[Any, ...], list[RuleSet]]


def keymap(app: App[Any]) -> dict[str, str]:
    """Return the keys that the user has set, by binding id."""
    return dict(app._keymap)


def use_parsed(app: App[Any], parsed: ParsedStyles) -> None:
    """Let `app` reuse the parsed style sheets in `parsed`, and store newly parsed ones there."""
    app.stylesheet._parse_cache = parsed
