"""What the engine chooses by itself, each choice with its reason: threads, sequences, context.

Pure arithmetic over facts that are passed in. Memory is in bytes, context in tokens.
"""

from __future__ import annotations

import math

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.platform.machine import Machine, Processors
from edgeinfer.runtime.options import Chosen, LoadOptions
from edgeinfer.runtime.planning.shape import CELL_STEP, Shape, padded
from edgeinfer.units import format_bytes

_MIB = 1 << 20
#: An automatic context is no longer than this. llama.cpp keeps some 50 bytes for each cell, and looks
#: at all of them when it copies or removes a sequence.
_AUTO_MAX_TOKENS = 131_072
#: A quantized cache is slower to attend to: one is chosen only where f16 does not hold so many tokens,
#: or as many as the model was trained on.
_AMPLE_TOKENS = 32_768
#: llama.cpp's file types whose weights have no matrix-matrix kernel on a CPU, only dot products row by
#: row: Q4_1, Q5_1, Q3_K, and the small IQ and TQ types. They give a row the same bits in any batch.
_DOT_ONLY = frozenset({3, 9, 11, 12, 13, 19, 20, 22, 23, 24, 26, 27, 28, 29, 30, 31, 36, 37})
#: Repacked weights are multiplied by another kernel from four rows on.
_REPACKED_ROWS = 3
#: What a small context and its compute buffer take, roughly.
_ROOM_BESIDE_WEIGHTS = 256 << 20
#: Cells of the shared KV cache that every sequence can count on when all are busy.
_CELLS_PER_SEQUENCE = 1024


def choose_threads(asked: int, here: Processors) -> Chosen:
    """Decode threads. 0 takes the physical cores we may use, or the control group's share of them."""
    if asked:
        return Chosen(asked, "as asked")
    cores = here.physical_cores
    if here.quota is not None and here.quota < cores:
        return Chosen(
            max(1, math.floor(here.quota)), f"the control group allows {here.quota:g} of {cores} cores"
        )
    noun = "core" if cores == 1 else "cores"
    return Chosen(cores, f"{cores} physical {noun} within our affinity ({here.logical_cpus} logical)")


def choose_parallel(asked: int, n_threads: int, kv_bytes_per_token: int, free_bytes: int) -> Chosen:
    """Sequences decoded at once: 0 takes four a thread, 4 to 16, or as many as their cache may fit."""
    if asked:
        return Chosen(asked, "as asked")
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
    """Type of the KV cache. "auto" takes f16 where it holds the context that is asked for, or else the
    trained one up to 32,768 tokens; then q8_0, which takes about half. Decision 082.
    """
    if options.kv_type != "auto":
        return Chosen(options.kv_type, "as asked")
    wanted = options.n_ctx or min(shape.n_ctx_train or _AMPLE_TOKENS, _AMPLE_TOKENS)
    room = max(0, free_bytes if options.n_ctx else free_bytes // 2)
    needed = wanted * shape.kv_bytes_per_token("f16")
    if needed <= room:
        return Chosen("f16", f"{wanted} tokens fit")
    if options.flash_attention == "off":
        return Chosen("f16", "a quantized cache needs flash attention, which is off")
    if not shape.can_quantize_kv:
        return Chosen("f16", "this model's cache cannot be quantized")
    return Chosen(
        "q8_0",
        f"{wanted} tokens would take {format_bytes(needed)} in f16, and there is room for"
        f" {format_bytes(room)}",
    )


def choose_context(asked: int, n_ctx_train: int, kv_bytes_per_token: int, free_bytes: int) -> Chosen:
    """Tokens one request may use. `free_bytes` is what is left after weights and compute buffers.

    Raises OutOfMemoryError when what was asked, or the least that is useful, does not fit.
    """
    per_token = max(1, kv_bytes_per_token)
    if asked:
        if asked * per_token > free_bytes:
            raise OutOfMemoryError(
                f"a context of {asked} tokens needs {asked * per_token // _MIB} MiB of KV cache;"
                f" {max(0, free_bytes) // _MIB} MiB are free"
            )
        return Chosen(asked, "as asked")
    fits = free_bytes // 2 // per_token
    if fits < CELL_STEP:
        raise OutOfMemoryError(
            f"no room for a context: {max(0, free_bytes) // _MIB} MiB are free for it"
        )
    limits = (
        (n_ctx_train, f"the model was trained on {n_ctx_train} tokens"),
        (fits, f"half of the {free_bytes // _MIB} MiB that are free for it"),
        (_AUTO_MAX_TOKENS, "enough for most; ask for more with --ctx"),
    )
    chosen, reason = min(limits, key=lambda limit: limit[0])
    rounded = chosen if chosen == n_ctx_train else max(CELL_STEP, chosen // CELL_STEP * CELL_STEP)
    return Chosen(rounded, reason)


def choose_cells(n_ctx: int, n_parallel: int, kv_bytes_per_token: int, free_bytes: int) -> Chosen:
    """Cells that all sequences share. They take memory when they are first used."""
    wanted = n_parallel * _CELLS_PER_SEQUENCE
    fits = free_bytes // 2 // max(1, kv_bytes_per_token)
    if wanted <= n_ctx or fits <= n_ctx:
        return Chosen(padded(n_ctx), "one full context, shared by all sequences")
    if wanted > fits:
        return Chosen(padded(fits), f"half of the {free_bytes // _MIB} MiB that are free for it")
    return Chosen(padded(wanted), f"{_CELLS_PER_SEQUENCE} for each of {n_parallel} sequences")


def choose_repack(asked: str, weights_bytes: int, machine: Machine) -> Chosen:
    """Decide whether weights are repacked for this CPU's fast paths, "on" or "off".

    "auto" leaves them mapped where memory is short: repacked weights must stay in memory, mapped ones
    need not.
    """
    if asked != "auto":
        return Chosen(asked, "as asked")
    available = machine.memory.available_bytes
    if weights_bytes + weights_bytes // 8 + _ROOM_BESIDE_WEIGHTS > available:
        return Chosen(
            "off",
            f"{format_bytes(weights_bytes)} of weights and a context are too much for the"
            f" {format_bytes(available)} of memory that are free: they stay mapped",
        )
    return Chosen("on", "weights are rearranged for this CPU")


def exact_rows(n_batch: int, file_type: int) -> int:
    """Tokens of a batch up to which kernels give each the bits it gives alone (decision 022)."""
    return n_batch if file_type in _DOT_ONLY else _REPACKED_ROWS
