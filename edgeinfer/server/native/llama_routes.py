"""Routes as other servers have them: llama.cpp's /completion and /infill, vLLM's LoRA adapters."""

from __future__ import annotations

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
    Sampling,
)
from edgeinfer.server.context import RequestContext
from edgeinfer.server.dialect import Renderer, RouteTable, sse, sse_comment, wire_timings
from edgeinfer.server.generation_response import answer
from edgeinfer.server.native import wire
from edgeinfer.server.native.wire import LlamaAnswer, LlamaFields, LlamaLogprob, StopType
from edgeinfer.server.openai.render import error_body
from edgeinfer.server.openai.translate import limit_of, prompts, sampling_of
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_fields import common_fields, refuse_infill, stop_strings

ROUTES = RouteTable()

#: The placeholder for a picture in a prompt of llama.cpp's server.
_MEDIA = "<__media__>"
_NO_PATH = (
    "lora_path must be the name of a pulled adapter; a file's path needs `edgeinfer serve --ollama`"
)


@ROUTES.post("/completion", reply=wire.LlamaAnswer | list[wire.LlamaAnswer], streams=True)
async def completion(context: RequestContext, body: wire.LlamaCompletion) -> Response:
    """Continue a text, as llama.cpp's server does."""
    asked = body.prompt
    text = asked.prompt_string if isinstance(asked, wire.PromptText) else asked
    all_prompts = prompts(text, "prompt")

    def requests(info: EngineInfo) -> list[GenerateRequest]:
        shared = _common_fields(body, info) | {"constraint": _constraint(body)}
        if isinstance(asked, wire.PromptText) and asked.multimodal_data is not None:
            content, pictures = _read_pictures(asked.prompt_string, asked.multimodal_data)
            return [GenerateRequest(prompt=content, pictures=pictures, **shared)]
        return [GenerateRequest(prompt=prompt, **shared) for prompt in all_prompts]

    return await answer(
        context,
        body,
        requests,
        lambda model, info: LlamaRenderer(model, all_prompts, body, _sampling(body, info)),
        stream=body.stream,
    )


def _read_pictures(prompt: str, encoded: list[str]) -> tuple[str, tuple[bytes, ...]]:
    param, texts = "prompt.multimodal_data", prompt.split(_MEDIA)
    if len(texts) != len(encoded) + 1:
        message = f"{len(encoded)} pictures, but {len(texts) - 1} placeholders {_MEDIA} in the prompt"
        raise InvalidRequestError(message, param=param)
    parts: list[str | bytes] = [texts[0]]
    for picture, text in zip(encoded, texts[1:], strict=True):
        parts += from_base64(picture, param), text
    return join_parts(parts)


def _sampling(body: wire.LlamaFields, info: EngineInfo) -> Sampling:
    """Convert llama.cpp's sampling fields. Raises InvalidRequestError for a wrong `logit_bias`."""
    if not isinstance(body.logit_bias, list):
        return sampling_of(body, info.sampling)
    if any(bias is True for _, bias in body.logit_bias):
        raise InvalidRequestError("logit_bias: use false to ban a token, not true", param="logit_bias")
    biases = {token: -math.inf if bias is False else bias for token, bias in body.logit_bias}
    sampling = sampling_of(msgspec.structs.replace(body, logit_bias=None), info.sampling)
    return msgspec.structs.replace(sampling, logit_bias=biases)


def _common_fields(body: wire.LlamaFields, info: EngineInfo) -> dict[str, Any]:
    return {
        "max_tokens": limit_of(body.n_predict),
        "sampling": _sampling(body, info),
        "logprobs": body.n_probs or (0 if body.return_tokens else None),
        "stop": stop_strings(body.stop),
        "ignore_eos": body.ignore_eos,
        "overflow": body.overflow,
        "speculative": body.speculative,
        **common_fields(msgspec.structs.replace(body, lora=None)),
        "lora": None if body.lora is None else adapters_by_id(body.lora, info.lora),
    }


def _constraint(body: wire.LlamaCompletion) -> Constraint | None:
    if body.grammar and body.json_schema is not None:
        raise InvalidRequestError("grammar cannot be combined with json_schema", param="grammar")
    if body.json_schema is not None:
        return JsonSchema(body.json_schema)
    return Grammar(body.grammar) if body.grammar else None


@ROUTES.post("/infill", reply=wire.LlamaAnswer, streams=True)
async def infill(context: RequestContext, body: wire.LlamaInfill) -> Response:
    """Write the text between a prefix and a suffix, as llama.cpp's server does."""
    return await answer(
        context,
        body,
        lambda info: [_infill_request(body, info)],
        lambda model, info: LlamaRenderer(model, [""], body, _sampling(body, info)),
        stream=body.stream,
    )


def _infill_request(body: wire.LlamaInfill, info: EngineInfo) -> GenerateRequest:
    refuse_infill(info, "input_suffix")
    gap = Infill(
        prefix=body.input_prefix + body.prompt,
        suffix=body.input_suffix,
        files=tuple(InfillFile(name=e.filename, text=e.text) for e in body.input_extra or ()),
    )
    return GenerateRequest(infill=gap, **_common_fields(body, info))


#: Function from the loaded adapters to those that should be loaded.
ChangeAdapters = Callable[[tuple[Adapter, ...]], Sequence[Adapter]]


def adapters_by_id(
    choices: Sequence[wire.LoraById], loaded: Sequence[Adapter]
) -> tuple[tuple[str, float], ...]:
    """Convert ids (indexes) to names and scales. Raises InvalidRequestError for an unknown id."""
    for index, choice in enumerate(choices):
        if choice.id >= len(loaded):
            where = f"lora[{index}].id"
            raise InvalidRequestError(f"no such id: {len(loaded)} adapters are loaded", param=where)
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
        raise InvalidRequestError(_NO_PATH, param="lora_path")
    try:
        adapters = parse_adapters(str(LORA.parse(text)))
    except ValueError:
        adapters = ()
    if len(adapters) != 1 or adapters[0].scale != 1:
        raise InvalidRequestError("lora_path must name one adapter, without a scale", param="lora_path")
    if not os.path.isfile(adapters[0].path):
        hint = "`edgeinfer pull ADAPTER --base MODEL`"
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


_encode = msgspec.json.Encoder().encode


def _stop_type(finished: Finished) -> StopType:
    if finished.is_cut_short:
        return "limit"
    return "eos" if finished.stop_sequence is None else "word"


class LlamaRenderer(Renderer):
    """Renders /completion and /infill: an answer per prompt, with the prompt if it was text."""

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
        limits = {"n_predict": body.n_predict, "max_tokens": body.n_predict, "stop": body.stop or []}
        self._settings = msgspec.to_builtins(sampling, str_keys=True) | limits

    def event(self, index: int, event: Event) -> bytes:
        match event:
            case TextDelta() | ReasoningDelta():
                return sse(self._answer(index, event.text, event.logprobs))
            case Finished():
                return sse(self._finish(self._answer(index, "", ()), event))
        return b""

    def failure(self, problem: Problem) -> bytes:
        return b"data: " + error_body(problem, "") + b"\n\n"

    def waiting(self, text: str) -> bytes:
        return sse_comment(text) + sse(self._answer(0, "", ()))

    def whole(self, answers: list[CollectedAnswer]) -> bytes:
        bodies = []
        for index, collected in enumerate(answers):
            text = collected.reasoning + collected.text
            whole = self._answer(index, text, collected.logprobs)
            bodies.append(self._finish(whole, collected.finish))
        return _encode(bodies[0] if len(bodies) == 1 else bodies)

    def _answer(self, index: int, text: str, tokens: Sequence[TokenLogprobs]) -> LlamaAnswer:
        answer = LlamaAnswer(index=index, content=text, stop=False, model=self._model)
        if self._body.return_tokens:
            ids = [token.chosen.token_id for token in tokens]
            answer = msgspec.structs.replace(answer, tokens=ids)
        if self._body.n_probs:
            likely = [_logprob(token.chosen, token.top) for token in tokens]
            answer = msgspec.structs.replace(answer, completion_probabilities=likely)
        return answer

    def _finish(self, answer: LlamaAnswer, finished: Finished) -> LlamaAnswer:
        prompt = self._prompts[answer.index]
        return msgspec.structs.replace(
            answer,
            stop=True,
            tokens_predicted=finished.usage.completion_tokens,
            tokens_evaluated=finished.usage.prompt_tokens,
            tokens_cached=finished.usage.cached_tokens,
            prompt=prompt if isinstance(prompt, str) else msgspec.UNSET,
            generation_settings=self._settings,
            truncated=False,
            stop_type=_stop_type(finished),
            stopping_word=finished.stop_sequence or "",
            timings=wire_timings(finished.usage, finished.timings),
        )


def _logprob(token: Logprob, top: Sequence[Logprob]) -> LlamaLogprob:
    return LlamaLogprob(
        id=token.token_id,
        token=token.piece.decode("utf-8", "replace"),
        bytes=list(token.piece),
        logprob=max(token.logprob, -9999.0),
        top_logprobs=[_logprob(other, ()) for other in top] or msgspec.UNSET,
    )
