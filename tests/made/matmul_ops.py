"""ggml's matrix products on made weights: tests check them, and `make bench-matmul` measures them."""

import ctypes

import gguf
import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.llama import libedgeinfer, libllama

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_F32, _I32 = 0, 26
#: ggml_backend_cpu_repack_buffer_type as C++ names it, a function of the CPU variant's library.
_REPACK = "_Z35ggml_backend_cpu_repack_buffer_typev"
#: Type → (offset of a half-precision scale in a block, its value) of random blocks.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 0.2),),
    "Q4_1": ((0, 0.1), (2, -0.75)),
    "Q5_0": ((0, 0.1),),
    "Q5_1": ((0, 0.1), (2, -1.5)),
    "Q8_0": ((0, 0.013),),
    "IQ4_NL": ((0, 0.016),),
    "MXFP4": (),
    "Q2_K": ((80, 0.06), (82, 0.09)),
    "Q3_K": ((108, 0.012),),
    "Q4_K": ((0, 0.006), (2, 0.045)),
    "Q5_K": ((0, 0.003), (2, 0.045)),
    "Q6_K": ((208, 0.0015),),
    "IQ4_XS": ((0, 0.0008),),
    "F32": (),
    "F16": (),
    "BF16": (),
}
TYPES = tuple(_SCALES)


def random_weights(kind: str, rows: int, width: int, seed: int = 0) -> Bytes:
    """Return rows of random blocks of a type, (rows, bytes); scales differ by block."""
    random = np.random.default_rng(seed)
    if kind in {"F32", "F16", "BF16"}:
        floats = random.normal(size=(rows, width)).astype(np.float32)
        return gguf.quants.quantize(floats, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    size, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows, width // size, n_bytes), dtype=np.uint8)
    for offset, scale in _SCALES[kind]:
        scales = random.uniform(0.5, 1.5, (*blocks.shape[:2], 1)) * scale
        blocks[:, :, offset : offset + 2] = scales.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = random.integers(118, 126, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def dequantize(kind: str, weights: Bytes) -> NDArray[np.float64]:
    """Return the weights that the blocks stand for."""
    return gguf.quants.dequantize(weights, gguf.GGMLQuantizationType[kind]).astype(np.float64)


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """ggml_cplan."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


class Products:
    """One graph of products that share their activations: a matrix, or experts, of each of `weights`.

    `experts` 0 is MUL_MAT. `is_repacked` has llama.cpp copy the weights into its layouts for this CPU.
    """

    def __init__(
        self,
        kind: str,
        weights: list[Bytes],
        n: int,
        experts: int = 0,
        used: int = 1,
        is_repacked: bool = False,
    ) -> None:
        self._base, self._cpu = self.libraries()
        quantization = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[quantization]
        rows = weights[0].shape[0] // max(experts, 1)
        width = weights[0].shape[1] // size * block
        shape = (width, rows, max(experts, 1))
        tensors = self._place_tensors(weights, quantization.value, shape, is_repacked)
        self._graph_context = self._context(4 * n * used * (width + rows * len(weights)))
        self._x = self._tensor(self._graph_context, _F32, width, *((1, n) if experts else (n, 1)))
        if experts:
            self._ids = self._tensor(self._graph_context, _I32, used, n, 1)
            self._outs = [
                self._base.ggml_mul_mat_id(self._graph_context, w, self._x, self._ids) for w in tensors
            ]
        else:
            self._outs = [self._base.ggml_mul_mat(self._graph_context, w, self._x) for w in tensors]
        self._graph = self._base.ggml_new_graph(self._graph_context)
        for out in self._outs:
            self._base.ggml_build_forward_expand(self._graph, out)
        self._shape = (n, used, rows)

    @classmethod
    def libraries(cls) -> tuple[ctypes.CDLL, ctypes.CDLL]:
        """Return what makes a graph and what computes it."""
        libllama.lib()
        return declare(libllama.base_library(), ctypes.CDLL(libedgeinfer.cpu_library()))

    def _place_tensors(
        self, weights: list[Bytes], kind: int, shape: tuple[int, ...], is_repacked: bool
    ) -> list[int]:
        n_bytes = 0 if is_repacked else sum(w.nbytes for w in weights)
        self._weights = self._context(n_bytes, no_alloc=is_repacked)
        tensors = [self._tensor(self._weights, kind, *shape) for _ in weights]
        if is_repacked:
            buffer_type = getattr(self._cpu, _REPACK)
            buffer_type.restype = ctypes.c_void_p
            self._base.ggml_backend_alloc_ctx_tensors_from_buft(self._weights, buffer_type())
        for tensor, values in zip(tensors, weights, strict=True):
            if is_repacked:
                self._base.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
            else:
                ctypes.memmove(self._base.ggml_get_data(tensor), values.ctypes.data, values.nbytes)
        return tensors

    def plan(self, n_threads: int) -> ctypes.Structure:
        """Plan the graph's computation: a ggml_cplan."""
        planned: ctypes.Structure = self._cpu.ggml_graph_plan(self._graph, n_threads, None)
        return planned

    def _context(self, n_bytes: int, *, no_alloc: bool = False) -> int:
        context: int = self._base.ggml_init(InitParams(n_bytes + (4 << 20), None, no_alloc))
        return context

    def _tensor(self, context: int, kind: int, *shape: int) -> int:
        tensor: int = self._base.ggml_new_tensor_3d(context, kind, *shape)
        return tensor

    def compute(
        self, x: Floats | None = None, ids: NDArray[np.int32] | None = None, n_threads: int = 2
    ) -> None:
        """Compute the graph for activations (n, width) and the experts of each (n, used)."""
        if x is not None:
            floats = np.ascontiguousarray(x, np.float32)
            ctypes.memmove(self._base.ggml_get_data(self._x), floats.ctypes.data, floats.nbytes)
        if ids is not None:
            chosen = np.ascontiguousarray(ids, np.int32)
            ctypes.memmove(self._base.ggml_get_data(self._ids), chosen.ctypes.data, chosen.nbytes)
        plan = self.plan(n_threads)
        work = ctypes.create_string_buffer(plan.work_size)
        plan.work_data = ctypes.addressof(work)
        if self._cpu.ggml_graph_compute(self._graph, ctypes.byref(plan)):
            raise RuntimeError("the graph was not computed")

    def results(self) -> list[Floats]:
        """Return what was computed for each of the weights, (n, used, rows)."""
        size = 4 * int(np.prod(self._shape))
        raw = (ctypes.string_at(self._base.ggml_get_data(out), size) for out in self._outs)
        return [np.frombuffer(row, np.float32).reshape(self._shape) for row in raw]

    def close(self) -> None:
        """Free the tensors."""
        for context in (self._graph_context, self._weights):
            self._base.ggml_free(context)


def use_level(level: str) -> None:
    """Load the kernels of that level, "none" for llama.cpp's. Once a process."""
    kernels = "" if level == "none" else level
    libedgeinfer.level_of = lambda variant: kernels
    assert libllama.build_info().kernels == kernels


def declare(base: ctypes.CDLL, cpu: ctypes.CDLL) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Declare the functions of both; every handle is a pointer."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    for name, arguments in {
        "ggml_init": [InitParams],
        "ggml_free": [pointer],
        "ggml_new_tensor_3d": [pointer, integer, *[ctypes.c_int64] * 3],
        "ggml_mul_mat": [pointer] * 3,
        "ggml_mul_mat_id": [pointer] * 4,
        "ggml_get_data": [pointer],
        "ggml_new_graph": [pointer],
        "ggml_build_forward_expand": [pointer] * 2,
        "ggml_backend_alloc_ctx_tensors_from_buft": [pointer] * 2,
        "ggml_backend_tensor_set": [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t],
    }.items():
        function = getattr(base, name)
        function.restype, function.argtypes = pointer, arguments
    cpu.ggml_graph_plan.restype = _Plan
    cpu.ggml_graph_plan.argtypes = [pointer, integer, pointer]
    cpu.ggml_graph_compute.argtypes = [pointer, pointer]
    return base, cpu
