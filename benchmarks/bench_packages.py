"""Every package of a release in a bare root: install, use, resume, update, go back, remove.

    bench_packages.py [--roots FOLDER] [--work FOLDER] [--out bench-out]

Needs root, `make release VERSION=`, debootstrap and rpm. `.deb`: Debian 11 and 13. `.rpm`: rpm's own program
installs it into Debian 11's files, without its dependencies, which only an rpm distribution could
know. Wheel: pipx and uv in Debian 13 with Python, pipx and CRIU of its own; what the wheel needs is
downloaded here and installed there without a network. Programs run as an ordinary user behind a
pivot_root; the newer version is the same program under another number. `--roots` keeps what debootstrap
made. The table goes to bench-out/packages.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / folder) for folder in (".", "build", "tests/made")]
os.environ.setdefault("SOURCE_DATE_EPOCH", "1577836800")

import made_shipped  # noqa: E402  the folders above come first
import publish  # noqa: E402
from common import ROOT, add_out, model_path, write_figure  # noqa: E402

from edgeinfer import __version__  # noqa: E402
from edgeinfer.shipping import payload  # noqa: E402

RELEASE = publish.OUT
NEWER = "999.0.0"
UID = 1000
HOME = "/home/person"
MODEL = "small"
#: pip finds wheels there alone.
ALONE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
#: Bare roots: Debian's suite, and packages beyond the minimum.
ROOTS = {
    "Debian 11": ("bullseye", ""),
    "Debian 13": ("trixie", ""),
    "Debian 13, Python": ("trixie", "python3-venv,pipx,criu,ca-certificates"),
}


def call(*command: str | Path, check: bool = True, **options: str) -> str:
    """Run a command; return both its outputs. Raises SystemExit with them if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        env=os.environ | {"LANG": "C.UTF-8"} | options,
    )
    if check and done.returncode:
        raise SystemExit(f"error: {' '.join(map(str, command))}: {done.stdout}")
    return done.stdout


class BareRoot:
    """A copy of a bare root with an ordinary user and the small model."""

    def __init__(self, name: str, roots: Path, work: Path) -> None:
        kept = roots / name.lower().replace(",", "").replace(" ", "-")
        if not kept.is_dir():
            suite, more = ROOTS[name]
            command = ["debootstrap", "--variant=minbase", *([f"--include={more}"] if more else [])]
            call(*command, suite, kept.with_suffix(".new"))
            kept.with_suffix(".new").rename(kept)
        self.folder = Path(tempfile.mkdtemp(prefix="root-", dir=work))
        call("cp", "-a", f"{kept}/.", self.folder)
        with (self.folder / "etc/passwd").open("a") as file:
            file.write(f"person:x:{UID}:{UID}::{HOME}:/bin/bash\n")
        (self.folder / HOME[1:]).mkdir()
        os.chown(self.folder / HOME[1:], UID, UID)
        shutil.copy(model_path("smollm2"), self.folder / "srv/small.gguf")
        (self.folder / "srv/small.gguf").chmod(0o644)
        self.before = self.files()

    def as_root(self, *command: str) -> str:
        return call("chroot", self.folder, *command, HOME="/root", DEBIAN_FRONTEND="noninteractive")

    def as_person(self, *command: str, check: bool = True) -> str:
        bare = [sys.executable, str(ROOT / "tests/binary/bare.py"), str(self.folder), "--uid", str(UID)]
        path = f"{HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin"
        return call(*bare, "--", "/usr/bin/env", *command, check=check, HOME=HOME, PATH=path, **ALONE)

    def files(self) -> set[str]:
        """List the files of the system; a person's home, what apt keeps, and logs are none of a package's."""
        apart = "home proc dev tmp srv root usr/local/share usr/lib/sysimage".split()
        apart += [f"var/{name}" for name in ("cache", "log", "lib/apt", "lib/dpkg", "lib/rpm")]
        found = set()
        for at, folders, names in os.walk(self.folder):
            here = os.path.relpath(at, self.folder)
            folders[:] = [name for name in folders if os.path.normpath(f"{here}/{name}") not in apart]
            found |= {os.path.normpath(f"{here}/{name}") for name in [*names, *folders]}
        return found


class Deb:
    suffix = ".deb"
    root_names: tuple[str, ...] = ("Debian 11", "Debian 13")
    how = "apt-get install ./FILE"

    def __init__(self, root: BareRoot) -> None:
        self.root = root

    def install(self, package: Path) -> None:
        shutil.copy(package, self.root.folder / "srv")
        options = ("-qq", "-y", "--allow-downgrades", "-o", "APT::Sandbox::User=root")
        self.root.as_root("apt-get", "install", *options, f"/srv/{package.name}")

    def version(self) -> str:
        """The installed version, by what is in the shipped file."""
        return payload.open_shipped(self.root.folder / "usr/bin/edgeinfer").app.rpartition("-")[0]

    def remove(self) -> None:
        self.root.as_root("apt-get", "purge", "-qq", "-y", "edgeinfer")


class Rpm(Deb):
    suffix = ".rpm"
    root_names = ("Debian 11",)
    how = "rpm --root, of Debian 12"

    def _rpm(self, *words: str) -> None:
        call("rpm", "--root", self.root.folder, "--dbpath", "/var/lib/rpm", *words)

    def install(self, package: Path) -> None:
        self._rpm("-U", "--oldpackage", "--nodeps", "--ignoreos", str(package))

    def remove(self) -> None:
        self._rpm("-e", "edgeinfer")


class Wheel(Deb):
    suffix = ".whl"
    root_names = ("Debian 13, Python",)
    how = "pipx install ./FILE"
    needs: tuple[str, ...] = ("pip", "setuptools")

    def __init__(self, root: BareRoot) -> None:
        super().__init__(root)
        self._wheels = root.folder / "wheels"
        python = root.as_root(
            "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"
        ).strip()
        self._fetch = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
        self._fetch += ["--python-version", python, "-d", str(self._wheels)]
        call(*self._fetch, "--no-deps", *self.needs)

    def install(self, package: Path) -> None:
        if not (self._wheels / package.name).exists():
            call(*self._fetch, package)
            shutil.copy(package, self._wheels)
        self._install(f"/wheels/{package.name}")

    def _install(self, wheel: str) -> None:
        self.root.as_person("pipx", "install", "--force", wheel)

    def version(self) -> str:
        return self.root.as_person("edgeinfer", "--version").split()[-1]

    def remove(self) -> None:
        self.root.as_person("pipx", "uninstall", "edgeinfer")


class UvWheel(Wheel):
    how = "uv tool install ./FILE"
    needs = ("uv",)

    def __init__(self, root: BareRoot) -> None:
        super().__init__(root)
        (uv,) = self._wheels.glob("uv-*.whl")
        with zipfile.ZipFile(uv) as archive:
            archive.extractall(root.folder / "uv")
        (program,) = (root.folder / "uv").glob("uv-*.data/scripts/uv")
        (root.folder / "usr/local/bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(program, root.folder / "usr/local/bin/uv")
        (root.folder / "usr/local/bin/uv").chmod(0o755)
        root.before = root.files()

    def _install(self, wheel: str) -> None:
        self.root.as_person(
            "uv", "tool", "install", "--force", "--no-index", "--find-links=/wheels", wheel
        )

    def remove(self) -> None:
        self.root.as_person("uv", "tool", "uninstall", "edgeinfer")


MANAGERS = (Deb, Rpm, Wheel, UvWheel)


def answer(root: BareRoot, *words: str) -> tuple[str, str]:
    """Ask the model; return the answer and how the launch started."""
    ask = ("run", MODEL, "Name three colours.", "--max-tokens", "8", "--temperature", "0", "--json")
    printed = root.as_person("edgeinfer", *ask, *words)
    result = json.loads(printed.strip().splitlines()[-1])["result"]
    return result["text"], result["start"]["how"]


def cycle(manager: Deb, package: Path, newer: Path) -> list[str]:
    """Run through a package's life; return the cells of its row. Raises SystemExit where a step fails."""
    root, began = manager.root, time.monotonic()
    manager.install(package)
    cells = [f"{time.monotonic() - began:.1f} s"]
    assert root.as_person("edgeinfer", "--version").strip().endswith(f"edgeinfer {__version__}")
    assert manager.version() == __version__
    root.as_person("edgeinfer", "pull", "/srv/small.gguf", "--name", MODEL, "--quiet")
    cold, _ = answer(root, "--resume", "never")
    assert cold.strip()
    root.as_person("edgeinfer", "warm", MODEL, "--quiet")
    resumed, how = answer(root, "--resume", "always")
    assert (resumed, how) == (cold, "resumed")
    cells.append("the cold answer, resumed")
    for version, file in ((NEWER, newer), (__version__, package)):
        began = time.monotonic()
        manager.install(file)
        cells.append(f"{time.monotonic() - began:.1f} s")
        assert manager.version() == version
        assert answer(root, "--resume", "never")[0] == cold
    root.as_person("edgeinfer", "stop", "--all", check=False)
    manager.remove()
    left = root.files() - root.before - {"wheels", "uv"}
    left = {name for name in left if not name.startswith(("wheels/", "uv/"))}
    assert not left, sorted(left)
    assert (
        "edgeinfer" not in root.as_person("ls", "/usr/bin", f"{HOME}/.local/bin", check=False).split()
    )
    return [*cells, "nothing left of it"]


def newer_packages(work: Path) -> dict[str, Path]:
    """Make the packages of NEWER: the shipped file under that number, and the wheel with another version in it."""
    program, _ = made_shipped.variant(ROOT / "dist/edgeinfer", work, {}, NEWER)
    publish.OUT, publish.__version__ = work, NEWER
    publish.package(program, platform.machine())
    (wheel,) = RELEASE.glob("edgeinfer-*.whl")
    renamed = work / wheel.name.replace(__version__, NEWER, 1)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(renamed, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            entry.filename = entry.filename.replace(f"edgeinfer-{__version__}.", f"edgeinfer-{NEWER}.")
            if entry.filename.endswith("/METADATA") or entry.filename == "edgeinfer/__init__.py":
                content = content.replace(__version__.encode(), NEWER.encode(), 1)
            if entry.filename.endswith("/RECORD"):  # without digests: pip compares none
                content = re.sub(rb",[^,\n]*,[^,\n]*\n", b",,\n", content).replace(
                    f"edgeinfer-{__version__}.".encode(), f"edgeinfer-{NEWER}.".encode()
                )
            new.writestr(entry, content)
    return {".deb": one(work, "*.deb"), ".rpm": one(work, "*.rpm"), ".whl": renamed}


def one(folder: Path, pattern: str) -> Path:
    """Return the only file of a pattern. Raises SystemExit if there is none or there are several."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(
            f"error: {len(found)} files {pattern} in {folder}\n\nhint: make release VERSION="
        )
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--roots", type=Path, metavar="FOLDER", help="keep debootstrap's roots here")
    parser.add_argument("--work", metavar="FOLDER", help="a folder with room for 2 GB, no tmpfs")
    add_out(parser)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-packages-", dir=options.work) as folder:
        work = Path(folder)
        work.chmod(0o755)
        newer = newer_packages(work)
        for manager in MANAGERS:
            package = one(RELEASE, f"*{manager.suffix}")
            for name in manager.root_names:
                root = BareRoot(name, options.roots or work, work)
                cells = cycle(manager(root), package, newer[manager.suffix])
                size = f"{package.stat().st_size / 1e6:.1f} MB"
                rows.append(
                    f"| `{manager.suffix}`, {manager.how} | {name} | {size} | {' | '.join(cells)} |"
                )
                print(rows[-1], flush=True)
                call("rm", "-rf", root.folder)  # while what a launch started ends
    heads = "package | bare root | size | install | use | update | back | remove"
    text = "\n".join([f"| {heads} |", "|---" * 8 + "|", *rows]) + "\n"
    write_figure(options.out, "packages", text)


if __name__ == "__main__":
    main()
