"""Convert engine events to Anthropic's message object or its event stream.

A stream is a sequence of content blocks (text, thinking, tool use), of which one at a time is open.
"""

from __future__ import annotations

from typing import Any

import msgspec

from edgeinfer.runtime.event_stream import CollectedAnswer, CollectedCall
from edgeinfer.runtime.events import (
    Event,
    Finished,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from edgeinfer.server.anthropic import wire
from edgeinfer.server.dialect import Renderer, sse, sse_comment, wire_timings
from edgeinfer.server.problems import Problem

_encode = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
#: Status → Anthropic's error type; other 4xx: `invalid_request_error`, other 5xx: `api_error`. Source:
#: Anthropic's API reference, "Errors".
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(problem: Problem, request_id: str) -> bytes:
    """Encode `{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    other = "invalid_request_error" if problem.status < 500 else "api_error"
    error = wire.AnthropicErrorBody(
        type=_TYPES.get(problem.status, other), message=_error_text(problem), details=_details(problem)
    )
    return _encode(wire.AnthropicError(error=error, request_id=request_id))


def _error_text(problem: Problem) -> str:
    """Return the error text. For a too long prompt it has the words that coding agents search for."""
    if problem.lengths is None:
        return problem.message
    n_tokens, n_ctx = problem.lengths
    return f"prompt is too long: {n_tokens} tokens > {n_ctx} maximum; {problem.message}"


def _details(problem: Problem) -> dict[str, Any] | msgspec.UnsetType:
    """Return `details` that make the official client repeat its request without the field `thread`."""
    if problem.code != "unsupported_parameter" or problem.param != "thread":
        return msgspec.UNSET
    return {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def error_events(problem: Problem, request_id: str) -> bytes:
    """Encode an error as the event `error`, the last one of a stream."""
    return b"event: error\ndata: " + error_body(problem, request_id) + b"\n\n"


def wire_usage(usage: Usage) -> wire.AnthropicUsage:
    """Convert token counts. Anthropic's `input_tokens` do not include cached tokens."""
    return wire.AnthropicUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        cache_read_disk_input_tokens=usage.cached_disk_tokens,
    )


def arguments_of(call: CollectedCall) -> dict[str, Any]:
    """Decode a tool call's arguments; return {} if the answer was cut off in the middle of them."""
    try:
        value = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


class MessageRenderer(Renderer):
    """Renders POST /v1/messages.

    `stop_strings` are the request's own: the model's other stop strings are reported as "end_turn". A
    stream begins with the first progress event, because `message_start` contains the prompt's length.
    """

    def __init__(self, request_id: str, model: str, stop_strings: tuple[str, ...] = ()) -> None:
        self.id = request_id
        self.model = model
        self._stops = stop_strings
        self._started = False
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._block = -1
        self._open: tuple[str, int] | None = None
        self._finished: Finished | None = None

    def event(self, index: int, event: Event) -> bytes:
        if isinstance(event, Progress):
            self._prompt_tokens = event.total_tokens
            if event.queued or self._started:
                return b""
            # prompt tokens that are done at the first event came from the prefix cache
            is_read = event.done_tokens == event.total_tokens
            self._cached_tokens = 0 if is_read else event.done_tokens
            return self._start()
        if isinstance(event, Finished):
            self._finished = event
            self._prompt_tokens = self._prompt_tokens or event.usage.prompt_tokens
            return self._start()
        out = self._start()
        match event:
            case TextDelta():
                out += self._switch_block("text", 0, {"type": "text", "text": ""})
                return out + self._delta(b'{"type":"text_delta","text":%b}' % _encode(event.text))
            case ReasoningDelta():
                out += self._switch_block(
                    "thinking", 0, {"type": "thinking", "thinking": "", "signature": ""}
                )
                delta = b'{"type":"thinking_delta","thinking":%b}' % _encode(event.text)
                return out + self._delta(delta)
            case ToolCallDelta():
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                out += self._switch_block("tool_use", event.index, block)
                if event.arguments:
                    json = _encode(event.arguments)
                    out += self._delta(b'{"type":"input_json_delta","partial_json":%b}' % json)
        return out

    def closing(self) -> bytes:
        finished = self._finished
        assert finished is not None
        reason, sequence = self._stop(finished)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage, timings = finished.usage, wire_timings(finished.usage, finished.timings)
        done = _event("message_delta", delta=delta, usage=wire_usage(usage), timings=timings)
        return self._close() + done + _event("message_stop")

    def waiting(self, text: str) -> bytes:
        return sse_comment(text) + (self._start() or _PING)

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        usage = wire.AnthropicUsage(
            input_tokens=self._prompt_tokens - self._cached_tokens,
            output_tokens=0,
            cache_read_input_tokens=self._cached_tokens,
        )
        message = wire.MessageReply(
            id=self.id, model=self.model, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        return _event("message_start", message=message) + _PING

    def _switch_block(self, kind: str, number: int, block: dict[str, Any]) -> bytes:
        if self._open == (kind, number):
            return b""
        out = self._close()
        self._block += 1
        self._open = (kind, number)
        return out + _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._block)

    def _delta(self, delta: bytes) -> bytes:
        return (
            b"event: content_block_delta\ndata: "
            b'{"type":"content_block_delta","index":%d,"delta":%b}\n\n' % (self._block, delta)
        )

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        (answer,) = answers
        content: list[wire.TextOut | wire.ThinkingOut | wire.ToolUseOut] = []
        if answer.reasoning:
            content.append(wire.ThinkingOut(thinking=answer.reasoning))
        if answer.text or not answer.calls:
            content.append(wire.TextOut(text=answer.text))
        content += [
            wire.ToolUseOut(id=call.id, name=call.name, input=arguments_of(call))
            for _, call in sorted(answer.calls.items())
        ]
        finished = answer.finish
        reason, sequence = self._stop(finished)
        reply = wire.MessageReply(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=wire_usage(finished.usage),
            timings=wire_timings(finished.usage, finished.timings),
        )
        return _encode(reply)

    def _stop(self, finished: Finished) -> tuple[wire.StopReason, str | None]:
        if finished.reason == "tool_calls":
            return "tool_use", None
        if finished.is_cut_short:
            return "max_tokens", None
        if finished.stop_sequence in self._stops:
            return "stop_sequence", finished.stop_sequence
        return "end_turn", None


def _event(name: str, **data: Any) -> bytes:
    return sse({"type": name, **data}, name)
