"""POST /v1/chat/completions: converts requests to GenerateRequest, and events to OpenAI's answers.

`completions.py` uses this module's base renderer, constraints and errors.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from edgeinfer import __version__
from edgeinfer.errors import InvalidRequestError
from edgeinfer.media import document_files
from edgeinfer.media.pictures import content_fields, from_base64
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import (
    Event,
    Finished,
    Logprob,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import (
    Choice,
    Constraint,
    GenerateRequest,
    Grammar,
    JsonSchema,
    Message,
    Regex,
    Tool,
    ToolCall,
    ToolChoice,
)
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Renderer, RouteTable, sse_comment, wire_timings
from edgeinfer.server.generation_response import answer
from edgeinfer.server.openai import wire
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_fields import common_fields, copies, reasoning

ROUTES = RouteTable()


@ROUTES.post("/v1/chat/completions", reply=wire.ChatCompletion, streams=True)
async def chat_completions(context: RequestContext, body: wire.ChatRequest) -> Response:
    """Answer a conversation."""
    if body.store is True:
        context.ignore(["store"])
    return await answer(context, body, chat_requests, ChatRenderer, stream=bool(body.stream))


def chat_requests(body: wire.ChatRequest, info: EngineInfo) -> list[GenerateRequest]:
    """Convert the body of POST /v1/chat/completions to `n` requests with different seeds.

    Raises InvalidRequestError for fields that cannot be combined, and for files that cannot be decoded.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError(
            "top_logprobs needs logprobs: true",
            param="top_logprobs",
            hint="add logprobs, or leave top_logprobs out",
        )
    _check_open_turn(body)
    limits = (body.max_tokens, body.max_completion_tokens)
    request = GenerateRequest(
        messages=tuple(map(_message, body.messages)),
        tools=tools_of(body.tools),
        tool_choice=_tool_choice(body),
        continue_final=body.continue_final_message,
        constraint=constraint_of(body),
        max_tokens=min((limit for limit in limits if limit is not None and limit >= 0), default=None),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **reasoning(
            body.reasoning_effort, budget=body.reasoning_budget, variables=body.chat_template_kwargs
        ),
        **common_fields(body, info),
    )
    return copies(request, body.n or 1)


def _check_open_turn(body: wire.ChatRequest) -> None:
    """Check that the model either begins a new assistant turn or continues the last one.

    Raises InvalidRequestError for other values of `continue_final_message` and `add_generation_prompt`.
    """
    continues = body.continue_final_message
    if continues and not isinstance(body.messages[-1], wire.AssistantMessage):
        message = "continue_final_message needs an assistant message as the last message"
        hint = "put one at the end of messages, or leave continue_final_message out"
        raise InvalidRequestError(message, param="continue_final_message", hint=hint)
    if body.add_generation_prompt is continues:
        message = "exactly one of add_generation_prompt and continue_final_message must be true"
        hint = "the first begins a new turn, the second continues the last turn"
        raise InvalidRequestError(message, param="add_generation_prompt", hint=hint)


def _message(turn: wire.ChatMessage) -> Message:
    match turn:
        case wire.DeveloperMessage():
            return Message(role="developer", **_content(turn.content))
        case wire.UserMessage():
            return Message(role="user", name=turn.name or "", **_content(turn.content))
        case wire.SystemMessage():  # after its subclasses, which would match here, too
            return Message(role="system", **_content(turn.content))
        case wire.ToolMessage():
            content = _content(turn.content or "")
            return Message(role="tool", tool_call_id=turn.tool_call_id, **content)
    calls = tuple(
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.json_arguments)
        for call in turn.tool_calls or ()
    )
    return Message(
        role="assistant",
        **_content(turn.refusal or "" if turn.content is None else turn.content),
        reasoning=turn.reasoning_content or turn.reasoning or "",
        tool_calls=calls,
        name=turn.name or "",
    )


def _content(
    content: str | Sequence[wire.TextPart | wire.ImagePart | wire.FilePart | wire.RefusalPart],
) -> dict[str, Any]:
    """Return the fields `content` and `pictures` of a Message."""
    if isinstance(content, str):
        return {"content": content}
    pieces: list[str | bytes] = []
    for content_part in content:
        match content_part:
            case wire.TextPart(text=text) | wire.RefusalPart(refusal=text):
                pieces.append(text)
            case wire.ImagePart(image_url=image):
                pieces.append(from_base64(image.url))
            case wire.FilePart(file=file):
                pieces += document_files.parts_of(file.file_data, file.filename)
    return content_fields(pieces)


def tools_of(tools: Sequence[wire.ToolParam] | None) -> tuple[Tool, ...]:
    return tuple(make_tool(tool.function, tool.function.name) for tool in tools or ())


def make_tool(function: wire.FunctionTool, name: str) -> Tool:
    """Make a tool that the model sees as `name`."""
    return Tool(
        name=name,
        description=function.description or "",
        parameters=function.parameters or {},
        strict=function.strict is True,
    )


def _tool_choice(body: wire.ChatRequest) -> ToolChoice:
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(choice, wire.NamedToolChoice):
        return ToolChoice(mode="named", name=choice.function.name, parallel=parallel)
    return ToolChoice(mode=choice or "auto", parallel=parallel)


#: Field of `structured_outputs` → function that makes its constraint.
_STRUCTURED: dict[str, Callable[[Any], Constraint]] = {
    "json": JsonSchema,
    "regex": Regex,
    "choice": lambda texts: Choice(tuple(texts)),
    "grammar": Grammar,
}


def constraint_of(body: wire.OpenAIFields) -> Constraint | None:
    """Return the answer's constraint; None if none is set. Raises InvalidRequestError for several."""
    by_field: dict[str, Constraint] = {}
    match body.response_format:
        case wire.JsonObjectFormat(schema=schema):
            by_field["response_format"] = JsonSchema(schema or {"type": "object"})
        case wire.JsonSchemaFormat(json_schema=described):
            by_field["response_format"] = JsonSchema(described.schema)
    if body.grammar is not None:
        by_field["grammar"] = Grammar(body.grammar)
    if (outputs := body.structured_outputs) is not None:
        for field, make_constraint in _STRUCTURED.items():
            if (value := getattr(outputs, field)) is not None:
                by_field[f"structured_outputs.{field}"] = make_constraint(value)
        if outputs == wire.StructuredOutputs():
            message = "structured_outputs needs json, regex, choice or grammar"
            hint = "set one of the four, or leave structured_outputs out"
            raise InvalidRequestError(message, param="structured_outputs", hint=hint)
    if len(by_field) > 1:
        first, second, *_ = by_field
        message = f"{second} cannot be combined with {first}"
        raise InvalidRequestError(message, param=second, hint="leave one of the two out")
    return next(iter(by_field.values()), None)


_encode = msgspec.json.Encoder().encode
#: End of a chunk in which `usage` is left out, because the client strands-agents drops the text of a
#: chunk with `"usage": null`.
_TAIL = b"]}\n\n"
_DONE = b"data: [DONE]\n\n"


class OpenAIRenderer(Renderer):
    """Base of the renderers of chat completions and completions.

    The JSON that all chunks of a stream share is encoded once (`_head`). `count` is the number of
    answers: the number of prompts times `n`.
    """

    id_prefix: str
    #: Value of the field `object` in each chunk, e.g. `chat.completion.chunk`.
    chunk_object: str
    #: JSON fields of a choice without text, e.g. `"delta":{}`.
    nothing: bytes
    #: Type of a response that is not streamed.
    reply_type: type[wire.ChatCompletion] | type[wire.Completion]

    def __init__(
        self, context: RequestContext, body: wire.OpenAIFields, info: EngineInfo, n_prompts: int = 1
    ) -> None:
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.n = body.n or 1
        self.count = self.n * n_prompts
        self._ends: dict[int, Finished] = {}
        self._shared_fields: dict[str, Any] = {
            "id": self.id_prefix + context.plain_id,
            "created": int(time.time()),
            "model": context.model,
            "system_fingerprint": f"ei-{__version__}-{info.version}".rstrip("-"),
        }
        head = _encode({**self._shared_fields, "object": self.chunk_object})
        self._head = b'data: %b,"choices":[' % head[:-1]

    def encode_choice(
        self, index: int, fields: bytes, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        """Encode a chunk of the answer `index` without its end (`_TAIL`).

        `fields` are e.g. `"text":"Hello"`. `logprobs` and `finish` (the finish reason) are JSON values.
        """
        values = (self._head, index, fields, finish, logprobs)
        return b'%b{"index":%d,%b,"finish_reason":%b,"logprobs":%b}' % values

    def encode_chunk(self, index: int, fields: bytes, logprobs: bytes = b"null") -> bytes:
        return self.encode_choice(index, fields, logprobs) + _TAIL

    def finish(self, index: int, finished: Finished) -> bytes:
        """Encode the last chunk of an answer. If all other answers have ended, add `timings`."""
        self._ends[index] = finished
        chunk = self.encode_choice(index, self.nothing, finish=_encode(finish_reason(finished)))
        if len(self._ends) < self.count:
            return chunk + _TAIL
        return chunk + b'],"timings":%b}\n\n' % _encode(wire_timings(*self._total()))

    def _total(self) -> tuple[Usage, Timings]:
        return total([self._ends[index] for index in sorted(self._ends)], self.n)

    def closing(self) -> bytes:
        if not self.include_usage:
            return _DONE
        usage, _ = self._total()
        return self._head + b'],"usage":%b}\n\n' % _encode(wire_usage(usage)) + _DONE

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        usage, timings = total([answer.finish for answer in answers], self.n)
        choices: Any = [self.choice(index, answer) for index, answer in enumerate(answers)]
        reply = self.reply_type(
            choices=choices,
            usage=wire_usage(usage),
            timings=wire_timings(usage, timings),
            **self._shared_fields,
        )
        return _encode(reply)

    @abstractmethod
    def choice(self, index: int, answer: CollectedAnswer) -> msgspec.Struct:
        """Make an element of `choices` in a response that is not streamed."""

    def waiting(self, text: str) -> bytes:
        waits = next((index for index in range(self.count) if index not in self._ends), 0)
        return sse_comment(text) + self.encode_chunk(waits, self.nothing)


class ChatRenderer(OpenAIRenderer):
    """Renders POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    nothing = b'"delta":{}'
    reply_type = wire.ChatCompletion

    def __init__(self, context: RequestContext, body: wire.ChatRequest, info: EngineInfo) -> None:
        super().__init__(context, body, info)
        self._logprobs = bool(body.logprobs)
        #: Whether the answer may consist of tool calls only. Its stream must not begin with an empty
        #: text, because some clients then show an empty message.
        self._may_call = bool(body.tools) and body.tool_choice != "none"

    def opening(self) -> bytes:
        delta = b'"role":"assistant","content":%b' % (b"null" if self._may_call else b'""')
        return b"".join(self._delta(index, delta) for index in range(self.n))

    def event(self, index: int, event: Event) -> bytes:
        match event:
            case TextDelta():
                logprobs = _encode(wire_logprobs(event.logprobs)) if event.logprobs else b"null"
                return self._delta(index, b'"content":' + _encode(event.text), logprobs)
            case ReasoningDelta():
                return self._delta(index, b'"reasoning_content":' + _encode(event.text))
            case ToolCallDelta():
                return self._delta(index, b'"tool_calls":[' + _encode(_tool_delta(event)) + b"]")
            case Finished():
                return self.finish(index, event)
        return b""

    def _delta(self, index: int, delta: bytes, logprobs: bytes = b"null") -> bytes:
        return self.encode_chunk(index, b'"delta":{%b}' % delta, logprobs)

    def choice(self, index: int, answer: CollectedAnswer) -> wire.ChatChoice:
        calls = []
        for _, call in sorted(answer.calls.items()):
            function = wire.WireFunction(name=call.name, arguments=call.arguments)
            calls.append(wire.WireToolCall(id=call.id, function=function))
        message = wire.ReplyMessage(
            content=answer.text or (None if calls else ""),
            reasoning_content=answer.reasoning or None,
            tool_calls=calls or None,
        )
        logprobs = wire_logprobs(answer.logprobs) if self._logprobs else None
        return wire.ChatChoice(
            index=index, message=message, finish_reason=finish_reason(answer.finish), logprobs=logprobs
        )


def _tool_delta(event: ToolCallDelta) -> dict[str, Any]:
    function = {"name": event.name} if event.name else {}
    delta = {"index": event.index, "function": {**function, "arguments": event.arguments}}
    return delta | {"id": event.id, "type": "function"} if event.id or event.name else delta


def finish_reason(finished: Finished) -> wire.WireFinish:
    """Return OpenAI's `finish_reason`. It is also "length" for an answer that a deadline cut off."""
    if finished.is_cut_short:
        return "length"
    return "tool_calls" if finished.reason == "tool_calls" else "stop"


def total(answers: list[Finished], n: int) -> tuple[Usage, Timings]:
    """Sum the usage of a request's answers, and return the timings of the slowest one.

    Each group of `n` answers has the same prompt, which is counted once.
    """
    if len(answers) == 1:
        return answers[0].usage, answers[0].timings
    firsts = answers[::n]
    usage = Usage(
        prompt_tokens=sum(finished.usage.prompt_tokens for finished in firsts),
        cached_tokens=sum(finished.usage.cached_tokens for finished in firsts),
        cached_disk_tokens=sum(finished.usage.cached_disk_tokens for finished in firsts),
        completion_tokens=sum(finished.usage.completion_tokens for finished in answers),
        reasoning_tokens=sum(finished.usage.reasoning_tokens for finished in answers),
    )
    slowest = max((finished.timings for finished in answers), key=lambda timings: timings.decode_ms)
    saved_ms = sum(finished.timings.saved_ms for finished in firsts)
    return usage, msgspec.structs.replace(slowest, saved_ms=saved_ms)


def wire_usage(usage: Usage) -> wire.WireUsage:
    return wire.WireUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=wire.PromptTokensDetails(
            cached_tokens=usage.cached_tokens, cached_disk_tokens=usage.cached_disk_tokens
        ),
        completion_tokens_details=wire.CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def wire_logprobs(tokens: Sequence[TokenLogprobs]) -> wire.ChoiceLogprobs:
    content = []
    for token in tokens:
        top = [wire.TopLogprob(**logprob_fields(other)) for other in token.top]
        content.append(wire.TokenLogprob(**logprob_fields(token.chosen), top_logprobs=top))
    return wire.ChoiceLogprobs(content=content)


def logprob_fields(token: Logprob) -> dict[str, Any]:
    """Return the fields `token`, `bytes` and `logprob`.

    A `logprob` below -9999 becomes -9999, because JSON has no minus infinity.
    """
    logprob = token.logprob if token.logprob > -9999.0 else -9999.0
    text = token.piece.decode("utf-8", "replace")
    return {"token": text, "logprob": logprob, "bytes": list(token.piece)}


def error_text(problem: Problem) -> str:
    """Return the error text. For a too long prompt, begin with OpenAI's text, which clients expect."""
    if problem.lengths is None:
        return problem.message
    n_tokens, n_ctx = problem.lengths
    expected = (
        f"This model's maximum context length is {n_ctx} tokens. However, your messages resulted in "
        f"{n_tokens} tokens, which exceeds the context window."
    )
    return f"{expected} Here {problem.message}"


def error_body(problem: Problem, request_id: str) -> bytes:
    """Encode `{"error": {"message", "type", "param", "code"}}`, which has no field for `request_id`."""
    message = error_text(problem)
    error = wire.ErrorBody(message=message, type=problem.kind, param=problem.param, code=problem.code)
    return _encode(wire.ErrorReply(error=error))


def error_events(problem: Problem, request_id: str) -> bytes:
    """Encode an error as the last chunk of a stream."""
    return b"data: " + error_body(problem, request_id) + b"\n\n" + _DONE


#: Arguments of `Dialect` for APIs that have OpenAI's errors.
ERRORS: dict[str, Any] = {
    "error_type": wire.ErrorReply,
    "error_body": error_body,
    "error_events": error_events,
}
