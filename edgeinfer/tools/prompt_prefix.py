"""The prefix that all questions of a conversation share: system prompt, tools, a document."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool


def prefill_request(
    engine: Engine, question_request: Callable[[str], GenerateRequest]
) -> GenerateRequest:
    """Return a request to prefill what all questions share, found by comparing two questions."""
    a, b = (_tokens(engine, question_request(text)) for text in ("Why?", "0 or 1"))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    prompt = tuple(pair[0] for pair in shared)
    return GenerateRequest(prompt=prompt, max_tokens=0)


def with_tools(tools: tuple[Tool, ...], system: str) -> Callable[[str], GenerateRequest]:
    """Return a function that makes the request for a question with these tools and system prompt."""
    first = [Message(role="system", content=system)] if system else []

    def question_request(text: str) -> GenerateRequest:
        return GenerateRequest(messages=(*first, Message(role="user", content=text)), tools=tools)

    return question_request


def _tokens(engine: Engine, request: GenerateRequest) -> list[int]:
    if isinstance(request.prompt, str):
        return engine.tokenize(request.prompt, add_special=True)
    return engine.tokenize_chat(request)
