"""Map a model's weights, and touch their pages beside what else a start does.

llama.cpp populates its mapping (MAP_POPULATE): 0.2 s for 4 GB that are in the page cache, on one core
and before anything else. Here a thread does that while the engine is imported and the context made.
What is not cached is populated as ever: that reads the file in order.

llama.cpp has no option for this, but does not populate on a machine with several NUMA nodes. It asks
ggml's CPU backend, by a function that the backend's table names: for the time of one load, that answer
is yes. The table's entry is found by probing, as those of `sparse_buffers`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from edgeinfer.errors import ModelLoadError
from edgeinfer.platform.page_cache import is_cold
from edgeinfer.runtime.llama import libllama
from edgeinfer.runtime.llama.mappings import NORMAL, POPULATE_READ, Range, advise, mapped_weights
from edgeinfer.runtime.llama.sparse_buffers import Pointer, find_entry, replaced, table
from edgeinfer.runtime.memory_plan.offload import Offload

Progress = Callable[[str, float | None], None]

_ADDRESS = ctypes.CFUNCTYPE(Pointer, Pointer, ctypes.c_char_p)
_IS_NUMA = ctypes.CFUNCTYPE(ctypes.c_bool)
_NAME = b"ggml_backend_cpu_is_numa"
#: ggml's number of the kind of device, and the pointers of a backend's table.
_CPU, _ENTRIES = 0, 6
#: For so long (13 ms) other threads wait if they map or unmap memory.
_PIECE_BYTES = 64 << 20


#: llama.cpp's names of the tensors that are a layer's experts.
_EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class Placement:
    """The device parameters of a model for `offload` on `pointers` (ggml_backend_dev_t).

    Without pointers it is all the CPU's: an empty list of devices, because llama.cpp creates each that
    it knows even for no layers. llama.cpp keeps pointers to this object's memory while it loads.
    """

    def __init__(self, pointers: Sequence[int], offload: Offload | None = None) -> None:
        self._devices = (ctypes.c_void_p * (len(pointers) + 1))(*pointers, None)
        self._n_layers = offload.n_layers if offload and pointers else 0
        n_shares = max(len(pointers), int(libllama.lib().llama_max_devices()))
        self._shares = (ctypes.c_float * n_shares)(*(offload.split if offload else ()))
        self._overrides = _overrides(offload.n_without_experts if offload and pointers else 0)

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


def check_files(paths: tuple[str, ...]) -> None:
    """Raise ModelLoadError naming the file that is missing."""
    for path in paths:
        if not os.path.isfile(path):
            raise ModelLoadError(f"{path} is not there")


def open_model(
    paths: tuple[str, ...], progress: Progress | None = None, placement: Placement | None = None
) -> Any:
    """Map the weights, on no device without a `placement`. Raises ModelLoadError."""
    llama = libllama.lib()
    check_files(paths)
    params = llama.llama_model_default_params()
    params.load_mode = llama.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = False  # repacked weights would be a second copy (decision 099)
    placement = placement or Placement(())
    placement.write(params)
    hook = _progress_hook(progress)
    params.progress_callback = hook
    libllama.clear_log()
    names = (ctypes.c_char_p * len(paths))(*(os.fsencode(path) for path in paths))
    with _unpopulated(paths):
        model = llama.llama_model_load_from_splits(names, len(paths), params)
    if not model:
        raise ModelLoadError(f"llama.cpp could not load {paths[0]}: {recent_reason()}")
    return model


def _progress_hook(progress: Progress | None) -> Any:
    shown = -1

    def report(fraction: float, _user: object) -> bool:
        nonlocal shown
        percent = int(fraction * 100)
        if progress and percent != shown:
            shown = percent
            progress("loading weights", fraction)
        return True

    return libllama.lib().llama_progress_callback(report)


def recent_reason() -> str:
    """Return the last lines of llama.cpp's log."""
    return "; ".join(libllama.recent_log(3)) or "no reason given"


def free_model(model: Any) -> None:
    """Free what `open_model` returned."""
    libllama.L.llama_model_free(model)


@contextlib.contextmanager
def _unpopulated(paths: Sequence[str]) -> Iterator[None]:
    """Populate what llama.cpp maps of these files meanwhile in a thread afterwards, if it is cached."""
    found = _find()
    if found is None or not _are_cached(paths):
        yield
        return
    entries, number = found
    original = _ADDRESS(entries[number])

    def address(registry: int, name: bytes) -> int | None:
        return ctypes.cast(_YES, Pointer).value if name == _NAME else original(registry, name)

    with replaced(entries, number, _ADDRESS(address)):
        yield
    threading.Thread(target=_populate, args=[paths], name="populate", daemon=True).start()


def _populate(paths: Sequence[str]) -> None:
    """Touch every page. Memory that was unmapped meanwhile is left out."""
    weights = [Range(area.low, area.high) for area in mapped_weights() if area.path in paths]
    advise(weights, NORMAL)  # with NUMA nodes llama.cpp advises random access
    for low, high in weights:
        pieces = (Range(at, min(at + _PIECE_BYTES, high)) for at in range(low, high, _PIECE_BYTES))
        advise(pieces, POPULATE_READ)


def _are_cached(paths: Sequence[str]) -> bool:
    try:
        return not any(map(is_cold, paths))
    except OSError:  # a file system that does not tell
        return False


_YES = _IS_NUMA(lambda: True)


@cache
def _find() -> tuple[Any, int] | None:
    """Return the CPU backend's table, and which of its entries gives addresses by name."""
    if sys.platform != "linux":
        return None
    base, ggml = libllama.base_library(), libllama.ggml_library()
    registry = base.ggml_backend_dev_backend_reg(ggml.ggml_backend_dev_by_type(_CPU))
    entries = table(registry, _ENTRIES)
    number = find_entry(
        entries, _ADDRESS, lambda: base.ggml_backend_reg_get_proc_address(registry, _NAME)
    )
    return None if number is None else (entries, number)
