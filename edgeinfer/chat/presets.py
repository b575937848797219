"""Sampling a person sets: options by name with their ranges, and presets of several at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.runtime.requests import Sampling

Value = float | int | None


class Option(msgspec.Struct, frozen=True):
    """An option with its range, both ends allowed. The engine checks once more."""

    kind: type[int] | type[float]
    low: float
    high: float
    summary: str


OPTIONS: dict[str, Option] = {
    "temperature": Option(float, 0, 10, "0 is greedy, higher is freer"),
    "top_k": Option(int, 0, 1_000_000, "sample from so many tokens; 0 from all"),
    "top_p": Option(float, 0, 1, "sample from the tokens that make up this probability"),
    "min_p": Option(float, 0, 1, "leave out tokens less likely than this share of the best"),
    "typical_p": Option(float, 0, 1, "locally typical sampling; 1 is off"),
    "repeat_penalty": Option(float, 0, 10, "against repeats; 1 is off"),
    "presence_penalty": Option(float, -2, 2, "against tokens that were there"),
    "frequency_penalty": Option(float, -2, 2, "against tokens that were there often"),
    "dry_multiplier": Option(float, 0, 100, "against repeated phrases; 0 is off"),
    "mirostat": Option(int, 0, 2, "0 off, or version 1 or 2"),
    "seed": Option(int, 0, (1 << 32) - 1, "the same seed gives the same answer"),
    "max_tokens": Option(int, 1, 1 << 24, "longest answer"),
}

#: Presets everyone has; the user's own (`[chat.presets]`) come beside and over them. `model` is the
#: model's own sampling.
PRESETS: dict[str, dict[str, Value]] = {
    "model": {},
    "greedy": {"temperature": 0.0},
    "precise": {"temperature": 0.3, "top_p": 0.9, "min_p": 0.05},
    "balanced": {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05},
    "creative": {"temperature": 1.1, "top_p": 1.0, "min_p": 0.08},
}


def option(name: str) -> str:
    """The field an option's name means: `top-p`, `temp` and `TOP_P` are understood. Raises
    UsageError.
    """
    key = name.lower().replace("-", "_")
    key = {"temp": "temperature"}.get(key, key)
    if key not in OPTIONS:
        near = difflib.get_close_matches(key, OPTIONS, n=1)
        known = ", ".join(k.replace("_", "-") for k in OPTIONS)
        step = f"did you mean {near[0].replace('_', '-')}?" if near else f"the options: {known}"
        raise UsageError(f"there is no sampling option {name!r}", hint=step)
    return key


def value(name: str, text: str) -> Value:
    """What was typed as the option's value; None for `default`. Raises UsageError outside its range."""
    wanted = OPTIONS[name]
    if text.lower() in ("default", "none", "model"):
        return None
    try:
        number = wanted.kind(text)
    except ValueError:
        number = float("nan")
    if not wanted.low <= number <= wanted.high:
        label = name.replace("_", "-")
        raise UsageError(
            f"{label} is a number from {wanted.low:g} to {wanted.high:g}",
            hint=f"or `default`: /set {label} default",
        )
    return number


def changed(sampling: Mapping[str, Value], name: str, new: Value) -> dict[str, Value]:
    """`sampling` with one option set, or left to the model when `new` is None."""
    rest = {k: v for k, v in sampling.items() if k != name}
    return rest if new is None else {**rest, name: new}


def overlay(base: Sampling, sampling: Mapping[str, Value]) -> Sampling:
    """The model's sampling with what the user set; `max_tokens` belongs to the request and is
    left out.
    """
    return msgspec.structs.replace(
        base, **{k: v for k, v in sampling.items() if k in Sampling.__struct_fields__}
    )


def describe(sampling: Mapping[str, Value]) -> str:
    """`temperature 0.3, top-p 0.9`; "the model's own" when nothing is set."""
    return (
        ", ".join(f"{k.replace('_', '-')} {v:g}" for k, v in sampling.items() if v is not None)
        or "the model's own"
    )


def matching(sampling: Mapping[str, Value], presets: Mapping[str, Mapping[str, Value]]) -> str:
    """The preset that these values are, or ""."""
    return next((name for name, values in presets.items() if dict(values) == dict(sampling)), "")
