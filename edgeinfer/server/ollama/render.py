"""Events as Ollama's answers: a line of JSON a piece, or one JSON for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from edgeinfer.runtime.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
)
from edgeinfer.runtime.generation import Collected, CollectedCall
from edgeinfer.server.dialect import Renderer
from edgeinfer.server.ollama import wire
from edgeinfer.server.openai.render import wire_logprobs
from edgeinfer.server.openai.wire import TokenLogprob
from edgeinfer.server.problems import Problem

_encode = msgspec.json.Encoder().encode
_MS = 1_000_000
#: Our code → how Ollama's own message for it begins: clients look for these words.
_BEGINNINGS = {
    "model_not_found": "model not found: ",
    "context_length_exceeded": "the input length exceeds the context length: ",
}


def error_body(problem: Problem, request_id: str) -> bytes:
    """Encode `{"error": "…"}`, which has no place for the request's id."""
    beginning = _BEGINNINGS.get(problem.code or "", "")
    return _encode(wire.OllamaError(error=beginning + problem.message))


def error_line(problem: Problem, request_id: str) -> bytes:
    """Encode the error as the last line of a stream."""
    return error_body(problem, request_id) + b"\n"


def waiting_line(text: str) -> bytes:
    """Keep a stream alive while the model is loaded: white space before its first line."""
    return b" "


def stamp(unix_s: float | None = None) -> str:
    """Format a time as Ollama does; now if none is given."""
    moment = datetime.now(UTC) if unix_s is None else datetime.fromtimestamp(unix_s, UTC)
    return moment.isoformat().replace("+00:00", "Z")


class Clock:
    """Measures one request from its arrival; made when its model is loaded."""

    def __init__(self, started: float) -> None:
        self._started = started
        self.load_ns = self.total_ns()

    def total_ns(self) -> int:
        return int((time.perf_counter() - self._started) * 1e9)


#: Makes a piece of an answer from its text, thinking and calls, and the fields that both shapes have.
Shape = Callable[..., msgspec.Struct]


def chat_piece(
    content: str, thinking: str, calls: list[wire.ToolCallReply] | None, **fields: Any
) -> wire.OllamaChatReply:
    """Make `{"message": {"role": "assistant", "content": …}}`."""
    message = wire.OllamaMessage(content=content, thinking=thinking, tool_calls=calls)
    return wire.OllamaChatReply(message=message, **fields)


def generate_piece(
    content: str, thinking: str, calls: list[wire.ToolCallReply] | None, **fields: Any
) -> wire.OllamaGenerateReply:
    """Make `{"response": …}`, which has no calls."""
    return wire.OllamaGenerateReply(response=content, thinking=thinking, **fields)


class OllamaRenderer(Renderer):
    """Pieces of one answer, in the shape of its route."""

    def __init__(self, model: str, clock: Clock, shape: Shape) -> None:
        self.model = model
        self._clock = clock
        self._shape = shape
        self._calls: dict[int, CollectedCall] = {}

    def piece(
        self,
        content: str = "",
        thinking: str = "",
        calls: list[wire.ToolCallReply] | None = None,
        **last: Any,
    ) -> msgspec.Struct:
        """Make a piece of the answer; `last` are the last piece's own fields."""
        fields = {"model": self.model, "created_at": stamp(), "done": False} | last
        return self._shape(content, thinking, calls, **fields)

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
        """Encode complete calls; a call is never sent in pieces."""
        found = _calls(self._calls)
        self._calls = {}
        return self._line(calls=found) if found else b""

    def failure(self, problem: Problem, request_id: str) -> bytes:
        return error_line(problem, request_id)

    def waiting(self, text: str) -> bytes:
        return self._line()

    def whole(self, answers: list[Collected]) -> bytes:
        (answer,) = answers
        return _encode(
            self.piece(
                answer.text,
                answer.reasoning,
                _calls(answer.calls) or None,
                done=True,
                logprobs=_logprobs(answer.logprobs),
                **self._statistics(answer.finished),
            )
        )

    def _statistics(self, end: Finished) -> dict[str, Any]:
        usage, timings = end.usage, end.timings
        return {
            "done_reason": "length" if end.reason in ("length", "deadline") else "stop",
            "total_duration": self._clock.total_ns(),
            "load_duration": self._clock.load_ns,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(timings.prefill_ms * _MS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(timings.decode_ms * _MS),
        }


def _calls(collected: dict[int, CollectedCall]) -> list[wire.ToolCallReply]:
    found = []
    for index, call in sorted(collected.items()):
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
        except msgspec.DecodeError:
            continue
        if call.name:
            function = wire.CalledReply(index=index, name=call.name, arguments=arguments)
            found.append(wire.ToolCallReply(id=call.id, function=function))
    return found


def _logprobs(tokens: Sequence[TokenLogprobs]) -> list[TokenLogprob] | None:
    return wire_logprobs(tokens).content if tokens else None
