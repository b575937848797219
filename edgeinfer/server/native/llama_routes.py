"""Routes of other servers: llama.cpp's /completion and /infill, vLLM's routes for LoRA adapters."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import PlainTextResponse, Response

from edgeinfer.config.load_options import LORA
from edgeinfer.errors import InvalidRequestError, UsageError
from edgeinfer.media.pictures import from_base64, join_parts
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Event, Finished, Logprob, ReasoningDelta, TextDelta, TokenLogprobs
from edgeinfer.runtime.options import Adapter, EngineInfo, parse_adapters
from edgeinfer.runtime.requests import (
    Constraint,
    GenerateRequest,
    Grammar,
    Infill,
    InfillFile,
    JsonSchema,
)
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Renderer, RouteTable, sse, sse_comment, wire_timings
from edgeinfer.server.generation_response import answer
from edgeinfer.server.native import wire
from edgeinfer.server.native.wire import LlamaAnswer, LlamaFields, LlamaLogprob
from edgeinfer.server.openai.chat import error_body, logprob_fields
from edgeinfer.server.openai.completions import TextOrTokens, prompts_of
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_fields import common_fields, refuse_infill, sampling_of

ROUTES = RouteTable()

#: The placeholder for a picture in a prompt of llama.cpp's server.
_MEDIA = "<__media__>"


@ROUTES.post("/completion", reply=wire.LlamaAnswer | list[wire.LlamaAnswer], streams=True)
async def completion(context: RequestContext, body: wire.LlamaCompletion) -> Response:
    """Continue a text, as llama.cpp's server does."""
    prompt = body.prompt
    text = prompt.prompt_string if isinstance(prompt, wire.PromptText) else prompt
    prompts = prompts_of(text, "prompt")
    return await answer(
        context,
        body,
        functools.partial(_completion_requests, prompts),
        functools.partial(LlamaRenderer, prompts),
        stream=body.stream,
    )


def _completion_requests(
    prompts: Sequence[TextOrTokens], body: wire.LlamaCompletion, info: EngineInfo
) -> list[GenerateRequest]:
    shared, prompt = _shared_fields(body, info) | {"constraint": _constraint(body)}, body.prompt
    if isinstance(prompt, wire.PromptText) and prompt.multimodal_data is not None:
        content, pictures = _read_pictures(prompt.prompt_string, prompt.multimodal_data)
        return [GenerateRequest(prompt=content, pictures=pictures, **shared)]
    return [GenerateRequest(prompt=text_or_tokens, **shared) for text_or_tokens in prompts]


def _read_pictures(prompt: str, encoded: list[str]) -> tuple[str, tuple[bytes, ...]]:
    param, texts = "prompt.multimodal_data", prompt.split(_MEDIA)
    if len(texts) != len(encoded) + 1:
        message = f"{len(encoded)} pictures, but {len(texts) - 1} placeholders {_MEDIA} in the prompt"
        hint = f"send one {_MEDIA} in prompt.prompt_string for each picture"
        raise InvalidRequestError(message, param=param, hint=hint)
    parts: list[str | bytes] = [texts[0]]
    for picture, text in zip(encoded, texts[1:], strict=True):
        parts += from_base64(picture, param), text
    return join_parts(parts)


def _shared_fields(body: wire.LlamaFields, info: EngineInfo) -> dict[str, Any]:
    return {
        **common_fields(msgspec.structs.replace(_with_biases(body), lora=None), info),
        "max_tokens": None if body.n_predict == -1 else body.n_predict,
        "logprobs": body.n_probs or (0 if body.return_tokens else None),
        "lora": None if body.lora is None else adapters_by_id(body.lora, info.lora),
    }


def _with_biases(body: wire.LlamaFields) -> wire.LlamaFields:
    """Return `body` with `logit_bias` as a dict. Raises InvalidRequestError for a bias `true`."""
    if not isinstance(body.logit_bias, list):
        return body
    if any(bias is True for _, bias in body.logit_bias):
        message = "logit_bias: the bias of a token must be a number or false, not true"
        hint = "send a number to change the token's logit, or false to ban the token"
        raise InvalidRequestError(message, param="logit_bias", hint=hint)
    biases = {token: -math.inf if bias is False else bias for token, bias in body.logit_bias}
    return msgspec.structs.replace(body, logit_bias=biases)


def _constraint(body: wire.LlamaCompletion) -> Constraint | None:
    if body.grammar and body.json_schema is not None:
        message = "grammar cannot be combined with json_schema"
        raise InvalidRequestError(message, param="grammar", hint="leave one of the two out")
    if body.json_schema is not None:
        return JsonSchema(body.json_schema)
    return Grammar(body.grammar) if body.grammar else None


@ROUTES.post("/infill", reply=wire.LlamaAnswer, streams=True)
async def infill(context: RequestContext, body: wire.LlamaInfill) -> Response:
    """Write the text between a prefix and a suffix, as llama.cpp's server does."""
    return await answer(
        context, body, _infill_requests, functools.partial(LlamaRenderer, [""]), stream=body.stream
    )


def _infill_requests(body: wire.LlamaInfill, info: EngineInfo) -> list[GenerateRequest]:
    refuse_infill(info, "input_suffix")
    files = tuple(InfillFile(name=e.filename, text=e.text) for e in body.input_extra or ())
    prefix = body.input_prefix + body.prompt
    fields = Infill(prefix=prefix, suffix=body.input_suffix, files=files)
    return [GenerateRequest(infill=fields, **_shared_fields(body, info))]


#: Function that gets the loaded LoRA adapters, and returns those to load in their place.
ChangeAdapters = Callable[[tuple[Adapter, ...]], Sequence[Adapter]]


def adapters_by_id(
    choices: Sequence[wire.LoraById], loaded: Sequence[Adapter]
) -> tuple[tuple[str, float], ...]:
    """Return (name, scale) of each chosen adapter. An adapter's id is its index in `loaded`.

    Raises InvalidRequestError for an id that no adapter has.
    """
    for index, choice in enumerate(choices):
        if choice.id >= len(loaded):
            message = f"no loaded adapter has the id {choice.id}"
            hint = f"loaded adapters: {len(loaded)}; their ids begin with 0"
            raise InvalidRequestError(message, param=f"lora[{index}].id", hint=hint)
    return tuple((loaded[choice.id].name, choice.scale) for choice in choices)


@ROUTES.post("/v1/load_lora_adapter", reply_type="text/plain", is_admin=True)
async def load_adapter(context: RequestContext, body: wire.LoadAdapter) -> Response:
    """Load an adapter into a running model, as vLLM does."""
    path = _adapter_path(context, body.lora_path or body.lora_name)
    new = Adapter(body.lora_name, path, body.scale)
    context.name_model(body.model)
    await _change_adapters(context, lambda now: [*(a for a in now if a.name != new.name), new])
    return PlainTextResponse(f"Success: LoRA adapter '{new.name}' added successfully.")


def _adapter_path(context: RequestContext, text: str) -> str:
    """Return an adapter's path. `text` is a name, or with `serve --ollama` also a path."""
    is_path = "/" in text or text.startswith("~") or text.endswith(".gguf")
    if is_path and context.endpoint.model_admin is None:
        message = "lora_path must be the name of a pulled adapter"
        hint = "`edgeinfer serve --ollama` also accepts the path of an adapter file"
        raise InvalidRequestError(message, param="lora_path", hint=hint)
    try:
        adapters = parse_adapters(str(LORA.parse(text)))
    except ValueError:
        adapters = ()
    if len(adapters) != 1 or adapters[0].scale != 1:
        message = f"lora_path must name one adapter, without a scale: '{text}' does not"
        hint = "send the adapter's name in lora_path, and its scale in the field scale"
        raise InvalidRequestError(message, param="lora_path", hint=hint)
    if not os.path.isfile(adapters[0].path):
        hint = "pull it: `edgeinfer pull ADAPTER --base MODEL`"
        raise UsageError(f"The adapter '{text}' is not pulled", hint=hint)
    return adapters[0].path


@ROUTES.post("/v1/unload_lora_adapter", reply_type="text/plain", is_admin=True)
async def unload_adapter(context: RequestContext, body: wire.UnloadAdapter) -> Response:
    """Unload an adapter from a running model, as vLLM does."""
    context.name_model(body.model)

    def change(now: tuple[Adapter, ...]) -> Sequence[Adapter]:
        remaining = [a for a in now if a.name != body.lora_name]
        if len(remaining) == len(now):
            message = f"The adapter '{body.lora_name}' is not loaded."
            raise Problem(404, message, code="adapter_not_found")
        return remaining

    await _change_adapters(context, change)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _change_adapters(context: RequestContext, change: ChangeAdapters) -> tuple[Adapter, ...]:
    models = context.endpoint.models
    with await models.acquire(context.model) as lease:
        return await models.use_adapters(lease, change)


class LlamaRenderer(Renderer):
    """Renders /completion and /infill: one answer for each prompt.

    The field `prompt` of an answer repeats a prompt that was sent as text, not as token ids.
    """

    def __init__(
        self,
        prompts: Sequence[TextOrTokens],
        context: RequestContext,
        body: LlamaFields,
        info: EngineInfo,
    ) -> None:
        self._prompts = prompts
        self._model = context.model
        self._body = body
        self._info = info

    def event(self, index: int, event: Event) -> bytes:
        match event:
            case TextDelta() | ReasoningDelta():
                return sse(self._answer(index, event.text, event.logprobs))
            case Finished():
                return sse(self._answer(index, finished=event))
        return b""

    def failure(self, problem: Problem) -> bytes:
        return b"data: " + error_body(problem, "") + b"\n\n"

    def waiting(self, text: str) -> bytes:
        return sse_comment(text) + sse(self._answer(0))

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        bodies = [
            self._answer(index, answer.reasoning + answer.text, answer.logprobs, answer.finish)
            for index, answer in enumerate(answers)
        ]
        return msgspec.json.encode(bodies[0] if len(bodies) == 1 else bodies)

    def _answer(
        self,
        index: int,
        text: str = "",
        tokens: Sequence[TokenLogprobs] = (),
        finished: Finished | None = None,
    ) -> LlamaAnswer:
        fields = {} if finished is None else self._statistics(index, finished)
        if self._body.return_tokens:
            fields["tokens"] = [token.chosen.token_id for token in tokens]
        if self._body.n_probs:
            fields["completion_probabilities"] = [_logprob(t.chosen, t.top) for t in tokens]
        is_last = finished is not None
        return LlamaAnswer(index=index, content=text, stop=is_last, model=self._model, **fields)

    def _statistics(self, index: int, finished: Finished) -> dict[str, Any]:
        """Return the fields that only the last event of an answer has."""
        prompt, body = self._prompts[index], self._body
        sampling = sampling_of(_with_biases(body), self._info.sampling)
        limits = {"n_predict": body.n_predict, "max_tokens": body.n_predict, "stop": body.stop or []}
        stop_type = "eos" if finished.stop_sequence is None else "word"
        return {
            "tokens_predicted": finished.usage.completion_tokens,
            "tokens_evaluated": finished.usage.prompt_tokens,
            "tokens_cached": finished.usage.cached_tokens,
            "prompt": prompt if isinstance(prompt, str) else msgspec.UNSET,
            "generation_settings": msgspec.to_builtins(sampling, str_keys=True) | limits,
            "truncated": False,
            "stop_type": "limit" if finished.is_cut_short else stop_type,
            "stopping_word": finished.stop_sequence or "",
            "timings": wire_timings(finished.usage, finished.timings),
        }


def _logprob(token: Logprob, top: Sequence[Logprob]) -> LlamaLogprob:
    return LlamaLogprob(
        id=token.token_id,
        **logprob_fields(token),
        top_logprobs=[_logprob(other, ()) for other in top] or msgspec.UNSET,
    )
