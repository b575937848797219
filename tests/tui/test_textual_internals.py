"""The private names of Textual and Rich that the app uses exist in the installed versions."""

from importlib import import_module
from importlib.metadata import version

import pytest
from fixed_chat import make_app
from textual.cache import LRUCache

from edgeinfer.tui import textual_internals
from edgeinfer.tui.textual_internals import XTermParser, divide_line, keymap

#: Versions for which these names were checked.
READ_IN = {"textual": "8.2", "rich": "15.0"}
#: Private methods that our subclasses override or call, by Textual's class.
METHODS = {
    "textual.app:App": ("_handle_exception", "_fatal_error", "_close_messages_no_wait"),
    "textual.widgets:TextArea": ("_on_key", "_toggle_cursor_blink_visible"),
    "textual.drivers.linux_driver:LinuxDriver": (
        "_get_terminal_size",
        "_sigtstp_application",
        "_request_terminal_sync_mode_support",
        "_query_in_band_window_resize",
    ),
}


@pytest.mark.parametrize("package", READ_IN)
def test_installed_version_is_the_one_read(package):
    assert version(package).startswith(f"{READ_IN[package]}.")


@pytest.mark.parametrize(("where", "names"), METHODS.items())
def test_private_methods_that_we_use_exist(where, names):
    module, _, name = where.partition(":")
    defined_by = getattr(import_module(module), name)
    assert [n for n in names if not hasattr(defined_by, n)] == []


async def test_rebound_keys_and_parsed_styles_reach_the_app(tmp_path):
    app = make_app(tmp_path)
    parsed: textual_internals.ParsedStyles = LRUCache(64)
    textual_internals.use_parsed(app, parsed)
    app.set_keymap({"regenerate": "ctrl+x"})
    async with app.run_test():
        assert keymap(app) == {"regenerate": "ctrl+x"}
    assert len(parsed) > 0


def test_keys_are_parsed_and_lines_divided():
    parser = XTermParser()
    assert [getattr(event, "key", None) for event in parser.feed("a\x1b[A")] == ["a", "up"]
    assert divide_line("one two", 4) == [4]
