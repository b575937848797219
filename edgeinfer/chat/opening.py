"""What a chat starts with, gathered from the command line before any screen is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgeinfer.chat.engines import Engines
from edgeinfer.chat.history.store import Store
from edgeinfer.chat.history.values import Attachment, Conversation
from edgeinfer.chat.session import ChatSession
from edgeinfer.config.config_file import ChatConfig
from edgeinfer.host import HandOver, Host, Start
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.units import format_ms


@dataclass
class Launch:
    """One start of the chat, for either front. `terminal` is the descriptor of the terminal to use.

    `hand_over` is the way to a resumed process, or from one that started cold.
    """

    host: Host
    model: str
    options: LoadOptions
    config: ChatConfig
    open_store: Callable[[], Store] = Store.open
    continue_last: bool = False
    conversation: Conversation = field(default_factory=Conversation)
    attachments: list[Attachment] = field(default_factory=list)
    hand_over: HandOver | None = None
    terminal: int = 0

    def session(self) -> ChatSession:
        """A session with a new conversation of this model."""
        session = ChatSession(self.open_store, self.model)
        session.set(system_prompt=self.conversation.system_prompt, sampling=self.conversation.sampling)
        return session

    def engines(self) -> Engines:
        """No engine is loaded yet."""
        return Engines(self.host, self.options)


def started(start: Start) -> str:
    """Say `resumed in 84 ms`, `cold start in 7.1 s: no snapshot yet`; no time until it is known."""
    how = "resumed" if start.how == "resumed" else "cold start"
    if how == "resumed" or "ready" in start.stages_ms:
        how += f" in {format_ms(start.ready_ms)}" if start.ready_ms else ""
    return f"{how}: {start.reason}" if start.how == "cold" and start.reason else how
