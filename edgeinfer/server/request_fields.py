"""Conversion of request fields that several APIs have. Pure functions."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from edgeinfer.errors import InvalidRequestError
from edgeinfer.media.pictures import join_parts
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import NO_PENALTIES, GenerateRequest, Sampling, Tool, ToolChoice
from edgeinfer.server.wire_types import GenerationFields
from edgeinfer.units import parse_duration

T = TypeVar("T")


#: A tool's name, description, JSON schema of its arguments, and whether they must match the schema.
ToolRow = tuple[str, str | None, dict[str, Any] | None, bool | None]


def make_tools(rows: Iterable[ToolRow]) -> tuple[Tool, ...]:
    """Make tools. Raises InvalidRequestError if two have the same name."""
    tools = tuple(
        Tool(name=name, description=description or "", parameters=schema or {}, strict=strict is True)
        for name, description, schema, strict in rows
    )
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequestError("two tools have the same name", param="tools")
    return tools


def check_choice(choice: ToolChoice, tools: tuple[Tool, ...], required: str = "required") -> ToolChoice:
    """Return `choice`. Raises InvalidRequestError if it requires a tool that `tools` does not have.

    `required` is the API's word for "must call any tool" (OpenAI "required", Anthropic "any").
    """
    message = ""
    if choice.mode == "named" and all(tool.name != choice.name for tool in tools):
        message = f"tool_choice names '{choice.name}', which is not among the tools"
    elif choice.mode == "required" and not tools:
        message = f"tool_choice is '{required}', but the request has no tools"
    if message:
        raise InvalidRequestError(message, param="tool_choice")
    return choice


def refuse_infill(info: EngineInfo, param: str) -> None:
    """Raise InvalidRequestError for a model without fill-in-the-middle tokens."""
    if not info.can_infill:
        message = f"{param}: {info.model} does not support fill-in-the-middle"
        raise InvalidRequestError(message, param=param)


def refuse_pictures(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise InvalidRequestError if the request has pictures and the model does not accept them."""
    if request.n_pictures and not info.can_see:
        message = f"{info.model} does not accept pictures"
        hint = "`edgeinfer list pictures` shows models that do"
        raise InvalidRequestError(message, hint=hint, param="messages")


def as_text(value: str | dict[str, Any]) -> str:
    """Return JSON text like `{"a": 1}` from a field that holds such text or the object itself."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def content_of(
    content: str | Iterable[T], pieces_of: Callable[[T], Iterable[str | bytes]], between: str = ""
) -> dict[str, Any]:
    """Return the fields `content` and `pictures` of a Message.

    `content` is a text, or parts of the API's own type, which `pieces_of` converts to texts (str) and
    picture files (bytes). `between` is put between two adjacent texts.
    """
    if isinstance(content, str):
        return {"content": content}
    spaced: list[str | bytes] = []
    for piece in itertools.chain.from_iterable(map(pieces_of, content)):
        if spaced and isinstance(piece, str) and isinstance(spaced[-1], str):
            spaced.append(between)
        spaced.append(piece)
    text, pictures = join_parts(spaced)
    return {"content": text, "pictures": pictures}


#: Reasoning efforts that no model was trained with → the nearest one.
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


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return a field `stop` (null, one string or a list) as a tuple."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def common_fields(body: GenerationFields) -> dict[str, Any]:
    """Convert `GenerationFields` to fields of GenerateRequest.

    OpenAI's `store: "none"` means the same as `cache_prompt: false`: no prefix is stored.
    """
    lora = None if body.lora is None else tuple((a.name, a.scale) for a in body.lora)
    return {
        "lora": lora,
        "cache_prompt": body.cache_prompt and getattr(body, "store", None) != "none",
        "cache_salt": body.cache_salt or "",
        "conversation": body.prompt_cache_key or "",
        "deadline_s": body.deadline_s,
        "record_tokens": body.receipt,
    }


def override_sampling(base: Sampling, **fields: Any) -> Sampling:
    """Return a model's sampling defaults, overridden by a request's fields that are not None.

    If the request sets any field but the seed, the default penalties are dropped.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if fields.get("top_k") == -1:  # other servers write -1 for "off", which is 0 here
        fields["top_k"] = 0
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


_YEAR_S = 31_536_000.0
_FOR_EVER = -1.0


def keep_alive_s(keep_alive: float | str | None) -> float | None:
    """Convert `keep_alive` to seconds; -1 means forever.

    Text is a duration like "5m" or "1h30m", or a number of seconds. Negative values and more than a
    year become -1. Raises InvalidRequestError.
    """
    if keep_alive is None:
        return None
    try:
        seconds = parse_duration(keep_alive) if isinstance(keep_alive, str) else keep_alive
    except ValueError as error:
        raise InvalidRequestError(f"keep_alive: {error}", param="keep_alive") from None
    return seconds if 0 <= seconds <= _YEAR_S else _FOR_EVER
