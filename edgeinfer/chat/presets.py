"""Sampling options of the chat, set one by one, or several together by a preset."""

from __future__ import annotations

from collections.abc import Mapping

from edgeinfer.config.sampling_options import BY_FIELD, MAX_TOKENS
from edgeinfer.error_text import similar_name_hint
from edgeinfer.errors import UsageError
from edgeinfer.runtime.requests import Sampling, with_options

Value = float | int | None

#: Options that `/set` accepts: every sampling option, and the maximum length of an answer.
OPTIONS = BY_FIELD | {MAX_TOKENS.field: MAX_TOKENS}

#: Built-in presets; `[chat.presets]` adds others. `model` restores the model's own sampling.
PRESETS: dict[str, dict[str, Value]] = {
    "model": {},
    "greedy": {"temperature": 0.0},
    "precise": {"temperature": 0.3, "top_p": 0.9, "min_p": 0.05},
    "balanced": {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05},
    "creative": {"temperature": 1.1, "top_p": 1.0, "min_p": 0.08},
}


def option(name: str) -> str:
    """Return the field name of a typed option: `top_p` for `top-p`. Raises UsageError if unknown."""
    key = name.lower().replace("-", "_")
    key = {"temp": "temperature"}.get(key, key)
    if key not in OPTIONS:
        labels = [option.label for option in OPTIONS.values()]
        hint = similar_name_hint(name, labels, f"options: {', '.join(labels)}")
        raise UsageError(f"there is no sampling option {name!r}", hint=hint)
    return key


def value(name: str, text: str) -> Value:
    """Parse the value `text` of the option `name`; None for `default`. Raises UsageError."""
    option = OPTIONS[name]
    if text.lower() in ("default", "none", "model"):
        return None
    try:
        return option.parse(text)
    except ValueError:
        message = f"{option.label} is {option.describe_range()}"
        raise UsageError(message, hint=f"`/set {option.label} default` resets the option") from None


def overlay(base: Sampling, sampling: Mapping[str, Value]) -> Sampling:
    """Return the model's sampling, `base`, overridden by the user's options, `sampling`."""
    return with_options(base, {k: v for k, v in sampling.items() if k in Sampling.__struct_fields__})


def describe(sampling: Mapping[str, Value]) -> str:
    """Return e.g. `temperature 0.3, top-p 0.9`; "the model's own" if no option is set."""
    options = (f"{k.replace('_', '-')} {v:g}" for k, v in sampling.items() if v is not None)
    return ", ".join(options) or "the model's own"


def matching(sampling: Mapping[str, Value], presets: Mapping[str, Mapping[str, Value]]) -> str:
    """Return the name of the preset with exactly the values of `sampling`; "" if there is none."""
    return next((name for name, values in presets.items() if dict(values) == dict(sampling)), "")
