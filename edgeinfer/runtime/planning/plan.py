"""What a load will allocate, worked out before it does: shape, options and machine to a `Plan`.

Pure: `show` calls it with the header's facts, the loader with the model's, and both say the same.
"""

from __future__ import annotations

import msgspec

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.platform.machine import Machine
from edgeinfer.runtime.options import Chosen, LoadOptions
from edgeinfer.runtime.planning.choices import (
    choose_cells,
    choose_context,
    choose_kv_type,
    choose_parallel,
    choose_threads,
)
from edgeinfer.runtime.planning.shape import CELL_STEP, Buffers, Shape, make_buffers
from edgeinfer.units import format_bytes

#: Tokens a step may verify for one sequence beyond its next one (speculative decoding).
MAX_DRAFT = 7
#: Sequence ids beyond the running ones: in 16 finished conversations wait for their next turn, and one
#: is where the states of computed blocks pass through.
_SPARE_SEQUENCES = 17
_MAX_SEQUENCES = 256
#: Context that a model is judged with when none fits.
_FALLBACK_CTX = 4096
#: KV cache that makes an automatic context useful, where all of it is larger.
_USEFUL_KV_BYTES = 1 << 30
#: Left for the process around the model.
_PROCESS_BYTES = 64 << 20
#: The rate of a disk that could not be measured: a SATA SSD's.
_ASSUMED_DISK_BYTES_PER_S = 500e6


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a context is to be, before it is made; each automatic choice with its reason.

    `n_cells` is the KV cache that all sequences share, `least_kv_bytes` what it needs to be of use: all
    of it for a context that was asked for. `from_disk` says that the weights do not stay in memory.
    `refusal` says why the model cannot be loaded so, "" when it can.
    """

    n_threads: Chosen
    n_parallel: Chosen
    n_ctx: Chosen
    n_cells: Chosen
    kv_type: Chosen
    repack: Chosen
    n_seq_max: int
    n_batch: int
    n_outputs: int
    buffers: Buffers
    least_kv_bytes: int
    from_disk: bool = False
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether weights and buffers have room in memory together."""
        return not self.refusal and not self.from_disk


def make_plan(shape: Shape, options: LoadOptions, machine: Machine, repack: Chosen) -> Plan:
    """Work out the context for `options`. `repack` is `choose_repack`'s."""
    n_threads = choose_threads(options.n_threads, machine)
    free, from_disk = _free_bytes(shape, options, machine, is_mapped=repack.value == "off")
    kv_type = choose_kv_type(options, shape, free)
    per_token = shape.kv_bytes_per_token(kv_type.value)
    n_parallel = choose_parallel(options.n_parallel, n_threads.value, per_token, free)
    refusal = ""
    try:
        n_ctx = choose_context(options.n_ctx, shape.n_ctx_train or _FALLBACK_CTX, per_token, free)
    except OutOfMemoryError as error:
        refusal = _refusal(error.message, shape, machine, repack)
        fallback = min(_FALLBACK_CTX, shape.n_ctx_train or _FALLBACK_CTX)
        n_ctx = Chosen(options.n_ctx or fallback, refusal)
    n_cells = choose_cells(n_ctx.value, n_parallel.value, per_token, free)
    n_seq_max = n_parallel.value
    if not shape.is_recurrent:
        n_seq_max = min(_MAX_SEQUENCES, n_seq_max + _SPARE_SEQUENCES)
    else:
        n_seq_max += 1  # parts of states pass through it (decision 080)
    n_batch = min(max(options.n_batch, n_parallel.value), n_cells.value)
    # llama.cpp aborts when fewer outputs are allowed than there are sequence ids
    n_outputs = max(n_seq_max, min(n_batch, n_parallel.value * (1 + MAX_DRAFT)))
    buffers = make_buffers(
        shape, n_cells.value, kv_type.value, n_seq_max=n_seq_max, n_ubatch=n_batch, n_outputs=n_outputs
    )
    return Plan(
        n_threads=n_threads,
        n_parallel=n_parallel,
        n_ctx=n_ctx,
        n_cells=n_cells,
        kv_type=kv_type,
        repack=repack,
        n_seq_max=n_seq_max,
        n_batch=n_batch,
        n_outputs=n_outputs,
        buffers=buffers,
        least_kv_bytes=buffers.kv_bytes if options.n_ctx else min(buffers.kv_bytes, _USEFUL_KV_BYTES),
        from_disk=from_disk,
        refusal=refusal,
    )


def _free_bytes(
    shape: Shape, options: LoadOptions, machine: Machine, *, is_mapped: bool
) -> tuple[int, bool]:
    """(bytes left for the KV cache, whether the weights stay on the disk for want of memory).

    Mapped weights without room for the least context are read from the disk as they are needed: then
    a quarter of the memory is left to the page cache.
    """
    available = machine.memory.available_bytes
    kv_type = "f16" if options.kv_type == "auto" else options.kv_type

    def rough_compute(n_seq_max: int, n_outputs: int) -> int:
        n_ctx = options.n_ctx or min(shape.n_ctx_train, 1 << 15)
        kept = {"n_seq_max": n_seq_max, "n_ubatch": options.n_batch, "n_outputs": n_outputs}
        return make_buffers(shape, n_ctx, kv_type, **kept).compute_bytes

    free = available - shape.weights_bytes - rough_compute(2 * _SPARE_SEQUENCES, 64) - _PROCESS_BYTES
    least = min(options.n_ctx or 2 * CELL_STEP, 2 * CELL_STEP)
    if is_mapped and free < least * shape.kv_bytes_per_token(kv_type):
        few = 1 + _SPARE_SEQUENCES
        return available - available // 4 - rough_compute(few, few), True
    return free, False


def _refusal(message: str, shape: Shape, machine: Machine, repack: Chosen) -> str:
    available = machine.memory.available_bytes
    if repack.value == "off" or shape.weights_bytes < available:
        return message
    return (
        f"repacked weights of {format_bytes(shape.weights_bytes)} do not fit into the"
        f" {format_bytes(available)} of memory that are free; --repack off reads them from the file"
    )


def disk_warning(shape: Shape, machine: Machine, disk_bytes_per_s: float = 0.0) -> str:
    """Describe how fast a model with `Plan.from_disk` will be. 0.0 takes an assumed disk.

    The rate is the worst case: nothing that a token needs is still in the page cache from the one
    before.
    """
    rate = disk_bytes_per_s or _ASSUMED_DISK_BYTES_PER_S
    per_s = rate / max(1, shape.weights_bytes_per_token)
    pace = f"{per_s:.1f} tokens/s" if per_s >= 1 else f"a token in {1 / per_s:.1f} s"
    how = "measured just now" if disk_bytes_per_s else "assumed"
    return (
        f"weights of {format_bytes(shape.weights_bytes)} do not fit into the"
        f" {format_bytes(machine.memory.available_bytes)} of memory that are free: they are read from"
        f" the disk again and again. Expect about {pace}: {format_bytes(shape.weights_bytes_per_token)}"
        f" a token at {format_bytes(rate)}/s ({how})"
    )
