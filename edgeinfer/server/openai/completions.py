"""POST /v1/completions: converts requests to GenerateRequest, and events to OpenAI's answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import (
    Event,
    Finished,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
)
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest, Infill
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import RouteTable
from edgeinfer.server.generation_response import answer
from edgeinfer.server.openai import wire
from edgeinfer.server.openai.chat import OpenAIRenderer, constraint_of, finish_reason, logprob_fields
from edgeinfer.server.request_fields import common_fields, copies, refuse_infill

ROUTES = RouteTable()
#: The text or the token ids of a prompt.
TextOrTokens = str | tuple[int, ...]


@ROUTES.post("/v1/completions", reply=wire.Completion, streams=True)
async def completions(context: RequestContext, body: wire.CompletionRequest) -> Response:
    """Continue a text."""
    prompts = prompts_of(body.prompt, "prompt")
    return await answer(
        context,
        body,
        functools.partial(completion_requests, prompts),
        functools.partial(CompletionRenderer, prompts),
        stream=bool(body.stream),
    )


def prompts_of(
    prompt: str | Sequence[str | int | Sequence[int]], param: str, max_prompts: int = 64
) -> list[TextOrTokens]:
    """Convert `prompt`, the value of the field `param`, to a list of texts or of tuples of token ids.

    Raises InvalidRequestError if the list mixes texts and token ids, or has more than `max_prompts`.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [tuple(prompt)]  # type: ignore[arg-type]  # a list of ints is one prompt
    if len(kinds) != 1:
        message = f"{param} must be a list of only texts, only token ids, or only lists of token ids"
        hint = "send texts and token ids in separate requests"
        raise InvalidRequestError(message, param=param, hint=hint)
    if len(prompt) > max_prompts:
        raise InvalidRequestError(
            f"{param} has {len(prompt)} elements, but at most {max_prompts} are allowed",
            param=param,
            hint="send them in several requests",
        )
    return [item if isinstance(item, str) else tuple(item) for item in prompt]  # type: ignore[arg-type]  # no int is left


def completion_requests(
    prompts: Sequence[TextOrTokens], body: wire.CompletionRequest, info: EngineInfo
) -> list[GenerateRequest]:
    """Make `n` requests for each prompt, in the prompts' order.

    Raises InvalidRequestError for more than 64 answers, and for fields that cannot be combined.
    """
    n = body.n or 1
    if len(prompts) * n > 64:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n = {n} make more than 64 answers",
            param="n",
            hint="use a smaller n, or send the prompts in several requests",
        )
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    shared: dict[str, Any] = {
        "max_tokens": None if max_tokens == -1 else max_tokens,
        "logprobs": body.logprobs,
        "constraint": constraint_of(body),
        **common_fields(body, info),
    }
    requests = [GenerateRequest(**_prompt_fields(prompt, body, info), **shared) for prompt in prompts]
    return [copy for request in requests for copy in copies(request, n)]


def _prompt_fields(
    prompt: TextOrTokens, body: wire.CompletionRequest, info: EngineInfo
) -> dict[str, Any]:
    # to echo a prompt of token ids, its text is taken from its logprobs: request them in any case
    top = body.logprobs if isinstance(prompt, str) else body.logprobs or 0
    prompt_logprobs = top if body.echo else None
    if not body.suffix:
        return {"prompt": prompt, "prompt_logprobs": prompt_logprobs}
    refuse_infill(info, "suffix")
    if not isinstance(prompt, str):
        raise InvalidRequestError(
            "suffix needs a prompt of text, not of token ids",
            param="suffix",
            hint="send the prompt as text, or leave suffix out",
        )
    if prompt_logprobs is not None:
        raise InvalidRequestError(
            "suffix cannot be combined with echo and logprobs",
            param="suffix",
            hint="leave one of the three out",
        )
    return {"infill": Infill(prefix=prompt, suffix=body.suffix)}


_encode = msgspec.json.Encoder().encode


class CompletionRenderer(OpenAIRenderer):
    """Renders POST /v1/completions. With `echo`, each answer begins with its prompt."""

    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    nothing = b'"text":""'
    reply_type = wire.Completion

    def __init__(
        self,
        prompts: Sequence[TextOrTokens],
        context: RequestContext,
        body: wire.CompletionRequest,
        info: EngineInfo,
    ) -> None:
        super().__init__(context, body, info, len(prompts))
        self._body = body
        self._prompts = prompts
        self._offsets = [0] * self.count

    def _echo(self, index: int, tokens: PromptLogprobs | None) -> str:
        """Return the prompt's text, "" without `echo`. The text of token ids comes from `tokens`."""
        prompt = self._prompts[index // self.n]
        if not self._body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        pieces = (tokens.first, *(t.chosen.piece for t in tokens.tokens)) if tokens else ()
        return b"".join(pieces).decode("utf-8", "replace")

    def opening(self) -> bytes:
        """Return the prompts to echo; b"" without `echo`, or if `event` sends them with logprobs."""
        if self._body.logprobs is not None:
            return b""
        texts = [(index, self._echo(index, None)) for index in range(self.count)]
        return b"".join(self._piece(index, text) for index, text in texts if text)

    def event(self, index: int, event: Event) -> bytes:
        match event:
            case PromptLogprobs():
                text = self._echo(index, event)
                self._offsets[index] = len(text)
                logprobs = _encode(self._prompt_logprobs(event, text))
                return self._piece(index, text, logprobs) if self._body.echo else b""
            case TextDelta() | ReasoningDelta():
                logprobs = b"null"
                if event.logprobs:
                    logprobs = _encode(_logprobs(event.logprobs, self._offsets[index]))
                self._offsets[index] += len(event.text)
                return self._piece(index, event.text, logprobs)
            case Finished():
                return self.finish(index, event)
        return b""

    def _piece(self, index: int, text: str, logprobs: bytes = b"null") -> bytes:
        return self.encode_chunk(index, b'"text":%b' % _encode(text), logprobs)

    def choice(self, index: int, answer: CollectedAnswer) -> wire.CompletionChoice:
        echo = self._echo(index, answer.prompt)
        logprobs = _logprobs(answer.logprobs, len(echo)) if answer.logprobs else None
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
        # if the first token is BOS, which `text` does not contain, the second token begins at offset 0
        offset = len(first) if text.startswith(first) else 0
        tokens = [TokenLogprobs(t.chosen, t.top[:top]) for t in prompt.tokens]
        head = wire.CompletionLogprobs(
            tokens=[first], token_logprobs=[None], top_logprobs=[None], text_offset=[0]
        )
        return _join_logprobs(head, _logprobs(tokens, offset))


def _logprobs(tokens: Sequence[TokenLogprobs], offset: int) -> wire.CompletionLogprobs:
    chosen = [logprob_fields(token.chosen) for token in tokens]
    offsets = []
    for token in chosen:
        offsets.append(offset)
        offset += len(token["token"])
    return wire.CompletionLogprobs(
        tokens=[token["token"] for token in chosen],
        token_logprobs=[token["logprob"] for token in chosen],
        top_logprobs=[
            {other["token"]: other["logprob"] for other in map(logprob_fields, token.top)}
            for token in tokens
        ],
        text_offset=offsets,
    )


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
