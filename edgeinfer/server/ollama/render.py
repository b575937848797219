"""Convert engine events and models to Ollama's format: a stream of JSON lines, or one JSON object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer.config.sampling_options import BY_FIELD
from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime.chat_format import reasoning
from edgeinfer.runtime.event_stream import CollectedAnswer, CollectedCall
from edgeinfer.runtime.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
)
from edgeinfer.runtime.options import EngineInfo, ModelFiles
from edgeinfer.runtime.requests import Sampling
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Renderer, stamp
from edgeinfer.server.model_names import ollama_name
from edgeinfer.server.model_pool import AvailableModel
from edgeinfer.server.ollama import wire
from edgeinfer.server.openai.render import wire_logprobs
from edgeinfer.server.openai.wire import TokenLogprob
from edgeinfer.server.problems import Problem

if TYPE_CHECKING:
    from edgeinfer.models.gguf import GgufHeader


_encode = msgspec.json.Encoder().encode
_MS = 1_000_000
#: `Problem.code` → beginning of Ollama's error text, which clients search for.
_PREFIXES = {
    "model_not_found": "model not found: ",
    "context_length_exceeded": "the input length exceeds the context length: ",
}


def error_body(problem: Problem, request_id: str) -> bytes:
    """Encode `{"error": "…"}`. Ollama's error has no field for `request_id`."""
    prefix = _PREFIXES.get(problem.code or "", "")
    return _encode(wire.OllamaError(error=prefix + problem.message))


def error_line(problem: Problem, request_id: str) -> bytes:
    """Encode the error as the last line of a stream."""
    return error_body(problem, request_id) + b"\n"


def waiting_line(text: str) -> bytes:
    """Return a space, which keeps a stream alive while the model loads: JSON lines have no comments."""
    return b" "


def durations(context: RequestContext) -> dict[str, int]:
    """Return the fields `total_duration` and `load_duration` (ns) of a response."""
    load_s = context.loaded_s - context.started
    return {"total_duration": int(context.seconds * 1e9), "load_duration": int(load_s * 1e9)}


class OllamaRenderer(Renderer):
    """Renders /api/chat (if `is_chat`) or /api/generate, which has no tool calls."""

    def __init__(self, model: str, context: RequestContext, *, is_chat: bool) -> None:
        self.model = model
        self._context = context
        self._is_chat = is_chat
        self._calls: dict[int, CollectedCall] = {}

    def piece(
        self,
        content: str = "",
        thinking: str = "",
        calls: list[wire.ToolCallReply] | None = None,
        **last: Any,
    ) -> msgspec.Struct:
        """Make one JSON object of the stream. `last` are the fields that only the last one has."""
        fields: dict[str, Any] = {"model": self.model, "created_at": stamp(time.time()), "done": False}
        fields |= last
        if not self._is_chat:
            return wire.OllamaGenerateReply(response=content, thinking=thinking, **fields)
        message = wire.OllamaMessage(content=content, thinking=thinking, tool_calls=calls)
        return wire.OllamaChatReply(message=message, **fields)

    def _line(self, content: str = "", thinking: str = "", **more: Any) -> bytes:
        return _encode(self.piece(content, thinking, **more)) + b"\n"

    def event(self, index: int, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._line(event.text, logprobs=_logprobs(event.logprobs))
            case ReasoningDelta():
                return self._line(thinking=event.text, logprobs=_logprobs(event.logprobs))
            case ToolCallDelta():
                before = b"" if event.index in self._calls else self._call_line()
                self._calls.setdefault(event.index, CollectedCall()).add(event)
                return before
            case Finished():
                return self._call_line() + self._line(done=True, **self._statistics(event))
        return b""

    def _call_line(self) -> bytes:
        """Encode the collected tool calls: Ollama sends each call in one line."""
        calls = _calls(self._calls)
        self._calls = {}
        return self._line(calls=calls) if calls else b""

    def waiting(self, text: str) -> bytes:
        return self._line()

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        (answer,) = answers
        calls, logprobs = _calls(answer.calls) or None, _logprobs(answer.logprobs)
        last = self._statistics(answer.finish) | {"done": True, "logprobs": logprobs}
        return _encode(self.piece(answer.text, answer.reasoning, calls, **last))

    def _statistics(self, finished: Finished) -> dict[str, Any]:
        usage, timings = finished.usage, finished.timings
        return {
            "done_reason": "length" if finished.is_cut_short else "stop",
            **durations(self._context),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(timings.prefill_ms * _MS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(timings.decode_ms * _MS),
        }


def _calls(collected: dict[int, CollectedCall]) -> list[wire.ToolCallReply]:
    calls = []
    for index, call in sorted(collected.items()):
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
        except msgspec.DecodeError:
            continue
        if call.name:
            function = wire.CalledReply(index=index, name=call.name, arguments=arguments)
            calls.append(wire.ToolCallReply(id=call.id, function=function))
    return calls


def _logprobs(tokens: Sequence[TokenLogprobs]) -> list[TokenLogprob] | None:
    return wire_logprobs(tokens).content if tokens else None


_FIM_KEY = "tokenizer.ggml.fim_pre_token_id"


def details(model: AvailableModel, info: EngineInfo | None = None) -> wire.ModelDetails:
    family = model.architecture or (info.architecture if info else "")
    return wire.ModelDetails(
        family=family,
        families=[family] if family else [],
        parameter_size=_size(model.n_params or (info.n_params if info else 0)),
        quantization_level=model.quantization,
    )


def _size(n_params: int) -> str:
    if not n_params:
        return ""
    return f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.1f}M"


def list_models(models: Sequence[AvailableModel]) -> wire.OllamaTags:
    names = {model.name for model in models}
    rows = [_model_row(model, ollama_name(model.name, names)) for model in models]
    return wire.OllamaTags(models=rows)


def _model_row(model: AvailableModel, name: str) -> wire.ListedModel:
    return wire.ListedModel(
        name=name,
        model=name,
        modified_at=stamp(model.created),
        size=model.size_bytes,
        digest=model.sha256,
        details=details(model),
    )


def describe(model: AvailableModel, info: EngineInfo | None) -> wire.OllamaShowReply:
    """Describe a model for /api/show. Without `info` (not loaded), read its file's header."""
    files, licence = _files(model.name)
    header = _header(files)
    metadata = _metadata(header, info)
    template = (files.chat_template if files else None) or (header.chat_template if header else "")
    return wire.OllamaShowReply(
        parameters=_parameters(files),
        template=template,
        details=details(model, info),
        model_info=metadata,
        capabilities=_capabilities(info or _guess(template, metadata, files)),
        modified_at=stamp(model.created),
        license=licence,
        system=files.system_prompt if files else "",
    )


def _files(name: str) -> tuple[ModelFiles | None, str]:
    # imported here, because few endpoints get /api/show requests
    from edgeinfer.models.external_stores import stores
    from edgeinfer.models.reference import resolve

    try:
        ref = resolve(name)
        # `ref.files()` would hash the whole file, which can wait until the model is loaded
        if ref.external is not None:
            return stores.describe_files(ref.external), ""
        return ref.files(), ref.entry.licence if ref.entry else ""
    except EdgeInferError:
        return None, ""


def _header(files: ModelFiles | None) -> GgufHeader | None:
    from edgeinfer.models.gguf import read_header  # imported here: few endpoints get /api/show requests

    try:
        return read_header(files.paths[0]) if files else None
    except EdgeInferError:
        return None


def _metadata(header: GgufHeader | None, info: EngineInfo | None) -> dict[str, Any]:
    """Return the GGUF metadata; `llama.context_length` and the like are the loaded context."""
    metadata: dict[str, Any] = {}
    if header is not None:
        metadata = {key: _plain(value) for key, value in header.metadata.items()}
        metadata["general.parameter_count"] = header.n_params
    if info is not None:
        metadata.setdefault("general.architecture", info.architecture)
        metadata.setdefault("general.parameter_count", info.n_params)
    family = metadata.get("general.architecture", "")
    metadata.setdefault("general.basename", metadata.get("general.name", family))
    context_key = f"{family}.context_length"
    if info is not None and info.n_ctx:
        metadata[context_key] = min(info.n_ctx, metadata.get(context_key) or info.n_ctx)
    metadata.pop("tokenizer.chat_template", None)
    return metadata


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else None


def _capabilities(info: EngineInfo) -> list[str]:
    capabilities = {
        "completion": info.can_generate,
        "tools": info.can_generate and bool(info.tool_format),
        "thinking": info.can_think,
        "insert": info.can_infill,
        "vision": info.can_see,
        "embedding": info.can_embed and not info.can_generate,
    }
    return [name for name, has in capabilities.items() if has]


def _guess(template: str, metadata: dict[str, Any], files: ModelFiles | None) -> EngineInfo:
    embeds = any(key.endswith((".pooling_type", ".classifier.output_labels")) for key in metadata)
    return EngineInfo(
        model="",
        can_generate=not embeds,
        can_embed=embeds,
        can_think=bool(template) and reasoning.detect(template)[1],
        can_infill=_FIM_KEY in metadata,
        can_see=bool(files and files.projector),
        tool_format="by its template" if template else "",
    )


def _parameters(files: ModelFiles | None) -> str:
    if files is None:
        return ""
    base = msgspec.structs.asdict(Sampling())
    sampling = msgspec.structs.asdict(files.sampling)
    lines = [f"{name} {sampling[name]}" for name in BY_FIELD if sampling[name] != base[name]]
    lines += [f"stop {msgspec.json.encode(text).decode()}" for text in files.stop]
    return "\n".join(lines)
