"""Where `show` says a model's layers would lie, by the plan that launches go by."""

from __future__ import annotations

import msgspec

from edgeinfer.config.config_file import GpuConfig
from edgeinfer.runtime.llama.backends.devices import Loaded, Wishes, survey
from edgeinfer.runtime.memory_plan.offload import DeviceShare, make_offload
from edgeinfer.runtime.memory_plan.plan import Plan
from edgeinfer.runtime.memory_plan.shape import Shape


class DevicesShown(msgspec.Struct, frozen=True, kw_only=True):
    """Layers on devices, the output counted as one; bytes. `reason` says why no more, or none."""

    n_layers: int
    n_all: int
    n_without_experts: int
    parts: tuple[DeviceShare, ...]
    reason: str
    summary: str


def planned_devices(
    shape: Shape, plan: Plan, layers: int | str, config: GpuConfig
) -> DevicesShown | None:
    """Ask this machine's devices and plan; None where there are none, or nobody wants them."""
    wishes = Wishes.of(layers, config.devices, config.max_memory_gib)
    if not wishes.is_worth_asking():
        return None
    answers = (answer for answer in survey() if isinstance(answer, Loaded))
    devices = next((chosen for answer in answers if (chosen := wishes.chosen(answer.devices))), ())
    if not devices:
        return None
    offload = make_offload(shape, plan, tuple(map(wishes.room, devices)), layers)
    return DevicesShown(
        n_layers=offload.n_layers,
        n_all=offload.n_all,
        n_without_experts=offload.n_without_experts,
        parts=offload.parts,
        reason=offload.reason,
        summary=str(offload),
    )
