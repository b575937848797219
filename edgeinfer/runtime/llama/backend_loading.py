"""Load a backend library into this process, and explain a missing device.

Loading opens the machine's drivers. Most drivers keep their device open until the process ends, and
CRIU cannot dump such a process: a process that will be parked must not call `load`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import platform
import re
import sys
import threading
from contextlib import suppress
from glob import glob
from pathlib import Path

from edgeinfer.errors import DecodeError
from edgeinfer.platform.disk import sha256_of
from edgeinfer.runtime.layer_plan import Device, Kind
from edgeinfer.runtime.llama import backends, libllama
from edgeinfer.runtime.llama.backends import (
    DRIVER,
    BackendFile,
    BackendOutcome,
    Build,
    LoadedBackend,
    MissingBackend,
)

_log = logging.getLogger("edgeinfer.gpu")
#: Value of ggml_backend_dev_type → kind of device. All other values count as "accelerator".
_KINDS: dict[int, Kind] = {1: "gpu", 2: "integrated"}
#: A device whose description begins with one of these names runs on the CPU (Mesa, Google).
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

#: Name of each backend that failed in this process → the error's message. Such a backend is not loaded
#: again, because a lost device stays lost until the process ends.
failed: dict[str, str] = {}

_lock = threading.Lock()
#: ggml's handle of each loaded backend that has devices, by the backend's name.
_handles: dict[str, int] = {}


class _Props(ctypes.Structure):
    """The struct ggml_backend_dev_props."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("free", ctypes.c_size_t),
        ("total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("id", ctypes.c_char_p),
        ("caps", ctypes.c_bool * 8),  # this version of ggml writes 5 of them
    )


def this_build() -> Build:
    """Describe this process's llama.cpp. Raises EngineError if no CPU backend runs on this CPU."""
    build = libllama.build_info()
    return Build(
        binding=build.binding_version,
        ggml=build.ggml_version,
        commit=build.ggml_commit,
        machine=backends.this_machine(),
    )


def check_driver() -> MissingBackend:
    """Load NVIDIA's driver; the result's `reason` says why it cannot run CUDA, "" if it can."""
    version = ctypes.c_int()
    reason, fix = _MISSING[DRIVER]
    with suppress(OSError, AttributeError):
        code = ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
        number = f"{version.value // 1000}.{version.value % 1000 // 10}"
        needed = "the library needs CUDA 13.0, which drivers from release 580 on support"
        reason = f"the NVIDIA driver is too old: it supports CUDA up to {number}; {needed}"
        if code or version.value <= 0:
            reason = f"{DRIVER} is not a working NVIDIA driver: it has no version (error {code})"
        elif version.value >= 13_000:
            reason = ""
    return MissingBackend(name=DRIVER, reason=reason, fix=fix, absent=True)


def load_after_probe(file: BackendFile, stop: threading.Event | None = None) -> BackendOutcome:
    """Load a backend's library into this process after a test in a separate process (`backends.ask`).

    If the test fails, or the backend failed earlier in this process, the library is not loaded, and the
    result says why. Raises EngineClosedError once `stop` is set.
    """
    if reason := failed.get(file.name):
        return MissingBackend(name=file.name, reason=f"failed before in this process: {reason}")
    libllama.guard_calls()
    answer = backends.ask(file.name, stop)
    if isinstance(answer, LoadedBackend):
        answer = load(file.name, answer)
    if isinstance(answer, MissingBackend) and file.added and not answer.absent:
        _log.warning("an added library is not used: %s: %s", answer.name, answer.reason)
    return answer


def load(name: str, probed: LoadedBackend | None = None) -> BackendOutcome:
    """Load a backend's library into this process, and return it with its devices, or why it failed.

    The first call takes 50 to 200 ms. Later calls only update the free memory. `probed` is an earlier
    result of `backends.ask`, so that the SHA-256 of an unchanged file is not computed again. Raises
    UsageError for an unknown backend, EngineError without a CPU backend.
    """
    with _lock:
        build = this_build()
        file = backends.find(name, build)
        if file is None:
            return backends.not_installed(name)
        try:
            problem = backends.misfit(file, build)
            is_checked = not file.added or (probed and file == probed.file) or name in _handles
            recorded = "" if problem or is_checked or not file.facts else file.facts.sha256
            if recorded and recorded != sha256_of(Path(file.path)):
                problem = f"its SHA-256 is not the one that libggml-{name}.json has"
            return MissingBackend(name=name, reason=problem, fix=file.fix) if problem else _load(file)
        except (DecodeError, OSError) as error:
            return MissingBackend(name=name, reason=str(error))


def _load(file: BackendFile) -> BackendOutcome:
    vulkan_loader = os.path.join(os.path.dirname(file.path), _VULKAN_LOADER)
    if file.name == "vulkan" and os.path.isfile(vulkan_loader):
        ctypes.CDLL(vulkan_loader)  # the backend then uses this copy
    warning = find_cublas(file.path) if file.name == "cuda" else ""
    lines: list[str] = []
    handle = _handles.get(file.name, 0)
    if not handle:
        handle, lines = libllama.load_backend(file.path)
    base = libllama.base_library()
    n_devices = base.ggml_backend_reg_dev_count(handle) if handle else 0
    if not n_devices:
        return _explain(file.name, " ".join(lines), is_loaded=bool(handle))
    _handles[file.name] = handle
    pointers = (base.ggml_backend_reg_dev_get(handle, i) for i in range(n_devices))
    devices = tuple(read_device(file.name, pointer) for pointer in pointers)
    return LoadedBackend(file=file, devices=devices, warning=warning)


def read_device(backend: str, pointer: int) -> Device:
    """Describe the device at `pointer` (a ggml_backend_dev_t). Raises DecodeError if it has failed."""
    props = _Props()
    libllama.call(libllama.base_library().ggml_backend_dev_get_props, pointer, ctypes.addressof(props))
    description = props.description.decode("utf-8", "replace")
    is_software = description.startswith(_SOFTWARE)
    return Device(
        name=props.name.decode(),
        description=description,
        kind="software" if is_software else _KINDS.get(props.type, "accelerator"),
        backend=backend,
        id=(props.id or b"").decode(),
        total_bytes=props.total,
        free_bytes=min(props.free, props.total),  # some drivers report an underflow, a huge number
        pointer=pointer,
    )


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
        return _no_vulkan_device()  # ggml lists no software devices
    if "driver version is insufficient" in log:
        reason = "the NVIDIA driver is too old for this library"
        return MissingBackend(name=name, reason=reason, fix=DRIVER_FIX)
    if is_loaded:
        return MissingBackend(name=name, reason="no usable device", absent=True)
    if "returned NULL" in log:
        return MissingBackend(name=name, reason="its driver could not start")
    message = re.sub(r"^.*?failed to \w+ \S+: ", "", log)
    return MissingBackend(name=name, reason=message or "llama.cpp gave no reason")


def _no_vulkan_device() -> MissingBackend:
    nodes = sorted(glob("/dev/dri/renderD*"))
    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        reason = f"this user may not open {closed[0]}"
        fix = "sudo usermod -aG render,video $USER, and log in again"
    else:
        reason = "no Vulkan driver has a device here"
        fix = "for AMD and Intel: apt-get install mesa-vulkan-drivers; for NVIDIA: its own driver, "
        fix += "which in a container needs apt-get install libgl1 libegl1"
    return MissingBackend(name="vulkan", reason=reason, fix=fix, absent=True)


#: Environment variable from which the CUDA backend reads the path of cuBLAS.
_CUBLAS_VARIABLE = "EDGEINFER_CUBLAS"
_CUBLAS = "libcublas.so.13"
#: Second way to install cuBLAS; "" in the one-file program, which cannot use installed wheels.
_WHEEL = "" if hasattr(sys, "_MEIPASS") else " or the wheel nvidia-cublas"
_CUBLAS_FIX = f"install NVIDIA's package{_WHEEL}"
_SYSTEM = "/usr/local/cuda/lib64 /usr/local/cuda-13/lib64 /opt/cuda/lib64 /usr/lib64".split()


def find_cublas(backend_path: str) -> str:
    """Find cuBLAS for the CUDA backend's library; return a warning if it is missing, otherwise "".

    If cuBLAS is found, the environment variable EDGEINFER_CUBLAS is set to its path.
    """
    folders = [os.path.dirname(backend_path), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    wheels = importlib.util.find_spec("nvidia")  # the package that contains all of NVIDIA's wheels
    folders += [f"{place}/cu13/lib" for place in (wheels and wheels.submodule_search_locations) or ()]
    folders += [*_SYSTEM, f"/usr/lib/{platform.machine()}-linux-gnu"]
    paths = [f"{folder}/{_CUBLAS}" for folder in folders if folder]
    library = next(filter(os.path.isfile, (os.environ.get(_CUBLAS_VARIABLE, ""), *paths)), "")
    if library:
        os.environ[_CUBLAS_VARIABLE] = library
        return ""
    return f"{_CUBLAS} is missing: models with F16, BF16 or F32 weights may fail; {_CUBLAS_FIX}"
