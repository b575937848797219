"""The rates that real answers had, by model; they replace what is expected of it."""

from __future__ import annotations

import msgspec

from edgeinfer.system.cache_files import CacheTable

#: Fewer tokens say little of a rate.
ENOUGH_TOKENS = 16
#: A rate this near to the one that is kept is not written again.
_SAME = 0.2


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of the latest answer, one stream."""

    decode: float


_RATES = CacheTable("measured-rates.json", dict[str, Measured])


def measured_rates() -> dict[str, Measured]:
    """What is known, by the model's name."""
    return _RATES.read()


def remember(model: str, decode: float, n_tokens: int) -> None:
    """Keep the rate of an answer of `n_tokens`, unless it is short or as before."""
    if n_tokens < ENOUGH_TOKENS or decode <= 0:
        return
    known = _RATES.read().get(model)
    if known is None or abs(known.decode / decode - 1) >= _SAME:
        _RATES.put(model, Measured(decode=round(decode, 2)))
