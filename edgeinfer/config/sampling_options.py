"""The sampling options: field, type, range, help, and flag of each.

This one table serves the parser (`cli.options`), the chat (`chat.presets`), the catalogue
(`models.catalog`), the engine (`runtime.requests`) and the endpoint (`server.wire_types`,
`server.request_fields`). The defaults are those of `runtime.requests.Sampling`.
"""

from __future__ import annotations

from typing import NamedTuple


class SamplingOption(NamedTuple):
    """A numeric option from `low` to `high`, inclusive; without a `flag`, only requests can set it."""

    field: str
    kind: type[int] | type[float]
    low: float
    high: float
    help: str
    flag: str = ""

    @property
    def label(self) -> str:
        """Name that users type: `top-p`."""
        return self.field.replace("_", "-")

    def parse(self, text: str) -> float | int:
        """Return the value of a typed text. Raises ValueError if it is out of range."""
        value = self.kind(text)
        if not self.low <= value <= self.high:
            raise ValueError(f"{text} is not {self.describe_range()}")
        return value

    def describe_range(self) -> str:
        return f"a number between {self.low} and {self.high}"


def _row(
    field: str, kind: type[int] | type[float], low: float, high: float, help: str
) -> SamplingOption:
    return SamplingOption(field, kind, low, high, help, f"--{field.replace('_', '-')}")


_TOKENS = 1 << 20
SAMPLING_OPTIONS = (
    _row("temperature", float, 0, 10, "0 always picks the likeliest token; higher values vary more"),
    _row("top_k", int, 0, 1_000_000, "keep only the N most likely tokens; 0 keeps all"),
    _row("top_p", float, 0, 1, "keep the most likely tokens that together have this probability"),
    _row("min_p", float, 0, 1, "drop tokens less likely than this share of the likeliest"),
    _row("repeat_penalty", float, 0.01, 10, "penalize tokens that were repeated; 1 is off"),
    SamplingOption(
        "repeat_last_n", int, -1, _TOKENS, "tokens that the penalties look back on; -1 is all"
    ),
    _row("presence_penalty", float, -2, 2, "penalize tokens that have appeared"),
    SamplingOption(
        "frequency_penalty", float, -2, 2, "penalize tokens by how often they have appeared"
    ),
    SamplingOption("dry_multiplier", float, 0, 100, "penalize repeated phrases (DRY); 0 is off"),
    SamplingOption(
        "dry_base", float, 1, 100, "growth of the DRY penalty with the length of the phrase"
    ),
    SamplingOption("dry_allowed_length", int, 0, _TOKENS, "longest phrase that may repeat, in tokens"),
    SamplingOption("dry_penalty_last_n", int, -1, _TOKENS, "tokens that DRY looks back on; -1 is all"),
    _row("seed", int, 0, (1 << 32) - 1, "with the same seed, the answer is the same"),
)
#: Longest answer of a chat: an option like the others, but not of the sampler.
MAX_TOKENS = SamplingOption("max_tokens", int, 1, 1 << 24, "longest answer")
BY_FIELD = {option.field: option for option in SAMPLING_OPTIONS}
#: Sampling options that have a flag on the command line; the chat's `/set` takes every option.
TYPED = tuple(option for option in SAMPLING_OPTIONS if option.flag)
