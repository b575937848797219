"""Convert engine events to OpenAI's chat completions and completions, as a stream or one object.

The JSON that all chunks of a stream share is encoded once (`_head`).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from edgeinfer import __version__
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import (
    Event,
    Finished,
    Logprob,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.server.dialect import Renderer, sse_comment, total, wire_timings
from edgeinfer.server.metrics import version_of
from edgeinfer.server.openai import wire
from edgeinfer.server.problems import Problem

_encode = msgspec.json.Encoder().encode
#: End of a chunk. There is no `usage: null`, because strands-agents drops the text of such chunks.
_TAIL = b"]}\n\n"


def finish_reason(finished: Finished) -> wire.WireFinish:
    """Return OpenAI's `finish_reason`. It is also "length" for an answer that a deadline cut off."""
    if finished.is_cut_short:
        return "length"
    return "tool_calls" if finished.reason == "tool_calls" else "stop"


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
        top = [wire.TopLogprob(**_logprob(other)) for other in token.top]
        content.append(wire.TokenLogprob(**_logprob(token.chosen), top_logprobs=top))
    return wire.ChoiceLogprobs(content=content)


def _logprob(token: Logprob) -> dict[str, Any]:
    return {"token": _piece(token), "logprob": _finite(token.logprob), "bytes": list(token.piece)}


def _piece(token: Logprob) -> str:
    return token.piece.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    """Return at least -9999, which OpenAI sends for minus infinity (JSON has no infinity)."""
    return logprob if logprob > -9999.0 else -9999.0


class _OpenAI(Renderer):
    """Base of both renderers. `count`: number of answers, which is the number of prompts times `n`."""

    #: Value of `object` in a chunk.
    chunk_object: str
    #: JSON fields of a choice without text, e.g. `"delta":{}`.
    nothing: bytes
    #: Type of a response that is not streamed.
    reply_type: type[wire.ChatCompletion] | type[wire.Completion]

    def __init__(
        self, request_id: str, model: str, info: EngineInfo, body: wire.OpenAIFields, count: int
    ) -> None:
        self.id = request_id
        self.model = model
        self.created = int(time.time())
        #: `system_fingerprint`: the program's and the model's version.
        self.fingerprint = f"ei-{__version__}-{version_of(info.sha256)}".rstrip("-")
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.n = body.n or 1
        self.count = count
        self._ends: dict[int, Finished] = {}
        about = {
            "id": request_id,
            "object": self.chunk_object,
            "created": self.created,
            "model": model,
            "system_fingerprint": self.fingerprint,
        }
        self._head = b'data: %b,"choices":[' % _encode(about)[:-1]

    @property
    def ends(self) -> list[Finished]:
        return [self._ends[index] for index in sorted(self._ends)]

    def _piece(
        self, index: int, piece: bytes, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        fields = (self._head, index, piece, finish, logprobs)
        return b'%b{"index":%d,%b,"finish_reason":%b,"logprobs":%b}' % fields

    def _finish(self, index: int, finished: Finished) -> bytes:
        """Encode the last chunk of an answer. `timings` are in the last chunk of all answers."""
        self._ends[index] = finished
        chunk = self._piece(index, self.nothing, finish=_encode(finish_reason(finished)))
        if len(self._ends) < self.count:
            return chunk + _TAIL
        return chunk + b'],"timings":%b}\n\n' % _encode(wire_timings(*total(self.ends, self.n)))

    def closing(self) -> bytes:
        if not self.include_usage:
            return DONE
        usage, _ = total(self.ends, self.n)
        return self._head + b'],"usage":%b}\n\n' % _encode(wire_usage(usage)) + DONE

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        usage, timings = total([answer.finish for answer in answers], self.n)
        choices: Any = [self._choice(index, answer) for index, answer in enumerate(answers)]
        reply = self.reply_type(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=wire_usage(usage),
            timings=wire_timings(usage, timings),
            system_fingerprint=self.fingerprint,
        )
        return _encode(reply)

    @abstractmethod
    def _choice(self, index: int, answer: CollectedAnswer) -> msgspec.Struct:
        """Make an element of `choices` in a response that is not streamed."""

    def waiting(self, text: str) -> bytes:
        waits = next((index for index in range(self.count) if index not in self._ends), 0)
        return sse_comment(text) + self._piece(waits, self.nothing) + _TAIL


class ChatRenderer(_OpenAI):
    """Renders POST /v1/chat/completions."""

    chunk_object = "chat.completion.chunk"
    nothing = b'"delta":{}'
    reply_type = wire.ChatCompletion

    def __init__(self, request_id: str, model: str, info: EngineInfo, body: wire.ChatRequest) -> None:
        super().__init__(request_id, model, info, body, body.n or 1)
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
                delta = b'"content":' + _encode(event.text)
                if event.logprobs:
                    return self._delta(index, delta, _encode(wire_logprobs(event.logprobs)))
                return self._delta(index, delta)
            case ReasoningDelta():
                return self._delta(index, b'"reasoning_content":' + _encode(event.text))
            case ToolCallDelta():
                return self._delta(index, b'"tool_calls":[' + _encode(_tool_delta(event)) + b"]")
            case Finished():
                return self._finish(index, event)
        return b""

    def _delta(self, index: int, delta: bytes, logprobs: bytes = b"null") -> bytes:
        return self._piece(index, b'"delta":{%b}' % delta, logprobs) + _TAIL

    def _choice(self, index: int, answer: CollectedAnswer) -> wire.ChatChoice:
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
    if not (event.id or event.name):
        return {"index": event.index, "function": {"arguments": event.arguments}}
    named = {"name": event.name} if event.name else {}
    return {
        "index": event.index,
        "id": event.id,
        "type": "function",
        "function": {**named, "arguments": event.arguments},
    }


def _join_logprobs(
    head: wire.CompletionLogprobs | None, tail: wire.CompletionLogprobs | None
) -> wire.CompletionLogprobs | None:
    if head is None or tail is None:
        return head or tail
    return wire.CompletionLogprobs(
        tokens=head.tokens + tail.tokens,
        token_logprobs=head.token_logprobs + tail.token_logprobs,
        top_logprobs=head.top_logprobs + tail.top_logprobs,
        text_offset=head.text_offset + tail.text_offset,
    )


class CompletionRenderer(_OpenAI):
    """Renders POST /v1/completions. With `echo`, each answer begins with its prompt."""

    chunk_object = "text_completion"
    nothing = b'"text":""'
    reply_type = wire.Completion

    def __init__(
        self,
        request_id: str,
        model: str,
        info: EngineInfo,
        body: wire.CompletionRequest,
        prompts: Sequence[str | tuple[int, ...]],
    ) -> None:
        count = (body.n or 1) * len(prompts)
        super().__init__(request_id, model, info, body, count)
        self._body = body
        self._prompts = prompts
        self._offsets = [0] * count

    def _echo(self, index: int, tokens: PromptLogprobs | None) -> str:
        """Return the prompt's text if it is echoed, else "". `tokens`: for a prompt of token ids."""
        prompt = self._prompts[index // self.n]
        if not self._body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        pieces = (tokens.first, *(t.chosen.piece for t in tokens.tokens)) if tokens else ()
        return b"".join(pieces).decode("utf-8", "replace")

    def opening(self) -> bytes:
        """Return the echoed prompts. If logprobs are requested, `event` returns both together later."""
        if self._body.logprobs is not None:
            return b""
        texts = [(index, self._echo(index, None)) for index in range(self.count)]
        return b"".join(self._delta(index, text, b"null") for index, text in texts if text)

    def event(self, index: int, event: Event) -> bytes:
        match event:
            case PromptLogprobs():
                text = self._echo(index, event)
                self._offsets[index] = len(text)
                logprobs = _encode(self._prompt_logprobs(event, text))
                return self._delta(index, text, logprobs) if self._body.echo else b""
            case TextDelta() | ReasoningDelta():
                logprobs = b"null"
                if event.logprobs:
                    logprobs = _encode(self._logprobs(event.logprobs, self._offsets[index]))
                self._offsets[index] += len(event.text)
                return self._delta(index, event.text, logprobs)
            case Finished():
                return self._finish(index, event)
        return b""

    def _delta(self, index: int, text: str, logprobs: bytes) -> bytes:
        return self._piece(index, b'"text":%b' % _encode(text), logprobs) + _TAIL

    def _choice(self, index: int, answer: CollectedAnswer) -> wire.CompletionChoice:
        echo = self._echo(index, answer.prompt)
        logprobs = self._logprobs(answer.logprobs, len(echo)) if answer.logprobs else None
        if answer.prompt is not None:
            logprobs = _join_logprobs(self._prompt_logprobs(answer.prompt, echo), logprobs)
        return wire.CompletionChoice(
            index=index,
            text=echo + answer.reasoning + answer.text,
            finish_reason=finish_reason(answer.finish),
            logprobs=logprobs,
        )

    def _prompt_logprobs(self, prompt: PromptLogprobs, text: str) -> wire.CompletionLogprobs | None:
        top = self._body.logprobs
        if top is None or not self._body.echo:
            return None
        first = prompt.first.decode("utf-8", "replace")
        # the first token may be BOS, which the text does not contain
        offset = len(first) if text.startswith(first) else 0
        tokens = [TokenLogprobs(t.chosen, t.top[:top]) for t in prompt.tokens]
        head = wire.CompletionLogprobs(
            tokens=[first], token_logprobs=[None], top_logprobs=[None], text_offset=[0]
        )
        return _join_logprobs(head, self._logprobs(tokens, offset))

    @staticmethod
    def _logprobs(tokens: Sequence[TokenLogprobs], offset: int) -> wire.CompletionLogprobs:
        names = [_piece(t.chosen) for t in tokens]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return wire.CompletionLogprobs(
            tokens=names,
            token_logprobs=[_finite(t.chosen.logprob) for t in tokens],
            top_logprobs=[{_piece(o): _finite(o.logprob) for o in t.top} for t in tokens],
            text_offset=offsets,
        )


DONE = b"data: [DONE]\n\n"


def error_text(problem: Problem) -> str:
    """Return the error text. For a too long prompt it begins with OpenAI's text, for clients."""
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
    return b"data: " + error_body(problem, request_id) + b"\n\n" + DONE


#: Fields of a `Dialect` with OpenAI's errors.
ERRORS: dict[str, Any] = {
    "error_type": wire.ErrorReply,
    "error_body": error_body,
    "error_events": error_events,
}
