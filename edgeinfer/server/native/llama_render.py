"""Events as llama.cpp's /completion, streamed or whole."""

from __future__ import annotations

import msgspec

from edgeinfer.runtime.collected import Collected
from edgeinfer.runtime.events import Event, Finished, ReasoningDelta, TextDelta
from edgeinfer.server.core.problems import Problem
from edgeinfer.server.core.renderer import sse_comment, wire_timings
from edgeinfer.server.native.llama_wire import LlamaAnswer
from edgeinfer.server.openai.errors import error_body

_encode = msgspec.json.Encoder().encode


def _stop_type(end: Finished) -> str:
    if end.reason in ("length", "deadline"):
        return "limit"
    return "eos" if end.stop_sequence is None else "word"


class LlamaRenderer:
    """`prompt` is repeated in the whole answer, and in the last event of a stream."""

    def __init__(self, model: str, prompt: str) -> None:
        self._model = model
        self._prompt = prompt
        self._end: Finished | None = None

    def opening(self) -> bytes:
        return b""

    def event(self, index: int, event: Event) -> bytes:
        match event:
            case TextDelta() | ReasoningDelta():
                return _sse(LlamaAnswer(content=event.text, stop=False, model=self._model))
            case Finished():
                self._end = event
        return b""

    def closing(self) -> bytes:
        assert self._end is not None
        return _sse(self._last("", self._end))

    def failure(self, problem: Problem, request_id: str) -> bytes:
        return b"data: " + error_body(problem, request_id) + b"\n\n"

    def waiting(self, said: str) -> bytes:
        return sse_comment(said) + _sse(LlamaAnswer(content="", stop=False, model=self._model))

    def whole(self, answers: list[Collected]) -> bytes:
        (answer,) = answers
        return _encode(self._last(answer.reasoning + answer.text, answer.finished))

    def _last(self, content: str, end: Finished) -> LlamaAnswer:
        last = LlamaAnswer(
            content=content,
            stop=True,
            model=self._model,
            tokens_predicted=end.usage.completion_tokens,
            tokens_evaluated=end.usage.prompt_tokens,
            tokens_cached=end.usage.cached_tokens,
            prompt=self._prompt,
            generation_settings={},
            truncated=False,
            stopping_word=end.stop_sequence or "",
            timings=wire_timings(end.usage, end.timings),
        )
        return msgspec.structs.replace(last, stop_type=_stop_type(end))


def _sse(answer: LlamaAnswer) -> bytes:
    return b"data: " + _encode(answer) + b"\n\n"
