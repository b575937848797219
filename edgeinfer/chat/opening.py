"""What a chat starts with, gathered from the command line before any screen is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgeinfer.chat.engines import Engines
from edgeinfer.chat.session import ChatSession
from edgeinfer.chat.store import Store
from edgeinfer.chat.values import Attachment, Conversation
from edgeinfer.config import ChatConfig
from edgeinfer.host import Host, Start
from edgeinfer.runtime.options import LoadOptions


@dataclass
class Launch:
    """One start of the chat, for either front. `terminal` is the descriptor of the terminal to use."""

    host: Host
    model: str
    options: LoadOptions
    config: ChatConfig
    open_store: Callable[[], Store] = Store.open
    continue_last: bool = False
    conversation: Conversation = field(default_factory=Conversation)
    attachments: list[Attachment] = field(default_factory=list)
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
    """`resumed in 84 ms`, or how it started and why."""
    if start.how == "resumed":
        total = max(start.stages_ms.values(), default=0.0)
        return f"resumed in {total:.0f} ms" if total else "resumed"
    return f"cold start: {start.reason}" if start.reason else "cold start"
