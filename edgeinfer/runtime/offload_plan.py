"""Divide a planned model among devices: which layers each gets, and how long their context is.

Pure arithmetic, in bytes, over passed facts, like `memory_plan`.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import itemgetter

import msgspec

from edgeinfer.runtime.memory_plan import Plan
from edgeinfer.runtime.model_shape import CELL_STEP, Shape, make_buffers
from edgeinfer.units import format_bytes

#: Memory left free on each device for llama.cpp's backends, the small context of the round-trip check
#: (40 MiB of an 8B) and other programs: at least these bytes, and at least 1/16 of the free memory.
_MARGIN_BYTES, _MARGIN_SHARE = 256 << 20, 16


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device's name in llama.cpp, and its usable memory."""

    name: str
    free_bytes: int


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a model: `n_layers` of `n_all` layers are on `devices`, including the output.

    The experts of the model's first `n_without_experts` layers stay on the CPU. `reason` explains the
    choice. `split` has the layers of each device; bytes are those of all devices together. The devices'
    context has `n_cells`, which may be fewer than the CPU's.
    """

    n_layers: int
    n_all: int
    reason: str
    n_without_experts: int = 0
    devices: tuple[str, ...] = ()
    split: tuple[int, ...] = ()
    n_cells: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes

    def __str__(self) -> str:
        if not self.n_layers:
            return f"none: {self.reason}"
        experts = f", experts of {self.n_without_experts} on the CPU" if self.n_without_experts else ""
        return f"{self.n_layers} of {self.n_all} on {' and '.join(self.devices)}{experts}"


def make_offload(
    shape: Shape, plan: Plan, memories: tuple[DeviceMemory, ...], layers: int | str
) -> Offload:
    """Place a model of `shape`, to be loaded by `plan`, on devices.

    `layers` is "none", "all", a number of layers, or "auto": all layers, if necessary without their
    experts; otherwise as many as fit; otherwise none, if less than half of them fit. Layers fit if each
    device holds its part, with a context of at least `plan.least_cells`; the longest context that fits
    is used. llama.cpp counts the output as the last layer, places the last layers on devices, in the
    devices' order and with the KV cache of each, and leaves the token table on the CPU.
    """
    n_all = shape.n_layer + 1
    if layers == "none" or not memories or layers == 0:
        reason = "as asked" if layers in ("none", 0) else "there is no device"
        return Offload(n_layers=0, n_all=n_all, reason=reason)
    for n_layers, n_without_experts, reason in _candidates(shape, n_all, layers):
        choices = [
            partial(_distribute, shape, plan, devices, n_layers, n_without_experts)
            for devices in _device_choices(memories)
        ]
        n_cells, distribute = max(((_max_cells(plan, c), c) for c in choices), key=itemgetter(0))
        if not n_cells and layers == "auto":
            continue  # for a requested number, loading will show whether it fits
        n_cells = n_cells or plan.least_cells
        if n_cells < plan.n_cells.value:
            reason += f" with a context of {n_cells:,} tokens; --ctx {plan.n_ctx.value} keeps that one"
        offload, _ = distribute(n_cells)
        return msgspec.structs.replace(offload, reason=reason)
    free = ", ".join(f"{format_bytes(memory.free_bytes)} of {memory.name}" for memory in memories)
    reason = f"{free} that are free, with a margin, do not hold half of the layers"
    return Offload(n_layers=0, n_all=n_all, reason=f"{reason}; --gpu-layers N puts N there")


def _candidates(shape: Shape, n_all: int, layers: int | str) -> list[tuple[int, int, str]]:
    """List layers on devices, layers without experts there and the reason, the best choice first."""
    if layers != "auto":
        return [(n_all if layers == "all" else min(int(layers), n_all), 0, "as asked")]
    most = n_all - 1 if shape.expert_bytes else 0
    whole = (n_all, 0, "all of it fits")
    bare = [(n_all, n, "all but these experts fits") for n in range(1, most + 1)]
    fewer = range(n_all - 1, (n_all - 1) // 2, -1)
    return [whole, *bare] + [(n, most, "as many as fit") for n in fewer]


def _device_choices(memories: tuple[DeviceMemory, ...]) -> list[tuple[DeviceMemory, ...]]:
    """Return all devices, then those left without the smallest, and so on.

    Layers are not divided: a small device may not hold the part of a model that is its share.
    """
    limits = sorted(memory.free_bytes for memory in memories)
    return [tuple(m for m in memories if m.free_bytes >= limit) for limit in limits]


def _max_cells(plan: Plan, distribute: Callable[[int], tuple[Offload, bool]]) -> int:
    """Return the most cells, at least `plan.least_cells`, whose distribution fits; 0 if none does."""

    def fits(n_cells: int) -> bool:
        return distribute(n_cells)[1]

    if fits(plan.n_cells.value):
        return int(plan.n_cells.value)
    steps = range(plan.least_cells // CELL_STEP, plan.n_cells.value // CELL_STEP)
    n_fitting = bisect_left(steps, True, key=lambda step: not fits(step * CELL_STEP))
    return steps[n_fitting - 1] * CELL_STEP if n_fitting else 0


def _distribute(
    shape: Shape,
    plan: Plan,
    memories: tuple[DeviceMemory, ...],
    n_layers: int,
    n_without_experts: int,
    n_cells: int,
) -> tuple[Offload, bool]:
    """Return an offload, and whether each device holds its share.

    For a quantized KV cache, CUDA's attention copies one layer's K and V to f16.
    """
    buffers = make_buffers(
        shape,
        n_cells,
        plan.kv_type.value,
        n_seq_max=plan.n_seq_max,
        n_ubatch=plan.n_batch,
        n_outputs=plan.n_outputs,
    )
    copies = 0 if plan.kv_type.value == "f16" else 4 * n_cells * max(shape.kv_rows, default=0)
    compute_bytes = buffers.compute_bytes + copies
    layer_kv_bytes = buffers.kv_bytes // max(1, shape.n_layer)
    margins = [max(_MARGIN_BYTES, memory.free_bytes // _MARGIN_SHARE) for memory in memories]
    usable = [
        max(0, memory.free_bytes - margin - compute_bytes)
        for memory, margin in zip(memories, margins, strict=True)
    ]
    weights = usable if any(usable) else [memory.free_bytes for memory in memories]
    layer_bytes = _layer_bytes(shape, layer_kv_bytes, n_layers, n_without_experts)
    shares = _split(weights, layer_bytes)
    used = [(memory.name, len(share)) for memory, share in zip(memories, shares, strict=True) if share]
    kv_bytes = (n_layers - 1) * layer_kv_bytes
    offload = Offload(
        n_layers=n_layers,
        n_all=shape.n_layer + 1,
        reason="",
        n_without_experts=n_without_experts,
        devices=tuple(name for name, _ in used),
        split=tuple(n for _, n in used),
        n_cells=n_cells,
        weights_bytes=sum(layer_bytes) - kv_bytes,
        kv_bytes=kv_bytes,
        compute_bytes=len(used) * compute_bytes,
    )
    return offload, all(sum(share) <= limit for share, limit in zip(shares, usable, strict=True))


def _layer_bytes(shape: Shape, kv_bytes: int, n_layers: int, n_without_experts: int) -> list[int]:
    """Estimate the bytes of each layer on devices, with `kv_bytes` of cache.

    The last one is the output, without a cache. It counts again if it may share the token table.
    """
    n = max(1, shape.n_layer)
    dense = max(0, shape.weights_bytes - shape.embedding_bytes - shape.expert_bytes) // n
    numbers = range(shape.n_layer + 1 - n_layers, shape.n_layer)
    experts = [shape.expert_bytes // n * (number >= n_without_experts) for number in numbers]
    return [dense + kv_bytes + expert_bytes for expert_bytes in experts] + [shape.embedding_bytes]


def _split(weights: list[int], layer_bytes: list[int]) -> list[list[int]]:
    """Split `layer_bytes` among devices by their `weights`, in whole layers."""
    total, all_bytes = sum(weights) or 1, sum(layer_bytes)
    middles = [stop - n / 2 for stop, n in zip(accumulate(layer_bytes), layer_bytes, strict=True)]
    ends = [bisect(middles, all_bytes * weight / total) for weight in accumulate(weights[:-1])]
    return [layer_bytes[begin:stop] for begin, stop in zip([0, *ends], [*ends, None], strict=True)]
