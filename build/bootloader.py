"""Compile PyInstaller's bootloader with the `main` of `handover.c`, which runs first.

The bootloader's sources have the version of the PyInstaller in this environment; pip fetches them once
into the build cache. The only edit renames their `main`. Compiling takes about 4 s on 2 cores, once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import floor

HANDOVER = Path(__file__).with_name("handover.c")
#: Files on which the compiled bootloader depends, in addition to PyInstaller's version.
SOURCES = [HANDOVER, floor.SOURCE, Path(floor.__file__), Path(__file__)]
MAIN = "\nmain(int argc, char **argv)\n"
#: Compiler flags. Without a build-id and paths, equal sources give equal bytes.
FLAGS = [
    "-O2",
    "-std=gnu99",
    "-s",
    "-fno-ident",
    "-ffile-prefix-map={src}=.",
    "-Wl,--build-id=none",
    "-Wl,-z,now",
]


def cache_dir() -> Path:
    """Return the folder of downloads and build results that later builds use again."""
    named = os.environ.get("EDGEINFER_BUILD_CACHE")
    return (
        Path(named)
        if named
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgeinfer-build"
    )


def build(cache: Path | None = None) -> Path:
    """Return the compiled bootloader; compile only if PyInstaller or `SOURCES` have changed."""
    version = importlib.metadata.version("pyinstaller")
    key = hashlib.sha256(b"".join(p.read_bytes() for p in SOURCES)).hexdigest()[:16]
    folder = (cache or cache_dir()) / "bootloader"
    finished = folder / f"run-{version}-{key}"
    if not finished.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source = _unpack(_sdist(folder, version), Path(scratch))
            _compile(source, Path(scratch) / "run")
            os.replace(Path(scratch) / "run", finished)
    return finished


def _sdist(folder: Path, version: str) -> Path:
    name = folder / f"pyinstaller-{version}.tar.gz"
    if not name.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "pyinstaller"]
        # pip compiles the bootloader to get the sdist's metadata: here, too, with the sdist's own zlib
        own_zlib = {**os.environ, "PYI_STATIC_ZLIB": "1"}
        subprocess.run([*pip, "-d", folder, f"pyinstaller=={version}"], check=True, env=own_zlib)
    return name


def _unpack(sdist: Path, scratch: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch)  # without filter=, which Python 3.11.2 lacks; pip checked the hash
    source = next(scratch.glob("pyinstaller-*/bootloader"))
    main = source / "src/main.c"
    text = main.read_text()
    if text.count(MAIN) != 1:
        raise SystemExit(f"{main} has changed: no single {MAIN.strip()!r} to rename")
    main.write_text(text.replace(MAIN, MAIN.replace("main", "pyinstaller_main")))
    for part in (HANDOVER, floor.SOURCE):
        shutil.copy(part, source / "src")
    return source


def _compile(source: Path, out: Path) -> None:
    """Compile as PyInstaller's wscript does for a release on 64-bit Linux, with its copy of zlib."""
    flags = [flag.format(src=source) for flag in FLAGS]
    zlib = [str(p) for p in sorted(source.glob("zlib/*.c"))]
    files = [str(p) for p in sorted(source.glob("src/*.c"))]
    have = [
        f"-DHAVE_{name}=1"
        for name in ("UNISTD_H", "UNSETENV", "MKDTEMP", "DIRNAME", "BASENAME", "WCSDUP")
    ]
    defines = ["-DNDEBUG", "-D_REENTRANT", "-D_FILE_OFFSET_BITS=64", "-U_FORTIFY_SOURCE", *have]
    includes = [f"-I{source / 'src'}", f"-I{source / 'zlib'}"]
    command = [
        os.environ.get("CC", "cc"),
        *flags,
        *defines,
        *includes,
        *files,
        *zlib,
        "-o",
        str(out),
        "-Wl,--no-as-needed",  # libc before 2.34 has these two as separate libraries
        "-l:libdl.so.2",
        "-l:libpthread.so.0",
    ]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(
            "error: the bootloader did not compile\n\nhint: install gcc and libc6-dev, or see gcc's "
            "messages above"
        )
    floor.lower(out, link=False)


if __name__ == "__main__":
    print(build())
