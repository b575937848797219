"""Use private names of Textual and Rich, in one place.

`tests/tui/test_textual_internals.py` tries every name, also of the methods that our subclasses
override, and fails if another version is installed than the one in which they were checked.
"""

from __future__ import annotations

from typing import Any

from rich._wrap import divide_line
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.cache import LRUCache
from textual.css.model import RuleSet

__all__ = ["ParsedStyles", "XTermParser", "divide_line", "keymap", "use_parsed"]

#: Parsed style sheets by their text.
ParsedStyles = LRUCache[tuple[Any, ...], list[RuleSet]]


def keymap(app: App[Any]) -> dict[str, str]:
    """Return the user's own keys by binding id."""
    return dict(app._keymap)


def use_parsed(app: App[Any], parsed: ParsedStyles) -> None:
    """Let `app` look up style sheets in `parsed`, and add those that it parses."""
    app.stylesheet._parse_cache = parsed
