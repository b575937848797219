"""The prefix that all questions of a conversation share: system prompt and tools."""

from __future__ import annotations

from itertools import takewhile

from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool


def prefill_request(engine: Engine, tools: tuple[Tool, ...], system: str) -> GenerateRequest:
    """Return a request to prefill what all questions share, found by comparing two questions."""
    first = [Message(role="system", content=system)] if system else []

    def tokens(question: str) -> list[int]:
        messages = (*first, Message(role="user", content=question))
        return engine.tokenize_chat(GenerateRequest(messages=messages, tools=tools))

    pairs = zip(tokens("Why?"), tokens("0 or 1"), strict=False)
    shared = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return GenerateRequest(prompt=tuple(pair[0] for pair in shared), max_tokens=0)
