"""Convert messages and tools to the dictionaries that a chat template expects."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec

from edgeinfer.runtime.requests import Message, Tool, ToolCall

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """What a chat template supports or requires, found by rendering test messages.

    `system`, `developer`, `tool_role`: the template renders messages of this role. `late_system`: a
    system message may follow other messages. `tools`, `tool_calls`: the template renders the list of
    tools, and earlier tool calls, whose arguments must be JSON text if `string_arguments` is true.
    `null_content`: a message with tool calls and no text has the content None.
    `typed_content`: content must be a list of parts. `tight_pictures`: no space precedes a picture that
    begins a message (SmolVLM's `User:`). `short_ids`: tool-call ids must have nine characters.
    `reasoning_key`: key of a message's reasoning, "" if the template renders none.
    """

    system: bool = True
    late_system: bool = True
    developer: bool = False
    tools: bool = False
    tool_calls: bool = False
    tool_role: bool = False
    string_arguments: bool = False
    null_content: bool = False
    typed_content: bool = False
    tight_pictures: bool = False
    short_ids: bool = False
    reasoning_key: str = ""


def tool_dict(tool: Tool) -> dict[str, Any]:
    """Return a tool as Hugging Face's templates expect it."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def adaptations(messages: Sequence[Message], traits: TemplateTraits) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation in the forms that templates may require, beginning with the unchanged one.

    Further forms have one tool call per message, join successive messages of a role, or make user and
    assistant alternate. Then all forms follow again, with {} for tool-call arguments that are not JSON.
    """
    forms: list[list[dict[str, Any]]] = []
    for variant in (messages, tuple(map(_without_broken_arguments, messages))):
        plain = shape(variant, traits)
        split = split_calls(plain)
        for turns in (plain, split, join_turns(plain), join_turns(split), alternate_turns(split)):
            if turns not in forms:
                forms.append(turns)
                yield turns


def shape(messages: Sequence[Message], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Convert messages to dictionaries that a template with `traits` supports."""
    shaped = [_shape_one(message, traits) for message in messages]
    if traits.system and traits.late_system:
        return shaped
    first_turns = takewhile(lambda message: message["role"] == "system", shaped)
    leading = list(first_turns) if traits.system else []
    return leading + _merge_system(shaped[len(leading) :])


def _shape_one(message: Message, traits: TemplateTraits) -> dict[str, Any]:
    role: str = message.role
    if role == "developer" and not traits.developer:
        role = "system"
    if role == "tool" and not traits.tool_role:
        role = "user"
    shaped: dict[str, Any] = {"role": role, "content": message.content}
    if message.name and role == message.role:
        shaped["name"] = message.name
    if message.tool_call_id and role == "tool":
        shaped["tool_call_id"] = _call_id(message.tool_call_id, traits)
    if message.reasoning and traits.reasoning_key:
        shaped[traits.reasoning_key] = message.reasoning
    if message.tool_calls:
        shaped["tool_calls"] = [_call_dict(call, traits) for call in message.tool_calls]
        if not message.content and traits.null_content:
            shaped["content"] = None
    return shaped


def _call_id(call_id: str, traits: TemplateTraits) -> str:
    """Convert an id to the nine letters and digits that Mistral's templates accept."""
    if not traits.short_ids or _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _call_dict(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    arguments = call.arguments if traits.string_arguments else read_arguments(call)
    return {
        "id": _call_id(call.id, traits),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def read_arguments(call: ToolCall) -> dict[str, Any] | str:
    """Decode a tool call's arguments: an object, {} for other JSON, or the text if it is not JSON."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, UnicodeEncodeError):
        return call.arguments
    return arguments if isinstance(arguments, dict) else {}


def _without_broken_arguments(message: Message) -> Message:
    calls = tuple(
        msgspec.structs.replace(call, arguments="{}")
        if read_arguments(call) == call.arguments
        else call
        for call in message.tool_calls
    )
    return msgspec.structs.replace(message, tool_calls=calls)


def _merge_system(shaped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the text of system messages to the beginning of the next user message, as Gemma expects.

    If no user message follows, the text is added to a user message at the end, or becomes one.
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
    """Join successive messages of one role that have no tool calls."""
    joined: list[dict[str, Any]] = []
    for message in shaped:
        is_plain = message["role"] in ("user", "assistant", "system") and not message.get("tool_calls")
        previous = joined[-1] if joined else {}
        if is_plain and previous.get("role") == message["role"] and not previous.get("tool_calls"):
            joined[-1] = {**previous, "content": f"{previous['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def split_calls(shaped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split a message with several tool calls into one message per call, each before its result."""
    results = {message["tool_call_id"]: message for message in shaped if message.get("tool_call_id")}
    split: list[dict[str, Any]] = []
    placed: set[str] = set()
    for message in shaped:
        calls = message.get("tool_calls", ())
        if not calls and message.get("tool_call_id") not in placed:
            split.append(message)
        content = message["content"]
        for call in calls:
            split.append({**message, "content": content, "tool_calls": [call]})
            content = None if content is None else ""
            if call["id"] in results:
                split.append(results[call["id"]])
                placed.add(call["id"])
    return split


def alternate_turns(shaped: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make user and assistant alternate: join successive messages of a role, insert empty ones.

    The order ignores messages with tool calls or results, as the check in Mistral's templates does.
    """
    turns: list[dict[str, Any]] = []
    expected = "user"
    for message in join_turns(shaped):
        role = message["role"]
        if role in ("user", "assistant") and not message.get("tool_calls"):
            if role != expected:
                turns.append({"role": expected, "content": ""})
            expected = "assistant" if role == "user" else "user"
        turns.append(message)
    return turns
