"""The launcher and every module it may import, as one uncompressed zip of byte code.

The launcher's Python has no standard library beside it: what is not in this zip, built into libpython
or in the application's `lib-dynload` cannot be imported. PyInstaller's module graph finds the modules,
deferred imports included.
"""

from __future__ import annotations

import importlib.util
import marshal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from PyInstaller.lib.modulegraph import modulegraph

ROOT = Path(__file__).parents[1]
#: Modules the launcher starts from; Python itself needs the codecs before anything is imported.
CODECS = [f"encodings.{name}" for name in ("utf_8", "ascii", "latin_1", "aliases", "idna")]
ROOTS = ["edgeinfer.shipping.shipped", "edgeinfer.launcher", *CODECS]
#: Never reached by the launcher, though something in the graph names them.
EXCLUDES = [
    "edgeinfer.cli",
    "edgeinfer.runtime",
    "edgeinfer.server",
    "edgeinfer.tui",
    "edgeinfer.chat",
    "edgeinfer.models",
    "edgeinfer.config.config_file",
    "platformdirs",
    "msgspec",
    "rich",
    "tkinter",
    "pydoc",
    "unittest",
    "doctest",
    "test",
    "ssl",
    "http",
    "email",
    "xml",
    "asyncio",
    "multiprocessing",
    "pdb",
    "sqlite3",
    "distutils",
    "ntpath",
    "nturl2path",
    "_winapi",
    "msvcrt",
    "winreg",
    "urllib.request",
    "ctypes.macholib",
    "ctypes.wintypes",
]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Name → source of every Python module the launcher may import."""
    path = [str(root), *(p for p in sys.path if p and p != str(root))]
    graph = modulegraph.ModuleGraph(path, excludes=EXCLUDES)
    for name in ROOTS:
        graph.import_hook(name)
    found: dict[str, Path] = {}
    for node in graph.iter_graph():
        if isinstance(node, (modulegraph.SourceModule, modulegraph.Package)) and str(
            node.filename
        ).endswith(".py"):
            found[node.identifier] = Path(node.filename)
    return dict(sorted(found.items()))


def extensions(root: Path = ROOT) -> set[str]:
    """Return the extension modules (`.so`) that the launcher may import, all of the application."""
    path = [str(root), *(p for p in sys.path if p and p != str(root))]
    graph = modulegraph.ModuleGraph(path, excludes=EXCLUDES)
    for name in ROOTS:
        graph.import_hook(name)
    return {n.identifier for n in graph.iter_graph() if type(n).__name__ == "Extension"}


def write(out: Path, root: Path = ROOT) -> int:
    """Write the zip; returns how many modules are in it. Equal sources give equal bytes: no paths, no
    times.
    """
    found = modules(root)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, source in found.items():
            inside = name.replace(".", "/") + ("/__init__" if source.name == "__init__.py" else "")
            code = compile(source.read_bytes(), f"{inside}.py", "exec", dont_inherit=True, optimize=2)
            archive.writestr(zipfile.ZipInfo(f"{inside}.pyc", (1980, 1, 1, 0, 0, 0)), _pyc(code))
    return len(found)


def _pyc(code: CodeType) -> bytes:
    """Compile to an unchecked hash-based .pyc: Python compares it with no source file.

    marshal marks what has further references and what is interned, which depends on the process: here
    all of it has, and so are the one-letter strings, which a process has once.
    """
    _held = list(_parts(code))
    for number in range(256):
        sys.intern(chr(number))
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)


def _parts(value: object) -> Iterator[object]:
    yield value
    if isinstance(value, CodeType):
        names = (value.co_names, value.co_varnames, value.co_cellvars, value.co_freevars)
        own = (value.co_filename, value.co_name, value.co_qualname)
        value = (value.co_consts, *names, *own, value.co_linetable, value.co_exceptiontable)
    if isinstance(value, (tuple, frozenset)):
        for part in value:
            yield from _parts(part)


if __name__ == "__main__":
    print(*modules(), sep="\n")
