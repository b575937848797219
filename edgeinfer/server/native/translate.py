"""Our own wire types → the engine's requests. Pure functions."""

from __future__ import annotations

from typing import Any

from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, Message
from edgeinfer.server.core.request_parts import caching, loras, overridden, seed_of, stop_strings
from edgeinfer.server.native.wire import InferQuery, InferRequest


def infer(body: InferRequest | InferQuery, info: EngineInfo) -> GenerateRequest:
    """One prompt as the user's only turn; the model's own system prompt unless another is given."""
    system = info.system_prompt if body.system is None else body.system
    turns = [Message(role="system", content=system)] if system else []
    sampling = overridden(info.sampling, seed=seed_of(body.seed), temperature=body.temperature)
    user = Message(role="user", content=body.prompt)
    stop = stop_strings(body.stop) if isinstance(body, InferRequest) else ()
    lora = loras(body.lora) if isinstance(body, InferRequest) else None
    shared: dict[str, Any] = {"sampling": sampling, "stop": stop, "lora": lora, **caching(body)}
    if not info.has_chat_template:
        max_tokens = 256 if body.max_tokens is None else body.max_tokens
        return GenerateRequest(prompt=body.prompt, max_tokens=max_tokens, **shared)
    return GenerateRequest(messages=(*turns, user), max_tokens=body.max_tokens, **shared)
