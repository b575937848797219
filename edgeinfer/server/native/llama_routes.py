"""Routes by which people script llama.cpp's server, in its shapes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer import __version__
from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import (
    Constraint,
    GenerateRequest,
    Grammar,
    Infill,
    InfillFile,
    JsonSchema,
    Sampling,
)
from edgeinfer.server.core.begin import Job
from edgeinfer.server.core.bodies import decode
from edgeinfer.server.core.exchange import exchange_of, json_reply
from edgeinfer.server.core.request_parts import caching, refuse_infill, stop_strings
from edgeinfer.server.core.stream import answer
from edgeinfer.server.native import llama_wire as wire
from edgeinfer.server.native.adapters import chosen_of_request
from edgeinfer.server.native.llama_render import LlamaRenderer
from edgeinfer.server.openai.routes import embed
from edgeinfer.server.openai.translate import limit_of, prompts, sampling_of


async def completion(request: Request) -> Response:
    body = await decode(request, wire.LlamaCompletion)
    given = body.prompt.prompt_string if isinstance(body.prompt, wire.PromptText) else body.prompt
    found = prompts(given, "prompt")
    job = Job(
        model=body.model,
        keep_alive=body.keep_alive,
        stream=body.stream,
        requests=lambda info: [
            GenerateRequest(prompt=prompt, constraint=_constraint(body), **_shared(body, info))
            for prompt in found
        ],
        renderer=lambda model, info: LlamaRenderer(model, found, body, _sampling(body, info)),
    )
    return await answer(exchange_of(request), job)


def _sampling(body: wire.LlamaFields, info: EngineInfo) -> Sampling:
    """Raises InvalidRequestError for a bias of true, which llama.cpp does not have."""
    if not isinstance(body.logit_bias, list):
        return sampling_of(body, info.sampling)
    if any(bias is True for _, bias in body.logit_bias):
        raise InvalidRequestError("logit_bias: false bans a token, true is no bias", param="logit_bias")
    biases = {token: -math.inf if bias is False else bias for token, bias in body.logit_bias}
    sampling = sampling_of(msgspec.structs.replace(body, logit_bias=None), info.sampling)
    return msgspec.structs.replace(sampling, logit_bias=biases)


def _shared(body: wire.LlamaFields, info: EngineInfo) -> dict[str, Any]:
    return {
        "max_tokens": limit_of(body.n_predict),
        "sampling": _sampling(body, info),
        "logprobs": body.n_probs or (0 if body.return_tokens else None),
        "stop": stop_strings(body.stop),
        "ignore_eos": body.ignore_eos,
        "overflow": body.overflow,
        "deadline_s": body.deadline_s,
        "speculative": body.speculative,
        "lora": chosen_of_request(body.lora, info),
        **caching(body),
    }


def _constraint(body: wire.LlamaCompletion) -> Constraint | None:
    if body.grammar and body.json_schema is not None:
        raise InvalidRequestError("grammar cannot be combined with json_schema", param="grammar")
    if body.json_schema is not None:
        return JsonSchema(body.json_schema)
    return Grammar(body.grammar) if body.grammar else None


async def infill(request: Request) -> Response:
    body = await decode(request, wire.LlamaInfill)
    job = Job(
        model=body.model,
        keep_alive=body.keep_alive,
        stream=body.stream,
        requests=lambda info: [_gap(body, info)],
        renderer=lambda model, info: LlamaRenderer(model, [""], body, _sampling(body, info)),
    )
    return await answer(exchange_of(request), job)


def _gap(body: wire.LlamaInfill, info: EngineInfo) -> GenerateRequest:
    refuse_infill(info, "input_suffix")
    gap = Infill(
        prefix=body.input_prefix + body.prompt,
        suffix=body.input_suffix,
        files=tuple(InfillFile(name=e.filename, text=e.text) for e in body.input_extra or ()),
    )
    return GenerateRequest(infill=gap, **_shared(body, info))


async def embedding(request: Request) -> Response:
    body = await decode(request, wire.LlamaEmbedding)
    given = body.content if body.content is not None else body.input
    if given is None:
        raise InvalidRequestError("content is missing: a text or several", param="content")
    texts = [given] if isinstance(given, str) else list(given)
    reply = await embed(exchange_of(request), body.model, body.keep_alive, texts)
    return json_reply(
        [
            wire.LlamaVector(index=vector.index, embedding=[vector.embedding])
            for vector in reply.data
            if isinstance(vector.embedding, list)
        ]
    )


async def version(request: Request) -> Response:
    return json_reply(wire.Version(version=__version__))
