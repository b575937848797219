"""Check in 1 ms whether a snapshot fits this machine and its files: CRIU compares only file sizes."""

from __future__ import annotations

import os
import sys

import edgeinfer
from edgeinfer.errors import SnapshotCorruptError, SnapshotStaleError
from edgeinfer.platform import paths
from edgeinfer.snapshot_format.storage import IMAGES, MEMORY, Manifest, short_hash

#: Folder of the package edgeinfer.
PACKAGE = os.path.dirname(os.path.abspath(edgeinfer.__file__))
_CPU_LINES = (
    *("vendor_id", "cpu family", "model", "stepping", "flags"),  # x86
    *("CPU implementer", "CPU part", "Features"),  # Arm
)


def stamp(path: str) -> str:
    """Return a file's size, mtime (ns) and inode: "913 1764417600000000000 42". Raises OSError."""
    info = os.stat(path)
    return f"{info.st_size} {info.st_mtime_ns} {info.st_ino}"


def program_paths() -> tuple[str, str]:
    """Return the paths of this program and of its venv ("" in the one-file program).

    Each such pair is an installation, which has its own snapshots.
    """
    return (sys.executable, "") if getattr(sys, "frozen", False) else (PACKAGE, sys.prefix)


def program_tag() -> str:
    """Return this installation's tag in the names of its snapshots' folders: 8 hex digits."""
    return short_hash("\n".join(program_paths()))


def machine_keys() -> dict[str, str]:
    """Return name → value of each property of program and machine that a snapshot must match."""
    system = os.uname()
    program, environment = program_paths()
    return {
        "edgeinfer": edgeinfer.__version__,
        "python": sys.version.split()[0],
        "program": program,
        "environment": environment,
        # a kernel with another page size differs in its release, too, but this reason is clearer
        "page size": str(os.sysconf("SC_PAGE_SIZE")),
        "kernel": system.release,
        "architecture": system.machine,
        "cpu": _cpu(),
        "user": f"{os.getuid()}:{os.getgid()}",
        "models.toml": _models_toml(),
    }


def _models_toml() -> str:
    """Return the mtime (ns) of the user's models.toml, which a parked process has read; "" if none."""
    try:
        return str(os.stat(f"{paths.base('config')}/models.toml").st_mtime_ns)
    except OSError:
        return ""


def _cpu() -> str:
    """Return the first processor's family and features, from /proc/cpuinfo; "" without that file."""
    try:
        fd = os.open("/proc/cpuinfo", os.O_RDONLY)
    except OSError:
        return ""
    try:
        text = os.read(fd, 4096).decode("ascii", "replace")
    finally:
        os.close(fd)
    values = []
    for line in text.split("\n\n")[0].split("\n"):
        name, _, value = line.partition(":")
        if name.strip() in _CPU_LINES:
            values.append(value.strip())
    return "; ".join(values)


def package_stamps() -> dict[str, str]:
    """Return path → `stamp(path)` of the files that an update changes: own sources, site-packages."""
    packages = ("site-packages", "dist-packages")
    files = [path for path in sys.path if os.path.basename(path) in packages]
    for folder, _, names in os.walk(PACKAGE):
        sources = [name for name in names if name.endswith((".py", ".tcss", ".toml", ".sql"))]
        files += [f"{folder}/{name}" for name in sources]
    return {path: stamp(path) for path in sorted(files) if os.path.exists(path)}


def refuse_stale(manifest: Manifest, folder: str) -> None:
    """Raise SnapshotStaleError if program, machine or a mapped file has changed since the build.

    Raises SnapshotCorruptError if a file in the snapshot's `folder` has another size,
    SnapshotMissingError if it is missing, SnapshotUnsafeError if other users can access it.
    """
    current = machine_keys()
    for key, value in current.items():
        recorded = manifest.keys.get(key, "")
        if recorded != value:
            raise SnapshotStaleError(_difference(manifest.name, key, recorded, value), key=key)
    for path, recorded in manifest.files.items():
        try:
            now = stamp(path)
        except OSError as error:
            problem = f"{path} does not exist, but the snapshot {manifest.name} needs it"
            raise SnapshotStaleError(problem, key=path) from error
        if now != recorded:
            problem = f"{path} was changed after the snapshot {manifest.name} was made"
            raise SnapshotStaleError(problem, key=path)
    for name, size in manifest.images.items():
        info = paths.refuse_unsafe(f"{folder}/{name}", directory=False)
        if info.st_size != size:
            raise SnapshotCorruptError(f"{folder}/{name} has {info.st_size} bytes instead of {size}")
    paths.refuse_unsafe(f"{folder}/{IMAGES}", directory=True)
    if MEMORY not in manifest.images:
        raise SnapshotCorruptError(f"{folder} has no {MEMORY}")


def _difference(name: str, key: str, before: str, now: str) -> str:
    if key == "cpu":
        return f"the snapshot {name} was made on another processor"
    if key == "models.toml":  # the values are mtimes
        return f"models.toml was changed after the snapshot {name} was made"
    return f"the snapshot {name} was made with another {key}: {before or 'none'}, now {now}"
