"""Conversions of request fields that several APIs have."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from edgeinfer.config.sampling_options import BY_FIELD
from edgeinfer.errors import InvalidRequestError
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import NO_PENALTIES, GenerateRequest, Sampling
from edgeinfer.server.wire_types import GenerationFields, Wire
from edgeinfer.units import parse_duration


def common_fields(
    body: GenerationFields, info: EngineInfo, options: Wire | None = None
) -> dict[str, Any]:
    """Return the fields of a GenerateRequest that have the same names in all APIs.

    `options` is the object that has the sampling options and `stop`, by default `body`. `cache_prompt`
    is false (no prefix is stored) also if the body has a field `store` with the value "none".
    """
    options = options or body
    stop = getattr(options, "stop", None) or ()
    scalars = ("ignore_eos", "overflow", "speculative")
    return {
        "sampling": sampling_of(options, info.sampling),
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "lora": None if body.lora is None else tuple((a.name, a.scale) for a in body.lora),
        "cache_prompt": body.cache_prompt and getattr(body, "store", None) != "none",
        "cache_salt": body.cache_salt or "",
        "conversation": body.prompt_cache_key or "",
        "deadline_s": body.deadline_s,
        "record_tokens": body.receipt,
        **{name: getattr(body, name) for name in scalars if hasattr(body, name)},
    }


def sampling_of(options: Wire, base: Sampling) -> Sampling:
    """Return `base`, the model's sampling defaults, overridden by the options that a request sets.

    If the request sets any option but the seed, the model's default penalties are dropped.
    """
    values: dict[str, Any] = {field: getattr(options, field, None) for field in BY_FIELD}
    if values["repeat_penalty"] is None:  # vLLM's name is repetition_penalty
        values["repeat_penalty"] = getattr(options, "repetition_penalty", None)
    if values["top_k"] == -1:  # other servers write -1 for "off", which is 0 here
        values["top_k"] = 0
    values["seed"] = seed_of(values["seed"])
    if (breakers := getattr(options, "dry_sequence_breakers", None)) is not None:
        values["dry_sequence_breakers"] = tuple(breakers)
    if bias := getattr(options, "logit_bias", None):
        values["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
    fields = {name: value for name, value in values.items() if value is not None}
    neutral = NO_PENALTIES if fields.keys() - {"seed"} else {}
    return msgspec.structs.replace(base, **neutral | fields)


def seed_of(seed: int | None) -> int | None:
    """Convert a 64-bit seed (OpenAI) to a 32-bit one (llama.cpp); None for -1, which means random.

    Seeds below 0xFFFFFFFF stay the same; others are hashed.
    """
    if seed is None or seed == -1:
        return None
    if 0 <= seed < 0xFFFF_FFFF:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(9, "little", signed=True), digest_size=4).digest()
    return min(int.from_bytes(digest, "little"), 0xFFFF_FFFE)


def copies(request: GenerateRequest, n: int) -> list[GenerateRequest]:
    """Return `n` copies of a request. If `request` has a seed, copy number i (from 0) has seed + i."""
    seed = request.sampling.seed
    if n == 1 or seed is None:
        return [request] * n
    samplings = [msgspec.structs.replace(request.sampling, seed=seed_of(seed + i)) for i in range(n)]
    return [msgspec.structs.replace(request, sampling=sampling) for sampling in samplings]


#: Reasoning efforts that no model was trained with → the nearest known effort.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


def reasoning(
    effort: str | None,
    *,
    enabled: bool | None = None,
    budget: int | None = None,
    variables: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields `template_options` and `reasoning_budget` (tokens) of a GenerateRequest.

    `effort` and `enabled` become variables of the chat template; the client's own `variables` take
    precedence. `enabled` False or the effort "none" sets the budget to 0, which also ends reasoning
    that a template begins by itself.
    """
    options: dict[str, Any] = {}
    if effort is not None:
        options["enable_thinking"] = effort != "none"
    if effort not in (None, "none"):
        options["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if enabled is not None:
        options["enable_thinking"] = enabled
    options |= variables or {}
    is_off = options.get("enable_thinking") is False
    return {"template_options": options, "reasoning_budget": 0 if is_off and budget is None else budget}


def refuse_infill(info: EngineInfo, param: str) -> None:
    """Raise InvalidRequestError for the field `param` if the model has no fill-in-the-middle tokens."""
    if not info.can_infill:
        message = f"{param}: {info.model} does not support fill-in-the-middle"
        hint = "use a model that has tokens for fill-in-the-middle"
        raise InvalidRequestError(message, param=param, hint=hint)


_YEAR_S = 31_536_000.0
_FOR_EVER = -1.0


def keep_alive_s(keep_alive: float | str) -> float:
    """Convert `keep_alive` to seconds; -1 means forever.

    Text is a duration like "5m" or "1h30m", or a number of seconds. Negative values and more than a
    year become -1. Raises InvalidRequestError for other text.
    """
    try:
        seconds = parse_duration(keep_alive) if isinstance(keep_alive, str) else keep_alive
    except ValueError as error:
        raise InvalidRequestError(f"keep_alive: {error}", param="keep_alive") from None
    return seconds if 0 <= seconds <= _YEAR_S else _FOR_EVER
