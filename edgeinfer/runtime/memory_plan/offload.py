"""Assign a model's layers to devices: shape, plan and free memory to an `Offload`.

Pure: `show` calls it with the header's facts, the engine with the model's, and both get the same. Sizes
are in bytes. llama.cpp counts the output as the last layer: `n_layer + 1` layers are all of a model. It
puts the last ones on devices, in the devices' order, with the KV cache of each, and leaves the token
table to the CPU.
"""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate

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


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a model: `n_layers` of the `n_all` are on `devices`, the output among them.

    The first `n_without_experts` of the model's layers leave their experts with the CPU. `reason`
    explains the choice. `split` are the layers of each device; bytes are those of all together.
    """

    n_layers: int
    n_all: int
    reason: str
    n_without_experts: int = 0
    devices: tuple[str, ...] = ()
    split: tuple[int, ...] = ()
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0

    def __str__(self) -> str:
        if not self.n_layers:
            return f"none: {self.reason}"
        experts = f", experts of {self.n_without_experts} on the CPU" if self.n_without_experts else ""
        return f"{self.n_layers} of {self.n_all} on {' and '.join(self.devices)}{experts}"


class _Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one layer without its experts, of them, of its KV cache, the output, and computing."""

    layer: int
    experts: int
    kv: int
    output: int
    compute: int


def make_offload(shape: Shape, plan: Plan, rooms: tuple[Room, ...], wanted: int | str) -> Offload:
    """Put a model of `shape`, to be loaded by `plan`, on devices.

    `wanted` is "none", "all", a number of layers, or "auto": all layers, if need be without their
    experts, else as many as fit, else none if that is less than half of them. They fit if each device
    holds its part.
    """
    n_all = shape.n_layer + 1
    if wanted == "none" or not rooms or wanted == 0:
        reason = "as asked" if wanted in ("none", 0) else "there is no device"
        return Offload(n_layers=0, n_all=n_all, reason=reason)
    sizes = _sizes(shape, plan)
    usable = [_usable(room, sizes) for room in rooms]
    memory = usable if any(usable) else [room.free_bytes for room in rooms]
    for n_layers, n_without, reason in _tries(sizes, n_all, wanted):
        needs = _needs(sizes, n_layers, n_all, n_without)
        shares = _split(memory, needs)
        fits = all(sum(share) <= held for share, held in zip(shares, usable, strict=True))
        if not fits and wanted == "auto":
            continue  # with a number that was asked for, loading will show if it fits
        used = [(room.name, len(share)) for room, share in zip(rooms, shares, strict=True) if share]
        kv_bytes = (n_layers - 1) * sizes.kv
        return Offload(
            n_layers=n_layers,
            n_all=n_all,
            reason=reason,
            n_without_experts=n_without,
            devices=tuple(name for name, _ in used),
            split=tuple(n for _, n in used),
            weights_bytes=sum(needs) - kv_bytes,
            kv_bytes=kv_bytes,
            compute_bytes=len(used) * sizes.compute,
        )
    free = ", ".join(f"{format_bytes(room.free_bytes)} of {room.name}" for room in rooms)
    reason = f"{free} that are free, with a margin, do not hold half of the layers"
    return Offload(n_layers=0, n_all=n_all, reason=f"{reason}; --gpu-layers N puts N there")


def _tries(sizes: _Sizes, n_all: int, wanted: int | str) -> list[tuple[int, int, str]]:
    """List layers on devices, layers without experts there and the reason, the best first."""
    if wanted != "auto":
        return [(n_all if wanted == "all" else min(int(wanted), n_all), 0, "as asked")]
    most = n_all - 1 if sizes.experts else 0
    whole = (n_all, 0, "all of it fits")
    bare = [(n_all, n, "all but these experts fits") for n in range(1, most + 1)]
    return [whole, *bare] + [(n, most, "as many as fit") for n in range(n_all - 1, n_all // 2, -1)]


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


def _usable(room: Room, sizes: _Sizes) -> int:
    """Return the memory of a device for layers."""
    margin = max(_MARGIN_BYTES, room.free_bytes // _MARGIN_SHARE)
    return max(0, room.free_bytes - margin - sizes.compute)


def _needs(sizes: _Sizes, n_layers: int, n_all: int, n_without: int) -> list[int]:
    """Return the bytes of each layer on devices; the last is the output, which has no cache."""
    bare = sizes.layer + sizes.kv
    numbers = range(n_all - n_layers, n_all - 1)
    return [bare + sizes.experts * (number >= n_without) for number in numbers] + [sizes.output]


def _split(memory: list[int], needs: list[int]) -> list[list[int]]:
    """Return what each device gets of `needs`: its share of the bytes, in whole layers."""
    total, all_bytes = sum(memory) or 1, sum(needs)
    middles = [end - need / 2 for end, need in zip(accumulate(needs), needs, strict=True)]
    ends = [bisect(middles, all_bytes * held / total) for held in accumulate(memory[:-1])]
    return [needs[begin:end] for begin, end in zip([0, *ends], [*ends, None], strict=True)]
