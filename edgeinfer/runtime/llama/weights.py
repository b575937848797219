"""Load a model's weights: mapped for the CPU, or copied to devices."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edgeinfer.errors import DecodeError, ModelLoadError
from edgeinfer.platform.machine import read_memory
from edgeinfer.runtime.layer_plan import LayerPlan
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.cells import replace_function

#: Called with a stage of loading and the fraction of the stage that is done; returns False to stop.
Progress = Callable[[str, float | None], object]

#: Value of the C constant GGML_BACKEND_DEVICE_TYPE_CPU.
_CPU = 0
#: Type of the C function get_proc_address of a ggml_backend_reg.
_GET_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
#: Matches llama.cpp's names of expert tensors.
_EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"


class _Registry(ctypes.Structure):
    """The beginning of the struct ggml_backend_reg."""

    _names = "get_name get_device_count get_device get_proc_address"
    _fields_ = (("version", ctypes.c_int), *((name, ctypes.c_void_p) for name in _names.split()))


class _Override(ctypes.Structure):
    """The struct llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def tensor_sizes(paths: Sequence[str]) -> dict[str, int]:
    """Return the size (bytes) of each tensor in GGUF files by name. Raises ModelLoadError."""
    base, sizes = libllama.base_library(), {}
    for path in paths:
        gguf = base.gguf_init_from_file(os.fsencode(path), libllama.GgufParams(no_alloc=True))
        if not gguf:
            hint = "pull the model again, or give the path of a GGUF file"
            raise ModelLoadError(f"{path} cannot be read as a GGUF file", hint=hint)
        for i in range(base.gguf_get_n_tensors(gguf)):
            name = base.gguf_get_tensor_name(gguf, i).decode("utf-8", "replace")
            sizes[name] = base.gguf_get_tensor_size(gguf, i)
        base.gguf_free(gguf)
    return sizes


class Placement:
    """Which layers llama.cpp loads to which devices; `pointers` are ggml_backend_dev_t.

    Without pointers, all layers stay on the CPU: llama.cpp gets an empty list of devices, because
    without a list it opens every device. The object must live until the model is loaded.
    """

    def __init__(self, pointers: Sequence[int], layer_plan: LayerPlan | None = None) -> None:
        self._devices = (ctypes.c_void_p * (len(pointers) + 1))(*pointers, None)
        self._n_layers = layer_plan.n_layers if layer_plan and pointers else 0
        n_shares = max(len(pointers), int(libllama.lib().llama_max_devices()))
        self._shares = (ctypes.c_float * n_shares)(*(layer_plan.split if layer_plan else ()))
        self._overrides = _overrides(layer_plan.n_without_experts if layer_plan and pointers else 0)

    def write(self, params: Any) -> None:
        """Set the device fields of `params` (llama_model_params)."""
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        params.n_gpu_layers = self._n_layers
        if self._n_layers:
            params.tensor_split = ctypes.cast(self._shares, type(params.tensor_split))
        if self._overrides:
            params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)


def _overrides(n_without_experts: int) -> Any:
    if not n_without_experts:
        return None
    numbers = "|".join(map(str, range(n_without_experts)))
    pattern = rf"blk\.({numbers})\.{_EXPERTS}".encode()
    cpu = libllama.base_library().ggml_backend_cpu_buffer_type()
    return (_Override * 2)(_Override(pattern, cpu), _Override(None, None))


def open_model(
    paths: tuple[str, ...], progress: Progress | None = None, placement: Placement | None = None
) -> Any:
    """Load GGUF files, by default for the CPU; return llama.cpp's pointer. Raises ModelLoadError."""
    llama = libllama.lib()
    for path in paths:
        if not os.path.isfile(path):
            hint = "pull the model (`edgeinfer pull MODEL`), or correct the path"
            raise ModelLoadError(f"there is no model file {path}", hint=hint)
    params = llama.llama_model_default_params()
    params.load_mode = llama.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = False  # repacking would copy the weights (decision 099)
    placement = placement or Placement(())
    placement.write(params)
    hook = _progress_hook(progress)
    params.progress_callback = hook
    libllama.clear_log()
    names = (ctypes.c_char_p * len(paths))(*(os.fsencode(path) for path in paths))
    is_too_large = sum(map(os.path.getsize, paths)) > read_memory().available_bytes
    has_known_structs = libllama.is_expected_version()
    with _without_prefetch() if is_too_large and has_known_structs else contextlib.nullcontext():
        model = libllama.call(llama.llama_model_load_from_splits, names, len(paths), params)
    if not model:
        problem = f"llama.cpp could not load {paths[0]}: {libllama.recent_reason()}"
        hint = "pull the model again if the file is damaged; otherwise use another (`edgeinfer list`)"
        raise ModelLoadError(problem, hint=hint)
    return model


@contextlib.contextmanager
def _without_prefetch() -> Iterator[None]:
    """Keep llama.cpp from reading the mapped files at once, by pretending that the machine has NUMA."""
    device = libllama.ggml_library().ggml_backend_dev_by_type(_CPU)
    registry = _Registry.from_address(libllama.base_library().ggml_backend_dev_backend_reg(device))
    original = _GET_FUNCTION(registry.get_proc_address)
    yes = ctypes.CFUNCTYPE(ctypes.c_bool)(lambda: True)
    replaced = {b"ggml_backend_cpu_is_numa": ctypes.cast(yes, ctypes.c_void_p).value}
    get_function = _GET_FUNCTION(lambda address, name: replaced.get(name) or original(address, name))
    with replace_function(registry, "get_proc_address", get_function):
        yield


def _progress_hook(progress: Progress | None) -> Any:
    shown = -1

    def report(fraction: float, _user: object) -> bool:
        nonlocal shown
        percent = int(fraction * 100)
        if progress and percent != shown:
            shown = percent
            return progress("loading weights", fraction) is not False
        return True

    return libllama.lib().llama_progress_callback(report)


def free_model(model: Any) -> None:
    """Free a model of `open_model`. Memory of a lost device stays allocated."""
    with contextlib.suppress(DecodeError):
        libllama.call(libllama.L.llama_model_free, model)
