"""ggml's attention on made tensors, beside the same in float64.

A program, because a process has one attention.

usage: attention_op.py v3|v3-vnni|v4|none: a JSON object, case → Outcome
"""

import ctypes
import hashlib
import json
import sys
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "made"))
from matmul_ops import Floats, InitParams, open_ggml, use_level

from edgeinfer.runtime.llama import libedgeinfer

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


@dataclass(frozen=True)
class Case:
    """One operation: `rows` tokens against `cells` of the cache, whose elements are of type `kind`.

    `mask` is "none", "causal", "holes" or "sequences"; `head_v` 0 is `head`, the elements of a head.
    """

    head: int = 64
    group: int = 4
    rows: int = 8
    cells: int = 256
    kind: str = "f16"
    mask: str = "causal"
    heads: int = 2
    streams: int = 1
    head_v: int = 0
    sinks: bool = False
    bias: float = 0
    softcap: float = 0

    def __str__(self) -> str:
        usual = asdict(Case())
        named = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return " ".join(f"{name}={value}" for name, value in named.items()) or "usual"


@dataclass(frozen=True)
class Outcome:
    """The result of a case. `error` is the largest difference from float64, in standard deviations of that.

    `digest` is of the result's bytes. `same`: rows are bit-identical in smaller batches, with
    other numbers of threads, and where the cells that they see lie elsewhere, among others and in
    another order.
    """

    error: float
    digest: str
    same: bool


#: What is computed by the attention of our own.
OURS = (
    *(Case(head=head, kind=kind) for head in (64, 80, 96, 128, 256) for kind in ("f16", "q8_0") if head % 32 == 0 or kind == "f16"),
    *(Case(kind=kind, mask="holes", cells=200) for kind in ("f32", "bf16", "q4_0", "q8_0")),
    *(Case(group=group, heads=heads, rows=5, mask="holes") for group, heads in ((1, 3), (2, 2), (3, 3), (7, 2), (8, 1), (16, 1), (40, 1))),
    *(Case(rows=rows, cells=320, kind=kind) for rows in (2, 3, 17, 33, 64, 70) for kind in ("f16", "q8_0")),
    *(Case(rows=rows, cells=cells, group=3, mask="holes") for rows in (2, 9) for cells in (1, 31, 63, 65, 130, 511, 513, 1100)),
    *(Case(rows=21, cells=1500, kind=kind, mask=mask, heads=1) for kind in ("f16", "q8_0") for mask in ("holes", "sequences", "none")),
    *(Case(streams=streams, rows=6, mask=mask, cells=600) for streams in (2, 3) for mask in ("holes", "none")),
    *(Case(sinks=True, rows=rows, mask=mask, group=8) for rows in (2, 40) for mask in ("causal", "holes")),
    Case(head=128, head_v=64, rows=9),
    Case(head=64, head_v=128, rows=9, kind="q8_0"),
    *(Case(bias=8, rows=rows, heads=heads, mask="holes") for rows in (1, 9) for heads in (2, 3)),
    *(Case(softcap=softcap, rows=rows) for softcap in (1, 30) for rows in (1, 9)),
    Case(softcap=5, bias=4, mask="holes", sinks=True),
)  # fmt: skip
#: The library of the level, once it is open.
_kernels: list[ctypes.CDLL] = []
#: What is left to llama.cpp's.
LEFT = (Case(head=576, head_v=512, group=4, heads=1, cells=64),)


class Inputs:
    """What a case attends to: the tensors as ggml gets them, and the floats that they stand for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.written: list[int] = []  # the cells in the order of writes, if the keys are a cache's
        digest = hashlib.sha256(str(case).encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:4], "little"))
        head_v = case.head_v or case.head
        shape = (case.streams, case.cells, case.heads)
        self.scale = 2 / case.head**0.5  # some cells weigh much more than others
        self.q: Floats = random.normal(
            size=(case.streams, case.rows, case.heads * case.group, case.head)
        ).astype(np.float32)
        self.k_raw, self.k = _store(random.normal(size=(*shape, case.head)), case.kind)
        self.v_raw, self.v = _store(random.normal(size=(*shape, head_v)) + 0.5, case.kind)
        self.mask = _mask(case, random)
        self.sinks = (
            random.normal(size=case.heads * case.group).astype(np.float32) * 2 if case.sinks else None
        )


def _store(values: NDArray[np.float64], kind: str) -> tuple[NDArray[np.uint8], Floats]:
    """The bytes of values in a type of the cache, (streams, cells, heads, bytes), and what these say."""
    floats = values.astype(np.float32)
    quantization = gguf.GGMLQuantizationType(TYPES[kind])
    raw = gguf.quants.quantize(floats, quantization)
    return raw.view(np.uint8), gguf.quants.dequantize(raw, quantization).astype(np.float32)


def _mask(case: Case, random: np.random.Generator) -> NDArray[np.float16] | None:
    """(streams, rows, cells): what is added to a score, -inf for a cell that is not seen."""
    row = np.arange(case.rows)[:, None]
    cell = np.arange(case.cells)[None, :]
    if case.mask == "none":
        return None
    if case.mask == "causal":
        seen = np.broadcast_to(
            cell <= case.cells - case.rows + row, (case.streams, case.rows, case.cells)
        )
    elif case.mask == "sequences":
        seen = (cell // 70 % 3 == row % 3)[None].repeat(case.streams, 0)
    else:
        seen = random.random((case.streams, case.rows, case.cells)) < 0.6
        if case.cells > 150:
            seen[:, :, 64:140] = False  # a whole block, for all
            seen[:, 0::3, :80] = False  # the first one, for some
            seen[:, 1::4, 500:] = False
        if case.rows > 2:
            seen[0, -1] = False  # and one sees nothing
    added = (
        np.where(random.random(seen.shape) < 0.1, -1.5, 0)
        if case.mask == "holes"
        else np.zeros(seen.shape)
    )
    return np.where(seen, added, -np.inf).astype(np.float16)


def _slopes(n_heads: int, bias: float) -> NDArray[np.float64]:
    """Return the factor of each head's mask (ALiBi)."""
    most, head = 2 ** (n_heads.bit_length() - 1), np.arange(n_heads)
    exponents = np.where(
        head < most, bias / most * (head + 1), bias / 2 / most * (2 * (head - most) + 1)
    )
    return np.exp2(-exponents) if bias else np.ones(n_heads)


def compute_exact(inputs: Inputs) -> NDArray[np.float64]:
    """(streams, rows, heads, head_v) in float64."""
    case = inputs.case
    q = inputs.q.astype(np.float64)
    k, v = (np.repeat(x.astype(np.float64), case.group, axis=2) for x in (inputs.k, inputs.v))
    scores = np.einsum("sthd,snhd->shtn", q, k) * inputs.scale
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if inputs.mask is not None:
        slopes = _slopes(case.heads * case.group, case.bias)[None, :, None, None]
        scores += slopes * inputs.mask[:, None].astype(np.float64)
    most = scores.max(axis=-1, keepdims=True)
    sinks = None if inputs.sinks is None else inputs.sinks.astype(np.float64)[None, :, None, None]
    if sinks is not None:
        most = np.maximum(most, sinks)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0))
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - most)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    result: NDArray[np.float64] = np.einsum("shtn,snhd->sthd", weights, v)
    return result


def with_gaps(inputs: Inputs) -> Inputs:
    """The same with cells in between that no row sees: 37 before the first one, and 100 in the middle."""
    other = copy(inputs)
    cells = inputs.case.cells
    places = [0] * 37 + [cells // 2] * 100
    other.case = replace(inputs.case, cells=cells + len(places))
    foreign = np.arange(len(places)) % cells
    other.k_raw, other.v_raw = (
        np.insert(x, places, x[:, foreign], axis=1) for x in (inputs.k_raw, inputs.v_raw)
    )
    shape = (inputs.case.streams, inputs.case.rows, cells)
    mask = np.zeros(shape, np.float16) if inputs.mask is None else inputs.mask
    other.mask = np.insert(mask, places, -np.inf, axis=2)
    return other


def shuffle_cells(inputs: Inputs) -> Inputs:
    """The same in a cache whose cells were written in the order of `inputs`, and lie in another."""
    if inputs.mask is None or inputs.case.streams > 1:
        return inputs
    other = copy(inputs)
    places = np.random.default_rng(7).permutation(inputs.case.cells)
    other.k_raw, other.v_raw = inputs.k_raw[:, places], inputs.v_raw[:, places]
    other.mask = inputs.mask[:, :, places]
    other.written = np.argsort(places).tolist()
    return other


def attend(inputs: Inputs, rows: slice, n_threads: int) -> Floats:
    """Compute some of the rows with ggml: (streams, rows, heads, head_v)."""
    case = inputs.case
    q = np.ascontiguousarray(inputs.q[:, rows])
    head_v = case.head_v or case.head
    base, cpu = open_ggml()
    context = base.ggml_init(InitParams(64 << 20, None, False))

    def tensor(values: NDArray[Any], kind: str, *shape: int) -> int:
        address: int = base.ggml_new_tensor_4d(context, TYPES[kind], *shape)
        ctypes.memmove(
            base.ggml_get_data(address), np.ascontiguousarray(values).tobytes(), values.nbytes
        )
        return address

    try:
        # as llama.cpp has them: the heads of a token lie together
        tensors = (
            tensor(q, "f32", case.head, q.shape[2], q.shape[1], case.streams),
            tensor(inputs.k_raw, case.kind, case.head, case.heads, case.cells, case.streams),
            tensor(inputs.v_raw, case.kind, head_v, case.heads, case.cells, case.streams),
        )
        if inputs.written and _kernels:
            keys = ctypes.c_void_p(tensors[1])
            base.ggml_set_name(keys, b"cache_k")
            for cell in inputs.written:
                _kernels[0].edgeinfer_cells_written(keys, ctypes.c_int64(cell), ctypes.c_int64(1))
        views = [base.ggml_permute(context, one, 0, 2, 1, 3) for one in tensors]
        mask = None
        if inputs.mask is not None:
            mask = tensor(inputs.mask[:, rows], "f16", case.cells, q.shape[1], 1, case.streams)
        out = base.ggml_flash_attn_ext(context, *views, mask, inputs.scale, case.bias, case.softcap)
        if inputs.sinks is not None:
            base.ggml_flash_attn_ext_add_sinks(
                out, tensor(inputs.sinks, "f32", len(inputs.sinks), 1, 1, 1)
            )
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, out)
        if cpu.ggml_graph_compute_with_ctx(context, graph, n_threads):
            raise RuntimeError(f"{case}: not computed")
        shape = (case.streams, q.shape[1], q.shape[2], head_v)
        raw = ctypes.string_at(base.ggml_get_data(out), 4 * int(np.prod(shape)))
        return np.frombuffer(raw, np.float32).reshape(shape)
    finally:
        base.ggml_free(context)


def outcome(case: Case) -> Outcome:
    """Compute a case whole, and some of its rows again, elsewhere and with other numbers of threads."""
    inputs = Inputs(case)
    got = attend(inputs, slice(None), 2)
    exact = compute_exact(inputs)
    last = slice(max(0, case.rows - 3), case.rows)
    again = (
        (inputs, slice(None), 1),
        (inputs, slice(None), 3),
        (inputs, slice(0, 2), 2),
        (with_gaps(inputs), slice(None), 2),
        (with_gaps(inputs), last, 3),
        (shuffle_cells(inputs), slice(None), 2),
        (shuffle_cells(inputs), last, 1),
    )
    same = all(np.array_equal(attend(selection, rows, n), got[:, rows]) for selection, rows, n in again)
    error = float(np.abs(got - exact).max() / exact.std())
    return Outcome(error, hashlib.sha256(got.tobytes()).hexdigest(), same)


def main(level: str) -> None:
    """Print the outcome of every case with the attention of that level, "none" for llama.cpp's."""
    use_level(level)
    if level != "none":
        _kernels.append(ctypes.CDLL(str(libedgeinfer.library(f"kernels-{level}"))))
    print(json.dumps({str(case): asdict(outcome(case)) for case in (*OURS, *LEFT)}))


if __name__ == "__main__":
    main(sys.argv[1])
