"""`edgeinfer chat`: chat in the terminal, full-screen or line by line."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from edgeinfer import typed_options
from edgeinfer.chat.attachments import MAX_BYTES, from_bytes
from edgeinfer.chat.history.values import Attachment, Conversation
from edgeinfer.cli import options as shared
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.host import EngineHost

if TYPE_CHECKING:
    from edgeinfer.chat.session import ChatSession
    from edgeinfer.chat.startup import ChatSetup


class ChatResult(Result, frozen=True, kw_only=True):
    """A chat that has ended. `conversation`: id of the stored conversation, 0 if none was stored."""

    model: str
    conversation: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser)
    summary = "continue the last conversation that is not open elsewhere"
    add_option(parser, "--continue", summary, dest="continue_last")
    add_option(parser, "--plain", "print plain lines, for screen readers and dumb terminals")
    add_option(parser, "--system TEXT|@FILE", shared.SYSTEM)
    add_option(parser, "--tools", "let the model call the configured tools")
    add_option(parser, "--max-tokens N", shared.MAX_TOKENS, type=shared.count)
    shared.add_sampling_options(parser)
    shared.add_load_options(parser)
    shared.add_launch_options(parser)


def run(options: argparse.Namespace, host: EngineHost) -> ChatResult:
    """Chat on this terminal; with `--plain` or on a dumb terminal, line by line.

    Raises CatalogError or UsageError for a missing model, before anything is shown; EdgeInferError if
    the app crashed (the conversation is stored).
    """
    if len((options.model or "").split()) > 1:
        hint = 'ask once with `edgeinfer run "QUESTION"`, or type `edgeinfer` and ask there'
        raise UsageError("`edgeinfer chat` takes the name of a model, not a question", hint=hint)
    if options.model:
        _refuse_missing(options.model, host)
    is_plain = options.plain or os.environ.get("TERM") == "dumb"
    setup = _setup(options, host)
    if not is_plain and (piped := _piped_attachment()) is not None:
        setup.attachments.append(piped)
    conversation = (_plain(setup) if is_plain else _on_screen(setup)).conversation
    return ChatResult(model=conversation.model, conversation=conversation.id)


def _refuse_missing(model: str, host: EngineHost) -> None:
    """Raise the error of a `model` that is not on this machine, unless it is loaded already."""
    if model == host.loaded_model:
        return
    from edgeinfer.models.reference import resolve  # a resumed chat seldom needs this import

    ref = resolve(model)
    if ref.kind in ("absent", "file"):
        host.files(ref)


def _on_screen(setup: ChatSetup) -> ChatSession:
    from edgeinfer.tui.app import ChatApp  # slow import: Textual takes 0.3 s

    driver = None
    if sys.platform != "win32":
        from edgeinfer.tui.driver import TerminalDriver, claim_terminal

        driver, TerminalDriver.out = TerminalDriver, claim_terminal()
        if TerminalDriver.out is None:
            return _plain(setup)
    app = ChatApp(setup, driver)
    app.run(mouse=setup.config.mouse)
    if app.crash is None:
        return app.chat.session
    if os.environ.get("EDGEINFER_DEBUG") == "1":
        raise app.crash
    raise EdgeInferError(
        f"the chat crashed: {type(app.crash).__name__}: {app.crash}",
        hint="`edgeinfer chat --continue` reopens the chat; EDGEINFER_DEBUG=1 shows the traceback",
    )


def _plain(setup: ChatSetup) -> ChatSession:
    from edgeinfer.chat.repl import Repl

    repl = Repl(setup, sys.stdin, sys.stdout)
    repl.run()
    return repl.session


def _setup(options: argparse.Namespace, host: EngineHost) -> ChatSetup:
    from edgeinfer.chat.startup import ChatSetup  # slow import: numpy takes 100 ms

    sampling = typed_options.typed_sampling(options)
    if options.max_tokens:
        sampling["max_tokens"] = options.max_tokens
    config = host.config
    return ChatSetup(
        host=host,
        model=options.model or config.default_model,
        options=typed_options.load_options(options, config.load),
        config=config.chat,
        continue_last=options.continue_last,
        typed_model=options.model or "",
        with_tools=options.tools,
        conversation=Conversation(
            system_prompt=typed_options.system_prompt(options.system or "", config), sampling=sampling
        ),
    )


def _piped_attachment() -> Attachment | None:
    """Return piped stdin as an attachment; None if nothing is piped or the chat has no terminal."""
    if sys.stdin is None or sys.stdin.isatty() or not any(os.isatty(fd) for fd in (1, 2)):
        return None
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    return from_bytes("stdin", data) if data.strip() else None
