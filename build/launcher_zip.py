"""Write the launcher and every module that it may import to an uncompressed zip of byte code.

The launcher's Python has no other standard library: it can import only from this zip, from libpython
and from the application's `lib-dynload`. PyInstaller's module graph finds the modules, also those that
are imported inside functions.
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
#: Modules with which the search begins. Python itself needs the codecs before its first import.
CODECS = [f"encodings.{name}" for name in ("utf_8", "ascii", "latin_1", "aliases", "idna")]
ROOTS = ["edgeinfer.shipping.shipped", "edgeinfer.launcher", *CODECS]
#: Modules that the launcher never imports, although modules in the graph name them.
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
    """Map the name of every Python module that the launcher may import to its source file."""
    path = [str(root), *(p for p in sys.path if p and p != str(root))]
    graph = modulegraph.ModuleGraph(path, excludes=EXCLUDES)
    for name in ROOTS:
        graph.import_hook(name)
    sources: dict[str, Path] = {}
    for node in graph.iter_graph():
        if isinstance(node, (modulegraph.SourceModule, modulegraph.Package)) and str(
            node.filename
        ).endswith(".py"):
            sources[node.identifier] = Path(node.filename)
    return dict(sorted(sources.items()))


def extensions(root: Path = ROOT) -> set[str]:
    """Return the names of the extension modules (`.so`) that the launcher may import."""
    path = [str(root), *(p for p in sys.path if p and p != str(root))]
    graph = modulegraph.ModuleGraph(path, excludes=EXCLUDES)
    for name in ROOTS:
        graph.import_hook(name)
    return {n.identifier for n in graph.iter_graph() if type(n).__name__ == "Extension"}


def write(out: Path, root: Path = ROOT) -> int:
    """Write the zip, without paths and times; return the number of modules in it."""
    sources = modules(root)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, source in sources.items():
            inside = name.replace(".", "/") + ("/__init__" if source.name == "__init__.py" else "")
            code = compile(source.read_bytes(), f"{inside}.py", "exec", dont_inherit=True, optimize=2)
            archive.writestr(zipfile.ZipInfo(f"{inside}.pyc", (1980, 1, 1, 0, 0, 0)), _pyc(code))
    return len(sources)


def _pyc(code: CodeType) -> bytes:
    """Return an unchecked hash-based .pyc, which Python compares with no source file.

    marshal's output depends on which objects have other references and which strings are interned. For
    equal bytes in each process, all objects get a reference, and one-letter strings are interned.
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
