"""Which models this machine can hold, in which quantization, and how fast they would answer."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from edgeinfer.catalog.ggml_types import TENSOR_TYPES
from edgeinfer.catalog.rates.measured import Measured
from edgeinfer.catalog.rates.probe import Rates
from edgeinfer.catalog.rates.speed import bytes_per_weight, choose, expected_speed

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([MB])")
_ACTIVE = re.compile(r"-a(\d+(?:\.\d+)?)b\b")
#: File types that most repositories have.
_PUBLISHED = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
#: Slower than one reads: what is below is listed after what is not.
_READABLE_TOKENS_PER_S = 8.0


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """One model here. `basis` says whether `decode` (tokens/s) is expected or was measured."""

    quantization: str
    reason: str
    size_bytes: int
    fits: bool
    decode: float
    basis: Literal["expected", "measured"] = "expected"
    n_params: float = 0.0

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The best first: what fits, quicker than one reads, and then the largest."""
        return (not self.fits, self.decode < _READABLE_TOKENS_PER_S, -self.n_params)


def parameters(text: str) -> float:
    """`"1.7B"` → 1.7e9; 0.0 for what is no such count."""
    match = _COUNT.search(text)
    return float(match[1]) * {"M": 1e6, "B": 1e9}[match[2]] if match else 0.0


def active_parameters(name: str, total: float, told: str = "") -> float:
    """A mixture's, when the catalogue or its name tells them, as `qwen3-30b-a3b`'s does; else all."""
    match = _ACTIVE.search(name.lower())
    return parameters(told) or (float(match[1]) * 1e9 if match else total)


def fit(
    name: str,
    total: float,
    told_active: str,
    quantization: str,
    *,
    here: bool,
    others: bool,
    rates: Rates,
    room: int,
    measured: Measured | None,
) -> Fit:
    """What is to be expected of a model of `total` parameters where `room` bytes are available.

    `here`: its file is, in `quantization`; `others`: its sources may have others to choose from.
    """
    active = active_parameters(name, total, told_active)
    chosen, reason = quantization, "the file that is here" if here else "what its makers publish"
    if others and not here:
        choice = choose("auto", _PUBLISHED, rates, active, room if active == total else 1 << 62)
        chosen, reason = choice.type, choice.reason
    kind = _tensor_type(chosen)
    size = int(total * bytes_per_weight(kind))
    return Fit(
        quantization=chosen,
        reason=reason,
        size_bytes=size,
        fits=size < 0.8 * room,
        decode=measured.decode if measured else expected_speed(active, kind, rates).decode,
        basis="measured" if measured else "expected",
        n_params=total,
    )


def _tensor_type(file_type: str) -> str:
    """The tensor type that a file type is mostly made of."""
    known = {kind.name for kind in TENSOR_TYPES.values()}
    plain = re.sub(r"_(?:XS|S|M|L|MOE)$", "", file_type.upper())
    return next((name for name in (file_type.upper(), plain) if name in known), "Q4_K")
