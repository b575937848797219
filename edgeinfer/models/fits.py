"""Estimate which models fit into this machine's memory, and how fast they answer."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from edgeinfer.config.config_file import load_config
from edgeinfer.config.load_options import UNFIT_DRAFT_HINT
from edgeinfer.errors import ModelLoadError
from edgeinfer.models import gguf
from edgeinfer.models.catalog import Model, load_catalog, parameter_count
from edgeinfer.models.gguf import GgufHeader
from edgeinfer.models.listing import ModelSummary, summarize_entry
from edgeinfer.models.store import list_pulled
from edgeinfer.platform.disk import CacheTable
from edgeinfer.platform.machine import (
    DISK_THREADS,
    Machine,
    Memory,
    Rate,
    is_busy,
    memory_threads,
    read_memory,
    read_memory_rate,
    read_rate,
)
from edgeinfer.platform.paths import DEFAULT_MODEL
from edgeinfer.runtime.layer_plan import Device, usable_bytes
from edgeinfer.runtime.llama.backends import OffloadRefused, OffloadRequest, find_devices
from edgeinfer.runtime.memory_plan import MemoryPlan, disk_pace, make_exact_plan, plan_streaming
from edgeinfer.runtime.model_shape import Shape, draft_problem, make_shape
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.units import format_bytes, format_duration

Group = Literal["comfortable", "slow", "too big", "embedding"]
Role = Literal["comfortable", "better", "tiny"]
#: Speed (tokens/s) at which a person reads.
READABLE_TOKENS_PER_S = 8.0
#: Speed (tokens/s) at which an answer is complete long before a person has read it.
_QUICK_TOKENS_PER_S = 20.0
_ANSWER_TOKENS = 200
#: Decoding reaches this share of the measured memory bandwidth.
_SHARE = 0.7
#: Weights (bytes/s) that one thread can multiply: two threads of a Zen 4 EPYC reach 15 to 21 GB/s.
_THREAD_BYTES_PER_S = 8e9
#: Assumed memory bandwidth (bytes/s) of a discrete GPU; drivers do not report it.
_CARD_BYTES_PER_S = 150e9
_ACTIVE = re.compile(r"-a(\d+(?:\.\d+)?)b\b")
#: Chat models that a first run may offer, the best first.
_FIRST_RUN_MODELS = """
    qwen3-30b-a3b-instruct-2507 phi-4 qwen3-4b-instruct-2507 llama-3.2-3b-instruct
    smollm2-1.7b-instruct llama-3.2-1b-instruct lfm2-700m lfm2-350m
""".split()


#: A model may use this share of the memory; the system and other programs need the rest.
_MEMORY_SHARE = 0.95
#: The context of a model larger than memory gets 1 / `_CONTEXT_SHARE` of the memory.
_CONTEXT_SHARE = 8
#: Measured read rates of the memory and of disks. A key has the host name, the architecture, and the
#: number of threads (memory) or the device numbers (disk).
_RATES = CacheTable("memory-rate.json", dict[str, Rate])


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How well a model runs on this machine: a group for `list`, and the estimated speed.

    `tokens_per_s` is for one stream with a short context; `why` explains the group. If other
    programs use too much memory now, `shortage` says what is needed and what is free; otherwise it is
    "". `busy`: other programs may have slowed the measurement.
    """

    group: Group
    tokens_per_s: float
    why: str
    needed_bytes: int
    shortage: str = ""
    busy: bool = False


class FirstRunChoice(msgspec.Struct, frozen=True):
    """A model that a first run offers as `role`: its advantage (`why`), and its estimated speed."""

    role: Role
    why: str
    model: Model
    tokens_per_s: float


_OPEN_LICENCES = ("Apache-2.0", "MIT", "BSD-3-Clause", "OpenMDW-1.0")


def is_restricted(licence: str) -> bool:
    """Return whether a licence is known and not open source, so that some uses need permission."""
    return bool(licence) and licence not in _OPEN_LICENCES


def needed_bytes(size_bytes: int) -> int:
    """Estimate the memory (bytes) for a model with a file of `size_bytes` and a short context."""
    return int(size_bytes * 1.2) + (100 << 20)


class Estimator:
    """Estimates the speed of models on this machine, which is measured when an estimator is created."""

    def __init__(self) -> None:
        self.catalog = load_catalog()
        self.rate = memory_rate()
        self.memory = read_memory()
        self.cards = cards()
        self.pulled_bytes = {model.name: model.size_bytes for model in list_pulled()}

    def fit(self, model: ModelSummary) -> Fit:
        """Estimate how a model of known size runs, with its draft model if that is pulled."""
        entry = self.catalog.get(model.name)
        return fit(
            model.size_bytes,
            model.purpose,
            active_share(entry, model.name, model.parameters),
            self.rate,
            memory=self.memory,
            card_bytes=sum(usable_bytes(card.total_bytes) for card in self.cards),
            draft_bytes=self.pulled_bytes.get(entry.draft, 0) if entry else 0,
        )

    def fit_of(self, model: Model) -> Fit | None:
        """Estimate how a model of the catalogue runs; None if its size is unknown."""
        return self.fit(summarize_entry(model)) if model.stored_bytes else None


def fit(
    size_bytes: int,
    purpose: str,
    active_share: float,
    rate: Rate,
    *,
    memory: Memory,
    card_bytes: int = 0,
    draft_bytes: int = 0,
) -> Fit:
    """Estimate how a model with a file of `size_bytes` runs, with a draft model of `draft_bytes`.

    `purpose` is that of `ModelSummary`; `rate` is the rate at which the machine reads memory.
    A token reads `active_share` of the weights (1.0 unless it is a mixture of experts). `card_bytes` is
    the memory of discrete GPUs that a plan may use; they count only if the whole model fits there. The
    draft model counts only if there is memory for both.
    """
    room = int(memory.total_bytes * _MEMORY_SHARE) or memory.available_bytes
    needed = needed_bytes(size_bytes + draft_bytes)
    if needed > min(room, memory.available_bytes):
        needed = needed_bytes(size_bytes)
    is_on_card = needed <= card_bytes
    reachable = min(_SHARE * rate.bytes_per_s, _THREAD_BYTES_PER_S * rate.threads)
    if is_on_card:
        reachable = max(reachable, _SHARE * _CARD_BYTES_PER_S)
    speed = round(reachable / (size_bytes * active_share), 1)
    group: Group = "comfortable" if speed >= READABLE_TOKENS_PER_S else "slow"
    why = f"{_ANSWER_TOKENS} tokens in {format_duration(max(1, _ANSWER_TOKENS / max(speed, 0.1)))}"
    why += ", on the GPU" if is_on_card else ""
    if purpose in ("embedding", "reranker"):
        group, why = "embedding", ""
    shortage = ""
    if needed > room:
        group = "embedding" if group == "embedding" else "too big"
        speed = _speed_from_disk(size_bytes, active_share, room, speed)
        why = f"needs {needed / 1e9:.2f} of {room / 1e9:.2f} GB: from the disk"
    elif needed > memory.available_bytes:
        shortage = f"needs {format_bytes(needed)}, {format_bytes(memory.available_bytes)} free now"
    busy = rate.busy or (needed > room and disk_rate().busy)
    return Fit(
        group=group, tokens_per_s=speed, why=why, needed_bytes=needed, shortage=shortage, busy=busy
    )


def _speed_from_disk(size_bytes: int, active_share: float, room_bytes: int, speed: float) -> float:
    """Return the speed (at most `speed`) of a model larger than its `room_bytes` of memory.

    For a mixture of experts, half of the weights that a token reads are assumed to be experts.
    """
    experts = 0 if active_share == 1.0 else int(size_bytes * (1.0 - active_share / 2))
    shape = make_shape({}, n_vocab=0, n_params=0, weights_bytes=size_bytes)
    per_token = int(size_bytes * active_share)
    shape = msgspec.structs.replace(shape, weights_bytes_per_token=per_token, expert_bytes=experts)
    streaming = plan_streaming(shape, room_bytes, room_bytes // _CONTEXT_SHARE)
    return round(min(speed, disk_pace(shape, streaming, disk_rate().bytes_per_s)), 1)


@cache
def disk_rate() -> Rate:
    """Return the highest rate of reading pulled models, measured for 0.4 s; 0.0 without such models."""
    devices: dict[Path, int] = {}
    for path in (path for model in list_pulled() for path in model.paths):
        with suppress(OSError):  # the file is missing, or in a folder that the user may not open
            devices[path] = path.stat().st_dev
    disks = sorted(set(devices.values()))
    return _highest_rate(f"disk {disks}", lambda: Rate(read_rate(*devices), DISK_THREADS, is_busy()))


@cache
def cards() -> tuple[Device, ...]:
    """Return the discrete GPUs that a launch would use. Takes 0.2 s. Raises ConfigError."""
    config = load_config()
    request = OffloadRequest(layers=config.load.gpu_layers, devices=config.gpu.devices)
    with suppress(OffloadRefused):
        if request.opens_backends():
            return tuple(device for device in next(find_devices(request)) if device.kind == "gpu")
    return ()


@cache
def memory_rate() -> Rate:
    """Return the machine's highest memory bandwidth; if none is stored yet, measure it for 0.2 s."""
    return _highest_rate(str(memory_threads()), read_memory_rate)


def _highest_rate(resource: str, measure: Callable[[], Rate]) -> Rate:
    """Return the highest rate measured; measure again if the machine was busy."""
    key = f"{platform.node()} {platform.machine()} {resource}"
    stored = _RATES.read().get(key, Rate(0.0, 0, busy=True))
    if not stored.busy:
        return stored
    rate = measure()
    rate = replace(rate, bytes_per_s=max(stored.bytes_per_s, rate.bytes_per_s))
    if rate.bytes_per_s:
        _RATES.put(key, rate)
    return rate


def active_share(model: Model | None, name: str, parameters: str) -> float:
    """Return the share of the weights that a token reads: less than 1 for a mixture of experts.

    The active parameters are those in the entry `model`, otherwise those in the name (`…-a3b`).
    `parameters` is the number of all, such as "30B"; if it is unknown, 1.0 is returned.
    """
    total = parameter_count(parameters)
    match = _ACTIVE.search(name.lower())
    stated = parameter_count(model.active_parameters) if model else 0.0
    active = stated or (float(match[1]) * 1e9 if match else total)
    return min(1.0, active / total) if total else 1.0


def first_run_choices() -> list[FirstRunChoice]:
    """Return up to three chat models for this machine: "comfortable", "better", "tiny", in this order.

    "tiny" is the default model, always offered. Takes 0.2 s to measure memory; uses no network.
    """
    estimator = Estimator()
    fitting: list[tuple[Model, float]] = []
    for model in map(estimator.catalog.__getitem__, (*_FIRST_RUN_MODELS, DEFAULT_MODEL)):
        figures = estimator.fit_of(model)
        is_comfortable = figures and figures.group == "comfortable" and not figures.shortage
        if is_comfortable or model.name == DEFAULT_MODEL:
            fitting.append((model, figures.tokens_per_s if figures else 0.0))
    *larger, tiny = fitting
    quick = [offer for offer in larger[1:] if offer[1] >= _QUICK_TOKENS_PER_S]
    return [
        *(FirstRunChoice("comfortable", "answers faster than you can read", *q) for q in quick[:1]),
        *(FirstRunChoice("better", "better answers, longer to download", *b) for b in larger[:1]),
        FirstRunChoice("tiny", "small and quick to download, simple answers", *tiny),
    ]


def header_shape(headers: Sequence[GgufHeader]) -> Shape:
    """Return a model's shape (sizes that decide its memory) from the headers of its files in order."""
    first = headers[0]
    return make_shape(
        first.metadata,
        n_vocab=first.n_vocab,
        n_params=sum(header.n_params for header in headers),
        weights_bytes=sum(header.weights_bytes for header in headers),
    )


def header_plan(
    headers: Sequence[GgufHeader],
    options: LoadOptions,
    machine: Machine,
    draft: Sequence[GgufHeader] = (),
) -> tuple[Shape, MemoryPlan]:
    """Return the shape and the memory plan with which an engine would load these files and `draft`."""
    sizes = {tensor.name: tensor.size_bytes for header in headers for tensor in header.tensors}
    draft_shape = header_shape(draft) if draft else None
    return make_exact_plan(header_shape(headers), options, machine, lambda: sizes, draft_shape)


def refuse_unfit_draft(files: ModelFiles) -> None:
    """Raise ModelLoadError if headers show that the draft model cannot draft tokens for the model."""
    paths = (files.draft_paths[0], files.paths[0])
    headers = [gguf.read_model_header(path, vocabulary=False) for path in paths]
    if problem := draft_problem(*(header_shape([header]) for header in headers)):
        problem = f"{files.draft} cannot draft for {files.name}: {problem}"
        raise ModelLoadError(problem, hint=UNFIT_DRAFT_HINT)
