"""Events as llama.cpp's /completion, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from edgeinfer.runtime.events import Event, Finished, Logprob, ReasoningDelta, TextDelta, TokenLogprobs
from edgeinfer.runtime.generation import Collected
from edgeinfer.runtime.requests import Sampling
from edgeinfer.server.dialect import Renderer, sse, sse_comment, wire_timings
from edgeinfer.server.native.wire import LlamaAnswer, LlamaFields, LlamaLogprob, StopType
from edgeinfer.server.openai.render import error_body
from edgeinfer.server.problems import Problem

_encode = msgspec.json.Encoder().encode


def _stop_type(end: Finished) -> StopType:
    if end.reason in ("length", "deadline"):
        return "limit"
    return "eos" if end.stop_sequence is None else "word"


class LlamaRenderer(Renderer):
    """One answer a prompt; a prompt that was given as text is repeated when its answer ends."""

    def __init__(
        self,
        model: str,
        prompts: Sequence[str | tuple[int, ...]],
        body: LlamaFields,
        sampling: Sampling,
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._body = body
        limit = {"n_predict": body.n_predict, "max_tokens": body.n_predict}
        self._settings = {
            **msgspec.to_builtins(sampling, str_keys=True),
            **limit,
            "stop": body.stop or [],
        }

    def event(self, index: int, event: Event) -> bytes:
        match event:
            case TextDelta() | ReasoningDelta():
                return sse(self._answer(index, event.text, event.logprobs))
            case Finished():
                return sse(self._last(self._answer(index, "", ()), event))
        return b""

    def failure(self, problem: Problem, request_id: str) -> bytes:
        return b"data: " + error_body(problem, request_id) + b"\n\n"

    def waiting(self, text: str) -> bytes:
        return sse_comment(text) + sse(self._answer(0, "", ()))

    def whole(self, answers: list[Collected]) -> bytes:
        found = [
            self._last(
                self._answer(index, answer.reasoning + answer.text, answer.logprobs), answer.finished
            )
            for index, answer in enumerate(answers)
        ]
        return _encode(found[0] if len(found) == 1 else found)

    def _answer(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> LlamaAnswer:
        answer = LlamaAnswer(index=index, content=text, stop=False, model=self._model)
        if self._body.return_tokens:
            ids = [token.chosen.token_id for token in tokens]
            answer = msgspec.structs.replace(answer, tokens=ids)
        if self._body.n_probs:
            likely = [_logprob(token.chosen, token.top) for token in tokens]
            answer = msgspec.structs.replace(answer, completion_probabilities=likely)
        return answer

    def _last(self, answer: LlamaAnswer, end: Finished) -> Any:
        prompt = self._prompts[answer.index]
        last = msgspec.structs.replace(
            answer,
            stop=True,
            tokens_predicted=end.usage.completion_tokens,
            tokens_evaluated=end.usage.prompt_tokens,
            tokens_cached=end.usage.cached_tokens,
            prompt=prompt if isinstance(prompt, str) else msgspec.UNSET,
            generation_settings=self._settings,
            truncated=False,
            stop_type=_stop_type(end),
            stopping_word=end.stop_sequence or "",
            timings=wire_timings(end.usage, end.timings),
        )
        return _only(last, self._body.response_fields) if self._body.response_fields else last


def _logprob(token: Logprob, top: Sequence[Logprob]) -> LlamaLogprob:
    return LlamaLogprob(
        id=token.token_id,
        token=token.piece.decode("utf-8", "replace"),
        bytes=list(token.piece),
        logprob=max(token.logprob, -9999.0),
        top_logprobs=[_logprob(other, ()) for other in top] or msgspec.UNSET,
    )


def _only(answer: LlamaAnswer, fields: Sequence[str]) -> dict[str, Any]:
    """Pick fields; `a/b` is `b` of the object `a`. Unknown ones are left out, as in llama.cpp."""
    found: dict[str, Any] = {}
    for field in fields:
        inner: Any = msgspec.to_builtins(answer)
        *above, name = field.split("/")
        for place in above:
            inner = inner.get(place) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and name in inner:
            found[name] = inner[name]
    return found
