"""Assign a model's layers to devices: shape, plan and free memory to an `Offload`.

Pure: `show` calls it with the header's facts, the engine with the model's, and both get the same. Sizes
are in bytes. llama.cpp counts the output as the last layer: `n_layer + 1` layers are all of a model. It
puts the last ones on devices, in the devices' order, with the KV cache of each, and leaves the token
table to the CPU.
"""

from __future__ import annotations

import msgspec

from edgeinfer.runtime.memory_plan.plan import Plan
from edgeinfer.runtime.memory_plan.shape import Shape, make_buffers
from edgeinfer.units import format_bytes

#: Left free on each device for llama.cpp's backends and other programs: at least this, and this share
#: of the free memory.
_MARGIN_BYTES = 256 << 20
_MARGIN_SHARE = 16


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """A device's name in llama.cpp, and the memory that may be used of it."""

    name: str
    free_bytes: int


class DeviceShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one device. `n_layers` counts the output."""

    device: str
    n_layers: int
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a model. `parts` are in the devices' order, those without layers left out.

    `n_layers` of the `n_all` are on devices, the output among them; the first `n_without_experts` of
    the model's layers leave their experts with the CPU. `reason` explains the choice.
    """

    n_layers: int
    n_all: int
    n_without_experts: int
    parts: tuple[DeviceShare, ...]
    reason: str

    def __str__(self) -> str:
        if not self.parts:
            return f"none: {self.reason}"
        names = ", ".join(f"{part.n_layers} on {part.device}" for part in self.parts)
        experts = f", experts of {self.n_without_experts} on the CPU" if self.n_without_experts else ""
        return f"{self.n_layers} of {self.n_all} ({names}{experts})"


class _Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one layer without its experts, of them, of its KV cache, the output, and computing."""

    layer: int
    experts: int
    kv: int
    output: int
    compute: int


def make_offload(shape: Shape, plan: Plan, rooms: tuple[Room, ...], wanted: int | str) -> Offload:
    """Spread a model of `shape`, to be loaded by `plan`, over devices.

    `wanted` is "none", "all", a number of layers, or "auto": all layers, if they fit without their
    experts at least, or none.
    """
    n_all = shape.n_layer + 1
    if wanted == "none" or not rooms or wanted == 0:
        reason = "as asked" if wanted in ("none", 0) else "there is no device"
        return Offload(n_layers=0, n_all=n_all, n_without_experts=0, parts=(), reason=reason)
    sizes = _sizes(shape, plan)
    if wanted != "auto":
        n_layers = n_all if wanted == "all" else min(int(wanted), n_all)
        parts = _spread(sizes, rooms, n_layers, n_all, 0, must_fit=False)  # loading will show
        return _offload(parts, n_all, 0, "as asked")
    for n_without in range(shape.n_layer + 1 if sizes.experts else 1):
        if parts := _spread(sizes, rooms, n_all, n_all, n_without):
            reason = "all of it fits" if not n_without else "all but these experts fits"
            return _offload(parts, n_all, n_without, reason)
    reason = f"{_free(rooms)} do not hold all layers; --gpu-layers N puts N there"
    return Offload(n_layers=0, n_all=n_all, n_without_experts=0, parts=(), reason=reason)


def _offload(parts: tuple[DeviceShare, ...], n_all: int, n_without: int, reason: str) -> Offload:
    return Offload(
        n_layers=sum(part.n_layers for part in parts),
        n_all=n_all,
        n_without_experts=n_without,
        parts=parts,
        reason=reason,
    )


def _sizes(shape: Shape, plan: Plan) -> _Sizes:
    """Estimate the sizes; an output that may share the token table counts once more."""
    n = max(1, shape.n_layer)
    buffers = make_buffers(
        shape,
        plan.n_cells.value,
        plan.kv_type.value,
        n_seq_max=plan.n_seq_max,
        n_ubatch=plan.n_batch,
        n_outputs=plan.n_outputs,
    )
    dense = shape.weights_bytes - shape.embedding_bytes - shape.expert_bytes
    return _Sizes(
        layer=max(0, dense) // n,
        experts=shape.expert_bytes // n,
        kv=buffers.kv_bytes // n,
        output=shape.embedding_bytes,
        compute=buffers.compute_bytes,
    )


def _usable(room: Room, sizes: _Sizes, n_layers: int, n_all: int) -> int:
    """Return the memory of a device for layers.

    If weights stay with the CPU, long prompts copy them to the device, a tensor at a time.
    """
    margin = max(_MARGIN_BYTES, room.free_bytes // _MARGIN_SHARE)
    passing = (sizes.layer + sizes.experts) // 2 if n_layers < n_all else 0
    return max(0, room.free_bytes - margin - sizes.compute - passing)


def _layers(sizes: _Sizes, n_layers: int, n_all: int, n_without: int) -> list[int]:
    """List the weights of the last `n_layers`, the output at the end."""
    first = n_all - n_layers
    whole = [sizes.layer + (sizes.experts if i >= n_without else 0) for i in range(first, n_all - 1)]
    return [*whole, sizes.output]


def _spread(
    sizes: _Sizes,
    rooms: tuple[Room, ...],
    n_layers: int,
    n_all: int,
    n_without: int,
    *,
    must_fit: bool = True,
) -> tuple[DeviceShare, ...]:
    """Spread layers by the devices' usable memory; () if they do not fit but must."""
    usable = [_usable(room, sizes, n_layers, n_all) for room in rooms]
    counts = _counts(usable if any(usable) else [room.free_bytes for room in rooms], n_layers)
    parts = _placed(sizes, counts, rooms, n_layers, n_all, n_without)
    bounds = {room.name: most for room, most in zip(rooms, usable, strict=True)}
    fits = all(part.weights_bytes + part.kv_bytes <= bounds[part.device] for part in parts)
    return parts if fits or not must_fit else ()


def _counts(memory: list[int], n_layers: int) -> list[int]:
    """Split `n_layers` by memory."""
    total = sum(memory) or 1
    ends = [n_layers * sum(memory[: i + 1]) // total for i in range(len(memory) - 1)]
    return [end - begin for begin, end in zip([0, *ends], [*ends, n_layers], strict=True)]


def _placed(
    sizes: _Sizes, counts: list[int], rooms: tuple[Room, ...], n_layers: int, n_all: int, n_without: int
) -> tuple[DeviceShare, ...]:
    weights = _layers(sizes, n_layers, n_all, n_without)
    parts, at = [], 0
    for room, count in zip(rooms, counts, strict=True):
        n_with_kv = min(at + count, n_layers - 1) - at  # the output has none
        part = DeviceShare(
            device=room.name,
            n_layers=count,
            weights_bytes=sum(weights[at : at + count]),
            kv_bytes=max(0, n_with_kv) * sizes.kv,
            compute_bytes=sizes.compute,
        )
        parts += [part] if count else []
        at += count
    return tuple(parts)


def _free(rooms: tuple[Room, ...]) -> str:
    free = ", ".join(f"{format_bytes(room.free_bytes)} of {room.name}" for room in rooms)
    return f"{free} that are free, with a margin,"
