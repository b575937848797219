"""From the rates of types to the speed of a file, and to the type that suits a purpose."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgeinfer.catalog.ggml_types import TENSOR_TYPES
from edgeinfer.catalog.gguf import GgufHeader
from edgeinfer.catalog.rates.probe import Rates
from edgeinfer.catalog.rates.purpose import Purpose

#: File types to choose from, best quality first, and the tensor type that they are mostly made of.
CHOICES = {
    "BF16": "BF16",
    "Q8_0": "Q8_0",
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K",
    "Q4_K_M": "Q4_K",
    "Q4_1": "Q4_1",
    "IQ4_NL": "IQ4_NL",
    "Q4_0": "Q4_0",
}
_QUESTION_TOKENS = 1000
_ANSWER_TOKENS = 200
#: A type of better quality is taken when it is at most this much slower than the quickest.
_NEARLY = 1.15
#: `advice` speaks of files that are read so many times slower than they need be.
_WORTH_SAYING = 2.0
#: Activations, cache and the rest of the machine beside weights.
_MEMORY_SHARE = 0.7


class Speed(msgspec.Struct, frozen=True):
    """Tokens per second that are to be expected of one stream."""

    prefill: float
    decode: float


class Choice(msgspec.Struct, frozen=True):
    """A file type, and why."""

    type: str
    reason: str


def bytes_per_weight(tensor_type: str) -> float:
    """Bytes that a weight of a tensor type takes. Raises KeyError for no type of ggml."""
    kind = next(t for t in TENSOR_TYPES.values() if t.name == tensor_type)
    return kind.bytes / kind.block


def expected_speed(n_params: float, tensor_type: str, rates: Rates) -> Speed:
    """The speed of a model of so many parameters (a mixture's active ones) in one type."""
    return Speed(
        _prefill_rate(tensor_type, rates) / n_params, _decode_rate(tensor_type, rates) / n_params
    )


def advice(name: str, headers: Sequence[GgufHeader], rates: Rates) -> str:
    """A sentence about a type of the same size that this CPU reads much quicker; "" for none."""
    sizes: dict[str, int] = {}
    for header in headers:
        for tensor in header.tensors:
            if len(tensor.shape) > 1:
                sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size_bytes
    own = max(sizes, key=lambda kind: sizes[kind], default="")
    if own not in rates.prefill:
        return ""
    near = [kind for kind in rates.prefill if _alike(kind, own)]
    best = max(near, key=lambda kind: rates.prefill[kind])
    times = rates.prefill[best] / rates.prefill[own]
    if times < _WORTH_SAYING or rates.decode[best] < 0.9 * rates.decode[own]:
        return ""
    wanted = next(file for file, kind in CHOICES.items() if kind == best)
    return (
        f"this file ({own}) is {times:.1f} times slower to read than it need be on this CPU: "
        f"`edgeinfer quantize {name} {wanted}` makes one, which loses quality a second time, and says "
        "how much"
    )


def choose(
    purpose: Purpose, choices: Sequence[str], rates: Rates, n_params: float, room: int
) -> Choice:
    """Choose one of the file types `choices` for `n_params` parameters in `room` bytes of memory.

    Raises ValueError when this program knows none of them.
    """
    known = [file for file in CHOICES if file in choices and CHOICES[file] in rates.decode]
    if not known:
        raise ValueError("none of the types is known")
    fitting = [f for f in known if n_params * bytes_per_weight(CHOICES[f]) < _MEMORY_SHARE * room]
    pool = fitting or known[-1:]
    times = {file: _seconds(purpose, CHOICES[file], rates, n_params) for file in pool}
    quickest = min(times.values())
    if purpose == "quality":
        return Choice(pool[0], "the most precise that fits in memory")
    if purpose == "size":
        least = min(bytes_per_weight(CHOICES[file]) for file in pool)
        smallest = [f for f in pool if bytes_per_weight(CHOICES[f]) <= least]
        return Choice(min(smallest, key=lambda f: times[f]), "the smallest, the quickest of those")
    chosen = next(file for file in pool if times[file] <= _NEARLY * quickest)
    what = {
        "prefill": "reading prompts",
        "decode": "writing answers",
        "auto": f"reading {_QUESTION_TOKENS:,} tokens and writing {_ANSWER_TOKENS}",
    }[purpose]
    almost = (
        "the quickest here" if times[chosen] == quickest else "nearly the quickest here, and better"
    )
    return Choice(chosen, f"{almost} at {what}: {times[chosen]:.1f} s")


def _seconds(purpose: Purpose, tensor_type: str, rates: Rates, n_params: float) -> float:
    speed = expected_speed(n_params, tensor_type, rates)
    reading = _QUESTION_TOKENS / speed.prefill
    writing = _ANSWER_TOKENS / speed.decode
    return {"prefill": reading, "decode": writing}.get(purpose, reading + writing)


def _decode_rate(tensor_type: str, rates: Rates) -> float:
    known = rates.decode.get(tensor_type)
    return known or rates.bandwidth / bytes_per_weight(tensor_type)


def _prefill_rate(tensor_type: str, rates: Rates) -> float:
    """A type that was not measured is taken for one without a kernel of its own."""
    return rates.prefill.get(tensor_type) or min(rates.prefill.values())


def _alike(kind: str, own: str) -> bool:
    """Whether a type takes about as many bytes as another, up to a fifth."""
    return 0.83 <= bytes_per_weight(kind) / bytes_per_weight(own) <= 1.2
