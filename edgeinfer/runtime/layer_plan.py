"""Divide a planned model among devices: which layers each device gets, and the devices' context size.

Like `memory_plan`, this is only arithmetic on sizes (bytes); nothing is read or loaded.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Literal

import msgspec

from edgeinfer.runtime.memory_plan import MemoryPlan
from edgeinfer.runtime.model_shape import CELL_STEP, Shape, make_buffers
from edgeinfer.units import format_bytes

#: Memory left free on each device for llama.cpp's backends, the small context of the round-trip check
#: (40 MiB for an 8B model) and other programs: this many bytes, and at least 1/16 of the free memory.
_MARGIN_BYTES, _MARGIN_SHARE = 256 << 20, 16


#: A "gpu" has separate memory, an "integrated" GPU shares the machine's, "software" runs on the CPU,
#: and an "accelerator" computes together with the CPU (BLAS, AMX).
Kind = Literal["gpu", "integrated", "software", "accelerator"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a loaded backend, with its memory (bytes) at the time of the query.

    `name` is llama.cpp's ("Vulkan0"); `pointer` is the ggml_backend_dev_t, valid only in this process.
    `id` is the PCI address, "" for none. Some drivers report all memory as free.
    """

    name: str
    description: str
    kind: Kind
    backend: str
    id: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    pointer: int = 0


class LayerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which layers go to devices: the last `n_layers` of `n_all`; the output counts as the last layer.

    The experts of the model's first `n_without_experts` layers stay on the CPU. `reason` explains the
    choice. `split` is the number of layers of each device; bytes are sums over all devices. The context
    on the devices has `n_cells`, perhaps fewer than the CPU's.
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


def usable_bytes(n_bytes: int) -> int:
    """Return how many of a device's free bytes (`n_bytes`) a plan may use."""
    return max(0, n_bytes - max(_MARGIN_BYTES, n_bytes // _MARGIN_SHARE))


def make_layer_plan(
    shape: Shape, plan: MemoryPlan, devices: Sequence[Device], layers: int | str
) -> LayerPlan:
    """Choose the layers that go to `devices`, for a model of `shape` with the memory plan `plan`.

    `layers` is "none", "all", a number of layers, or "auto". "auto" means all layers, if necessary
    without some experts; otherwise as many layers as fit, but none if less than half of them fit.
    Layers fit if each device holds its layers and a context of at least `plan.least_cells`. The context
    is as long as fits.

    llama.cpp counts the output as the last layer. The last layers go to the devices, in the devices'
    order, each layer with its KV cache. The token table stays on the CPU.
    """
    n_all = shape.n_layer + 1
    if layers in ("none", 0) or not devices:
        reason = "as asked" if layers in ("none", 0) else "there is no device"
        return LayerPlan(n_layers=0, n_all=n_all, reason=reason)
    for n_layers, n_without_experts, reason in _candidates(shape, n_all, layers):
        choices = [
            partial(_distribute, shape, plan, chosen, n_layers, n_without_experts)
            for chosen in _device_choices(devices)
        ]
        n_cells, distribute = max(((_max_cells(plan, c), c) for c in choices), key=itemgetter(0))
        if not n_cells and layers == "auto":
            continue  # a requested number is tried even if it seems not to fit
        n_cells = n_cells or plan.least_cells
        if n_cells < plan.n_cells.value:
            reason += f" with a context of {n_cells:,} tokens; --ctx {plan.n_ctx.value} keeps all of it"
        return msgspec.structs.replace(distribute(n_cells)[0], reason=reason)
    free = ", ".join(f"{format_bytes(device.free_bytes)} of {device.name}" for device in devices)
    reason = f"half of the layers do not fit into the free memory less a margin ({free})"
    return LayerPlan(n_layers=0, n_all=n_all, reason=f"{reason}; --gpu-layers N tries N layers")


def _candidates(shape: Shape, n_all: int, layers: int | str) -> list[tuple[int, int, str]]:
    """List candidates (layers on devices, those without experts there, reason), the best one first."""
    if layers != "auto":
        return [(n_all if layers == "all" else min(int(layers), n_all), 0, "as asked")]
    max_without = n_all - 1 if shape.expert_bytes else 0
    all_layers = (n_all, 0, "the whole model fits")
    without_experts = [(n_all, n, "all except these experts fits") for n in range(1, max_without + 1)]
    fewer = range(n_all - 1, (n_all - 1) // 2, -1)
    return [all_layers, *without_experts] + [(n, max_without, "as many as fit") for n in fewer]


def _device_choices(devices: Sequence[Device]) -> list[list[Device]]:
    """Return lists of devices to try: all devices, then all except the smallest, and so on.

    A layer cannot be divided, so the share of a small device may not fit into its memory.
    """
    limits = sorted(device.free_bytes for device in devices)
    return [[device for device in devices if device.free_bytes >= limit] for limit in limits]


def _max_cells(plan: MemoryPlan, distribute: Callable[[int], tuple[LayerPlan, bool]]) -> int:
    """Return the most cells, at least `plan.least_cells`, that fit on the devices; 0 if none do."""

    max_cells = int(plan.n_cells.value)
    steps = range(plan.least_cells // CELL_STEP, max_cells // CELL_STEP)
    lengths = [*(step * CELL_STEP for step in steps), max_cells]
    n_fitting = bisect_left(lengths, True, key=lambda n_cells: not distribute(n_cells)[1])
    return lengths[n_fitting - 1] if n_fitting else 0


def _distribute(
    shape: Shape,
    plan: MemoryPlan,
    devices: Sequence[Device],
    n_layers: int,
    n_without_experts: int,
    n_cells: int,
) -> tuple[LayerPlan, bool]:
    """Return a plan without its reason, and whether each device has memory for its share.

    A quantized KV cache needs more: CUDA's attention copies one layer's K and V to f16.
    """
    limits = {"n_seq_max": plan.n_seq_max, "n_ubatch": plan.n_batch, "n_outputs": plan.n_outputs}
    buffers = make_buffers(shape, n_cells, plan.kv_type.value, **limits)
    copies = 0 if plan.kv_type.value == "f16" else 4 * n_cells * max(shape.kv_rows, default=0)
    compute_bytes = buffers.compute_bytes + copies
    layer_kv_bytes = buffers.kv_bytes // max(1, shape.n_layer)
    usable = [max(0, usable_bytes(device.free_bytes) - compute_bytes) for device in devices]
    weights = usable if any(usable) else [device.free_bytes for device in devices]
    layer_bytes = _layer_bytes(shape, layer_kv_bytes, n_layers, n_without_experts)
    shares = _split(weights, layer_bytes)
    used = [(device.name, len(share)) for device, share in zip(devices, shares, strict=True) if share]
    kv_bytes = (n_layers - 1) * layer_kv_bytes
    layer_plan = LayerPlan(
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
    return layer_plan, all(sum(share) <= limit for share, limit in zip(shares, usable, strict=True))


def _layer_bytes(shape: Shape, kv_bytes: int, n_layers: int, n_without_experts: int) -> list[int]:
    """Estimate the bytes of each layer on devices, with `kv_bytes` of cache.

    The last entry is the output, which has no cache. A token table that the output shares is copied.
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
