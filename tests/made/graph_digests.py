"""Print digests of every tensor of some steps of models, with one of ggml's CPU variants and our kernels of its level.

A program, because a process has one variant.

usage: graph_digests.py VARIANT LEVEL MODEL...: a JSON object, model → a Computed for each attention; LEVEL "none" for
llama.cpp's kernels. `--record FILE` also writes every operation there, for tests/runtime/replay_graph.cpp.
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import llama_cpp as llama
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from matmul_ops import use_level
from raw_logits import decode

from edgeinfer.runtime.llama import libedgeinfer, libllama

#: Tokens of the steps: a prompt, two tokens, and some more at once.
_STEPS = (37, 1, 1, 5)


@dataclass
class Computed:
    """What one context computed. `dependent` is an operation whose bits depend on the processor.

    `tensors` are name, operation and digest of each contiguous one, and `logits` the last token's.
    """

    dependent: str = ""
    tensors: list[list[str]] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)


class Tensor(ctypes.Structure):
    """ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("shape_and_strides", ctypes.c_int64 * 8),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("sources", ctypes.c_void_p * 10),
        ("view_source", ctypes.c_void_p),
        ("view_offset", ctypes.c_size_t),
        ("content", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


_FLAG_INPUT = 1
#: Operations that compute nothing.
_VIEWS = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}


class Recorder:
    """Writes the operations of a context, each after the inputs and weights that it reads first.

    Of each tensor: address, number of bytes of its content, ggml_tensor, content (of an operation: its result).
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._weights = set[int]()  # and caches, which stay from step to step
        self._known = set[int]()

    def begin_step(self) -> None:
        """Forget the last step's graph: another's tensors may have its addresses."""
        self._known = set(self._weights)

    def write(self, address: int, n_bytes: int) -> None:
        tensor = Tensor.from_address(address)
        self._file.write(address.to_bytes(8, "little") + n_bytes.to_bytes(8, "little") + bytes(tensor))
        self._file.write(ctypes.string_at(tensor.content, n_bytes) if n_bytes else b"")
        self._known.add(address)

    def write_sources(self, address: int, n_bytes: Callable[[int], int]) -> None:
        """Write what an operation reads and no other has computed; call it before it is computed."""
        for source in {*Tensor.from_address(address).sources} - self._known - {None}:
            tensor = Tensor.from_address(source)
            assert (tensor.op, tensor.view_source) == (0, None), tensor.name
            self.write(source, n_bytes(source))
            if not tensor.flags & _FLAG_INPUT:
                self._weights.add(source)


def _use_variant(variant: str) -> None:
    name, folders = f"libggml-cpu-{variant}.so", libllama.variant_dirs()
    (library,) = (path for folder in folders for path in folder.glob(name))
    folder = Path(tempfile.mkdtemp())
    (folder / library.name).symlink_to(library)
    libllama.variant_dirs = lambda: [folder]


def _declare_tensors(base: ctypes.CDLL) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result in {
        "ggml_get_name": ctypes.c_char_p,
        "ggml_op_desc": ctypes.c_char_p,
        "ggml_nbytes": size,
        "ggml_is_contiguous": ctypes.c_bool,
    }.items():
        function = getattr(base, name)
        function.restype, function.argtypes = result, [pointer]
    base.ggml_backend_tensor_get.argtypes = [pointer, pointer, size, size]


def compute(
    model: Any, flash_attention: bool, steps: tuple[int, ...], record: BinaryIO | None
) -> Computed:
    """Compute steps of that many tokens in a new context."""
    base, computed = libllama.base_library(), Computed()
    recorder = Recorder(record) if record else None
    _declare_tensors(base)

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
    def on_tensor(tensor: int, ask: bool, _: object) -> bool:
        if ask and recorder:
            recorder.write_sources(tensor, base.ggml_nbytes)
        elif recorder:
            is_computed = base.ggml_op_desc(tensor).decode() not in _VIEWS
            is_compared = is_computed and base.ggml_is_contiguous(tensor)
            recorder.write(tensor, base.ggml_nbytes(tensor) if is_compared else 0)
        if not ask and base.ggml_is_contiguous(tensor):
            content = ctypes.create_string_buffer(base.ggml_nbytes(tensor))
            base.ggml_backend_tensor_get(tensor, content, 0, len(content))
            digest = hashlib.sha256(content.raw).hexdigest()[:12]
            name, operation = base.ggml_get_name(tensor), base.ggml_op_desc(tensor)
            computed.tensors.append([name.decode(), operation.decode(), digest])
        return True

    options = llama.llama_context_default_params()
    options.n_ctx = 512
    options.n_batch = options.n_ubatch = 128
    options.n_threads = options.n_threads_batch = 1
    options.flash_attn_type = int(flash_attention)
    options.cb_eval = ctypes.cast(on_tensor, type(options.cb_eval))
    context = llama.llama_init_from_model(model, options)
    n_tokens = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    first = 0
    for n in steps:
        if recorder:
            recorder.begin_step()
        tokens = [(position * 37 + 11) % min(250, n_tokens) for position in range(first, first + n)]
        decode(context, tokens, first)
        first += n
    logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (n_tokens,))
    computed.logits = [float(x) for x in logits]
    llama.llama_free(context)
    computed.dependent = libedgeinfer.dependent_operation()
    return computed


def main() -> None:
    """Print what every model computes, with ggml's flash attention and without."""
    parser = argparse.ArgumentParser()
    parser.add_argument("variant")
    parser.add_argument("level")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--steps", type=lambda text: tuple(map(int, text.split(","))), default=_STEPS)
    options = parser.parse_args()
    _use_variant(options.variant)
    use_level(options.level)
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = False
    results = {}
    with options.record.open("wb") if options.record else contextlib.nullcontext() as file:
        for path in options.models:
            model = llama.llama_model_load_from_file(path.encode(), parameters)
            assert model, libllama.recent_reason()
            both = (compute(model, is_flash, options.steps, file) for is_flash in (True, False))
            results[path] = list(map(asdict, both))
            llama.llama_model_free(model)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
