"""Find a working CRIU, choose how to run it, and run it; no other module does.

Three tiers, tried in this order, each with the reason why it was chosen or not:

    root           the caller is root: new pid and mount namespaces suffice
    unprivileged   new user, pid and mount namespaces; four capabilities that are valid only inside
    capabilities   namespaces are forbidden; the criu binary has file capabilities: one app at a time

Standard library only. Modules that the launcher does not need are imported inside functions.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C part: `signal` costs 3 ms for its enums
import os
import sys

from edgeinfer.errors import SnapshotsUnavailableError, SnapshotUnsafeError
from edgeinfer.platform import linux, paths
from edgeinfer.snapshot_format.format import Manifest, refuse_unsafe

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import NoReturn

#: First CRIU version that dumps and restores without privilege.
MINIMUM = (4, 1)
#: First version that restores a process on an Arm processor with pointer authentication; older ones
#: hang (criu issues 2709, 2720).
MINIMUM_WITH_POINTER_AUTHENTICATION = (4, 2)
#: Limit (s) of a restore, which usually takes hundredths of a second; after it, the launch starts cold.
RESTORE_LIMIT_S = 60
#: Limit (s) of a restore by `snapshots verify`, which may run at idle priority with uncached files.
CHECK_LIMIT_S = 600
ROOT = "root"
UNPRIVILEGED = "unprivileged"
CAPABILITIES = "capabilities"
NAMESPACES = {
    ROOT: linux.CLONE_NEWNS | linux.CLONE_NEWPID,
    UNPRIVILEGED: linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWUSER,
    CAPABILITIES: 0,
}
#: Arguments of `setcap` for the third tier.
FILE_CAPABILITIES = "cap_checkpoint_restore,cap_sys_admin,cap_sys_ptrace,cap_setpcap+ep"
_TIMEOUT_S = 20
_TMPFS = "/dev/shm"  # noqa: S108  our folder there is checked


class Probe:
    """Whether CRIU works here.

    `tier` names the privileges that it has, None if it does not work; `reason` says why, and `fix` is
    the command that helps.
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
    """List paths of CRIU, best first: only EDGEINFER_CRIU if set, or bundled, venv, data, PATH."""
    named = os.environ.get("EDGEINFER_CRIU")
    if named:
        return [named]
    import shutil  # 6 ms, only for builds and `doctor`

    folders = [os.path.dirname(sys.executable)] if getattr(sys, "frozen", False) else []
    folders += [sys.prefix, paths.base("data")]
    programs = [f"{folder}/criu/bin/criu" for folder in folders]
    programs += [shutil.which("criu") or "", "/usr/sbin/criu", "/usr/local/sbin/criu"]
    return [path for path in programs if path and os.access(path, os.X_OK)]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a short program and return its output as text. Raises OSError."""
    from subprocess import DEVNULL, TimeoutExpired, run  # 8 ms, only for builds and `doctor`

    try:
        return run(command, stdin=DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except TimeoutExpired as error:
        raise OSError(str(error)) from error


def version_of(criu: str) -> tuple[int, ...]:
    """Return the version of a criu binary; empty if it cannot be run."""
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
    """Return the oldest CRIU version that works on the processor of `cpuinfo`."""
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as file:
            has_pac = any(line.startswith("Features") and " paca" in line for line in file)
    except OSError:
        return MINIMUM
    return MINIMUM_WITH_POINTER_AUTHENTICATION if has_pac else MINIMUM


def probe() -> Probe:
    """Find a CRIU that is new enough, and the tier in which it works. Runs programs: 10 to 100 ms."""
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
        was = ".".join(map(str, version)) or "of unknown version"
        return Probe(None, f"{path} is {was}; this machine needs at least {first}", fix)
    path, version = able[0]
    return _tier(path, ".".join(map(str, version)))


#: Reason in most containers and in WSL2.
FILTERED = "a seccomp filter, which every process has here, prevents building snapshots"


def is_filtered(status: str = "/proc/self/status") -> bool:
    """Return whether a seccomp filter was inherited; such a process may not suspend filters."""
    try:
        with open(status, encoding="ascii", errors="replace") as file:
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
    """Create a tier's namespaces in a child; return why that was refused, or ""."""
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
    """Create the folder of CRIU's cache of kernel facts; outside a tmpfs it costs 20 to 40 ms.

    Another user may have created the folders with well-known names. Raises SnapshotUnsafeError, which
    lists each folder with its owner.
    """
    refused = []
    shared = [f"{_TMPFS}/edgeinfer-{os.getuid()}"] if os.path.isdir(_TMPFS) else []
    for path in (*shared, paths.runtime_path(), os.path.join(paths.base("cache"), "criu")):
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            refuse_unsafe(path, directory=True)
            return path
        except (OSError, SnapshotUnsafeError) as error:
            refused.append(str(error))
    problem = f"CRIU can use no folder here: {'; '.join(refused)}"
    raise SnapshotUnsafeError(problem, hint="remove one of these folders")


def exec_dump(criu: str, tier: str, pid: int, images: str, log: str) -> NoReturn:
    """Replace this process by `criu dump` of a process, which ends if the dump succeeds."""
    _exec(criu, tier, ["dump", "-t", str(pid), "-D", images, "-o", log, "-v2"])


def exec_restore(manifest: Manifest, images: str, link_fd: int, wake_fd: int, limit_s: int) -> NoReturn:
    """Replace this process by `criu restore` with our descriptors; it ends once that process runs.

    The restored process is a child of our caller from its first instruction, as CRIU's sibling (`-S`).
    As CRIU's child it would be killed with CRIU, because it has asked to die with its parent. It
    continues in `snapshots.parked._sleep`, after the poll during which CRIU dumped it.
    """
    arguments = ["restore", "-D", images, "-d", "-S", "-v1"]
    socket, pipe = f"socket:[{manifest.link_inode}]", f"pipe:[{manifest.wake_inode}]"
    for fd, original in ((link_fd, socket), (wake_fd, pipe)):
        arguments += ["--inherit-fd", f"fd[{fd}]:{original}"]
        os.set_inheritable(fd, True)
    _signal.alarm(limit_s)  # an alarm survives exec, so it ends CRIU
    _exec(manifest.criu, manifest.tier, arguments)


def _exec(criu: str, tier: str, arguments: list[str]) -> NoReturn:
    directory = work_dir()
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "XDG_RUNTIME_DIR": directory}
    if tier == UNPRIVILEGED:
        linux.keep_capabilities(linux.CRIU_CAPABILITIES)
    os.execve(criu, [criu, "--unprivileged", *arguments, "-W", directory], environment)


def available() -> Probe:
    """Probe for CRIU. Raises SnapshotsUnavailableError (its hint is the fix), SnapshotUnsafeError."""
    probed = probe()
    if probed.tier is None:
        problem = f"snapshots do not work here: {probed.reason}"
        raise SnapshotsUnavailableError(problem, hint=probed.fix or None)
    work_dir()
    return probed
