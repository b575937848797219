"""The binding of llama.cpp: load its backends, read its log, describe its build.

Only this module imports llama_cpp. Call `lib()` before the first function of llama.cpp: it loads the
CPU backend, of which there is one library per instruction set. `L` is the same binding, for code that
has a model or context and thus knows that the backend is loaded.
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
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.errors import DecodeError, EngineError
from edgeinfer.runtime.llama import libedgeinfer

#: Environment variables that are set while libgomp and ggml are loaded. GOMP_SPINCOUNT: by default,
#: libgomp's threads spin for a millisecond at each barrier, which slows ggml as soon as another program
#: runs (docs/decisions/002-spin-count.md). GGML_NO_BACKTRACE: by default, ggml runs gdb if it aborts.
_WHILE_MAPPED = {"GOMP_SPINCOUNT": "1000", "GGML_NO_BACKTRACE": "1"}


@contextmanager
def _environment_while_mapped() -> Iterator[None]:
    """Set the unset variables of `_WHILE_MAPPED` only in the block: children must not inherit them."""
    variables = {name: value for name, value in _WHILE_MAPPED.items() if name not in os.environ}
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _import_binding() -> Any:
    """Import the module with llama.cpp's functions, without the package's classes, which take 45 ms."""
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
#: Folder of the package llama_cpp.
_PACKAGE = Path(L.__file__).resolve().parent
#: Log levels of ggml.h. A message of level CONT continues the line before.
_INFO = 2
_WARN = 3
_CONT = 5

#: Code that `decode` returns if a device throws an exception.
_THROWN = -100
#: Maximum number of arguments that `call` passes to a C function; a struct at the end does not count.
_MAX_ARGUMENTS = 6

#: Held while a backend is added, and while a context is made, which iterates over the backends.
registry_lock = threading.Lock()

_lock = threading.Lock()
_state: dict[str, Any] = {}
_log: deque[str] = deque(maxlen=200)
_listeners: list[list[str]] = []


class BuildInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The build of llama.cpp, and edgeinfer's kernels in it.

    `cpu_variant` is the library that was chosen for this CPU ("zen4"), "" if there is only one.
    `kernels` is the instruction set of edgeinfer's kernels ("v3", "v4", "i8mm" …), `kernels_version` a
    digest of their sources; both are "" if llama.cpp's own kernels are used.
    """

    binding_version: str
    llama_version: str
    ggml_version: str
    ggml_commit: str
    cpu_variant: str
    kernels: str
    kernels_version: str
    flags: tuple[str, ...]


def lib() -> Any:
    """Load the CPU backend once; return llama.cpp's functions. Raises EngineError if none runs here."""
    with _lock:
        if "ggml" not in _state:
            _capture_logs()
            _print_aborts()
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
    _state["log"] = callback  # keep the object: llama.cpp stores only a pointer to it
    L.llama_log_set(callback, ctypes.c_void_p(0))


def _print_aborts() -> None:
    """Let ggml print only its message when it aborts, and not run gdb on this process."""

    def on_abort(message: bytes) -> None:
        os.write(2, message + b"\n")

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(on_abort)
    _state["abort"] = callback  # keep the object: ggml stores only a pointer to it
    base_library().ggml_set_abort_callback(callback)


def recent_reason() -> str:
    """Return llama.cpp's last three warnings and errors, or "no reason given" without any."""
    return "; ".join(line for line in list(_log)[-3:] if line.strip(" .")) or "no reason given"


def log_callback() -> ctypes.c_void_p:
    """Return the address of the log function, so that another library can log to it."""
    return ctypes.cast(_state["log"], ctypes.c_void_p)


def clear_log() -> None:
    """Drop the messages logged so far, so that `recent_reason` is about the next call."""
    _log.clear()


@contextmanager
def listening() -> Iterator[list[str]]:
    """Yield a list that collects llama.cpp's log lines during the block, from all threads."""
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
    """Return the version of llama-cpp-python, from the name of its metadata folder."""
    folders = [
        p for parent in (_PACKAGE, _PACKAGE.parent) for p in parent.glob("llama_cpp_python-*.dist-info")
    ]
    return folders[0].name.removesuffix(".dist-info").partition("-")[2]


def variant_dirs() -> list[Path]:
    """Return the folders, of llama_cpp and the one-file program, that may contain CPU libraries."""
    frozen = getattr(sys, "_MEIPASS", None)
    places = [_PACKAGE.parent / "bin", _PACKAGE / "lib", _PACKAGE / "bin"]
    return places + ([Path(frozen) / "bin", Path(frozen)] if frozen else [])


def ggml_library() -> ctypes.CDLL:
    """Open libggml; declare the functions that this module calls."""
    # libllama uses libggml.so.0; the wheel's libggml.so is a copy with a separate registry
    path = library_dir() / "libggml.so.0"
    ggml = ctypes.CDLL(str(path if path.exists() else library_dir() / "libggml.so"))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_reg_count": (ctypes.c_size_t, []),
        "ggml_backend_load_all_from_path": (None, [ctypes.c_char_p]),
        "ggml_backend_load": (ctypes.c_void_p, [ctypes.c_char_p]),
        "ggml_backend_dev_by_type": (ctypes.c_void_p, [ctypes.c_int]),
    }
    return declare_functions(ggml, signatures)


def declare_functions(
    library: ctypes.CDLL, signatures: dict[str, tuple[Any, list[Any]]]
) -> ctypes.CDLL:
    """Set the result and argument types of functions, by their names; return the library."""
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
        raise EngineError(problem, hint="install edgeinfer again, then run `edgeinfer doctor`")
    return ggml


def load_backend(path: str) -> tuple[int, list[str]]:
    """Load a backend's library; return ggml's handle (0 on failure) and llama.cpp's log."""
    lib()
    with registry_lock, listening() as lines:
        return _state["ggml"].ggml_backend_load(os.fsencode(path)) or 0, lines


def is_expected_version() -> bool:
    """Return whether this is the llama.cpp whose private structs edgeinfer uses (`BUILT_FOR`)."""
    return binding_version() == libedgeinfer.BUILT_FOR


def own_library(name: str) -> ctypes.CDLL:
    """Open one of edgeinfer's C++ libraries (native/). Raises OSError as `open_library` does."""
    return libedgeinfer.open_library(name, binding_version())


def guard_calls() -> None:
    """From now on, let `decode` and `call` catch errors of devices, if native/guard.cpp is built.

    The errors are C++ exceptions and aborts, which would otherwise end the process.
    """
    if "guard" in _state:
        return
    try:
        guard = own_library("guard")
    except OSError:
        return
    pointer, word_pointer = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "edgeinfer_guard": (None, [pointer]),
        "edgeinfer_reason": (ctypes.c_char_p, []),
        "edgeinfer_guarded_call": (
            ctypes.c_bool,
            [pointer, word_pointer, ctypes.c_int, pointer, ctypes.c_size_t, word_pointer],
        ),
    }
    declare_functions(guard, signatures)
    guard.edgeinfer_guard(ctypes.cast(base_library().ggml_set_abort_callback, pointer))
    _state["guard"] = guard


def decode(context: Any, batch: Any) -> int:
    """Run llama_decode and return its code: 0 success, 1 no free KV cells, 2 aborted, below 0 fatal."""
    if "guard" not in _state:
        return int(L.llama_decode(context, batch))
    try:
        code = call(L.llama_decode, context, batch)
        call(L.llama_synchronize, context)  # devices report most errors only here
    except DecodeError:
        return _THROWN
    return ctypes.c_int32(code).value


def decode_error(code: int, work: str) -> DecodeError:
    """Make the error for a nonzero result `code` of `decode`; `work` names what was computed.

    Call this on the thread of `decode`, right after it: a device's failure is stored per thread.
    """
    thrown = f" ({_thrown()})" if code == _THROWN else ""
    return DecodeError(f"llama.cpp could not compute {work}: llama_decode returned {code}{thrown}")


def call(function: Any, *args: Any) -> Any:
    """Call a C function that returns a pointer, a number or nothing.

    The arguments are integers, pointers, and perhaps a struct at the end. After `guard_calls`, raises
    DecodeError if a device fails during the call.
    """
    guard = _state.get("guard")
    if guard is None:
        return function(*args)
    *plain, params = args if isinstance(args[-1], ctypes.Structure) else (*args, None)
    word_array, result = (ctypes.c_uint64 * _MAX_ARGUMENTS)(*map(_word, plain)), ctypes.c_uint64()
    address = ctypes.cast(function, ctypes.c_void_p)
    struct = (len(plain), ctypes.byref(params), ctypes.sizeof(params)) if params else (0, None, 0)
    if not guard.edgeinfer_guarded_call(address, word_array, *struct, result):
        raise DecodeError(f"llama.cpp's {function.__name__} failed: {_thrown()}")
    is_pointer = hasattr(function.restype, "contents")  # return the same type as an unguarded call
    return ctypes.cast(result.value, function.restype) if is_pointer else result.value


def _word(value: Any) -> int:
    return value if isinstance(value, int) else ctypes.cast(value, ctypes.c_void_p).value or 0


def _thrown() -> str:
    """Return the message of the exception that ended this thread's last call, and recent log errors."""
    thrown = _state["guard"].edgeinfer_reason().decode("utf-8", "replace")
    errors = [line.strip() for line in list(_log)[-3:] if re.search(r"error|lost|fail", line, re.I)]
    return "; ".join([thrown, *errors])


class GgufParams(ctypes.Structure):
    """The struct gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def base_library() -> ctypes.CDLL:
    """Open libggml-base; declare the functions that this module calls."""
    base = ctypes.CDLL(str(library_dir() / "libggml-base.so.0"))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_dev_get_props": (None, [pointer, pointer]),
        "ggml_backend_dev_backend_reg": (pointer, [pointer]),
        "ggml_backend_reg_get_proc_address": (pointer, [pointer, ctypes.c_char_p]),
        "ggml_backend_reg_dev_count": (size, [pointer]),
        "ggml_backend_reg_dev_get": (pointer, [pointer, size]),
        "ggml_version": (ctypes.c_char_p, []),
        "ggml_commit": (ctypes.c_char_p, []),
        "ggml_backend_cpu_buffer_type": (pointer, []),
        "ggml_backend_buffer_get_base": (pointer, [pointer]),
        "ggml_backend_buffer_get_size": (size, [pointer]),
        "gguf_init_from_file": (pointer, [ctypes.c_char_p, GgufParams]),
        "gguf_free": (None, [pointer]),
        "gguf_get_n_tensors": (ctypes.c_int64, [pointer]),
        "gguf_get_tensor_name": (ctypes.c_char_p, [pointer, ctypes.c_int64]),
        "gguf_get_tensor_size": (size, [pointer, ctypes.c_int64]),
    }
    return declare_functions(base, signatures)


@cache
def build_info() -> BuildInfo:
    """Describe the build of llama.cpp. Raises EngineError if no CPU backend runs on this CPU."""
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
    )
