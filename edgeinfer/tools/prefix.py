"""The part of a prompt that every session with the same tools has: system prompt and tool list."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.requests import GenerateRequest, Message, Tool


def prefill_request(engine: Engine, tools: Sequence[Tool], system: str) -> GenerateRequest:
    """Return the request that prefills the tools, for whatever is asked then.

    It is the common prefix of two questions: a template may put tools where it likes.
    """
    first = [Message(role="system", content=system)] if system else []
    a, b = (
        engine.tokenize_chat(
            GenerateRequest(messages=(*first, Message(role="user", content=text)), tools=tuple(tools))
        )
        for text in ("Why?", "0 or 1")
    )
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return GenerateRequest(prompt=tuple(pair[0] for pair in shared), max_tokens=0)
