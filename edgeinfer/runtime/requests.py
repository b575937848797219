"""Requests to the engine, and checks of their fields."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Literal

import msgspec

from edgeinfer.config.sampling_options import SAMPLING_OPTIONS
from edgeinfer.errors import ContextLengthError, InvalidRequestError


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in an earlier assistant message. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation.

    Only role "tool" has `tool_call_id` and `name`; only role "assistant" has `tool_calls` and
    `reasoning`. `pictures` are image files. `media.pictures.join_parts` makes both `content` and
    `pictures`, so that `content` has a mark at the place of each picture.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[bytes, ...] = ()


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments.

    If the schema cannot be enforced, the arguments may be any JSON object. But if the tool is `strict`
    and a call is required, the request is refused.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model may ("auto") or must ("required"; "named": only the tool `name`) call tools.

    `parallel`: several calls are allowed.
    """

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""
    parallel: bool = True


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling options, with llama.cpp's names. `edgeinfer.config.sampling_options` describes each.

    The samplers run in llama.cpp's order. If `seed` is None, the seed is random. Without
    `penalize_prompt`, the repeat penalties ignore the prompt's tokens.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    penalize_prompt: bool = True
    logit_bias: dict[int, float] = {}
    seed: int | None = None


#: Models of up to this many parameters repeat themselves, so they get penalties by default. There are
#: no DRY sequence breakers, so that repeated lines are penalized, too. The tokens of the prompt are not
#: penalized: with such penalties, SmolLM2 would lose a third of its right answers.
_SMALL = 500_000_000
_PENALTIES: dict[str, Any] = {
    "repeat_penalty": 1.1,
    "dry_multiplier": 0.8,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 512,
    "dry_sequence_breakers": (),
    "penalize_prompt": False,
}
#: Values of request fields that switch the default penalties off.
NO_PENALTIES = {"repeat_penalty": 1.0, "dry_multiplier": 0.0, "penalize_prompt": True}


def default_sampling(n_params: float) -> Sampling:
    """Return the default options for a model with `n_params` parameters (0: unknown)."""
    return Sampling(**_PENALTIES) if 0 < n_params <= _SMALL else Sampling()


def with_options(defaults: Sampling, options: Mapping[str, Any]) -> Sampling:
    """Return a model's `defaults`, overridden by the given `options`.

    Temperature 0 drops the default penalties, so that greedy output is the model's own.
    """
    neutral = NO_PENALTIES if options.get("temperature") == 0 else {}
    return msgspec.structs.replace(defaults, **neutral | dict(options))


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """Constraint: the answer is JSON that `schema` allows; `{}` allows any JSON value."""

    schema: dict[str, Any]


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """Constraint: the whole answer matches `pattern` (syntax of Rust's regex crate)."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """Constraint: the answer is one of `options`."""

    options: tuple[str, ...]


class Grammar(msgspec.Struct, frozen=True, tag="gbnf"):
    """Constraint: the answer follows a grammar in llama.cpp's notation (GBNF) with the rule `root`."""

    gbnf: str


Constraint = JsonSchema | Regex | Choice | Grammar


class InfillFile(msgspec.Struct, frozen=True, kw_only=True):
    """Another file of the project, as context for fill-in-the-middle."""

    name: str
    text: str


class Infill(msgspec.Struct, frozen=True, kw_only=True):
    """A fill-in-the-middle prompt: text before and after the gap; `files`, the most relevant last."""

    prefix: str = ""
    suffix: str = ""
    files: tuple[InfillFile, ...] = ()


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier answer (tokens) with which the engine's answer is compared, to verify a receipt.

    The answer's tokens are verified several at a time, like draft tokens. The generation ends at the
    first different token. Chat templates that write the date get `time`.
    """

    answer: tuple[int, ...]
    time: datetime


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. Its prompt is exactly one of `messages`, `prompt` (text or tokens) and `infill`.

    - prompt: with `pictures`, a text `prompt` has a mark for each, as `Message.content` has.
      `continue_final`: the answer continues the last message.
    - limits: `overflow` decides what happens if the context is full: "refuse" refuses a longer prompt
      and ends the answer with "length"; "shift" drops the oldest tokens after the system prompt.
      `deadline_s` counts from submission. `reasoning_budget` is the most reasoning tokens.
    - log-probabilities: `logprobs` is the number of alternatives per token (0 to 20); None returns no
      log-probabilities. `prompt_logprobs` is the same for the prompt (one event, `PromptLogprobs`).
    - model: `lora` are pairs of adapter name and scale; None applies all loaded adapters. `speculative`
      "auto" drafts tokens while that pays.
    - prefill only: with `max_tokens` 0, the prompt is prefilled for later requests, at the lowest
      priority. If the request is cancelled, the finished part stays cached. With `background`, the
      prefill has a lower CPU priority than other programs.
    - prefix cache: without `cache_prompt`, the cache is neither read nor filled, in memory and on disk.
      Without `cache_on_disk`, the prompt stays only in memory. Only requests with the same `cache_salt`
      share prefixes. Blocks on disk are deleted with their `conversation`. `preamble` names a coding
      agent; the prefix that its sessions share is evicted last.
    - receipts: `record_tokens` and `replay` put the tokens of prompt and answer into `Finished.record`.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    pictures: tuple[bytes, ...] = ()
    infill: Infill | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_options: dict[str, Any] = {}
    continue_final: bool = False
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    background: bool = False
    stop: tuple[str, ...] = ()
    reasoning_budget: int | None = None
    ignore_eos: bool = False
    constraint: Constraint | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    overflow: Literal["refuse", "shift"] = "refuse"
    deadline_s: float | None = None
    cache_prompt: bool = True
    cache_on_disk: bool = True
    cache_salt: str = ""
    conversation: str = ""
    preamble: str = ""
    lora: tuple[tuple[str, float], ...] | None = None
    speculative: Literal["auto", "off", "ngram"] = "auto"
    record_tokens: bool = False
    replay: Replay | None = None

    @property
    def length(self) -> int:
        """Length of the prompt in characters (in tokens if the prompt is tokens)."""
        gap = self.infill or Infill()
        texts = (gap.prefix, gap.suffix, *(file.text for file in gap.files), self.prompt or "")
        return sum(map(len, texts)) + sum(len(turn.content) for turn in self.messages)

    @property
    def n_pictures(self) -> int:
        return len(self.pictures) + sum(len(turn.pictures) for turn in self.messages)


#: Longest answer (tokens) in the chat and in `run` by default, without and with reasoning.
_ANSWER_TOKENS, _REASONED_ANSWER_TOKENS = 1_500, 8_000


def with_answer_limit(request: GenerateRequest, *, can_think: bool) -> GenerateRequest:
    """Return a request with the default `max_tokens`, unless it has a limit, tools or a constraint.

    The default is higher if `can_think`: the model may write its reasoning before the answer.
    """
    if request.max_tokens is not None or request.constraint is not None or request.tools:
        return request
    limit = _REASONED_ANSWER_TOKENS if can_think else _ANSWER_TOKENS
    return msgspec.structs.replace(request, max_tokens=limit)


#: Twice the turns that an API accepts, because a turn may have results of tools. The time to tokenize
#: a chat grows with the square of its number of messages: 10,000 take 1.6 s, 60,000 take 48 s.
_MAX_MESSAGES = 8192
_MAX_BIASES = 1024
_MAX_BIAS = 1000.0
_MAX_STOPS = 128
_MAX_STOP_CHARS = 1024
_MAX_TOOLS = 128
_MAX_TOOL_NAME = 128
#: Largest allowed values of request fields.
_MOST = {"max_tokens": 1 << 24, "reasoning_budget": 1 << 24, "logprobs": 20, "prompt_logprobs": 20}
#: Every tokenizer makes at least one token per 64 characters, so a text that is too long is refused
#: before it is tokenized. Texts of up to 1 Mi characters are tokenized in any case.
_MAX_TOKEN_CHARS = 64
_TRIED_CHARS = 1 << 20


def _refuse(param: str, message: str) -> None:
    raise InvalidRequestError(f"{param}: {message}", param=param)


def check_sampling(sampling: Sampling, n_vocab: int) -> None:
    """Check the sampling options. Raises InvalidRequestError, which names the field."""
    for option in SAMPLING_OPTIONS:
        value = getattr(sampling, option.field)
        if value is None and option.field == "seed":
            continue
        if not option.low <= value <= option.high:  # NaN is in no range
            _refuse(option.field, f"{value} is not {option.describe_range()}")
    if len(sampling.logit_bias) > _MAX_BIASES:
        _refuse("logit_bias", f"at most {_MAX_BIASES} tokens are allowed")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < n_vocab:
            _refuse("logit_bias", f"token {token} is not in the vocabulary of {n_vocab} tokens")
        if not (-_MAX_BIAS <= bias <= _MAX_BIAS or bias == -math.inf):
            _refuse("logit_bias", f"{bias} is not between -{_MAX_BIAS:g} and {_MAX_BIAS:g}")
    if len(sampling.dry_sequence_breakers) > _MAX_STOPS:
        _refuse("dry_sequence_breakers", f"at most {_MAX_STOPS} texts are allowed")
    for breaker in sampling.dry_sequence_breakers:
        if not breaker or "\0" in breaker:
            _refuse("dry_sequence_breakers", f"{breaker!r} must have 1 or more characters and no NUL")


def check_request(request: GenerateRequest, n_vocab: int) -> None:
    """Check the fields of a request, except the prompt's length. Raises InvalidRequestError."""
    check_sampling(request.sampling, n_vocab)
    inputs = (bool(request.messages), request.prompt is not None, request.infill is not None)
    if sum(inputs) != 1:
        _refuse("messages", "give exactly one of messages, prompt and infill")
    if len(request.messages) > _MAX_MESSAGES:
        _refuse("messages", f"at most {_MAX_MESSAGES:,} messages are allowed")
    if request.tools and not request.messages:
        _refuse("tools", "a request with tools needs messages, not a prompt")
    for name, max_value in _MOST.items():
        value = getattr(request, name)
        if value is not None and not 0 <= value <= max_value:
            _refuse(name, f"{value} is not between 0 and {max_value}")
    last = request.messages[-1].role if request.messages else ""
    if request.continue_final and last != "assistant" and request.max_tokens != 0:
        _refuse("messages", "to be continued, the last message must have the role assistant")
    if request.reasoning_budget is not None and not request.messages:
        _refuse("reasoning_budget", "a request without messages has no reasoning; leave out this field")
    if request.deadline_s is not None and not (
        math.isfinite(request.deadline_s) and request.deadline_s > 0
    ):
        _refuse("deadline_s", f"{request.deadline_s} is not a positive number of seconds")
    if request.prompt_logprobs is not None and request.overflow == "shift":
        _refuse(
            "prompt_logprobs",
            'cannot be combined with overflow "shift", which drops tokens; use "refuse"',
        )
    if request.n_pictures and request.overflow == "shift":
        _refuse("overflow", 'a context with pictures cannot be shifted; use "refuse"')
    if request.n_pictures and request.prompt_logprobs is not None:
        _refuse("prompt_logprobs", "pictures have no log-probabilities; leave out this field")
    if len(request.stop) > _MAX_STOPS:
        _refuse("stop", f"at most {_MAX_STOPS} stop strings are allowed")
    if any(not stop or len(stop) > _MAX_STOP_CHARS for stop in request.stop):
        _refuse("stop", f"a stop string must have 1 to {_MAX_STOP_CHARS} characters")
    for token in request.prompt if isinstance(request.prompt, tuple) else ():
        if not 0 <= token < n_vocab:
            _refuse("prompt", f"token {token} is not in the vocabulary of {n_vocab} tokens")
    if request.speculative not in ("auto", "off", "ngram"):
        _refuse("speculative", f'{request.speculative!r} is not "auto", "off" or "ngram"')


def check_tools(request: GenerateRequest) -> None:
    """Check the tools and the tool choice. Raises InvalidRequestError, which names the field."""
    choice, names = request.tool_choice, [tool.name for tool in request.tools]
    if choice.mode == "none":
        return
    if choice.mode == "required" and not names:
        _refuse("tool_choice", "a call is required, but the request has no tools")
    if len(names) > _MAX_TOOLS:
        _refuse("tools", f"at most {_MAX_TOOLS} tools are allowed")
    for i, name in enumerate(names):
        if not name or len(name) > _MAX_TOOL_NAME or not name.isprintable():
            limits = f"printable and at most {_MAX_TOOL_NAME} characters long"
            _refuse(f"tools[{i}].name", f"the name must be {limits}")
        if name in names[:i]:
            _refuse(f"tools[{i}].name", f"two tools are called {name!r}")
    if choice.mode == "named" and choice.name not in names:
        _refuse("tool_choice", f"there is no tool named {choice.name!r}")


def hint_beyond_training(n_tokens: int, n_ctx_train: int) -> str | None:
    """Return an error's hint if the model was trained on no more than `n_tokens`, otherwise None.

    `n_ctx_train` is the training context (tokens), 0 if unknown.
    """
    if not n_ctx_train or n_tokens < n_ctx_train:
        return None
    return f"shorten the prompt or use another model: this one was trained on {n_ctx_train:,} tokens"


def check_length(n_chars: int, n_ctx: int, param: str, n_ctx_train: int = 0) -> None:
    """Raise ContextLengthError for a text that cannot fit into the context. Does not tokenize it.

    To tokenize 20 MB of one letter takes 38 s. `param` is the request's field that the error names.
    """
    max_chars = max(_TRIED_CHARS, n_ctx * _MAX_TOKEN_CHARS)
    if n_chars > max_chars:
        raise ContextLengthError(
            f"the text has {n_chars:,} characters; a context of {n_ctx:,} tokens holds at most "
            f"{n_ctx * _MAX_TOKEN_CHARS:,} characters",
            param=param,
            hint=hint_beyond_training(n_chars // _MAX_TOKEN_CHARS, n_ctx_train),
            n_tokens=n_chars // _MAX_TOKEN_CHARS,
            n_ctx=n_ctx,
        )


#: CPU time (s) for preparing one request: template, schema, tokens. The slowest of 150 published
#: schemas takes less than 2 s.
PREPARATION_S = 10.0

_deadline: ContextVar[float] = ContextVar("edgeinfer_prepare_deadline", default=float("inf"))


@contextmanager
def limit_preparation(seconds: float = PREPARATION_S) -> Iterator[None]:
    """Let `check_deadline` raise after `seconds` of this thread's CPU time in the `with` block."""
    token = _deadline.set(min(_deadline.get(), time.thread_time() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def check_deadline() -> None:
    """Raise InvalidRequestError if the CPU time of `limit_preparation` is used up."""
    if time.thread_time() > _deadline.get():
        raise InvalidRequestError(
            f"preparing the request takes more than {PREPARATION_S:.0f} s of processor time",
            hint="send a smaller schema, fewer tools or a shorter prompt",
        )


_count = itertools.count()


def random_bytes(size: int, entropy: bytes = b"") -> bytes:
    """Return `size` (at most 64) random bytes, different in each process restored from one snapshot.

    They are a hash of the kernel's random bytes, the time, a counter and the `entropy` of the launch.
    """
    import hashlib  # here, because the import takes 1 ms, and verbs without an engine do not need it

    clock, count = time.time_ns().to_bytes(8, "little"), next(_count).to_bytes(8, "little")
    return hashlib.blake2b(os.urandom(16) + clock + count + entropy, digest_size=size).digest()
