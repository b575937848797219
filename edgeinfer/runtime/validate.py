"""Every number of a request has a range; what is outside it is refused before anything is computed."""

from __future__ import annotations

import math

from edgeinfer.config.sampling_options import SAMPLING_OPTIONS
from edgeinfer.errors import ContextLengthError, InvalidRequestError
from edgeinfer.runtime.requests import GenerateRequest, Sampling

_MAX_BIASES = 1024
_MAX_BIAS = 1000.0
_MAX_STOPS = 128
_MAX_STOP_CHARS = 1024
_MAX_LOGPROBS = 20
#: No tokenizer fits more characters into a token, taken over a whole context; so many are tried anyway.
_MAX_TOKEN_CHARS = 64
_TRIED_CHARS = 1 << 20


def _refuse(param: str, message: str) -> None:
    raise InvalidRequestError(f"{param}: {message}", param=param)


def check_sampling(s: Sampling, n_vocab: int) -> None:
    """Raises InvalidRequestError naming the field."""
    for option in SAMPLING_OPTIONS:
        value = getattr(s, option.field)
        if value is None and option.field == "seed":
            continue
        if not option.low <= value <= option.high:  # a NaN is in no range
            _refuse(option.field, f"{value} is not {option.allowed()}")
    if len(s.logit_bias) > _MAX_BIASES:
        _refuse("logit_bias", f"more than {_MAX_BIASES} tokens")
    for token, bias in s.logit_bias.items():
        if not 0 <= token < n_vocab:
            _refuse("logit_bias", f"token {token} is not in the vocabulary of {n_vocab}")
        if not (-_MAX_BIAS <= bias <= _MAX_BIAS or bias == -math.inf):
            _refuse("logit_bias", f"{bias} is not between -{_MAX_BIAS:g} and {_MAX_BIAS:g}")
    if len(s.dry_sequence_breakers) > _MAX_STOPS or any(
        "\0" in b or not b for b in s.dry_sequence_breakers
    ):
        _refuse("dry_sequence_breakers", f"at most {_MAX_STOPS}, none empty")


def check_request(request: GenerateRequest, n_vocab: int) -> None:
    """Raises InvalidRequestError naming the field; tokenizing checks the prompt's length."""
    check_sampling(request.sampling, n_vocab)
    given = (bool(request.messages), request.prompt is not None, request.infill is not None)
    if sum(given) != 1:
        _refuse("messages", "give either messages or a prompt")
    if request.tools and not request.messages:
        _refuse("tools", "tools need messages")
    if request.max_tokens is not None and not 0 <= request.max_tokens <= 1 << 24:
        _refuse("max_tokens", f"{request.max_tokens} is not between 0 and {1 << 24}")
    last = request.messages[-1].role if request.messages else ""
    if request.continue_final and last != "assistant" and request.max_tokens != 0:
        _refuse("messages", "only a last message of the assistant can be continued")
    budget = request.reasoning_budget
    if budget is not None and not request.messages:
        _refuse("reasoning_budget", "a plain prompt has no reasoning to tell from text; give messages")
    if budget is not None and not 0 <= budget <= 1 << 24:
        _refuse("reasoning_budget", f"{budget} is not between 0 and {1 << 24}")
    if request.deadline_s is not None and not (
        math.isfinite(request.deadline_s) and request.deadline_s > 0
    ):
        _refuse("deadline_s", "a positive number of seconds")
    for name in ("logprobs", "prompt_logprobs"):
        top = getattr(request, name)
        if top is not None and not 0 <= top <= _MAX_LOGPROBS:
            _refuse(name, f"{top} is not between 0 and {_MAX_LOGPROBS}")
    if request.prompt_logprobs is not None and request.overflow == "shift":
        _refuse("prompt_logprobs", 'a shifted prompt is not whole; leave overflow at "refuse"')
    if len(request.stop) > _MAX_STOPS:
        _refuse("stop", f"more than {_MAX_STOPS} stop strings")
    if any(not stop or len(stop) > _MAX_STOP_CHARS for stop in request.stop):
        _refuse("stop", f"a stop string has 1 to {_MAX_STOP_CHARS} characters")
    if isinstance(request.prompt, tuple) and any(not 0 <= t < n_vocab for t in request.prompt):
        _refuse("prompt", f"a token is not in the vocabulary of {n_vocab}")
    if request.speculative not in ("auto", "off", "ngram", "draft"):
        _refuse("speculative", '"auto", "off", "ngram" or "draft"')


def check_length(n_chars: int, n_ctx: int, param: str) -> None:
    """Refuse a text that no context holds before it is tokenized: 20 MB of one letter take 38 s.

    Raises ContextLengthError, with the fewest tokens that the text can have.
    """
    most = max(_TRIED_CHARS, n_ctx * _MAX_TOKEN_CHARS)
    if n_chars > most:
        raise ContextLengthError(
            f"the text has {n_chars:,} characters; for a context of {n_ctx:,} tokens {most:,} are "
            "tokenized at most",
            param=param,
            n_tokens=n_chars // _MAX_TOKEN_CHARS,
            n_ctx=n_ctx,
        )
