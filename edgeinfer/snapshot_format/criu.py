"""Find a CRIU that works, choose its privileges, and run it. No other module runs CRIU.

A tier says which privileges CRIU has. Tiers are tried in this order:

    root           the caller is root: new pid and mount namespaces suffice
    unprivileged   new user, pid and mount namespaces; four capabilities that are valid only inside
    capabilities   no namespaces; the criu binary has file capabilities; one app at a time (same pid)

Standard library only. Modules that the launcher does not need are imported inside functions.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # importing `signal` takes 3 ms
import os
import sys

from edgeinfer.errors import SnapshotMissingError, SnapshotsUnavailableError, SnapshotUnsafeError
from edgeinfer.platform import linux, paths
from edgeinfer.snapshot_format.storage import Manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import NoReturn

#: Oldest CRIU version that dumps and restores without root.
MINIMUM = (4, 1)
#: Oldest version for Arm processors with pointer authentication: with older ones, a restored process
#: hangs (criu issues 2709, 2720).
MINIMUM_WITH_POINTER_AUTHENTICATION = (4, 2)
#: Time limit (s) of a restore, which usually takes 0.05 s. After that time, the launch starts cold.
RESTORE_LIMIT_S = 60
#: Time limit (s) of a restore by `snapshots verify`, which may run at idle priority on a cold cache.
CHECK_LIMIT_S = 600
ROOT = "root"
UNPRIVILEGED = "unprivileged"
CAPABILITIES = "capabilities"
NAMESPACES = {
    ROOT: linux.CLONE_NEWNS | linux.CLONE_NEWPID,
    UNPRIVILEGED: linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWUSER,
    CAPABILITIES: 0,
}
#: Argument of `setcap` that enables the tier `capabilities`.
FILE_CAPABILITIES = "cap_checkpoint_restore,cap_sys_admin,cap_sys_ptrace,cap_setpcap+ep"
#: Time limit (s) of each test of CRIU. Background builds run these tests at idle priority: 20 s were
#: not enough at a load of 15.
_TIMEOUT_S = 60
_TMPFS = "/dev/shm"  # noqa: S108  our folder there is checked


class Probe:
    """The result of `probe`: which CRIU (its path) works, and in which `tier` of privileges.

    If `tier` is None, CRIU does not work; `reason` says why, and `fix` what to do about it.
    """

    def __init__(
        self, tier: str | None, reason: str, fix: str = "", criu: str = "", version: str = ""
    ) -> None:
        self.tier = tier
        self.reason = reason
        self.fix = fix
        self.criu = criu
        self.version = version


def candidates() -> list[str]:
    """List the paths of criu binaries, preferred ones first; only EDGEINFER_CRIU if that is set."""
    named = os.environ.get("EDGEINFER_CRIU")
    if named:
        return [named]
    import shutil  # slow import (6 ms), which only builds and `doctor` need

    folders = [os.path.dirname(sys.executable)] if getattr(sys, "frozen", False) else []
    folders += [sys.prefix, paths.base("data")]
    programs = [f"{folder}/criu/bin/criu" for folder in folders]
    programs += [shutil.which("criu") or "", "/usr/sbin/criu", "/usr/local/sbin/criu"]
    return [path for path in programs if path and os.access(path, os.X_OK)]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # slow import (8 ms), which only builds and `doctor` need
    from subprocess import DEVNULL, TimeoutExpired, run

    try:
        return run(command, stdin=DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except TimeoutExpired as error:
        raise OSError(f"the test took more than {_TIMEOUT_S} s") from error


def version_of(criu: str) -> tuple[int, ...]:
    """Return the version of a criu binary, e.g. (4, 1); () if it cannot be run."""
    try:
        done = _run(criu, "--version")
    except OSError:
        return ()
    for line in (done.stdout + done.stderr).splitlines():
        name, _, number = line.partition(":")
        if name.strip() == "Version":
            return tuple(int(digits) for digits in number.strip().split(".") if digits.isdecimal())
    return ()


def minimum(cpuinfo: str = "/proc/cpuinfo") -> tuple[int, int]:
    """Return the oldest CRIU version that works on the processor described in the file `cpuinfo`."""
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as file:
            has_pac = any(line.startswith("Features") and " paca" in line for line in file)
    except OSError:
        return MINIMUM
    return MINIMUM_WITH_POINTER_AUTHENTICATION if has_pac else MINIMUM


def probe() -> Probe:
    """Find a CRIU that is new enough, and the tier (kind of privileges) with which it works.

    Runs programs, which takes 10 to 100 ms.
    """
    if sys.platform != "linux":
        return Probe(None, "snapshots need Linux")
    if os.uname().machine not in ("x86_64", "aarch64"):
        return Probe(None, f"snapshots are not supported on {os.uname().machine}")
    versions = [(path, version_of(path)) for path in candidates()]
    needed = minimum()
    first = ".".join(map(str, needed))
    distribution = "Debian 13" if needed == MINIMUM else "Debian 14"
    fix = (
        f"install CRIU >= {first} (`apt-get install criu` from {distribution} on, "
        "`make setup` in a checkout)"
    )
    if not versions:
        return Probe(None, "CRIU is not installed", fix)
    able = [(path, version) for path, version in versions if version >= needed]
    if not able:
        path, version = versions[0]
        was = ".".join(map(str, version)) or "unknown"
        return Probe(None, f"{path} has version {was}; this machine needs CRIU {first} or newer", fix)
    path, version = able[0]
    return _tier(path, ".".join(map(str, version)))


#: Reason why no snapshot can be built in most containers and in WSL2.
FILTERED = "a seccomp filter, which every process has here, prevents building snapshots"


def is_filtered() -> bool:
    """Return whether this process inherited a seccomp filter, which CRIU cannot suspend."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return any(line.startswith("Seccomp:") and line.split()[1] != "0" for line in file)
    except OSError:
        return False


def _tier(criu: str, version: str) -> Probe:
    if is_filtered():
        fix = "start the container with --security-opt seccomp=unconfined; WSL2 has no such option"
        return Probe(None, FILTERED, fix, criu, version)
    tier = ROOT if os.geteuid() == 0 else UNPRIVILEGED
    why_not = namespaces_refused(tier)
    if not why_not:
        return Probe(
            tier, f"CRIU {version} at {criu}, in separate namespaces", criu=criu, version=version
        )
    if _has_file_capabilities(criu):
        has = f"CRIU {version} at {criu} has file capabilities"
        reason = f"{has}; one resumed process at a time, because {why_not}"
        return Probe(CAPABILITIES, reason, criu=criu, version=version)
    fix = (
        "allow user namespaces (sysctl user.max_user_namespaces, "
        "kernel.apparmor_restrict_unprivileged_userns), "
        f"or `sudo setcap {FILE_CAPABILITIES} {criu}`"
    )
    return Probe(None, why_not, fix, criu, version)


def namespaces_refused(tier: str) -> str:
    """Return why the kernel refuses the new namespaces that `tier` needs; "" if they are allowed."""
    from edgeinfer.platform.process import child_command

    try:
        done = _run(*child_command("edgeinfer.launcher.supervise", "probe", tier))
    except OSError as error:
        return f"namespaces could not be tested: {error}"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or ["no reason given"]
    return f"this system does not let you create namespaces ({lines[-1]})"


def _has_file_capabilities(criu: str) -> bool:
    try:
        return bool(os.getxattr(criu, "security.capability"))
    except OSError:
        return False


def work_dir() -> str:
    """Create and return the folder in which CRIU caches the kernel's features.

    Without this cache, each run takes 20 to 40 ms longer. Raises SnapshotUnsafeError if other users
    can write to each of the possible folders, for example because they created them first.
    """
    refused = []
    shared = [f"{_TMPFS}/edgeinfer-{os.getuid()}"] if os.path.isdir(_TMPFS) else []
    for path in (*shared, paths.runtime_path(), os.path.join(paths.base("cache"), "criu")):
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            paths.refuse_unsafe(path, directory=True)
            return path
        except (OSError, SnapshotMissingError, SnapshotUnsafeError) as error:
            refused.append(str(error))
    problem = f"CRIU has no safe folder for its cache: {'; '.join(refused)}"
    raise SnapshotUnsafeError(problem, hint="remove one of these folders")


def exec_dump(criu: str, tier: str, pid: int, images: str, log: str) -> NoReturn:
    """Replace this process by `criu dump`, which writes the images of process `pid`, then kills `pid`.

    `images` is the folder of the images. CRIU's messages are written to the file `log`.
    """
    _exec(criu, tier, ["dump", "-t", str(pid), "-D", images, "-o", log, "-v2"])


def exec_restore(manifest: Manifest, images: str, link_fd: int, wake_fd: int, limit_s: int) -> NoReturn:
    """Replace this process by `criu restore`, which ends once the restored process runs.

    `images` is the folder of the images. `link_fd` and `wake_fd` replace the parked process's LINK_FD
    and WAKE_FD. An alarm ends CRIU after `limit_s` seconds. `-S` makes the restored process a child of
    this process's parent: as CRIU's child it would die with CRIU, because it has set PR_SET_PDEATHSIG.
    The restored process continues in `snapshots.parked._sleep`.
    """
    arguments = ["restore", "-D", images, "-d", "-S", "-v1"]
    socket, pipe = f"socket:[{manifest.link_inode}]", f"pipe:[{manifest.wake_inode}]"
    for fd, original in ((link_fd, socket), (wake_fd, pipe)):
        arguments += ["--inherit-fd", f"fd[{fd}]:{original}"]
        os.set_inheritable(fd, True)
    _signal.alarm(limit_s)  # the alarm survives exec, so it ends a CRIU that hangs
    _exec(manifest.criu, manifest.tier, arguments)


def _exec(criu: str, tier: str, arguments: list[str]) -> NoReturn:
    directory = work_dir()
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "XDG_RUNTIME_DIR": directory}
    if tier == UNPRIVILEGED:
        linux.keep_capabilities(linux.CRIU_CAPABILITIES)
    os.execve(criu, [criu, "--unprivileged", *arguments, "-W", directory], environment)


def available() -> Probe:
    """Return the result of `probe` if a CRIU works, otherwise raise SnapshotsUnavailableError.

    Raises SnapshotUnsafeError if other users can write to CRIU's work folder.
    """
    probed = probe()
    if probed.tier is None:
        problem = f"snapshots do not work here: {probed.reason}"
        raise SnapshotsUnavailableError(problem, hint=probed.fix or None)
    work_dir()
    return probed
