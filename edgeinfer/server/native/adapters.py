"""Routes of LoRA adapters: llama.cpp's for lists and scales, vLLM's for loading while a model runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from edgeinfer.config.load_options import LORA
from edgeinfer.errors import InvalidRequestError, UsageError
from edgeinfer.runtime.options import Adapter, EngineInfo, parse_adapters
from edgeinfer.server.core.bodies import decode, decode_list, decode_query
from edgeinfer.server.core.exchange import Exchange, exchange_of, json_reply
from edgeinfer.server.core.problems import Problem
from edgeinfer.server.native import llama_wire as wire

#: From the adapters that are loaded to those that are wanted.
Change = Callable[[tuple[Adapter, ...]], Sequence[Adapter]]


async def listed(request: Request) -> Response:
    """The default model's, or those of `?model=`."""
    exchange = exchange_of(request)
    exchange.name_model(decode_query(request, wire.AdaptersQuery).model)
    info = exchange.endpoint.models.info(exchange.model)
    return json_reply(_described(info.lora if info else ()))


def _described(adapters: Sequence[Adapter]) -> list[wire.LoadedAdapter]:
    return [wire.LoadedAdapter(id=i, path=a.name, scale=a.scale) for i, a in enumerate(adapters)]


async def scaled(request: Request) -> Response:
    """Scales for requests that name no adapters. As in llama.cpp, who is not in the list gets 0."""
    exchange = exchange_of(request)
    body = await decode_list(request, wire.LoraById)
    exchange.name_model(decode_query(request, wire.AdaptersQuery).model)

    def change(loaded: tuple[Adapter, ...]) -> Sequence[Adapter]:
        scales = dict(chosen(body, loaded, param=""))
        return [Adapter(a.name, a.path, scales.get(a.name, 0.0)) for a in loaded]

    return json_reply(_described(await _change(exchange, change)))


def chosen(
    given: Sequence[wire.LoraById], loaded: Sequence[Adapter], param: str = "lora"
) -> tuple[tuple[str, float], ...]:
    """The adapters by name and scale. Raises InvalidRequestError for one that is not loaded."""
    for place, choice in enumerate(given):
        if choice.id >= len(loaded):
            where = f"{param}[{place}].id"
            raise InvalidRequestError(f"{len(loaded)} adapters are loaded", param=where)
    return tuple((loaded[choice.id].name, choice.scale) for choice in given)


def chosen_of_request(
    given: Sequence[wire.LoraById] | None, info: EngineInfo
) -> tuple[tuple[str, float], ...] | None:
    """What a request's `lora` names; None when it does not say."""
    return None if given is None else chosen(given, info.lora)


async def loaded(request: Request) -> Response:
    exchange = exchange_of(request)
    body = await decode(request, wire.LoadAdapter)
    path = _file(exchange, body.lora_path or body.lora_name)
    new = Adapter(body.lora_name, path, body.scale)
    exchange.name_model(body.model)
    await _change(exchange, lambda now: [*(a for a in now if a.name != new.name), new])
    return PlainTextResponse(f"Success: LoRA adapter '{new.name}' added successfully.")


def _file(exchange: Exchange, text: str) -> str:
    """The file of a pulled adapter. Files elsewhere are for endpoints that let clients name files."""
    is_path = "/" in text or text.startswith("~") or text.endswith(".gguf")
    if is_path and exchange.endpoint.shelf is None:
        raise InvalidRequestError(
            "lora_path: the name of an adapter that was pulled; a file's path only where the endpoint "
            "was started with `edgeinfer serve --ollama`",
            param="lora_path",
        )
    try:
        found = parse_adapters(str(LORA.parse(text)))
    except ValueError:
        found = ()
    if len(found) != 1 or found[0].scale != 1:
        raise InvalidRequestError("lora_path: one adapter, without a scale", param="lora_path")
    if not os.path.isfile(found[0].path):
        raise UsageError(
            f"There is no adapter '{text}' here", hint="`edgeinfer pull ADAPTER --base MODEL`"
        )
    return found[0].path


async def unloaded(request: Request) -> Response:
    exchange = exchange_of(request)
    body = await decode(request, wire.UnloadAdapter)
    exchange.name_model(body.model)

    def change(now: tuple[Adapter, ...]) -> Sequence[Adapter]:
        left = [a for a in now if a.name != body.lora_name]
        if len(left) == len(now):
            raise Problem(
                404, f"The adapter '{body.lora_name}' is not loaded.", code="adapter_not_found"
            )
        return left

    await _change(exchange, change)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _change(exchange: Exchange, change: Change) -> tuple[Adapter, ...]:
    models = exchange.endpoint.models
    lease = await models.acquire(exchange.model)
    try:
        return await models.use_adapters(lease, change)
    finally:
        lease.release()
