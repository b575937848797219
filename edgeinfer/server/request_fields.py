"""Parts of a request that several dialects share. Pure functions."""

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


def unique_tools(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Return the tools. Raises InvalidRequestError if two have the same name."""
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequestError("two tools have the same name", param="tools")
    return tools


def tool_of(
    name: str, description: str | None, schema: dict[str, Any] | None, strict: bool | None
) -> Tool:
    """Make a tool from a client's description; `schema` is that of its arguments."""
    text, parameters = description or "", schema or {}
    return Tool(name=name, description=text, parameters=parameters, strict=strict is True)


def check_choice(choice: ToolChoice, tools: tuple[Tool, ...], required: str = "required") -> ToolChoice:
    """Return `choice`. Raises InvalidRequestError if it demands a call of an unknown tool.

    `required` is the API's name for the mode that demands any call.
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
    """Raise InvalidRequestError for pictures that the model cannot read."""
    if request.n_pictures and not info.can_see:
        message, hint = (
            f"{info.model} does not accept pictures",
            "`edgeinfer list pictures` shows models that do",
        )
        raise InvalidRequestError(message, hint=hint, param="messages")


def as_text(value: str | dict[str, Any]) -> str:
    """Return JSON text from a field that may hold text or the object itself."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def content_of(
    content: str | Iterable[T], pieces_of: Callable[[T], Iterable[str | bytes]], between: str = ""
) -> dict[str, Any]:
    """Return a Message's `content` and `pictures`; `pieces_of` gives those of each part.

    `between` separates texts.
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


#: Efforts that no model was trained on → the nearest trained one.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


def reasoning(
    effort: str | None,
    *,
    enabled: bool | None = None,
    budget: int | None = None,
    variables: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the GenerateRequest fields that limit reasoning; templates get the effort.

    `enabled` False or an effort of "none" also closes a reasoning span that the template opens.
    `variables` are the request's own template variables, which take precedence.
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
    """Return the stop strings of a field that may hold none, one or several."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def common_fields(body: GenerationFields) -> dict[str, Any]:
    """Convert the fields that every API accepts to GenerateRequest fields.

    `store: "none"` stores no prefix, the same as `cache_prompt: false`.
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
    """Override the model's sampling defaults with the request's fields; None means not given.

    A request that sets any sampling option gets no repeat penalty unless it asks for one.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    if fields.get("top_k") == -1:  # other servers write -1 for "off", which is 0 here
        fields["top_k"] = 0
    neutral = NO_PENALTIES if fields.keys() - {"seed"} else {}
    return msgspec.structs.replace(base, **neutral | fields)


def seed_of(seed: int | None) -> int | None:
    """Convert OpenAI's 64-bit seed to llama.cpp's 32-bit one; -1 means random, as in llama.cpp.

    Seeds below 0xFFFFFFFF are not changed; llama.cpp takes 0xFFFFFFFF as random.
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
    """Convert `keep_alive` to seconds; any negative value becomes -1 (forever). Raises
    InvalidRequestError.

    Text is a duration in Go's notation ("5m", "1h30m"), or a plain number of seconds.
    """
    if keep_alive is None:
        return None
    try:
        seconds = parse_duration(keep_alive) if isinstance(keep_alive, str) else keep_alive
    except ValueError as error:
        raise InvalidRequestError(f"keep_alive: {error}", param="keep_alive") from None
    return seconds if 0 <= seconds <= _YEAR_S else _FOR_EVER
