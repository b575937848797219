"""Minimal request bodies by path, and the text of their replies."""

import json
from collections.abc import Iterable
from typing import Any

HI = [{"role": "user", "content": "hi"}]
#: Schema of a tool's arguments, or of an answer.
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
STREAMING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}
GENERATING = STREAMING | {"/infer": {"prompt": "hi"}}
OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "fake", "messages": HI, "stream": False},
    "/api/generate": {"model": "fake", "prompt": "hi", "stream": False},
}
#: Every route that generates text, whole.
EVERY = GENERATING | OLLAMA | {"/completion": {"prompt": "hi"}}
#: Every route that has a model read something.
READING = GENERATING | {
    "/v1/embeddings": {"input": "hi"},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/rerank": {"query": "hi", "documents": ["hi"]},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [65]},
}


def objects_of(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Yield the JSON objects of a reply: the only one, or those of a stream."""
    for line in lines:
        if (text := line.removeprefix("data: ")).startswith("{"):
            yield json.loads(text)


def text_of(reply: dict[str, Any]) -> str:
    """Return the text of a reply, or of an object of its stream, in any API but that of embeddings."""
    match reply:
        case {"choices": choices}:
            messages = [choice.get("delta") or choice.get("message") or choice for choice in choices]
            return "".join(message.get("content") or message.get("text") or "" for message in messages)
        case {"output": [{"content": [{"text": text}]}]} | {"content": [{"text": text}]}:
            return text  # Responses, Anthropic
        case {"type": "response.output_text.delta", "delta": text} | {"delta": {"text": text}}:
            return text
        case {"message": {"content": text}} if reply.get("type") != "message_start":
            return text  # Ollama
        case {"response": str(text)} | {"content": str(text)} | {"result": text}:
            return text  # Ollama's generate, llama.cpp, /infer
    return ""
