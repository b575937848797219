"""The V2 protocol's routes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from edgeinfer import __version__
from edgeinfer.errors import InvalidRequestError, UnknownModelError
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.server.core.begin import Job
from edgeinfer.server.core.bodies import decode
from edgeinfer.server.core.exchange import Exchange, exchange_of
from edgeinfer.server.core.problems import Problem, no_such_model
from edgeinfer.server.core.replies import json_reply
from edgeinfer.server.core.request_parts import caching, stop_strings
from edgeinfer.server.core.stream import answer
from edgeinfer.server.inference_v2 import wire
from edgeinfer.server.inference_v2.render import GenerateRenderer, InferRenderer
from edgeinfer.server.native.routes import health_of
from edgeinfer.server.openai.translate import sampling_of

#: As `/v1/completions` has it.
_MAX_TOKENS = 16
_VERSIONS = "/versions/"
#: The protocol tells "no" by any status from 400 to 499.
_NOT_READY = 400


async def server_metadata(request: Request) -> Response:
    return json_reply(wire.ServerMetadata(version=__version__))


async def live(request: Request) -> Response:
    return json_reply(wire.Live())


async def ready(request: Request) -> Response:
    is_ready = health_of(exchange_of(request).endpoint).status == "ok"
    return json_reply(wire.Ready(ready=is_ready), 200 if is_ready else _NOT_READY)


async def model_metadata(request: Request) -> Response:
    exchange = exchange_of(request)
    return json_reply(wire.ModelMetadata(name=_meant(exchange, _name(request))))


async def model_ready(request: Request) -> Response:
    exchange = exchange_of(request)
    name = _meant(exchange, _name(request))
    is_ready = exchange.endpoint.models.state(name) == "loaded" and not exchange.endpoint.draining
    return json_reply(wire.ModelReady(name=name, ready=is_ready), 200 if is_ready else _NOT_READY)


async def generate(request: Request) -> Response:
    return await _generate(request, stream=False)


async def generate_stream(request: Request) -> Response:
    return await _generate(request, stream=True)


async def _generate(request: Request, *, stream: bool) -> Response:
    body = await decode(request, wire.GenerateBody)
    parameters = body.parameters or wire.Parameters()
    job = Job(
        model=_name(request),
        keep_alive=parameters.keep_alive,
        stream=stream,
        requests=lambda info: _requests([body.text_input], parameters, info),
        renderer=lambda model, info: GenerateRenderer(model, body.id),
    )
    return await answer(exchange_of(request), job)


async def infer(request: Request) -> Response:
    body = await decode(request, wire.InferBody)
    parameters = body.parameters or wire.Parameters()
    (tensor,) = body.inputs
    if tensor.name != wire.TEXT_IN:
        raise InvalidRequestError(f"the input is called {wire.TEXT_IN}", param="inputs[0].name")
    job = Job(
        model=_name(request),
        keep_alive=parameters.keep_alive,
        stream=False,
        requests=lambda info: _requests(tensor.data, parameters, info),
        renderer=lambda model, info: InferRenderer(model, body.id),
    )
    return await answer(exchange_of(request), job)


def _requests(texts: Sequence[str], given: wire.Parameters, info: EngineInfo) -> list[GenerateRequest]:
    """One request a prompt."""
    request = GenerateRequest(
        max_tokens=_MAX_TOKENS if given.max_tokens is None else given.max_tokens,
        sampling=sampling_of(given, info.sampling),
        stop=stop_strings(given.stop),
        ignore_eos=given.ignore_eos,
        overflow=given.overflow,
        deadline_s=given.deadline_s,
        speculative=given.speculative,
        **caching(given),
    )
    return [msgspec.structs.replace(request, prompt=text) for text in texts]


def _name(request: Request) -> str:
    """The model in the path, a version behind it or not. Raises Problem 404 for another version."""
    name: str = request.path_params["id"]
    name, _, version = name.partition(_VERSIONS)
    if version not in ("", wire.VERSION):
        raise Problem(404, f"{name} has the version {wire.VERSION} alone.", code="model_not_found")
    return name


def _meant(exchange: Exchange, name: str) -> str:
    """What a name means. Raises Problem 404."""
    try:
        return exchange.endpoint.models.resolve(name)
    except UnknownModelError:
        raise no_such_model(name) from None
