"""Ollama's /api/chat and /api/generate: converts requests to GenerateRequest, events to JSON lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from edgeinfer.errors import InvalidRequestError
from edgeinfer.media.pictures import content_fields, from_base64
from edgeinfer.runtime.event_stream import CollectedAnswer, CollectedCall
from edgeinfer.runtime.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
)
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, Infill, JsonSchema, Message, ToolCall
from edgeinfer.server.context import RequestContext, json_reply
from edgeinfer.server.dialect import Renderer, RouteTable, stamp
from edgeinfer.server.generation_response import answer
from edgeinfer.server.ollama import wire
from edgeinfer.server.openai.chat import tools_of, wire_logprobs
from edgeinfer.server.openai.wire import TokenLogprob
from edgeinfer.server.request_fields import common_fields, reasoning

ROUTES = RouteTable()


@ROUTES.post("/api/chat", reply=wire.OllamaChatReply, streams=True)
async def chat(context: RequestContext, body: wire.OllamaChatRequest) -> Response:
    """Answer a conversation."""
    if not body.messages:
        return await _load_or_unload(context, body)
    return await _answer(context, body, chat_request)


@ROUTES.post("/api/generate", reply=wire.OllamaGenerateReply, streams=True)
async def generate(context: RequestContext, body: wire.OllamaGenerateRequest) -> Response:
    """Answer a prompt, continue a raw prompt, or write the text before a suffix."""
    if not (body.prompt or body.suffix):
        return await _load_or_unload(context, body)
    return await _answer(context, body, generate_request)


async def _answer(
    context: RequestContext,
    body: wire.OllamaFields,
    convert: Callable[[Any, EngineInfo], GenerateRequest],
) -> Response:
    def requests(body: wire.OllamaFields, info: EngineInfo) -> list[GenerateRequest]:
        n_ctx = int((body.options and body.options.num_ctx) or 0)
        if n_ctx > info.n_ctx:
            context.ignore([f"options.num_ctx ({info.n_ctx} here: `edgeinfer serve --ctx`)"])
        return [convert(body, info)]

    return await answer(context, body, requests, OllamaRenderer, stream=body.stream is not False)


async def _load_or_unload(context: RequestContext, body: wire.OllamaFields) -> Response:
    models = context.endpoint.models
    keep_alive_s = context.keep_alive_s(body.keep_alive)
    if keep_alive_s == 0:
        context.model = models.resolve(body.model)  # `name_model` would accept unknown names, too
        await models.unload(context.model)
    else:
        context.name_model(body.model)
        (await models.acquire(context.model, keep_alive_s)).release()
    reason, load_ns = "unload" if keep_alive_s == 0 else "load", int(context.seconds * 1e9)
    renderer = OllamaRenderer(context, body)
    return json_reply(renderer.piece(done=True, done_reason=reason, load_duration=load_ns))


def chat_request(body: wire.OllamaChatRequest, info: EngineInfo) -> GenerateRequest:
    """Convert the body of POST /api/chat to a request for the engine.

    Raises InvalidRequestError for invalid pictures, and for `think` if the model does not reason.
    """
    turns = _messages(body.messages or ())
    if info.system_prompt and turns[0].role not in ("system", "developer"):
        turns = (Message(role="system", content=info.system_prompt), *turns)
    shared = _shared_fields(body, info) | _thinking(body.think, info)
    return _make_request(messages=turns, tools=tools_of(body.tools), **shared)


def generate_request(body: wire.OllamaGenerateRequest, info: EngineInfo) -> GenerateRequest:
    """Convert the body of POST /api/generate to a request: a chat turn, a raw prompt or an infill.

    Raises InvalidRequestError for invalid pictures, for fields that cannot be combined, and for
    `suffix` and `think` if the model does not support them.
    """
    shared, prompt = _shared_fields(body, info), body.prompt or ""
    if body.suffix:
        if not info.can_infill:
            raise InvalidRequestError(
                f"{info.model} does not support insert",
                param="suffix",
                hint="leave suffix out, or use a model for which /api/show lists the capability insert",
            )
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


#: Values of the request field `template` that insert only the prompt, as `"raw": true` does.
_PROMPT_ONLY = ("{{ .Prompt }}", "{{.Prompt}}")


def _is_raw(body: wire.OllamaGenerateRequest) -> bool:
    template = (body.template or "").strip()
    if body.raw and (template or body.system):
        param = "template" if template else "system"
        message = f"{param} cannot be combined with raw"
        raise InvalidRequestError(message, param=param, hint=f"leave {param} or raw out")
    if template and template not in _PROMPT_ONLY:
        message = "template: Ollama's templates are not supported"
        hint = "leave template out, or send `raw` for a prompt without a template"
        raise InvalidRequestError(message, param="template", hint=hint)
    return bool(body.raw or template)


def _messages(turns: Sequence[wire.MessageParam]) -> tuple[Message, ...]:
    """Convert messages. Tool results without `tool_call_id` belong to the preceding calls, in order."""
    messages: list[Message] = []
    open_calls: list[ToolCall] = []
    for index, turn in enumerate(turns):
        content = _content(turn.content or "", turn.images)
        match turn.role:
            case "assistant":
                open_calls = [_call(call, index, n) for n, call in enumerate(turn.tool_calls or ())]
                calls, thought = tuple(open_calls), turn.thinking or ""
                message = Message(role="assistant", reasoning=thought, tool_calls=calls, **content)
            case "tool":
                name = turn.tool_name or turn.name or ""
                call = _take_call(open_calls, turn.tool_call_id or "", name)
                name = name or (call.name if call else "")
                call_id = turn.tool_call_id or (call.id if call else "")
                message = Message(role="tool", tool_call_id=call_id, name=name, **content)
            case role:
                message = Message(role=role, **content)
        messages.append(message)
    return tuple(messages)


def _call(call: wire.CallParam, index: int, number: int) -> ToolCall:
    function, call_id = call.function, call.id or f"call_{index}_{number}"
    return ToolCall(id=call_id, name=function.name, arguments=function.json_arguments)


def _take_call(open_calls: list[ToolCall], call_id: str, name: str) -> ToolCall | None:
    for call in open_calls:
        if (call_id and call.id == call_id) or (not call_id and name in ("", call.name)):
            open_calls.remove(call)
            return call
    return None


def _content(text: str, images: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields `content` and `pictures` of a Message: the pictures, then the text."""
    return content_fields([*map(from_base64, images or ()), text])


#: Integer option → minimum. Lower values are raised to the minimum: clients send e.g. -1 for "off".
_WHOLE = {"top_k": 0, "repeat_last_n": -1, "seed": -(1 << 53)}


def _shared_fields(body: wire.OllamaFields, info: EngineInfo) -> dict[str, Any]:
    options = body.options or wire.Options()
    numbers = {
        field: max(low, int(number))
        for field, low in _WHOLE.items()
        if (number := getattr(options, field)) is not None
    }
    options = msgspec.structs.replace(options, repeat_penalty=options.repeat_penalty or None, **numbers)
    predict = int(options.num_predict or 0)
    schema = {"type": "object"} if isinstance(body.format, str) else body.format
    may_shift = info.can_shift and body.truncate is not False and body.shift is not False
    return {
        "max_tokens": predict if predict > 0 else None,
        "constraint": JsonSchema(schema) if body.format and schema else None,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "overflow": "shift" if may_shift else "refuse",
        **common_fields(body, info, options),
    }


def _thinking(think: bool | str | None, info: EngineInfo) -> dict[str, Any]:
    if think not in (None, False, "none") and not info.can_think:
        raise InvalidRequestError(
            f"{info.model} does not support thinking",
            param="think",
            hint="leave think out, or use a model for which /api/show lists the capability thinking",
        )
    return reasoning(think) if isinstance(think, str) else reasoning(None, enabled=think)


_encode = msgspec.json.Encoder().encode
_MS = 1_000_000


def durations(context: RequestContext) -> dict[str, int]:
    """Return the fields `total_duration` and `load_duration` (ns) of a response."""
    load_s = context.loaded_s - context.started
    return {"total_duration": int(context.seconds * 1e9), "load_duration": int(load_s * 1e9)}


class OllamaRenderer(Renderer):
    """Renders /api/chat and /api/generate as JSON lines, or as one JSON object.

    Only /api/chat returns tool calls.
    """

    def __init__(
        self, context: RequestContext, body: wire.OllamaFields, info: EngineInfo | None = None
    ) -> None:
        self._context = context
        self._model = body.model
        self._is_chat = isinstance(body, wire.OllamaChatRequest)
        self._calls: dict[int, CollectedCall] = {}

    def piece(
        self,
        content: str = "",
        thinking: str = "",
        calls: list[wire.ToolCallReply] | None = None,
        **last: Any,
    ) -> msgspec.Struct:
        """Make one JSON object of the stream. `last` are fields that only the last object has."""
        fields: dict[str, Any] = {"model": self._model, "created_at": stamp(time.time()), "done": False}
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
        """Encode the collected tool calls as a line, b"" for none: Ollama sends only whole calls."""
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
