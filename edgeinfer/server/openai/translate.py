"""Convert requests of OpenAI's API to requests of the engine. Pure functions.

Rules that the types of fields cannot express are checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from edgeinfer.config.sampling_options import BY_FIELD
from edgeinfer.errors import InvalidRequestError
from edgeinfer.media import document_files
from edgeinfer.media.pictures import from_base64
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.runtime.requests import (
    Choice,
    Constraint,
    GenerateRequest,
    Grammar,
    Infill,
    JsonSchema,
    Message,
    Regex,
    Sampling,
    Tool,
    ToolCall,
    ToolChoice,
)
from edgeinfer.server.openai import wire
from edgeinfer.server.request_fields import (
    as_text,
    check_choice,
    common_fields,
    content_of,
    make_tools,
    override_sampling,
    reasoning,
    refuse_infill,
    seed_of,
    stop_strings,
)
from edgeinfer.server.wire_types import SamplingFields


def chat(body: wire.ChatRequest, info: EngineInfo) -> list[GenerateRequest]:
    """Convert a chat request to `n` requests with different seeds. Raises InvalidRequestError."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    _check_open_turn(body)
    tools = tools_of(body.tools)
    request = GenerateRequest(
        messages=tuple(map(_message, body.messages)),
        tools=tools,
        tool_choice=tool_choice(body.tool_choice, body.parallel_tool_calls, tools),
        **reasoning(
            body.reasoning_effort, budget=body.reasoning_budget, variables=body.chat_template_kwargs
        ),
        continue_final=body.continue_final_message,
        max_tokens=_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **_common_fields(body, info),
    )
    return copies(request, body.n or 1)


def _check_open_turn(body: wire.ChatRequest) -> None:
    """Check that the model either begins a new assistant turn or continues the last one.

    Raises InvalidRequestError for other values of `continue_final_message` and `add_generation_prompt`.
    """
    continues = body.continue_final_message
    if continues and not isinstance(body.messages[-1], wire.AssistantMessage):
        message = "the last message must be the assistant's to continue it"
        raise InvalidRequestError(message, param="continue_final_message")
    if body.add_generation_prompt is continues:
        message = (
            "add_generation_prompt opens a turn, continue_final_message continues the last one: set "
            "exactly one of them"
        )
        raise InvalidRequestError(message, param="add_generation_prompt")


def completion(body: wire.CompletionRequest, info: EngineInfo) -> list[GenerateRequest]:
    """Convert to `n` requests per prompt, in order of the prompts. Raises InvalidRequestError."""
    shared = _common_fields(body, info)
    all_prompts = prompts(body.prompt, "prompt")
    if len(all_prompts) * (body.n or 1) > 64:
        raise InvalidRequestError("a request may have at most 64 answers (prompts times n)", param="n")
    requests = []
    max_tokens = 16 if body.max_tokens is None else limit_of(body.max_tokens)
    for prompt in all_prompts:
        request = GenerateRequest(
            **_prompt_fields(prompt, body, info),
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs(prompt, body),
            **shared,
        )
        requests += copies(request, body.n or 1)
    return requests


def prompt_logprobs(prompt: str | tuple[int, ...], body: wire.CompletionRequest) -> int | None:
    """Return the number of alternatives per prompt token; None if prompt tokens are not needed.

    0 still returns the tokens themselves: `echo` needs the text of a prompt of token ids.
    """
    if not body.echo:
        return None
    return body.logprobs if isinstance(prompt, str) else body.logprobs or 0


def _prompt_fields(
    prompt: str | tuple[int, ...], body: wire.CompletionRequest, info: EngineInfo
) -> dict[str, Any]:
    if not body.suffix:
        return {"prompt": prompt}
    refuse_infill(info, "suffix")
    if not isinstance(prompt, str):
        raise InvalidRequestError("suffix needs a text prompt, not token ids", param="suffix")
    if prompt_logprobs(prompt, body) is not None:
        raise InvalidRequestError("suffix cannot be combined with echo and logprobs", param="suffix")
    return {"infill": Infill(prefix=prompt, suffix=body.suffix)}


def copies(request: GenerateRequest, n: int) -> list[GenerateRequest]:
    """Return `n` copies of a request. Their seeds are `seed`, `seed + 1`, … if the request has one."""
    seed = request.sampling.seed
    if n == 1:
        return [request]
    if seed is None:
        return [request] * n
    samplings = [msgspec.structs.replace(request.sampling, seed=seed_of(seed + i)) for i in range(n)]
    return [msgspec.structs.replace(request, sampling=sampling) for sampling in samplings]


def _message(turn: wire.ChatMessage) -> Message:
    match turn:
        case wire.DeveloperMessage():
            return Message(role="developer", **content_of(turn.content, _pieces))
        case wire.UserMessage():
            return Message(role="user", name=turn.name or "", **content_of(turn.content, _pieces))
        case wire.SystemMessage():  # after its subclasses, which would match too
            return Message(role="system", **content_of(turn.content, _pieces))
        case wire.ToolMessage():
            content = "" if turn.content is None else turn.content
            return Message(role="tool", tool_call_id=turn.tool_call_id, **content_of(content, _pieces))
    calls = tuple(
        ToolCall(id=call.id, name=call.function.name, arguments=as_text(call.function.arguments))
        for call in turn.tool_calls or ()
    )
    return Message(
        role="assistant",
        **content_of(turn.refusal or "" if turn.content is None else turn.content, _pieces),
        reasoning=turn.reasoning_content or turn.reasoning or "",
        tool_calls=calls,
        name=turn.name or "",
    )


_Part = wire.TextPart | wire.ImagePart | wire.FilePart | wire.RefusalPart


def _pieces(item: _Part) -> Sequence[str | bytes]:
    match item:
        case wire.TextPart(text=text):
            return [text]
        case wire.ImagePart(image_url=image):
            return [from_base64(image.url)]
        case wire.FilePart(file=file):
            return document_files.parts_of(file.file_data, file.filename)
        case wire.RefusalPart(refusal=refusal):
            return [refusal]


def tools_of(tools: Sequence[wire.ToolParam] | None) -> tuple[Tool, ...]:
    functions = [tool.function for tool in tools or ()]
    return make_tools((f.name, f.description, f.parameters, f.strict) for f in functions)


def tool_choice(
    choice: str | wire.NamedToolChoice | None, parallel: bool | None, tools: tuple[Tool, ...]
) -> ToolChoice:
    """Convert `tool_choice`. Raises InvalidRequestError if it requires an unknown tool."""
    fields: dict[str, Any] = {"parallel": parallel is not False, "mode": choice or "auto"}
    if isinstance(choice, wire.NamedToolChoice):
        fields |= {"mode": "named", "name": choice.function.name}
    return check_choice(ToolChoice(**fields), tools)


def _constraint(body: wire.OpenAIFields) -> Constraint | None:
    """Return the constraint of the answer, or None. Raises InvalidRequestError if there are several."""
    by_field: dict[str, Constraint] = {}
    match body.response_format:
        case wire.JsonObjectFormat(schema=schema):
            by_field["response_format"] = JsonSchema(schema or {"type": "object"})
        case wire.JsonSchemaFormat(json_schema=described):
            by_field["response_format"] = JsonSchema(described.schema)
    if body.grammar is not None:
        by_field["grammar"] = Grammar(body.grammar)
    if body.structured_outputs is not None:
        by_field |= _structured_constraints(body.structured_outputs)
    if len(by_field) > 1:
        first, second, *_ = by_field
        raise InvalidRequestError(f"{second} cannot be combined with {first}", param=second)
    return next(iter(by_field.values()), None)


#: Field of `structured_outputs` → function that makes its constraint.
_STRUCTURED: dict[str, Callable[[Any], Constraint]] = {
    "json": JsonSchema,
    "regex": Regex,
    "choice": lambda texts: Choice(tuple(texts)),
    "grammar": Grammar,
}


def _structured_constraints(outputs: wire.StructuredOutputs) -> dict[str, Constraint]:
    values = {field: getattr(outputs, field) for field in _STRUCTURED}
    by_field = {
        f"structured_outputs.{field}": _STRUCTURED[field](value)
        for field, value in values.items()
        if value is not None
    }
    if not by_field:
        message = "structured_outputs needs json, regex, choice or grammar"
        raise InvalidRequestError(message, param="structured_outputs")
    return by_field


def prompts(
    prompt: str | Sequence[str | int | Sequence[int]], param: str, most: int = 64
) -> list[str | tuple[int, ...]]:
    """Convert a field `prompt` or `input` to a list of texts or tuples of token ids.

    Raises InvalidRequestError, which names `param`, if a list mixes these or has more than `most`.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [tuple(prompt)]  # type: ignore[arg-type]  # a list of ints is one prompt
    if len(kinds) != 1:
        message = "a list must hold only texts, only token ids, or only lists of token ids"
        raise InvalidRequestError(message, param=param)
    if len(prompt) > most:
        raise InvalidRequestError(f"a request may have at most {most} prompts", param=param)
    return [item if isinstance(item, str) else tuple(item) for item in prompt]  # type: ignore[arg-type]  # no int is left


def sampling_of(body: SamplingFields, base: Sampling) -> Sampling:
    """Return the model's sampling defaults, overridden by the request's fields."""
    fields: dict[str, Any] = {field: getattr(body, field, None) for field in BY_FIELD}
    if body.repeat_penalty is None:  # vLLM's name for the same option
        fields["repeat_penalty"] = getattr(body, "repetition_penalty", None)
    if body.dry_sequence_breakers is not None:
        fields["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    bias = getattr(body, "logit_bias", None)
    if bias:
        fields["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
    fields["seed"] = seed_of(body.seed)
    return override_sampling(base, **fields)


def _max_tokens(body: wire.ChatRequest) -> int | None:
    """Return the smaller of `max_tokens` and `max_completion_tokens`; None for no limit."""
    limits = [limit_of(limit) for limit in (body.max_tokens, body.max_completion_tokens)]
    return min((limit for limit in limits if limit is not None), default=None)


def limit_of(max_tokens: int | None) -> int | None:
    """Return a token limit, or None if the client sent -1 or nothing."""
    return None if max_tokens == -1 else max_tokens


def _common_fields(body: wire.OpenAIFields, info: EngineInfo) -> dict[str, Any]:
    return {
        "sampling": sampling_of(body, info.sampling),
        "stop": stop_strings(body.stop),
        "ignore_eos": body.ignore_eos,
        "constraint": _constraint(body),
        "overflow": body.overflow,
        **common_fields(body),
        "speculative": body.speculative,
    }
