"""llama.cpp itself: its CPU variants, its log, and its build.

This is the only module that imports llama_cpp. The portable wheel has one library per instruction set
next to the package, and nothing loads them automatically. `lib()` loads one, once per process, before a
model is opened. `L` is the same binding for code that already holds a model, a context or a memory.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.errors import DecodeError, EngineError
from edgeinfer.runtime.llama import libedgeinfer

#: Environment variables that libgomp and ggml read when they are mapped. By default libgomp spins for a
#: millisecond at every barrier, which starves ggml's own threads as soon as another program runs
#: (docs/decisions/002-spin-count.md). ggml would run gdb on a process that ends by an exception.
_WHILE_MAPPED = {"GOMP_SPINCOUNT": "1000", "GGML_NO_BACKTRACE": "1"}


@contextmanager
def _environment_while_mapped() -> Iterator[None]:
    """Set the missing variables during the block, then remove them, so that no child inherits them."""
    variables = {name: value for name, value in _WHILE_MAPPED.items() if name not in os.environ}
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _import_binding() -> Any:
    """Import llama.cpp's functions without the package's classes, which take 45 ms."""
    spec = importlib.util.find_spec("llama_cpp") if "llama_cpp" not in sys.modules else None
    package = importlib.util.module_from_spec(spec) if spec else None
    if package is not None:
        sys.modules["llama_cpp"] = package
    from llama_cpp import llama_cpp as binding

    if package is not None:
        vars(package).update({**vars(binding), **vars(package)})
    return binding


with _environment_while_mapped():
    L: Any = _import_binding()
#: Folder of the binding.
_PACKAGE = Path(L.__file__).resolve().parent
#: llama.cpp's log levels (ggml.h); a line of level CONT continues the previous one.
_INFO = 2
_WARN = 3
_CONT = 5

#: Code that `decode` returns after a device's exception; most integers and pointers for `call`.
_THROWN = -100
_WORDS = 6

#: Held while a context is created, which iterates over ggml's backends, and while a backend is added.
registry_lock = threading.Lock()

_lock = threading.Lock()
_state: dict[str, Any] = {}
_log: deque[str] = deque(maxlen=200)
_listeners: list[list[str]] = []


class BuildInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The build of llama.cpp. `cpu_variant` "": one library serves every CPU.

    `kernels` is the level of the in-tree kernels in use (`libedgeinfer.level_of`), and
    `kernels_version` a digest of their sources; both are "" for llama.cpp's own.
    """

    binding_version: str
    llama_version: str
    ggml_version: str
    ggml_commit: str
    cpu_variant: str
    kernels: str
    kernels_version: str
    flags: tuple[str, ...]
    devices: tuple[str, ...]


def lib() -> Any:
    """Load the backends and capture the logs once. Raises EngineError without a CPU backend."""
    with _lock:
        if "ggml" not in _state:
            _capture_logs()
            _say_aborts()
            _state["ggml"] = _load_backends()
            _state["kernels"] = libedgeinfer.use_kernels(
                _state["ggml"], base_library(), binding_version()
            )
            L.llama_backend_init()
    return L


def _capture_logs() -> None:
    level = 0

    def on_line(line_level: int, text: bytes, _user: object) -> None:
        nonlocal level
        level = level if line_level == _CONT else line_level
        if level >= _WARN:
            _log.append(text.decode("utf-8", "replace").rstrip("\n"))
        if _listeners and level >= _INFO:
            line = text.decode("utf-8", "replace").rstrip("\n")
            for listener in _listeners:
                listener.append(line)

    callback = L.llama_log_callback(on_line)
    _state["log"] = callback  # the library keeps only the pointer, so keep the object
    L.llama_log_set(callback, ctypes.c_void_p(0))


def _say_aborts() -> None:
    """Print ggml's abort message, without running gdb on this process."""

    def on_abort(message: bytes) -> None:
        os.write(2, message + b"\n")

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(on_abort)
    _state["abort"] = callback  # keep the object, of which the library has only a pointer
    base_library().ggml_set_abort_callback(callback)


def recent_reason() -> str:
    """Return the last warnings and errors of llama.cpp, oldest first."""
    return "; ".join(line for line in list(_log)[-3:] if line.strip(" .")) or "no reason given"


def log_callback() -> ctypes.c_void_p:
    """Return the callback that logs llama.cpp's lines, for other libraries."""
    return ctypes.cast(_state["log"], ctypes.c_void_p)


def clear_log() -> None:
    """Clear the log before a call whose own messages are needed."""
    _log.clear()


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect llama.cpp's log during the block, from any thread."""
    lines: list[str] = []
    _listeners.append(lines)
    try:
        yield lines
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not lines]


def library_dir() -> Path:
    return _PACKAGE / "lib"


@cache
def binding_version() -> str:
    """Return the binding's version from the name of its metadata folder, which our wheel contains."""
    folders = [
        p for parent in (_PACKAGE, _PACKAGE.parent) for p in parent.glob("llama_cpp_python-*.dist-info")
    ]
    return folders[0].name.removesuffix(".dist-info").partition("-")[2]


def variant_dirs() -> list[Path]:
    """List the folders that may hold the CPU variants: next to the package, or in a frozen program."""
    frozen = getattr(sys, "_MEIPASS", None)
    places = [_PACKAGE.parent / "bin", _PACKAGE / "lib", _PACKAGE / "bin"]
    return places + ([Path(frozen) / "bin", Path(frozen)] if frozen else [])


def ggml_library() -> ctypes.CDLL:
    """Open libggml, with the functions that edgeinfer calls declared."""
    # libllama is linked against the soname; the wheel's libggml.so is a copy with another registry
    path = library_dir() / "libggml.so.0"
    ggml = ctypes.CDLL(str(path if path.exists() else library_dir() / "libggml.so"))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_reg_count": (ctypes.c_size_t, []),
        "ggml_backend_dev_count": (ctypes.c_size_t, []),
        "ggml_backend_load_all_from_path": (None, [ctypes.c_char_p]),
        "ggml_backend_load": (ctypes.c_void_p, [ctypes.c_char_p]),
        "ggml_backend_dev_get": (ctypes.c_void_p, [ctypes.c_size_t]),
        "ggml_backend_dev_by_type": (ctypes.c_void_p, [ctypes.c_int]),
    }
    return _declare_functions(ggml, signatures)


def _declare_functions(
    library: ctypes.CDLL, signatures: dict[str, tuple[Any, list[Any]]]
) -> ctypes.CDLL:
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _load_backends() -> ctypes.CDLL:
    ggml = ggml_library()
    for folder in variant_dirs():
        if ggml.ggml_backend_reg_count():
            break
        if any(folder.glob("libggml-cpu*.so")):
            ggml.ggml_backend_load_all_from_path(str(folder).encode())
    if not ggml.ggml_backend_reg_count():
        places = ", ".join(str(p) for p in variant_dirs())
        problem = f"llama.cpp has no CPU backend: no libggml-cpu*.so in {places} runs on this machine"
        raise EngineError(problem)
    return ggml


def load_backend(path: str) -> tuple[int, list[str]]:
    """Register a backend library; return ggml's handle (0 on failure) and the log."""
    lib()
    with registry_lock, listening() as lines:
        return _state["ggml"].ggml_backend_load(os.fsencode(path)) or 0, lines


def own_library(name: str) -> ctypes.CDLL:
    """Open a native/ library for the loaded llama.cpp. Raises OSError."""
    return libedgeinfer.open_library(name, binding_version())


def guard_calls() -> None:
    """Let native/guard.cpp catch devices' errors in `decode` and `call`. Called once.

    They are C++ exceptions and aborts, which would end the process.
    """
    if "guard" in _state:
        return
    try:
        guard = own_library("guard")
    except OSError:
        return
    pointer, words = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "edgeinfer_guard": (None, [pointer]),
        "edgeinfer_decode": (ctypes.c_int32, [pointer, pointer, *L.llama_decode.argtypes]),
        "edgeinfer_reason": (ctypes.c_char_p, []),
        "edgeinfer_call": (ctypes.c_bool, [pointer, words, words]),
        "edgeinfer_call_with": (
            ctypes.c_bool,
            [pointer, ctypes.c_int, words, pointer, ctypes.c_size_t, words],
        ),
    }
    _declare_functions(guard, signatures)
    guard.edgeinfer_guard(ctypes.cast(base_library().ggml_set_abort_callback, pointer))
    functions = (ctypes.cast(f, pointer) for f in (L.llama_decode, L.llama_synchronize))
    _state["decode"] = partial(guard.edgeinfer_decode, *functions)
    _state["guard"] = guard


def decode(context: Any, batch: Any) -> int:
    """Run llama_decode: 0, 1 without KV cells, 2 if aborted; negative is fatal."""
    return int(_state.get("decode", L.llama_decode)(context, batch))


def decode_error(code: int, work: str) -> DecodeError:
    """Make the error for a code of `decode` on this thread, with the device's message."""
    thrown = f" ({_thrown()})" if code == _THROWN else ""
    return DecodeError(f"llama_decode returned {code}{thrown} for {work}")


def call(function: Any, *args: Any) -> Any:
    """Call a function, guarded by `guard_calls`, with integers, pointers, and one structure at the end.

    It returns a pointer, a size, or nothing. Raises DecodeError if a device throws during the call.
    """
    guard = _state.get("guard")
    if guard is None:
        return function(*args)
    params = args[-1] if isinstance(args[-1], ctypes.Structure) else None
    plain = args if params is None else args[:-1]
    words, result = (ctypes.c_uint64 * _WORDS)(*map(_word, plain)), ctypes.c_uint64()
    address = ctypes.cast(function, ctypes.c_void_p)
    if params is None:
        has_returned = guard.edgeinfer_call(address, words, result)
    else:
        has_returned = guard.edgeinfer_call_with(
            address, len(plain), words, ctypes.byref(params), ctypes.sizeof(params), result
        )
    if not has_returned:
        raise DecodeError(f"{function.__name__}: {_thrown()}")
    return result.value


def _word(value: Any) -> int:
    return value if isinstance(value, int) else ctypes.cast(value, ctypes.c_void_p).value or 0


def _thrown() -> str:
    """Return the message thrown in this thread's last guarded call, and the errors logged with it."""
    thrown = _state["guard"].edgeinfer_reason().decode("utf-8", "replace")
    errors = [line.strip() for line in list(_log)[-3:] if re.search(r"error|lost|fail", line, re.I)]
    return "; ".join([thrown, *errors])


class GgufParams(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def base_library() -> ctypes.CDLL:
    """Open libggml-base, with the functions that edgeinfer calls declared."""
    base = ctypes.CDLL(str(library_dir() / "libggml-base.so.0"))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_dev_name": (ctypes.c_char_p, [pointer]),
        "ggml_backend_dev_description": (ctypes.c_char_p, [pointer]),
        "ggml_backend_dev_get_props": (None, [pointer, pointer]),
        "ggml_backend_dev_backend_reg": (pointer, [pointer]),
        "ggml_backend_reg_get_proc_address": (pointer, [pointer, ctypes.c_char_p]),
        "ggml_backend_reg_dev_count": (size, [pointer]),
        "ggml_backend_reg_dev_get": (pointer, [pointer, size]),
        "ggml_version": (ctypes.c_char_p, []),
        "ggml_commit": (ctypes.c_char_p, []),
        "ggml_backend_cpu_buffer_type": (pointer, []),
        "ggml_backend_buft_alloc_buffer": (pointer, [pointer, size]),
        "ggml_backend_buffer_clear": (None, [pointer, ctypes.c_uint8]),
        "ggml_backend_buffer_free": (None, [pointer]),
        "ggml_backend_buffer_get_base": (pointer, [pointer]),
        "ggml_backend_buffer_get_size": (size, [pointer]),
        "ggml_new_tensor_1d": (pointer, [pointer, ctypes.c_int, ctypes.c_int64]),
        "ggml_free": (None, [pointer]),
        "ggml_backend_tensor_alloc": (ctypes.c_int, [pointer, pointer, pointer]),
        "gguf_init_from_file": (pointer, [ctypes.c_char_p, GgufParams]),
        "gguf_free": (None, [pointer]),
        "gguf_get_n_tensors": (ctypes.c_int64, [pointer]),
        "gguf_get_tensor_name": (ctypes.c_char_p, [pointer, ctypes.c_int64]),
        "gguf_get_tensor_size": (size, [pointer, ctypes.c_int64]),
        "ggml_backend_tensor_get": (None, [pointer, pointer, size, size]),
        "ggml_backend_tensor_set": (None, [pointer, pointer, size, size]),
    }
    return _declare_functions(base, signatures)


def _device_names(ggml: ctypes.CDLL) -> tuple[str, ...]:
    base = base_library()
    devices = [ggml.ggml_backend_dev_get(i) for i in range(ggml.ggml_backend_dev_count())]
    return tuple(
        f"{base.ggml_backend_dev_name(d).decode()}: {base.ggml_backend_dev_description(d).decode()}"
        for d in devices
    )


@cache
def build_info() -> BuildInfo:
    """Describe the build for `doctor` and `version`. Raises EngineError as `lib` does."""
    llama = lib()
    base = base_library()
    system = llama.llama_print_system_info().decode()
    return BuildInfo(
        binding_version=binding_version(),
        llama_version=llama.llama_version().decode(),
        ggml_version=base.ggml_version().decode(),
        ggml_commit=base.ggml_commit().decode(),
        cpu_variant=libedgeinfer.variant_of(libedgeinfer.cpu_library()),
        kernels=_state["kernels"].level,
        kernels_version=_state["kernels"].version,
        flags=tuple(
            flag.strip().removesuffix(" = 1")
            for flag in system.split(":", 1)[-1].split("|")
            if flag.strip()
        ),
        devices=_device_names(_state["ggml"]),
    )
