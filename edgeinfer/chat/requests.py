"""Build the engine's requests from a conversation: messages, sampling and tools."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgeinfer.chat import presets
from edgeinfer.chat.attachments import with_attachments
from edgeinfer.chat.history.values import Conversation, Turn, sent_part
from edgeinfer.media.pictures import join_parts
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling, with_answer_limit
from edgeinfer.tools.tool_use import ToolUse, call_messages

if TYPE_CHECKING:
    from edgeinfer.tools.loop import ChatTools


@dataclass(frozen=True)
class PromptContext:
    """Builds requests from turns, with the options of the conversation, the engine and the tools.

    `engine` is None if no model is loaded, `tools` if the chat has no tools.
    """

    conversation: Conversation
    engine: Engine | None
    tools: ChatTools | None

    def messages(self, turns: Sequence[Turn]) -> tuple[Message, ...]:
        """Convert turns to messages. Raises InvalidRequestError if a picture cannot be decoded."""
        summary, sent = sent_part(list(turns))
        of_model = self.engine.info.system_prompt if self.engine else ""
        told = f"Summary of the conversation so far:\n{summary}" if summary else ""
        system = "\n\n".join(filter(None, (self.conversation.system_prompt or of_model, told)))
        messages = [Message(role="system", content=system)] if system else []
        for turn in sent:
            if turn.role == "user":
                messages.append(_question(turn))
            elif turn.calls:
                messages += call_messages(turn.content, turn.reasoning, turn.calls)
            elif turn.content:
                messages.append(Message(role="assistant", content=turn.content))
        return tuple(messages)

    def sampling(self) -> Sampling:
        """Return the model's sampling options, overridden by those of the conversation."""
        base = self.engine.info.sampling if self.engine else Sampling()
        return presets.overlay(base, self.conversation.sampling)

    def request(self, turns: Sequence[Turn], *, continue_final: bool = False) -> GenerateRequest:
        """Build the request to answer a branch, or (`continue_final`) to continue the last answer."""
        limit = self.conversation.sampling.get("max_tokens")
        request = GenerateRequest(
            messages=self.messages(turns),
            **(self.tools.fields(rounds_of(turns)) if self.tools is not None else {}),
            sampling=self.sampling(),
            continue_final=continue_final,
            max_tokens=int(limit) if limit else None,
            conversation=self.conversation.owner,
        )
        can_think = self.engine is not None and self.engine.info.can_think
        return with_answer_limit(request, can_think=can_think)


def rounds_of(turns: Sequence[Turn]) -> list[tuple[ToolUse, ...]]:
    """Return the tool calls since the last question: one tuple for each answer that made calls."""
    since = itertools.takewhile(lambda turn: turn.role == "assistant", reversed(turns))
    return [turn.calls for turn in since if turn.calls][::-1]


def _question(turn: Turn) -> Message:
    """Convert a question to a message: pictures, then text files, then the typed text."""
    pictures = [a.data for a in turn.attachments if a.is_picture]
    text = with_attachments(turn.content, turn.attachments)
    content, pictured = join_parts([*pictures, text])
    return Message(role="user", content=content, pictures=pictured)
