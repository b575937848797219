"""The least that a route takes: path → body."""

from typing import Any

HI = [{"role": "user", "content": "hi"}]
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
