"""The rates that real answers had, by model; they replace what is expected of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgeinfer import paths
from edgeinfer.disk import write_whole
from edgeinfer.errors import DiskFullError

#: Fewer tokens say little of a rate.
ENOUGH_TOKENS = 16
#: A rate this near to the one that is kept is not written again.
_SAME = 0.2


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of the latest answer, one stream."""

    decode: float


def _place() -> Path:
    return paths.cache_dir() / "measured-rates.json"


def measured_rates() -> dict[str, Measured]:
    """What is known, by the model's name."""
    try:
        return msgspec.json.decode(_place().read_bytes(), type=dict[str, Measured])
    except (OSError, msgspec.MsgspecError):
        return {}


def remember(model: str, decode: float, n_tokens: int) -> None:
    """Keep the rate of an answer of `n_tokens`, unless it is short or the disk refuses."""
    if n_tokens < ENOUGH_TOKENS or decode <= 0:
        return
    known = measured_rates()
    if model in known and abs(known[model].decode / decode - 1) < _SAME:
        return
    try:
        paths.cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(_place(), msgspec.json.encode(known | {model: Measured(decode=round(decode, 2))}))
    except (OSError, DiskFullError):
        return
