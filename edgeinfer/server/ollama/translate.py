"""Convert requests of Ollama's API to requests of the engine. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edgeinfer.config.sampling_options import BY_FIELD
from edgeinfer.errors import InvalidRequestError
from edgeinfer.media.pictures import from_base64
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, Infill, JsonSchema, Message, Sampling, ToolCall
from edgeinfer.server.ollama import wire
from edgeinfer.server.openai.translate import tools_of
from edgeinfer.server.request_fields import (
    as_text,
    common_fields,
    content_of,
    override_sampling,
    reasoning,
    seed_of,
    stop_strings,
)

#: Integer option → its minimum. Clients send lower values, e.g. -1 for "off".
_WHOLE = {"top_k": 0, "repeat_last_n": -1}
#: Templates that insert only the prompt, which means the same as `raw`.
_PROMPT_ALONE = ("{{ .Prompt }}", "{{.Prompt}}")
_NO_TEMPLATES = (
    "template: Ollama's templates are not supported; leave it out, or send `raw` for a prompt "
    "without a template"
)


def chat(body: wire.OllamaChatRequest, info: EngineInfo) -> GenerateRequest:
    """Convert POST /api/chat. Raises InvalidRequestError."""
    turns = messages(body.messages or ())
    if info.system_prompt and turns[0].role not in ("system", "developer"):
        turns = (Message(role="system", content=info.system_prompt), *turns)
    shared = _common_fields(body, info) | _thinking(body.think, info)
    return _make_request(messages=turns, tools=tools_of(body.tools), **shared)


def generate(body: wire.OllamaGenerateRequest, info: EngineInfo) -> GenerateRequest:
    """Convert to a chat turn, a raw prompt or fill-in-the-middle. Raises InvalidRequestError."""
    shared, prompt = _common_fields(body, info), body.prompt or ""
    if body.suffix:
        if not info.can_infill:
            raise InvalidRequestError(f"{info.model} does not support insert", param="suffix")
        return GenerateRequest(infill=Infill(prefix=prompt, suffix=body.suffix), **shared)
    if _is_raw(body) or not info.has_chat_template:
        fields = _content(f"{body.system or ''}{prompt}", body.images)
        return _make_request(prompt=fields.pop("content"), **fields, **shared)
    system = info.system_prompt if body.system is None else body.system
    turns = (Message(role="system", content=system),) if system else ()
    user = Message(role="user", **_content(prompt, body.images))
    return _make_request(messages=(*turns, user), **shared, **_thinking(body.think, info))


def _make_request(**fields: Any) -> GenerateRequest:
    """Make a request. With pictures, `overflow` is "refuse": the engine cannot drop their tokens."""
    request = GenerateRequest(**fields)
    return msgspec.structs.replace(request, overflow="refuse") if request.n_pictures else request


def _is_raw(body: wire.OllamaGenerateRequest) -> bool:
    template = (body.template or "").strip()
    if body.raw and (template or body.system):
        param = "template" if template else "system"
        raise InvalidRequestError(f"{param}: cannot be combined with `raw`", param=param)
    if template and template not in _PROMPT_ALONE:
        raise InvalidRequestError(_NO_TEMPLATES, param="template")
    return bool(body.raw or template)


def messages(turns: Sequence[wire.MessageParam]) -> tuple[Message, ...]:
    """Convert messages. Tool results without `tool_call_id` belong to the preceding calls, in order."""
    converted: list[Message] = []
    open_calls: list[ToolCall] = []
    for index, turn in enumerate(turns):
        if turn.role == "assistant":
            open_calls = [_call(call, index, n) for n, call in enumerate(turn.tool_calls or ())]
        converted.append(_message(turn, open_calls))
    return tuple(converted)


def _call(call: wire.CallParam, index: int, number: int) -> ToolCall:
    function, call_id = call.function, call.id or f"call_{index}_{number}"
    return ToolCall(id=call_id, name=function.name, arguments=as_text(function.arguments))


def _content(text: str, images: Sequence[str] | None) -> dict[str, Any]:
    if not images:
        return {"content": text}
    pieces: list[str | bytes] = [*map(from_base64, images), text]
    return content_of(pieces, lambda piece: [piece])


def _message(turn: wire.MessageParam, open_calls: list[ToolCall]) -> Message:
    content = _content(turn.content or "", turn.images)
    if turn.role == "assistant":
        return Message(
            role="assistant", **content, reasoning=turn.thinking or "", tool_calls=tuple(open_calls)
        )
    if turn.role == "tool":
        name = turn.tool_name or turn.name or ""
        call = _take_call(open_calls, turn.tool_call_id or "", name)
        name = name or (call.name if call else "")
        call_id = turn.tool_call_id or (call.id if call else "")
        return Message(role="tool", tool_call_id=call_id, name=name, **content)
    return Message(role=turn.role, **content)


def _take_call(open_calls: list[ToolCall], call_id: str, name: str) -> ToolCall | None:
    for call in open_calls:
        if (call_id and call.id == call_id) or (not call_id and name in ("", call.name)):
            open_calls.remove(call)
            return call
    return None


def _common_fields(body: wire.OllamaFields, info: EngineInfo) -> dict[str, Any]:
    options = body.options or wire.Options()
    predict = int(options.num_predict or 0)
    goes_on = info.can_shift and body.truncate is not False and body.shift is not False
    return {
        "sampling": sampling_of(options, info.sampling),
        "stop": stop_strings(options.stop),
        "max_tokens": predict if predict > 0 else None,
        "constraint": _constraint(body.format),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "overflow": "shift" if goes_on else "refuse",
        **common_fields(body),
    }


def _thinking(think: bool | str | None, info: EngineInfo) -> dict[str, Any]:
    if think not in (None, False, "none") and not info.can_think:
        raise InvalidRequestError(f"{info.model} does not support thinking", param="think")
    if isinstance(think, str):
        return reasoning(think)
    return reasoning(None, enabled=think)


def _constraint(form: str | dict[str, Any] | None) -> JsonSchema | None:
    if not form:
        return None
    return JsonSchema({"type": "object"} if isinstance(form, str) else form)


def sampling_of(options: wire.Options, base: Sampling) -> Sampling:
    """Return the model's sampling defaults, overridden by the request's options."""
    fields: dict[str, Any] = {field: getattr(options, field, None) for field in BY_FIELD}
    for field, low in _WHOLE.items():
        if fields[field] is not None:
            fields[field] = max(low, int(fields[field]))
    fields["repeat_penalty"] = options.repeat_penalty or None
    fields["seed"] = None if options.seed is None else seed_of(int(options.seed))
    return override_sampling(base, **fields)


def ignored_num_ctx(options: wire.Options | None, info: EngineInfo) -> list[str]:
    """Return `num_ctx` as an ignored field if the model was loaded with a smaller context; else []."""
    if options is None or options.num_ctx is None or int(options.num_ctx) <= info.n_ctx:
        return []
    return [f"options.num_ctx ({info.n_ctx} here: `edgeinfer serve --ctx`)"]
