"""What a machine must be or have so that a snapshot of another one runs on it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

import edgeinfer
from edgeinfer.errors import SnapshotStaleError
from edgeinfer.platform.disk import sha256_of
from edgeinfer.shipping import shipped
from edgeinfer.snapshots import fingerprint
from edgeinfer.snapshots.transfer.description import Folders, Requirements

_FEATURE_LINES = ("flags", "Features")


def places(snapshot: str) -> Folders:
    """This program's folders, and a snapshot's."""
    app = shipped.app_dir()
    if app is not None:
        return Folders(program=str(app), environment="", snapshot=snapshot)
    program, environment = fingerprint.program_places()
    return Folders(program=os.path.dirname(program), environment=environment, snapshot=snapshot)


def real(folders: Folders) -> Folders:
    """The same folders without symlinks."""
    named = msgspec.to_builtins(folders)
    return Folders(**{name: os.path.realpath(path) if path else "" for name, path in named.items()})


def told(theirs: Folders, ours: Folders) -> dict[str, str]:
    """The exporter's folders → ours."""
    pairs = zip(msgspec.structs.astuple(theirs), msgspec.structs.astuple(ours), strict=True)
    return {old: new for old, new in pairs if old and new}


def gather(libraries: Iterable[str], criu: str) -> Requirements:
    """What this machine has. `libraries` are files that a process maps. Raises OSError."""
    keys = fingerprint.machine_keys()
    return Requirements(
        architecture=keys["architecture"],
        cpu=cpu_features(),
        kernel=keys["kernel"],
        glibc=glibc(),
        python=keys["python"],
        criu=criu,
        edgeinfer=keys["edgeinfer"],
        program=_program(),
        packages=_packages(),
        libraries={path: sha256_of(Path(path), lambda _done: None) for path in sorted(libraries)},
    )


def refuse_other_machine(theirs: Requirements, libraries: dict[str, str], criu: str) -> None:
    """Raise SnapshotStaleError naming the first thing that does not fit, theirs and ours.

    `libraries` maps the exporter's paths to those here, `criu` is the version here.
    """
    keys = fingerprint.machine_keys()
    _same("architecture", theirs.architecture, keys["architecture"])
    missing = sorted(set(theirs.cpu) - set(cpu_features()))
    if missing:
        _differs("cpu", f"a processor with {' '.join(missing)}", "one without")
    _same("kernel", theirs.kernel, keys["kernel"])
    _same("glibc", theirs.glibc, glibc())
    _same("python", theirs.python, keys["python"])
    _same("edgeinfer", theirs.edgeinfer, keys["edgeinfer"])
    _same("program", theirs.program, _program())
    ours = _packages()
    for name in sorted(theirs.packages.keys() | ours.keys()):
        _same(f"package {name}", theirs.packages.get(name, "none"), ours.get(name, "none"))
    for path, digest in theirs.libraries.items():
        _same_file(path, libraries.get(path, path), digest)
    if _numbers(criu) < _numbers(theirs.criu):
        _differs("criu", theirs.criu, criu)


def cpu_features() -> tuple[str, ...]:
    """What the first processor can do, as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("ascii", errors="replace").partition("\n\n")[0]
    except OSError:
        return ()
    rows = (line.partition(":") for line in lines.splitlines())
    found = next((value for name, _, value in rows if name.strip() in _FEATURE_LINES), "")
    return tuple(sorted(found.split()))


def glibc() -> str:
    """The C library's version, "" for another one than glibc."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""


def _program() -> str:
    app = shipped.app_dir()
    if app is not None:
        return app.name
    hashed = hashlib.sha256()
    root = Path(fingerprint.PACKAGE)
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".tcss", ".toml", ".sql") and path.is_file():
            hashed.update(os.fsencode(path.relative_to(root)) + b"\0" + path.read_bytes())
    return hashed.hexdigest()


def _packages() -> dict[str, str]:
    """What is installed beside us; nothing to compare where our build holds it all."""
    if shipped.is_shipped():
        return {}
    found = {
        dist.name.lower().replace("_", "-"): dist.version for dist in importlib.metadata.distributions()
    }
    return {name: version for name, version in sorted(found.items()) if name != edgeinfer.__name__}


def _same(key: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        _differs(key, theirs or "none", ours or "none")


def _same_file(name: str, path: str, digest: str) -> None:
    try:
        found = sha256_of(Path(path), lambda _done: None)
    except OSError as error:
        found = f"no such file ({error.strerror})"
    if found != digest:
        _differs(f"library {os.path.basename(name)}", f"sha256 {digest}", found)


def _differs(key: str, theirs: str, ours: str) -> None:
    raise SnapshotStaleError(
        f"the snapshot does not fit this machine: {key}: it was made with {theirs}, here is {ours}",
        key=key,
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
