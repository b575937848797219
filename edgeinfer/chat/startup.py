"""The start of a chat: options, the first session, and the engines that a chat loads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgeinfer.chat.history.store import ConversationStore
from edgeinfer.chat.history.values import Attachment, Conversation
from edgeinfer.chat.session import ChatSession
from edgeinfer.config.config_file import ChatConfig, append_config_key
from edgeinfer.errors import EdgeInferError
from edgeinfer.host import EngineHost, LoadProgress, ProcessStart
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.units import format_ms

if TYPE_CHECKING:
    from edgeinfer.tools.loop import ChatTools


@dataclass
class ChatSetup:
    """Options and configuration of one chat, for the Textual app or the plain chat.

    `conversation` has the system prompt and the sampling options of a new conversation; `attachments`
    are sent with its first question. `continue_last`: open the last conversation instead of a new one.
    `typed_model`: the model that the user typed, which answers in either; "" if none was typed.
    """

    host: EngineHost
    model: str
    options: LoadOptions
    config: ChatConfig
    open_store: Callable[[], ConversationStore] = ConversationStore.open
    continue_last: bool = False
    typed_model: str = ""
    conversation: Conversation = field(default_factory=Conversation)
    attachments: list[Attachment] = field(default_factory=list)
    with_tools: bool = False

    def tools(self) -> ChatTools:
        """Return the configured tools. Raises UsageError if there are none, ConfigError if invalid."""
        from edgeinfer.tools.loop import ChatTools  # imported here: most chats have no tools

        return ChatTools(self.host.config.tools, Path.cwd())

    def session(self) -> ChatSession:
        """Return a session with a new conversation of the chosen model."""
        session = ChatSession(self.open_store, self.model)
        session.is_window = True
        session.set(system_prompt=self.conversation.system_prompt, sampling=self.conversation.sampling)
        return session

    def engines(self) -> Engines:
        return Engines(self.host, self.options)


def describe_start(start: ProcessStart) -> str:
    """Describe a start: `resumed in 84 ms`, or `cold start in 7.1 s: no snapshot yet`.

    The time is left out if it is not known.
    """
    text = "resumed" if start.how == "resumed" else "cold start"
    if text == "resumed" or "ready" in start.stages_ms:
        text += f" in {format_ms(start.ready_ms)}" if start.ready_ms else ""
    return f"{text}: {start.reason}" if start.how == "cold" and start.reason else text


class Engines:
    """Loads the models of a chat: the first in this process, later ones in worker processes.

    `engine` is the newest engine, None before the first load; `model` is the name of its model. Loading
    another model closes the previous engine, except for one resumed from a snapshot.
    """

    def __init__(self, host: EngineHost, options: LoadOptions) -> None:
        self.host = host
        self.options = options
        self.engine: Engine | None = None
        self.model = ""
        self._local: Engine | None = None
        self._first: tuple[str, int] | None = None
        self._start_text = ""
        self._loading = threading.Lock()
        self._local_key: tuple[str, int] | None = None

    @property
    def start_text(self) -> str:
        """Text on how `engine` was loaded: `resumed in 84 ms`, `loaded in 3.2 s`, `stayed loaded`."""
        return self._start_text or describe_start(self.host.start)

    def get(self, model: str, n_ctx: int | None, progress: LoadProgress | None = None) -> Engine:
        """Return an engine of `model`; load the model if necessary, then close the previous engine.

        `n_ctx` is the context (tokens); None for the context of `options`. Raises the errors of
        `EngineHost.engine`, and then leaves the previous engine open.
        """
        options = self.options if n_ctx is None else msgspec.structs.replace(self.options, n_ctx=n_ctx)
        with self._loading:
            try:
                return self._get(model, options, progress)
            except EdgeInferError as error:
                append_config_key(error)
                raise

    def _get(self, model: str, options: LoadOptions, progress: LoadProgress | None) -> Engine:
        if self._first is not None and model != self._first[0]:
            options = options.for_another_model()
        key = (model, options.n_ctx)
        self._first = self._first or key
        began = time.monotonic()
        if self._local is not None and key == self._local_key:
            new = self._local
            began = 0.0
        elif self._local is None:
            new = self._local = self.host.engine(model, options, progress)
            self._local_key = key
        else:
            new = self.host.worker(model, options, progress)
        before, self.engine = self.engine, new
        self.model = model
        if before is not None and before is not new:
            load_ms = (time.monotonic() - began) * 1000
            self._start_text = f"loaded in {format_ms(load_ms)}" if began else "stayed loaded"
            self._release(before)
        return new

    def _release(self, engine: Engine) -> None:
        """Close an engine, but not a resumed one, which takes no private memory and can be reused."""
        if engine is self._local:
            if self.host.start.how == "resumed":
                return
            self._local = self._local_key = None
        engine.close()

    def close(self) -> None:
        """Close every engine. Idempotent."""
        for engine in {id(e): e for e in (self.engine, self._local) if e is not None}.values():
            engine.close()
        self.engine = self._local = None
