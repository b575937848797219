"""The prefix that all questions of a conversation share: system prompt and tools."""

from __future__ import annotations

from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.kv_cache import common_prefix
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool


def prefill_request(engine: Engine, tools: tuple[Tool, ...], system: str) -> GenerateRequest:
    """Return a request to prefill the prompt tokens that all first questions have in common.

    They are found by comparing the prompts of two questions. `system` is the system prompt.
    """
    first = [Message(role="system", content=system)] if system else []

    def tokens(question: str) -> list[int]:
        messages = (*first, Message(role="user", content=question))
        return engine.tokenize_chat(GenerateRequest(messages=messages, tools=tools))

    a, b = tokens("Why?"), tokens("0 or 1")
    return GenerateRequest(prompt=tuple(a[: common_prefix(a, b)]), max_tokens=0)
