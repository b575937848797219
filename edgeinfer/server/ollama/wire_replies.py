"""Ollama's answers. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from edgeinfer.server.core.wire import Reply
from edgeinfer.server.openai.wire_replies import TokenLogprob


class OllamaError(Reply, frozen=True, kw_only=True):
    """Ollama's error envelope."""

    error: str


DoneReason = Literal["stop", "length", "load", "unload"]


class AnswerFields(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """What both answers share. The last line has the statistics; zeros are left out, as Ollama does."""

    model: str
    created_at: str
    done: bool
    done_reason: DoneReason | None = None
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    logprobs: list[TokenLogprob] | None = None


class CalledReply(Reply, frozen=True, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class ToolCallReply(Reply, frozen=True, kw_only=True):
    id: str
    function: CalledReply


class OllamaMessage(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """A turn of the assistant, or the next piece of it."""

    role: Literal["assistant"] = msgspec.field(default_factory=lambda: "assistant")
    content: str
    thinking: str = ""
    tool_calls: list[ToolCallReply] | None = None


class OllamaChatReply(AnswerFields, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of /api/chat, and each line of its stream."""

    message: OllamaMessage


class OllamaGenerateReply(AnswerFields, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of /api/generate, and each line of its stream."""

    response: str
    thinking: str = ""


class OllamaEmbedReply(Reply, frozen=True, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsReply(Reply, frozen=True, kw_only=True):
    embedding: list[float]


class ModelDetails(Reply, frozen=True, kw_only=True):
    """What a model is. `family` is its architecture's name in GGUF."""

    parent_model: str = ""
    format: str = "gguf"
    family: str = ""
    families: list[str] = msgspec.field(default_factory=list)
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(Reply, frozen=True, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class OllamaTags(Reply, frozen=True, kw_only=True):
    """The answer of /api/tags."""

    models: list[ListedModel]


class RunningModel(Reply, frozen=True, kw_only=True):
    """A loaded model. `size` is its memory; what of it is a GPU's is not told apart."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(Reply, frozen=True, kw_only=True):
    """The answer of /api/ps."""

    models: list[RunningModel]


class OllamaShowReply(Reply, frozen=True, kw_only=True):
    """The answer of /api/show. `template` is Jinja, as the file has it, not Ollama's notation."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str = ""
    system: str = ""


class OllamaStatus(Reply, frozen=True, kw_only=True, omit_defaults=True):
    """How far a change is; the last one is "success"."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


class OllamaVersion(Reply, frozen=True, kw_only=True):
    """`version` is that of Ollama's API which is followed here: clients compare it."""

    version: str
    edgeinfer: str
