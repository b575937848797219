"""Measures whether a model is faster on devices: a trial of at most two seconds, the first time.

Integrated GPUs often lose to the CPU beside them, and nothing but measuring tells. What was found is
remembered with its figures, by model, devices, drivers, builds and layers.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from edgeinfer import paths
from edgeinfer.errors import DecodeError
from edgeinfer.runtime.backends.devices import Device
from edgeinfer.runtime.decoding.active import ActiveContext
from edgeinfer.runtime.decoding.batch import Batch
from edgeinfer.runtime.libllama import L
from edgeinfer.runtime.offload import Offload

#: A side computes so many tokens of a prompt, and then so many one by one, but no longer (seconds).
_PROMPT, _ANSWER = 64, 16
_SIDE_S = 1.0
#: What the sides are compared by: a turn of so many tokens read and written.
_TURN_READ, _TURN_WRITTEN = 512, 128
#: Trials that are remembered.
_MOST = 200

#: Runs work between two steps, or just runs it.
Call = Callable[[Callable[[], float]], float]


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second of a prompt, and of an answer."""

    prefill: float
    decode: float

    @property
    def turn_s(self) -> float:
        """Seconds of a turn."""
        return _TURN_READ / self.prefill + _TURN_WRITTEN / self.decode

    def __str__(self) -> str:
        return f"{self.prefill:.0f} and {self.decode:.1f} tokens/s"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. `place` is where the layers were, `at` seconds since 1970."""

    model: str
    place: str
    cpu: Rates
    devices: Rates
    at: float

    @property
    def is_won(self) -> bool:
        """Whether devices take less time for a turn."""
        return self.devices.turn_s < self.cpu.turn_s

    def __str__(self) -> str:
        verb = "is faster" if self.is_won else "is no faster"
        return f"{self.place} {verb}: {self.devices} read and written, the CPU {self.cpu}"


class Probe:
    """Computes a sequence of its own in a context that others use only between its calls of `call`."""

    def __init__(self, active: ActiveContext, batch: Batch, call: Call) -> None:
        self._active, self._batch = active, batch
        self._call = call
        self._prompt = list(range(1, 1 + min(_PROMPT, batch.capacity)))

    def warm_up(self) -> None:
        """Have a device compile what a prompt and an answer need. Raises DecodeError."""
        self._read()
        self._write(0)
        self._forget()

    def measure(self) -> Rates:
        """Compute a prompt and an answer once that is done. Raises DecodeError."""
        self.warm_up()
        read_s = self._read()
        written_s, written = 0.0, 0
        while not written or (written < _ANSWER and read_s + written_s < _SIDE_S):
            written_s += self._write(written)
            written += 1
        self._forget()
        n_read = len(self._prompt)
        return Rates(prefill=n_read / max(1e-9, read_s), decode=written / max(1e-9, written_s))

    def _read(self) -> float:
        return self._call(lambda: self._step(self._prompt, 0))

    def _write(self, n_before: int) -> float:
        return self._call(lambda: self._step(self._prompt[:1], len(self._prompt) + n_before))

    def _forget(self) -> None:
        self._call(lambda: float(L.llama_memory_seq_rm(self._active.memory, 0, -1, -1)))

    def _step(self, tokens: Sequence[int], at: int) -> float:
        """Seconds that these tokens took."""
        began = time.perf_counter()
        self._batch.clear()
        self._batch.add(tokens, at, 0, outputs=1)
        if code := self._batch.decode(self._active):
            raise DecodeError(f"llama_decode returned {code} for {len(tokens)} tokens")
        return time.perf_counter() - began


def trial_key(model: str, devices: Sequence[Device], builds: str, offload: Offload) -> str:
    """The name under which a trial is remembered."""
    seen = [f"{d.name} {d.description} {d.driver}" for d in devices]
    return hashlib.sha256("\n".join([model, builds, str(offload), *seen]).encode()).hexdigest()[:32]


def remembered() -> dict[str, Trial]:
    """Every trial by its key, the oldest first; none where they cannot be read."""
    try:
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, Trial])
    except (OSError, msgspec.MsgspecError):
        return {}


def remember(key: str, trial: Trial) -> None:
    """Keep a trial for later processes; where that fails, it is made again."""
    known = remembered()
    known.pop(key, None)
    known[key] = trial
    recent = dict(list(known.items())[-_MOST:])
    place = _file()
    written = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        paths.private_dir(place.parent)
        written.write_bytes(msgspec.json.encode(recent))
        written.replace(place)
    except OSError:
        written.unlink(missing_ok=True)


def _file() -> Path:
    return paths.cache_dir() / "gpu-trials.json"
