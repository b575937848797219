"""Requests to the engine, and their checks before any computation."""

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
    """A call that an assistant made in an earlier turn. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A turn. Role "tool" has `tool_call_id` and `name`, role "assistant" `tool_calls` and `reasoning`.

    `content` has a `PICTURE_MARK` for each of `pictures`, in order; `pictures.join_parts` makes both.
    Each picture is a file's bytes; the engine decodes files that it has not seen before.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[bytes, ...] = ()


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema.

    A `strict` tool refuses a required call if its schema cannot be enforced; for other tools, the
    arguments are then any JSON object.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The mode of tool calls: forbidden, free, required, or required of one tool (`name`)."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""
    parallel: bool = True


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options with llama.cpp's names and order. Neutral values switch a stage off.

    `seed` None draws a seed from the kernel. `edgeinfer.config.sampling_options` describes each option.
    `penalize_prompt` False makes the repeat penalties count only the answer.
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


#: Models of up to this many parameters repeat themselves. DRY's usual breakers would exempt the lines
#: of lists. Penalties on the question's words cost SmolLM2 a third of its right answers.
_SMALL = 500_000_000
_PENALTIES: dict[str, Any] = {
    "repeat_penalty": 1.1,
    "dry_multiplier": 0.8,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 512,
    "dry_sequence_breakers": (),
    "penalize_prompt": False,
}
#: Neutral values of the penalties that a model's defaults may have.
NO_PENALTIES = {"repeat_penalty": 1.0, "dry_multiplier": 0.0, "penalize_prompt": True}


def default_sampling(n_params: float) -> Sampling:
    """Return the defaults for a model's size (0: unknown): small models get repeat penalties."""
    return Sampling(**_PENALTIES) if 0 < n_params <= _SMALL else Sampling()


def with_options(defaults: Sampling, options: Mapping[str, Any]) -> Sampling:
    """Return a model's `defaults`, overridden by the given `options`.

    Temperature 0 drops the default penalties, so that greedy output is the model's own.
    """
    neutral = NO_PENALTIES if options.get("temperature") == 0 else {}
    return msgspec.structs.replace(defaults, **neutral | dict(options))


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """Output is JSON that is valid for `schema` (`{}` for any JSON value)."""

    schema: dict[str, Any]


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The whole output matches `pattern` (Rust regex syntax)."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """Output is one of `options`."""

    options: tuple[str, ...]


class Grammar(msgspec.Struct, frozen=True, tag="gbnf"):
    """Output follows a GBNF grammar (llama.cpp's notation), from its rule `root`."""

    gbnf: str


Constraint = JsonSchema | Regex | Choice | Grammar


class InfillFile(msgspec.Struct, frozen=True, kw_only=True):
    """Text of another file that helps to fill the gap."""

    name: str
    text: str


class Infill(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix and suffix of an infill, and extra files, the most relevant last."""

    prefix: str = ""
    suffix: str = ""
    files: tuple[InfillFile, ...] = ()


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier answer to a request, to be compared with the engine's output.

    `answer` are its tokens, which are verified in groups like draft tokens. The generation ends at the
    first different token. Templates that write the date get the day of `time` (ISO 8601).
    """

    answer: tuple[int, ...]
    time: datetime


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, with exactly one of `messages` (for the chat template), `prompt` and `infill`.

    `prompt` has a `PICTURE_MARK` for each of `pictures`, as a message has.

    `continue_final` leaves the last message open: an assistant's message is continued, a user's message
    is still being typed (`max_tokens` 0). `overflow` says what happens if the context is full: "refuse"
    refuses a longer prompt and ends the answer with "length", "shift" drops the oldest tokens after the
    system prompt. `logprobs` is the number of alternatives per token (0 to 20), None for no
    log-probabilities. `prompt_logprobs` is the same for the prompt's tokens, reported at once in
    `PromptLogprobs`; it uses a cached prefix only if its log-probabilities are cached too. `lora` are
    (adapter name, scale) pairs; None applies all adapters loaded with the model. `speculative` "auto"
    lets the engine decide by measured gain. `deadline_s` counts from submission.

    `max_tokens` 0 prefills the prompt for later requests and ends without a token, at the lowest
    priority; if it is cancelled, the finished part is kept. With `background` it also yields the
    processor to other programs. `cache_prompt` False neither uses nor fills the prefix cache, in memory
    or on disk. `cache_on_disk` False keeps the prompt in memory, until a later request with it is
    stored. Requests share prefixes only under one `cache_salt`. `conversation` owns the blocks, which
    are deleted with it. `preamble` names an agent, whose shared prefix is evicted last.

    `reasoning_budget` closes a reasoning span after this many tokens, 0 immediately, None never.

    `record_tokens` and `replay` report the tokens of prompt and answer in `Finished.record`.
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
        """Number of characters to tokenize; a token of a token prompt counts as one."""
        gap = self.infill or Infill()
        texts = (gap.prefix, gap.suffix, *(file.text for file in gap.files), self.prompt or "")
        return sum(map(len, texts)) + sum(len(turn.content) for turn in self.messages)

    @property
    def n_pictures(self) -> int:
        return len(self.pictures) + sum(len(turn.pictures) for turn in self.messages)


#: Default limit (tokens) of an answer in the chat and `run`, without and with reasoning.
_ANSWER_TOKENS, _REASONED_ANSWER_TOKENS = 1_500, 8_000


def with_answer_limit(request: GenerateRequest, *, can_think: bool) -> GenerateRequest:
    """Set `max_tokens` of a chat request without a limit, unless it has tools or a constraint."""
    if request.max_tokens is not None or request.constraint is not None or request.tools:
        return request
    limit = _REASONED_ANSWER_TOKENS if can_think else _ANSWER_TOKENS
    return msgspec.structs.replace(request, max_tokens=limit)


_MAX_BIASES = 1024
_MAX_BIAS = 1000.0
_MAX_STOPS = 128
_MAX_STOP_CHARS = 1024
#: Largest values of fields that count something.
_MOST = {"max_tokens": 1 << 24, "reasoning_budget": 1 << 24, "logprobs": 20, "prompt_logprobs": 20}
#: Most characters per token of any tokenizer, on average over a context; and the length (characters) up
#: to which every text is tokenized.
_MAX_TOKEN_CHARS = 64
_TRIED_CHARS = 1 << 20


def _refuse(param: str, message: str) -> None:
    raise InvalidRequestError(f"{param}: {message}", param=param)


def check_sampling(s: Sampling, n_vocab: int) -> None:
    """Check the sampling options. Raises InvalidRequestError naming the field."""
    for option in SAMPLING_OPTIONS:
        value = getattr(s, option.field)
        if value is None and option.field == "seed":
            continue
        if not option.low <= value <= option.high:  # NaN is in no range
            _refuse(option.field, f"{value} is not {option.describe_range()}")
    if len(s.logit_bias) > _MAX_BIASES:
        _refuse("logit_bias", f"at most {_MAX_BIASES} tokens are allowed")
    for token, bias in s.logit_bias.items():
        if not 0 <= token < n_vocab:
            _refuse("logit_bias", f"token {token} is not in the vocabulary of {n_vocab}")
        if not (-_MAX_BIAS <= bias <= _MAX_BIAS or bias == -math.inf):
            _refuse("logit_bias", f"{bias} is not between -{_MAX_BIAS:g} and {_MAX_BIAS:g}")
    if len(s.dry_sequence_breakers) > _MAX_STOPS or any(
        "\0" in b or not b for b in s.dry_sequence_breakers
    ):
        _refuse("dry_sequence_breakers", f"at most {_MAX_STOPS} texts are allowed, none empty")


def check_request(request: GenerateRequest, n_vocab: int) -> None:
    """Check a request. Raises InvalidRequestError naming the field; tokenizing checks the length."""
    check_sampling(request.sampling, n_vocab)
    inputs = (bool(request.messages), request.prompt is not None, request.infill is not None)
    if sum(inputs) != 1:
        _refuse("messages", "give either messages or a prompt")
    if request.tools and not request.messages:
        _refuse("tools", "tools need messages")
    for name, most in _MOST.items():
        value = getattr(request, name)
        if value is not None and not 0 <= value <= most:
            _refuse(name, f"{value} is not between 0 and {most}")
    last = request.messages[-1].role if request.messages else ""
    if request.continue_final and last != "assistant" and request.max_tokens != 0:
        _refuse("messages", "the last message must be the assistant's to continue it")
    if request.reasoning_budget is not None and not request.messages:
        _refuse("reasoning_budget", "a plain prompt has no reasoning; use messages")
    if request.deadline_s is not None and not (
        math.isfinite(request.deadline_s) and request.deadline_s > 0
    ):
        _refuse("deadline_s", "must be a positive number of seconds")
    if request.prompt_logprobs is not None and request.overflow == "shift":
        _refuse("prompt_logprobs", 'a shifted prompt is incomplete; use overflow "refuse"')
    if request.n_pictures and request.overflow == "shift":
        _refuse("overflow", 'a context with pictures cannot be shifted; use "refuse"')
    if request.n_pictures and request.prompt_logprobs is not None:
        _refuse("prompt_logprobs", "rows of pictures have no log-probabilities")
    if len(request.stop) > _MAX_STOPS:
        _refuse("stop", f"at most {_MAX_STOPS} stop strings are allowed")
    if any(not stop or len(stop) > _MAX_STOP_CHARS for stop in request.stop):
        _refuse("stop", f"a stop string must have 1 to {_MAX_STOP_CHARS} characters")
    if isinstance(request.prompt, tuple) and any(not 0 <= t < n_vocab for t in request.prompt):
        _refuse("prompt", f"a token is not in the vocabulary of {n_vocab}")
    if request.speculative not in ("auto", "off", "ngram"):
        _refuse("speculative", '"auto", "off" or "ngram"')


def hint_beyond_training(n_tokens: int, n_ctx_train: int) -> str | None:
    """Return the hint for a prompt beyond the training context; None if a larger context may help."""
    if not n_ctx_train or n_tokens < n_ctx_train:
        return None
    return f"shorten it, or use another model: this one was trained on {n_ctx_train:,} tokens"


def check_length(n_chars: int, n_ctx: int, param: str, n_ctx_train: int = 0) -> None:
    """Refuse a text that no context can hold, before it is tokenized: 20 MB of one letter take 38 s.

    Raises ContextLengthError, with the fewest tokens that the text can have.
    """
    most = max(_TRIED_CHARS, n_ctx * _MAX_TOKEN_CHARS)
    if n_chars > most:
        raise ContextLengthError(
            f"the text has {n_chars:,} characters; for a context of {n_ctx:,} tokens {most:,} are "
            "tokenized at most",
            param=param,
            hint=hint_beyond_training(n_chars // _MAX_TOKEN_CHARS, n_ctx_train),
            n_tokens=n_chars // _MAX_TOKEN_CHARS,
            n_ctx=n_ctx,
        )


#: Limit of preparation (CPU seconds); the slowest of 150 published schemas takes less than 2.
PREPARATION_S = 10.0

_deadline: ContextVar[float] = ContextVar("edgeinfer_prepare_deadline", default=float("inf"))


@contextmanager
def limit_preparation(seconds: float = PREPARATION_S) -> Iterator[None]:
    """Let `check_deadline` raise inside the block after `seconds` of this thread's CPU time."""
    token = _deadline.set(min(_deadline.get(), time.thread_time() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def check_deadline() -> None:
    """Raise InvalidRequestError if the request that is being prepared has used up its time."""
    if time.thread_time() > _deadline.get():
        raise InvalidRequestError(
            f"preparing the request takes more than {PREPARATION_S:.0f} s of processor time",
            hint="send a smaller schema, fewer tools or a shorter prompt",
        )


_count = itertools.count()


def random_bytes(size: int, entropy: bytes = b"") -> bytes:
    """Draw up to 64 bytes from kernel, time, count and `entropy`: a resume may repeat one of them."""
    import hashlib  # takes 1 ms, which verbs without an engine save

    clock, count = time.time_ns().to_bytes(8, "little"), next(_count).to_bytes(8, "little")
    return hashlib.blake2b(os.urandom(16) + clock + count + entropy, digest_size=size).digest()
