"""Measure what this CPU makes of each common type, once, and keep it per CPU and build.

The rates are in weights per second: how many weights of a type are multiplied with one token's
activations each second, while reading a prompt and while writing. A model's time is the sum over its
tensors.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path

import msgspec

from edgeinfer.catalog.ggml_types import TENSOR_TYPES, file_type
from edgeinfer.catalog.progress.job import Job
from edgeinfer.catalog.quantizing import children
from edgeinfer.catalog.quantizing.quantizer import QuantizeOptions, run_quantizer
from edgeinfer.catalog.rates import matrix_model
from edgeinfer.errors import QuantizeError
from edgeinfer.system import paths
from edgeinfer.system.cache_files import CacheFile

#: Tensor types that files are mostly made of, and the file type whose matrices are of that alone.
PROBED = {
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "IQ4_NL": "IQ4_NL",
    "Q4_K": "Q4_K_S",
    "Q5_K": "Q5_K_S",
    "Q6_K": "Q6_K",
    "Q8_0": "Q8_0",
    "BF16": "BF16",
    "F16": "F16",
}
#: Weights of all copies together: more than the caches of most processors hold.
_COPIES_BYTES = 96 << 20


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Weights per second by tensor type. `machine` says of which processor and build.

    `busy`: something else was using the processor, so that they are measured again when it is not.
    """

    machine: str
    busy: bool = False
    prefill: dict[str, float]
    decode: dict[str, float]

    @property
    def bandwidth(self) -> float:
        """Bytes of weights a second that decoding reads at best."""
        per_weight = {t.name: t.bytes / t.block for t in TENSOR_TYPES.values()}
        return max(rate * per_weight[name] for name, rate in self.decode.items())


_KEPT = CacheFile("type-rates.json", Rates)


def _machine() -> str:
    """This processor, how much of it we may use, and the llama.cpp that computes."""
    wanted = ("vendor_id", "model name", "flags", "CPU part", "Features")
    cpu = ""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0]
        cpu = "\n".join(line for line in first.splitlines() if line.startswith(wanted))
    try:
        build = metadata.version("llama_cpp_python")
    except metadata.PackageNotFoundError:
        build = metadata.version("edgeinfer")
    text = f"{cpu}\n{len(os.sched_getaffinity(0))}\n{build}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def kept() -> Rates | None:
    """What was measured on this CPU with this build, None when nothing was."""
    rates = _KEPT.read()
    return rates if rates and rates.machine == _machine() else None


def measure(job: Job) -> Rates:
    """Measure every type, some seconds altogether, and keep it.

    Raises QuantizeError when no type can be measured, DiskFullError, InterruptedByUser.
    """
    busy = _is_busy()
    work = paths.cache_dir() / "type-rates.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700, parents=True)
    try:
        source = work / "source.gguf"
        n_weights = matrix_model.write(source)
        prefill, decode = {}, {}
        for name, kind in PROBED.items():
            job.begin("probing", name)
            found = _measured(source, kind, work, job)
            if found:
                prefill[name] = found[0] * n_weights
                decode[name] = found[1] * n_weights
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not decode:
        raise QuantizeError("no type could be measured on this machine")
    rates = Rates(machine=_machine(), busy=busy, prefill=prefill, decode=decode)
    _KEPT.write(rates)
    return rates


def kept_or_measured(job: Job) -> Rates:
    """What is known, or else measured now. Raises what `measure` raises."""
    rates = kept()
    return rates if rates and (not rates.busy or _is_busy()) else measure(job)


def _is_busy() -> bool:
    """Whether others have kept more than a quarter of the processors at work in the last minute."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0)) / 4


def _measured(source: Path, kind: str, work: Path, job: Job) -> tuple[float, float] | None:
    """Tokens per second of the probe's model in this type: (prefill, decode). None: not possible."""
    target = work / f"{kind}.gguf"
    number = file_type(kind)
    assert number is not None
    try:
        if kind == "F16":
            target = source
        else:
            run_quantizer(source, target, number, Job(), QuantizeOptions(pure=True))
        copies = max(2, -(-_COPIES_BYTES // target.stat().st_size))
        child = "edgeinfer.runtime.helpers.type_rates"
        with closing(children.events(child, str(target), str(copies), job=job)) as lines:
            *_, said = lines
    except QuantizeError:
        return None
    if said["event"] == "error":
        return None
    return float(str(said["prefill"])), float(str(said["decode"]))
