"""Plan how a model is loaded, by its sizes, the options and the machine's memory: `make_plan`.

A plan is computed without llama.cpp, so that `edgeinfer show` makes the same plan from a file's header
as the loader from the loaded model. Each automatic choice has a reason. Memory is in bytes, context in
tokens. `layer_plan` divides a planned model among devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.platform.machine import Machine, Processors
from edgeinfer.runtime.model_shape import (
    CELL_STEP,
    Buffers,
    Shape,
    make_buffers,
    outputs_without_memory,
    round_up_cells,
    with_tensors,
)
from edgeinfer.runtime.options import Chosen, LoadOptions
from edgeinfer.units import format_bytes

_MIB = 1 << 20
#: Longest automatic context (tokens). llama.cpp needs some 50 bytes per cell besides K and V, and looks
#: at all cells when it copies or removes a sequence.
_AUTO_MAX_TOKENS = 131_072
#: A quantized KV cache, which slows attention, is chosen only if an f16 cache cannot hold this many
#: tokens (or the training context, if that is shorter).
_AMPLE_TOKENS = 32_768
#: Minimum number of cells for each sequence that decodes in parallel.
_CELLS_PER_SEQUENCE = 1024


def choose_threads(n_threads: int, processors: Processors) -> Chosen:
    """Choose the number of threads: 0 means the physical cores that this process may use."""
    if n_threads:
        return Chosen(n_threads, "as asked")
    cores = processors.physical_cores
    if processors.quota is not None and processors.quota < cores:
        return Chosen(
            max(1, math.floor(processors.quota)),
            f"the control group allows {processors.quota:g} of {cores} cores",
        )
    noun = "core" if cores == 1 else "cores"
    return Chosen(
        cores, f"{cores} physical {noun} in the CPU affinity mask ({processors.logical_cpus} logical)"
    )


def choose_parallel(
    n_parallel: int, n_threads: int, kv_bytes_per_token: int, free_bytes: int
) -> Chosen:
    """Choose how many sequences decode in parallel: 0 means four per thread (4 to 16), if they fit."""
    if n_parallel:
        return Chosen(n_parallel, "as asked")
    by_cores = min(16, max(4, 4 * n_threads))
    per_sequence = max(1, kv_bytes_per_token) * _CELLS_PER_SEQUENCE
    by_memory = max(1, int(free_bytes / 2 // per_sequence))
    if by_memory < by_cores:
        return Chosen(
            by_memory,
            f"{free_bytes // _MIB} MiB free hold {by_memory} sequences of {_CELLS_PER_SEQUENCE} tokens",
        )
    return Chosen(by_cores, f"four for each of {n_threads} threads, 4 to 16")


def choose_kv_type(options: LoadOptions, shape: Shape, free_bytes: int) -> Chosen:
    """Choose the type of the KV cache (decision 082).

    "auto" means f16 if an f16 cache of the requested context fits into `free_bytes`. Without a
    requested context, a cache of the trained one (at most 32,768 tokens) must fit into half of
    `free_bytes`. Otherwise "auto" means q8_0, which needs about half of the memory, or f16 if flash
    attention is off or the model's cache cannot be quantized.
    """
    if options.kv_type != "auto":
        return Chosen(options.kv_type, "as asked")
    n_tokens = options.n_ctx or min(shape.n_ctx_train or _AMPLE_TOKENS, _AMPLE_TOKENS)
    room = max(0, free_bytes if options.n_ctx else free_bytes // 2)
    needed = n_tokens * shape.kv_bytes_per_token("f16")
    if needed <= room:
        return Chosen("f16", f"{n_tokens} tokens fit")
    if options.flash_attention == "off":
        return Chosen("f16", "a quantized cache needs flash attention, which is off")
    if not shape.can_quantize_kv:
        return Chosen("f16", "this model's cache cannot be quantized")
    return Chosen(
        "q8_0",
        f"{n_tokens} tokens would take {format_bytes(needed)} in f16, and there is room for"
        f" {format_bytes(room)}",
    )


def choose_context(n_ctx: int, n_ctx_train: int, kv_bytes_per_token: int, free_bytes: int) -> Chosen:
    """Choose the context of one request (tokens). `free_bytes` excludes weights and compute buffers.

    Raises OutOfMemoryError if the requested context, or the smallest useful one, does not fit.
    """
    per_token = max(1, kv_bytes_per_token)
    if n_ctx:
        if n_ctx * per_token > free_bytes:
            raise OutOfMemoryError(
                f"a context of {n_ctx} tokens needs {n_ctx * per_token // _MIB} MiB of KV cache;"
                f" {max(0, free_bytes) // _MIB} MiB are free"
            )
        return Chosen(n_ctx, "as asked")
    fits = free_bytes // 2 // per_token
    if fits < CELL_STEP:
        problem = f"too little memory for a context: {max(0, free_bytes) // _MIB} MiB are free"
        raise OutOfMemoryError(problem)
    limits = (
        (n_ctx_train, f"the model was trained on {n_ctx_train} tokens"),
        (fits, f"half of the {free_bytes // _MIB} MiB available for it"),
        (_AUTO_MAX_TOKENS, "the longest automatic context; --ctx sets a longer one"),
    )
    chosen, reason = min(limits, key=lambda limit: limit[0])
    rounded = chosen if chosen == n_ctx_train else max(CELL_STEP, chosen // CELL_STEP * CELL_STEP)
    return Chosen(rounded, reason)


def choose_cells(n_ctx: int, n_parallel: int, kv_bytes_per_token: int, free_bytes: int) -> Chosen:
    """Choose how many cells (tokens) all sequences share: at least one full context of `n_ctx`.

    More are chosen for parallel sequences, up to half of `free_bytes`: a cell takes memory when it is
    first used.
    """
    n_cells = n_parallel * _CELLS_PER_SEQUENCE
    fits = free_bytes // 2 // max(1, kv_bytes_per_token)
    if n_cells <= n_ctx or fits <= n_ctx:
        return Chosen(round_up_cells(n_ctx), "one full context, shared by all sequences")
    if n_cells > fits:
        return Chosen(round_up_cells(fits), f"half of the {free_bytes // _MIB} MiB available for it")
    return Chosen(round_up_cells(n_cells), f"{_CELLS_PER_SEQUENCE} for each of {n_parallel} sequences")


#: A draft model computes at most this many tokens per call, so that other requests do not wait long.
#: `DRAFT_SPARE_SEQUENCES` of its sequence ids are for texts that later requests may continue.
DRAFT_BATCH = 128
DRAFT_SPARE_SEQUENCES = 8
#: A step may compute logits for `_OUTPUTS_PER_REQUEST` tokens per request. More tokens, up to
#: `_MAX_FREE_OUTPUTS`, are allowed if their logits take at most 1/8 of the unused memory, and fit into
#: `_SMALL_LOGITS` bytes or into memory that the layers need anyway. So verifying 200 tokens with a 135M
#: model takes 0.178 s, not 0.201 s.
_OUTPUTS_PER_REQUEST, _MAX_FREE_OUTPUTS = 8, 256
_OUTPUTS_SHARE, _SMALL_LOGITS = 8, 64 << 20
#: Sequence ids in addition to one per running request: 16 for idle conversations, one to save blocks.
_SPARE_SEQUENCES = 17
_MAX_SEQUENCES = 256
#: An automatic context is not shortened below this (cells) to place more layers on devices.
_MIN_DEVICE_CELLS = 8192
#: Context (tokens) in the plan of a model that does not fit, or whose file has no training context.
_FALLBACK_CTX = 4096
#: Smallest useful KV cache (bytes) of an automatic context.
_USEFUL_KV_BYTES = 1 << 30
#: Memory (bytes) that the process takes in addition to the model.
_PROCESS_BYTES = 64 << 20
#: Least memory (bytes) for streamed weights of a dense model. There is room for two tensors: one is
#: read while the other is multiplied. Each may need two more pages of 64 KiB (_PADDING_BYTES).
_SLOT_BYTES, _PADDING_BYTES = 64 << 20, 128 << 10
#: Memory that streaming leaves free: this many bytes, and at least 1/20 of the machine's memory.
_STREAMING_MARGIN_BYTES, _STREAMING_MARGIN_SHARE = 100_000_000, 20
#: Shortest automatic context (tokens, f16 cache) of a model with streamed weights. A longer automatic
#: context takes at most 1/8 of the memory, because a larger cache leaves less memory to weights.
_STREAMING_CTX = 2048
#: If weights are streamed, memory is reserved for a quarter of the KV cache. As more of the cache is
#: used, `llama.streaming` evicts weights.
_KV_SHARE = 4
#: If a `share` of all experts is in memory, about (1 - share) ** _MISS_POWER of a token's experts are
#: read from disk: in a trace of 24 layers, 0.56 with a share of 0.13, 0.36 with 0.25, 0.20 with 0.40.
_MISS_POWER = 3
#: Read rate (bytes/s) of a SATA SSD, assumed for a disk that was not measured.
_ASSUMED_DISK_BYTES_PER_S = 500e6


@dataclass(frozen=True, slots=True)
class StreamingPlan:
    """How the weights of a model that does not fit into memory are divided (bytes).

    `pinned_bytes` of the mapped file stay in memory. The other weights are read from disk into slots
    (`slot_bytes` of separate memory): weights of a dense model at every step, experts of a mixture when
    they are used. An expert stays in its slot while it is used often. A step of one token reads
    `read_bytes` from the disk; for a mixture, this number is an estimate.
    """

    pinned_bytes: int
    slot_bytes: int
    read_bytes: int


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a model's context, with the reason for each automatic choice.

    - n_cells: size of the KV cache, which all sequences share.
    - n_seq_max, n_batch, n_outputs: limits on sequence ids, tokens per batch, and tokens with logits.
    - least_kv_bytes: smallest useful size of the KV cache; the whole size for a requested context.
    - least_cells: smallest size of the KV cache in a context on devices.
    - from_disk: not all weights stay in memory. `streaming` says which do; None means that there is too
      little memory to stream weights, so Linux reads them by page faults.
    - refusal: why the model cannot be loaded; "" if it can.
    - has_draft: `buffers` include the buffers of a draft model.
    """

    n_threads: Chosen
    n_parallel: Chosen
    n_ctx: Chosen
    n_cells: Chosen
    kv_type: Chosen
    n_seq_max: int
    n_batch: int
    n_outputs: int
    buffers: Buffers
    least_kv_bytes: int
    least_cells: int = 0
    from_disk: bool = False
    streaming: StreamingPlan | None = None
    refusal: str = ""
    has_draft: bool = False

    @property
    def fits(self) -> bool:
        return not self.refusal and not self.from_disk


def make_plan(
    shape: Shape, options: LoadOptions, machine: Machine, draft: Shape | None = None
) -> MemoryPlan:
    """Plan the context for `options`, with room for a draft model of shape `draft`.

    A draft model that the options do not name is left out if both models do not fit together.
    """
    plan = _make_plan(shape, options, machine)
    if draft is None:
        return plan
    n_seq = (options.n_parallel or _SPARE_SEQUENCES) + DRAFT_SPARE_SEQUENCES
    limits = {"n_ubatch": DRAFT_BATCH, "n_seq_max": n_seq, "n_outputs": n_seq}
    compute_bytes = _compute_bytes(draft, options, "f16", **limits)
    machine = machine.without(draft.weights_bytes + compute_bytes)
    shape = msgspec.structs.replace(shape, kv_rows=(*shape.kv_rows, *draft.kv_rows))
    plan_with_draft = _make_plan(shape, options, machine)
    is_streamed_anyway = plan_with_draft.streaming is not None and not plan.fits
    if not (options.draft or plan_with_draft.fits or is_streamed_anyway):
        return plan
    buffers = msgspec.structs.replace(
        plan_with_draft.buffers,
        weights_bytes=plan_with_draft.buffers.weights_bytes + draft.weights_bytes,
        compute_bytes=plan_with_draft.buffers.compute_bytes + compute_bytes,
    )
    return msgspec.structs.replace(plan_with_draft, buffers=buffers, has_draft=True)


def _make_plan(shape: Shape, options: LoadOptions, machine: Machine) -> MemoryPlan:
    n_threads = choose_threads(options.n_threads, machine)
    free, from_disk = _free_bytes(shape, options, machine)
    kv_type = choose_kv_type(options, shape, free)
    per_token = shape.kv_bytes_per_token(kv_type.value)
    n_parallel = choose_parallel(options.n_parallel, n_threads.value, per_token, free)
    refusal = ""
    try:
        n_ctx = choose_context(options.n_ctx, shape.n_ctx_train or _FALLBACK_CTX, per_token, free)
    except OutOfMemoryError as error:
        refusal = error.message
        fallback = min(_FALLBACK_CTX, shape.n_ctx_train or _FALLBACK_CTX)
        n_ctx = Chosen(options.n_ctx or fallback, refusal)
    n_cells = choose_cells(n_ctx.value, n_parallel.value, per_token, free)
    n_seq_max = min(_MAX_SEQUENCES, n_parallel.value + _SPARE_SEQUENCES)
    if shape.is_recurrent:  # a scratch id for saving and restoring ranges of states (decision 080)
        n_seq_max = n_parallel.value + 1
    n_batch = min(max(options.n_batch, n_parallel.value), n_cells.value)
    unused_bytes = 0 if from_disk else max(0, free - n_cells.value * per_token)
    n_affordable = unused_bytes // _OUTPUTS_SHARE // shape.logits_bytes(1)
    n_small = max(_SMALL_LOGITS // shape.logits_bytes(1), outputs_without_memory(shape, n_batch))
    n_free = min(_MAX_FREE_OUTPUTS, n_affordable, n_small)
    # llama.cpp aborts if fewer outputs are allowed than there are sequence ids
    n_outputs = max(n_seq_max, min(n_batch, max(n_free, n_parallel.value * _OUTPUTS_PER_REQUEST)))
    buffers = make_buffers(
        shape, n_cells.value, kv_type.value, n_seq_max=n_seq_max, n_ubatch=n_batch, n_outputs=n_outputs
    )
    streaming = None
    if from_disk and not refusal:
        context_bytes = buffers.kv_bytes // _KV_SHARE + buffers.compute_bytes
        # `buffers` has room for one token's logits per sequence; llama.cpp allocates more when needed
        context_bytes += shape.logits_bytes(n_outputs - n_seq_max)
        streaming = plan_streaming(shape, machine.memory.available_bytes, context_bytes)
    return MemoryPlan(
        n_threads=n_threads,
        n_parallel=n_parallel,
        n_ctx=n_ctx,
        n_cells=n_cells,
        kv_type=kv_type,
        n_seq_max=n_seq_max,
        n_batch=n_batch,
        n_outputs=n_outputs,
        buffers=buffers,
        least_kv_bytes=buffers.kv_bytes if options.n_ctx else min(buffers.kv_bytes, _USEFUL_KV_BYTES),
        least_cells=n_cells.value if options.n_ctx else min(n_cells.value, _MIN_DEVICE_CELLS),
        from_disk=from_disk,
        streaming=streaming,
        refusal=refusal,
    )


def make_exact_plan(
    shape: Shape,
    options: LoadOptions,
    machine: Machine,
    tensor_sizes: Callable[[], Mapping[str, int]],
    draft: Shape | None = None,
) -> tuple[Shape, MemoryPlan]:
    """Return the plan, and the shape from which the plan was computed.

    If the weights do not fit into memory, both are computed again with the exact `tensor_sizes()`.
    """
    plan = make_plan(shape, options, machine, draft)
    if plan.from_disk:
        shape = with_tensors(shape, tensor_sizes())
        plan = make_plan(shape, options, machine, draft)
    return shape, plan


def plan_streaming(shape: Shape, available_bytes: int, context_bytes: int) -> StreamingPlan | None:
    """Decide which weights stay in the memory that a context leaves, and which are streamed.

    Returns None if there is too little memory: for the output and the slots of a dense model, or for
    the experts that a token uses in one layer of a mixture of experts.
    """
    margin = max(_STREAMING_MARGIN_BYTES, available_bytes // _STREAMING_MARGIN_SHARE)
    weights_budget = available_bytes - context_bytes - _PROCESS_BYTES - margin
    dense_bytes = shape.weights_bytes - shape.unread_bytes - shape.expert_bytes
    if shape.expert_bytes:
        slot_bytes = min(weights_budget - dense_bytes, shape.expert_bytes)
        if slot_bytes < shape.used_expert_bytes // max(1, shape.n_layer):
            return None
        miss_share = (1.0 - slot_bytes / shape.expert_bytes) ** _MISS_POWER
        return StreamingPlan(dense_bytes, slot_bytes, int(shape.used_expert_bytes * miss_share))
    slot_bytes = max(_SLOT_BYTES, 2 * (shape.layer_tensor_bytes + _PADDING_BYTES))
    pinned = min(weights_budget - slot_bytes, dense_bytes)
    if pinned < shape.embedding_bytes:
        return None
    return StreamingPlan(pinned, slot_bytes, dense_bytes - pinned)


def _compute_bytes(shape: Shape, options: LoadOptions, kv_type: str, **limits: int) -> int:
    """Estimate the compute buffers (bytes) of a context whose size is not planned yet.

    `limits` are arguments of `make_buffers`.
    """
    n_ctx = options.n_ctx or min(shape.n_ctx_train, 1 << 15)
    return make_buffers(shape, n_ctx, kv_type, **limits).compute_bytes


def _free_bytes(shape: Shape, options: LoadOptions, machine: Machine) -> tuple[int, bool]:
    """Return the memory (bytes) for the KV cache, and whether weights must be read from disk.

    Weights are read from disk if they leave no memory for the smallest context. Then an automatic
    context is small, and a requested one leaves a quarter of the memory to weights.
    """
    available = machine.memory.available_bytes
    kv_type = "f16" if options.kv_type == "auto" else options.kv_type
    compute = partial(_compute_bytes, shape, options, kv_type, n_ubatch=options.n_batch)
    compute_bytes = compute(n_seq_max=2 * _SPARE_SEQUENCES, n_outputs=64)
    free = available - shape.weights_bytes - compute_bytes - _PROCESS_BYTES
    least_tokens = min(options.n_ctx or 2 * CELL_STEP, 2 * CELL_STEP)
    if free < least_tokens * shape.kv_bytes_per_token(kv_type):
        n_seq = 1 + _SPARE_SEQUENCES
        max_bytes = available - available // 4 - compute(n_seq_max=n_seq, n_outputs=n_seq)
        small = max(available // 4, 2 * _STREAMING_CTX * shape.kv_bytes_per_token("f16"))
        return max_bytes if options.n_ctx else min(max_bytes, small), True
    return free, False


def disk_pace(shape: Shape, streaming: StreamingPlan | None, disk_bytes_per_s: float) -> float:
    """Estimate the rate (tokens/s) of one request if weights are read from disk.

    Without `streaming`, the worst case is assumed: all weights that a token uses are read from disk.
    """
    n_bytes = streaming.read_bytes if streaming else shape.weights_bytes_per_token
    return (disk_bytes_per_s or _ASSUMED_DISK_BYTES_PER_S) / max(1, n_bytes)


def disk_warning(shape: Shape, machine: Machine, plan: MemoryPlan, disk_bytes_per_s: float) -> str:
    """Return a warning for the user that says how fast a model with `plan.from_disk` will be.

    If the disk's rate is 0.0 (not measured), the rate of a SATA SSD is assumed.
    """
    rate = disk_bytes_per_s or _ASSUMED_DISK_BYTES_PER_S
    per_s = disk_pace(shape, plan.streaming, rate)
    pace = f"{per_s:.1f} tokens/s" if per_s >= 1 else f"a token in {1 / per_s:.1f} s"
    source = "measured just now" if disk_bytes_per_s else "assumed"
    placement = "they are read from disk again and again"
    if streaming := plan.streaming:
        held_bytes = streaming.pinned_bytes + (streaming.slot_bytes if shape.expert_bytes else 0)
        placement = f"{format_bytes(held_bytes)} of them stay in memory"
        placement += ", the others are read from disk for each token"
        if shape.expert_bytes:
            hits = 1.0 - streaming.read_bytes / max(1, shape.used_expert_bytes)
            source += f", if {hits:.0%} of the experts that a token uses are in memory"
    return (
        f"weights of {format_bytes(shape.weights_bytes)} do not fit into the"
        f" {format_bytes(machine.memory.available_bytes)} of memory that are free: {placement}. Expect"
        f" about {pace}: {format_bytes(rate / per_s)} a token at {format_bytes(rate)}/s ({source})"
    )
