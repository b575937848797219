"""Events as the V2 protocol's answers, streamed or whole."""

from __future__ import annotations

import msgspec

from edgeinfer.runtime.collected import Collected
from edgeinfer.runtime.events import Event, ReasoningDelta, TextDelta
from edgeinfer.server.core.problems import Problem
from edgeinfer.server.core.renderer import sse_comment
from edgeinfer.server.inference_v2 import wire

_encode = msgspec.json.Encoder().encode


def error_body(problem: Problem, request_id: str) -> bytes:
    """`{"error": "…"}`; there is no place for the request's id."""
    return _encode(wire.V2Error(error=problem.message))


def error_events(problem: Problem, request_id: str) -> bytes:
    """The envelope as a stream's last event."""
    return b"data: " + error_body(problem, request_id) + b"\n\n"


class GenerateRenderer:
    """One prompt's answer, whole or in pieces. `given_id` is the client's name for its request."""

    def __init__(self, model: str, given_id: str | None) -> None:
        self._model = model
        self._id = msgspec.UNSET if given_id is None else given_id

    def opening(self) -> bytes:
        return b""

    def event(self, index: int, event: Event) -> bytes:
        if isinstance(event, TextDelta | ReasoningDelta):
            return self._sse(event.text)
        return b""

    def closing(self) -> bytes:
        return b""

    def failure(self, problem: Problem, request_id: str) -> bytes:
        return error_events(problem, request_id)

    def waiting(self, said: str) -> bytes:
        return sse_comment(said) + self._sse("")

    def whole(self, answers: list[Collected]) -> bytes:
        (answer,) = answers
        return _encode(self._reply(answer.reasoning + answer.text))

    def _sse(self, text: str) -> bytes:
        return b"data: " + _encode(self._reply(text)) + b"\n\n"

    def _reply(self, text: str) -> wire.GenerateReply:
        return wire.GenerateReply(model_name=self._model, text_output=text, id=self._id)


class InferRenderer(GenerateRenderer):
    """All prompts' answers as one tensor; never streamed."""

    def whole(self, answers: list[Collected]) -> bytes:
        texts = [answer.reasoning + answer.text for answer in answers]
        tensor = wire.TensorOut(data=texts, shape=[len(texts)])
        return _encode(wire.InferenceReply(model_name=self._model, outputs=[tensor], id=self._id))
