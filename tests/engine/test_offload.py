"""Where layers lie, for models and devices that are only described."""

from __future__ import annotations

import msgspec
import pytest

from edgeinfer.runtime.memory_plan.offload import Offload, Room, make_offload
from edgeinfer.runtime.memory_plan.plan import Plan, make_plan
from edgeinfer.runtime.memory_plan.shape import Shape
from edgeinfer.runtime.options import LoadOptions

from .conftest import machine

GIB = 1 << 30
#: An 8B of 32 layers in four bits: 4.6 GiB of weights, 128 KiB of cache a token.
DENSE = Shape(
    weights_bytes=int(4.6 * GIB),
    weights_bytes_per_token=int(4.6 * GIB),
    file_type=15,
    n_ctx_train=8192,
    n_vocab=128_256,
    n_embd=4096,
    n_ff=14_336,
    n_query=4096,
    kv_rows=(65_536,),
    n_layer=32,
    embedding_bytes=int(0.3 * GIB),
)
#: 48 layers whose experts are nearly all of 17 GiB.
EXPERTS = msgspec.structs.replace(
    DENSE, weights_bytes=17 * GIB, expert_bytes=16 * GIB, n_layer=48, n_ff=6144, kv_rows=(49_152,)
)
#: 30 layers in 90 MB.
TINY = msgspec.structs.replace(
    DENSE,
    weights_bytes=90 << 20,
    embedding_bytes=28 << 20,
    n_layer=30,
    n_embd=576,
    n_ff=1536,
    n_query=576,
    n_vocab=49_152,
    kv_rows=(11_520,),
)
#: Half of it is the output.
LARGE_OUTPUT = msgspec.structs.replace(DENSE, embedding_bytes=int(2.3 * GIB))


def plan_of(shape: Shape) -> Plan:
    return make_plan(shape, LoadOptions(n_ctx=4096, n_parallel=4), machine(64 * GIB))


def devices_with(*free_gib: float) -> tuple[Room, ...]:
    return tuple(Room(name=f"Vulkan{i}", free_bytes=int(g * GIB)) for i, g in enumerate(free_gib))


def spread(shape: Shape, *free_gib: float, wanted: int | str = "auto") -> Offload:
    return make_offload(shape, plan_of(shape), devices_with(*free_gib), wanted)


@pytest.mark.parametrize(
    ("shape", "free_gib", "n_layers", "n_without"),
    [
        (DENSE, (24.0,), 33, 0),
        (DENSE, (8.0,), 33, 0),
        (DENSE, (4.0,), 23, 0),
        (DENSE, (2.0,), 0, 0),
        (DENSE, (0.5,), 0, 0),
        (DENSE, (3.5, 3.5), 33, 0),
        (DENSE, (24.0, 0.1), 33, 0),
        (EXPERTS, (24.0,), 49, 0),
        (EXPERTS, (12.0,), 49, range(10, 40)),
        (EXPERTS, (4.0,), 49, range(35, 49)),
        (EXPERTS, (1.0,), 0, 0),
        (TINY, (1.0,), 31, 0),
        (TINY, (0.3,), 0, 0),
        (DENSE, (), 0, 0),
    ],
)
def test_auto_leaves_experts_first_then_layers_then_all(shape, free_gib, n_layers, n_without) -> None:
    found = spread(shape, *free_gib)
    assert found.n_layers == n_layers
    assert found.n_without_experts in (n_without if isinstance(n_without, range) else (n_without,))
    assert found.reason
    held = found.weights_bytes + found.kv_bytes + found.compute_bytes
    assert held <= sum(
        room.free_bytes for room in devices_with(*free_gib) if room.name in found.devices
    )


def test_more_room_never_holds_less() -> None:
    counts = [spread(DENSE, gib / 4).n_layers for gib in range(1, 33)]
    assert counts == sorted(counts)
    assert {0, 33} < set(counts)
    assert min(filter(None, counts)) >= 17, "less than half was never measured to gain"
    assert "--gpu-layers N" in spread(DENSE, 2.0).reason


def test_layers_are_split_by_the_room_of_each_device() -> None:
    small, large = spread(DENSE, 6.0, 18.0).split
    assert (small < large / 2, small + large) == (True, 33)
    assert spread(DENSE, 1.0, 1.0, wanted=8).split == (5, 3), "the output weighs two layers"
    assert spread(DENSE, 24.0, 0.1).devices == ("Vulkan0",)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS, LARGE_OUTPUT])
@pytest.mark.parametrize("free_gib", [(4, 2.5), (2.5, 4), (3, 3), (5, 1, 4), (8, 7)])
def test_no_device_is_given_more_than_it_has(shape, free_gib) -> None:
    found = spread(shape, *free_gib)
    layer = (shape.weights_bytes - shape.embedding_bytes - shape.expert_bytes) // shape.n_layer
    layer += found.kv_bytes // (found.n_layers - 1)
    experts = shape.expert_bytes // shape.n_layer
    first = found.n_all - found.n_layers
    held = [layer + experts * (i >= found.n_without_experts) for i in range(first, shape.n_layer)]
    held.append(shape.embedding_bytes)
    for name, n in zip(found.devices, found.split, strict=True):
        free = free_gib[int(name.removeprefix("Vulkan"))] * GIB
        assert sum(held[:n]) + found.compute_bytes / len(found.devices) <= free
        held = held[n:]


def test_what_is_asked_is_taken_at_its_word() -> None:
    assert spread(DENSE, 1.0, wanted="all").n_layers == 33
    assert spread(DENSE, 24.0, wanted=7).n_layers == 7
    assert spread(DENSE, 24.0, wanted=700).n_layers == 33
    assert spread(DENSE, 24.0, wanted="none").devices == ()
    assert spread(DENSE, 24.0, wanted=0).reason == "as asked"
    assert "no device" in spread(DENSE, wanted="all").reason


def test_a_person_reads_it() -> None:
    assert str(spread(DENSE, 24.0)) == "33 of 33 on Vulkan0"
    assert "experts of" in str(spread(EXPERTS, 12.0))
    assert str(spread(DENSE, 0.5)).startswith("none: ")
