"""Shape messages and tools into the dictionaries that one chat template understands."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.requests import Message, Tool, ToolCall

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """What a template was probed to support. `late_system`: a system turn behind others too."""

    system: bool = True
    late_system: bool = True
    developer: bool = False
    tools: bool = False
    tool_calls: bool = False
    tool_role: bool = False
    string_arguments: bool = False
    null_content: bool = False
    short_ids: bool = False
    reasoning_key: str = ""


def tool_dict(tool: Tool) -> dict[str, Any]:
    """Return a tool in the form of Hugging Face's templates."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def shape(messages: Sequence[Message], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return messages in the shapes that this template supports. Raises InvalidRequestError."""
    shaped = [_shape_one(message, traits) for message in messages]
    if traits.system and traits.late_system:
        return shaped
    n_kept = _n_leading(shaped) if traits.system else 0
    return shaped[:n_kept] + _merge_system(shaped[n_kept:])


def _n_leading(shaped: list[dict[str, Any]]) -> int:
    others = (i for i, message in enumerate(shaped) if message["role"] != "system")
    return next(others, len(shaped))


def _shape_one(message: Message, traits: TemplateTraits) -> dict[str, Any]:
    role: str = message.role
    if role == "developer" and not traits.developer:
        role = "system"
    if role == "tool" and not traits.tool_role:
        role = "user"
    made: dict[str, Any] = {"role": role, "content": message.content}
    if message.name and role == message.role:
        made["name"] = message.name
    if message.tool_call_id and role == "tool":
        made["tool_call_id"] = _call_id(message.tool_call_id, traits)
    if message.reasoning and traits.reasoning_key:
        made[traits.reasoning_key] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [_call_dict(call, traits) for call in message.tool_calls]
        if not message.content and traits.null_content:
            made["content"] = None
    return made


def _call_id(call_id: str, traits: TemplateTraits) -> str:
    """Map an id to the nine letters and digits that Mistral's templates accept."""
    if not traits.short_ids or _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _call_dict(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not traits.string_arguments:
        try:
            arguments = msgspec.json.decode(call.arguments or "{}")
        except msgspec.DecodeError as error:
            raise InvalidRequestError(
                f"the arguments of the call to {call.name} are not JSON: {error}", param="messages"
            ) from error
    return {
        "id": _call_id(call.id, traits),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _merge_system(shaped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put system messages before the text of the next user turn, as Gemma's makers advise.

    The last ones, without a user turn behind them, go behind the text of the user turn before.
    """
    merged: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in shaped:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            merged.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            merged.append(message)
    if waiting and merged and merged[-1]["role"] == "user":
        merged[-1] = {**merged[-1], "content": "\n\n".join([merged[-1]["content"], *waiting])}
    elif waiting:
        merged.append({"role": "user", "content": "\n\n".join(waiting)})
    return merged


def join_turns(shaped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join plain turns of one role in a row, for templates that insist on alternation."""
    joined: list[dict[str, Any]] = []
    for message in shaped:
        plain = message["role"] in ("user", "assistant", "system") and not message.get("tool_calls")
        before = joined[-1] if joined else {}
        if plain and before.get("role") == message["role"] and not before.get("tool_calls"):
            joined[-1] = {**before, "content": f"{before['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def split_calls(shaped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split a turn of several calls into turns of one, each followed by its own result."""
    results = {message["tool_call_id"]: message for message in shaped if message.get("tool_call_id")}
    split: list[dict[str, Any]] = []
    placed: set[str] = set()
    for message in shaped:
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            if message.get("tool_call_id") not in placed:
                split.append(message)
            continue
        content = message["content"]
        for call in calls:
            split.append({**message, "content": content, "tool_calls": [call]})
            content = None if content is None else ""
            if call["id"] in results:
                split.append(results[call["id"]])
                placed.add(call["id"])
    return split
