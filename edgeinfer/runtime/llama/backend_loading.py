"""Load a backend library into this process, and explain a missing device.

Loading opens the machine's drivers. Most keep their device open until the process ends, and CRIU
refuses such a process: a process that will be parked must not call `load`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import sys
import threading
from contextlib import suppress
from glob import glob
from pathlib import Path

import msgspec

from edgeinfer.errors import DecodeError
from edgeinfer.platform.disk import sha256_of
from edgeinfer.runtime.llama import backends, libllama
from edgeinfer.runtime.llama.backends import (
    DRIVER,
    BackendFile,
    Build,
    Device,
    Kind,
    LoadedBackend,
    MissingBackend,
)

#: ggml_backend_dev_type.
_KINDS: dict[int, Kind] = {1: "gpu", 2: "integrated"}
#: Prefixes of descriptions of software devices: Mesa's and Google's.
_SOFTWARE = ("llvmpipe", "SwiftShader")
_VULKAN_LOADER = "libvulkan.so.1"
DRIVER_FIX = "use Vulkan with your distribution's driver; CUDA needs NVIDIA's driver 580 or newer"
#: Library that the linker did not find → what is missing, and what to do.
_MISSING = {
    DRIVER: (f"there is no NVIDIA driver ({DRIVER})", DRIVER_FIX),
    _VULKAN_LOADER: (
        f"there is no Vulkan loader ({_VULKAN_LOADER})",
        "install the Vulkan loader: apt-get install libvulkan1, or dnf install vulkan-loader",
    ),
}

_lock = threading.Lock()
_loaded: dict[str, tuple[int, LoadedBackend]] = {}


class _Props(ctypes.Structure):
    """ggml_backend_dev_props."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("free", ctypes.c_size_t),
        ("total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("id", ctypes.c_char_p),
        ("caps", ctypes.c_bool * 8),  # 5 in this version of ggml
    )


def this_build() -> Build:
    """Describe the llama.cpp of this process. Raises EngineError as `libllama.lib` does."""
    build = libllama.build_info()
    return Build(
        binding=build.binding_version,
        ggml=build.ggml_version,
        commit=build.ggml_commit,
        machine=backends.this_machine(),
    )


def load_driver() -> MissingBackend:
    """Load NVIDIA's driver; return why it cannot run the CUDA backend, with "" as reason if it can."""
    version = ctypes.c_int()
    reason, fix = _MISSING[DRIVER]
    with suppress(OSError, AttributeError):
        ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
        number = f"{version.value // 1000}.{version.value % 1000 // 10}"
        needed = "the library needs CUDA 13.0, which drivers from release 580 on support"
        old = f"the NVIDIA driver is too old: it supports CUDA up to {number}; {needed}"
        reason = "" if version.value >= 13_000 else old
    return MissingBackend(name=DRIVER, reason=reason, fix=fix, absent=True)


def load(name: str, tried: LoadedBackend | None = None) -> LoadedBackend | MissingBackend:
    """Load a backend's library into this process, and return it with its devices, or why it failed.

    The first call takes 50 to 200 ms. Later calls only update the free memory. The SHA-256 of a file
    that another process has `tried` is not computed again. Raises UsageError for an unknown backend,
    EngineError without a CPU backend.
    """
    with _lock:
        build = this_build()
        file = backends.find(name, build)
        if file is None:
            return backends.not_installed(name)
        if misfit := backends.misfit(file, build):
            return MissingBackend(name=name, reason=misfit, fix=file.fix)
        try:
            is_checked = not file.added or (tried and file == tried.file) or name in _loaded
            described = file.facts.sha256 if file.facts and not is_checked else ""
            path = Path(file.path)
            if described and described != sha256_of(path):
                reason = f"its SHA-256 is not the one that {backends.facts_path(path).name} has"
                return MissingBackend(name=name, reason=reason, fix=file.fix)
            return _load(file)
        except (DecodeError, OSError) as error:
            return MissingBackend(name=name, reason=str(error))


def _load(file: BackendFile) -> LoadedBackend | MissingBackend:
    if file.name in _loaded:
        handle, loaded = _loaded[file.name]
        return msgspec.structs.replace(loaded, devices=_devices(file.name, handle))
    beside = os.path.join(os.path.dirname(file.path), _VULKAN_LOADER)
    if file.name == "vulkan" and os.path.isfile(beside):
        ctypes.CDLL(beside)  # so that the linker resolves the backend's dependency to this file
    warning = find_cublas(file.path) if file.name == "cuda" else ""
    handle, lines = libllama.load_backend(file.path)
    devices = _devices(file.name, handle) if handle else ()
    if not devices:
        return _explain(file.name, " ".join(lines), is_loaded=bool(handle))
    loaded = LoadedBackend(file=file, devices=devices, warning=warning)
    _loaded[file.name] = handle, loaded
    return loaded


def _devices(backend: str, handle: int) -> tuple[Device, ...]:
    base = libllama.base_library()
    devices = []
    for index in range(base.ggml_backend_reg_dev_count(handle)):
        pointer = base.ggml_backend_reg_dev_get(handle, index)
        props = _Props()
        libllama.call(base.ggml_backend_dev_get_props, pointer, ctypes.addressof(props))
        description = props.description.decode("utf-8", "replace")
        is_software = description.startswith(_SOFTWARE)
        devices.append(
            Device(
                name=props.name.decode(),
                description=description,
                kind="software" if is_software else _KINDS.get(props.type, "accelerator"),
                backend=backend,
                id=(props.id or b"").decode(),
                total_bytes=props.total,
                free_bytes=min(props.free, props.total),  # some drivers subtract below 0
                pointer=pointer,
            )
        )
    return tuple(devices)


def _explain(name: str, log: str, *, is_loaded: bool) -> MissingBackend:
    """Explain by ggml's log why a library, loaded or not, has no device."""
    missing = re.search(r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file", log)
    if missing and not is_loaded:
        library = missing.group(1)
        for prefix, (reason, fix) in _MISSING.items():
            if library.startswith(prefix):
                return MissingBackend(name=name, reason=reason, fix=fix, absent=True)
        return MissingBackend(name=name, reason=f"it needs {library}, which is not on this machine")
    if name == "vulkan" and (is_loaded or "returned NULL" in log):
        return _no_vulkan_device()  # ggml leaves out software devices, which are slower than the CPU
    if "driver version is insufficient" in log:
        reason = "the NVIDIA driver is too old for this library"
        return MissingBackend(name=name, reason=reason, fix=DRIVER_FIX)
    if is_loaded:
        return MissingBackend(name=name, reason="no usable device", absent=True)
    if "returned NULL" in log:
        return MissingBackend(name=name, reason="its driver could not start")
    said = re.sub(r"^.*?failed to \w+ \S+: ", "", log)
    return MissingBackend(name=name, reason=said or "llama.cpp gave no reason")


def _no_vulkan_device() -> MissingBackend:
    closed = [
        node for node in sorted(glob("/dev/dri/renderD*")) if not os.access(node, os.R_OK | os.W_OK)
    ]
    if closed:
        reason = f"this user may not open {closed[0]}"
        fix = "sudo usermod -aG render,video $USER, and log in again"
    else:
        reason = "no Vulkan driver has a device here"
        fix = (
            "for AMD and Intel: apt-get install mesa-vulkan-drivers; for NVIDIA: its own driver, "
            "which in a container needs apt-get install libgl1 libegl1"
        )
    return MissingBackend(name="vulkan", reason=reason, fix=fix, absent=True)


#: Environment variable from which the CUDA backend reads the path of cuBLAS.
VARIABLE = "EDGEINFER_CUBLAS"
LIBRARY = "libcublas.so.13"
#: The one-file program cannot use installed wheels.
_CUBLAS_FIX = "install NVIDIA's package" + (
    "" if hasattr(sys, "_MEIPASS") else " or the wheel nvidia-cublas"
)
_SYSTEM = (
    "/usr/local/cuda/lib64",
    "/usr/local/cuda-13/lib64",
    "/opt/cuda/lib64",
    f"/usr/lib/{platform.machine()}-linux-gnu",
    "/usr/lib64",
)


def find_cublas(backend: str) -> str:
    """Find cuBLAS and set VARIABLE for the CUDA backend; return a warning if it is missing, or ""."""
    folders = [os.path.dirname(backend), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    wheels = importlib.util.find_spec("nvidia")  # the package that contains all of NVIDIA's wheels
    folders += [f"{place}/cu13/lib" for place in (wheels and wheels.submodule_search_locations) or ()]
    paths = [f"{folder}/{LIBRARY}" for folder in (*folders, *_SYSTEM) if folder]
    library = next(filter(os.path.isfile, (os.environ.get(VARIABLE, ""), *paths)), "")
    if library:
        os.environ[VARIABLE] = library
        return ""
    return f"cuBLAS 13 is not here ({LIBRARY}): F16, BF16 or F32 weights may stop at it; {_CUBLAS_FIX}"
