"""System calls that Python 3.11 lacks: namespaces, mounts, capabilities. The import takes 1.7 ms."""

from __future__ import annotations

import ctypes
import os

_CLONE = {"x86_64": 56, "aarch64": 220}
_SIGCHLD = 17
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
#: Namespaces of a sandbox: mounts, users, pids, and (as numbers) cgroups, host name, IPC and network.
SANDBOX_NAMESPACES = CLONE_NEWNS | CLONE_NEWUSER | CLONE_NEWPID | 0x4E000000 | 0x02000000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
MS_NOSUID, MS_NODEV = 2, 4
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_MS_BIND = 0x1000
_MNT_DETACH = 2
_PR_SET_NAME = 15
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION_3 = 0x20080522
#: Capabilities that CRIU needs in a user namespace: checkpoint_restore, sys_ptrace, setpcap, sys_admin.
CRIU_CAPABILITIES = (40, 19, 8, 21)
_CAP_SETFCAP = 31
MADV_DONTNEED = 4

_loaded: list[ctypes.CDLL] = []


def _libc() -> ctypes.CDLL:
    """Return the C library, opened at the first use, so that any system can import this module."""
    if not _loaded:
        _loaded.append(ctypes.CDLL(None, use_errno=True))
    return _loaded[0]


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def clone(flags: int) -> int:
    """Fork this single-threaded process into new namespaces (`flags`: CLONE_NEW…). Raises OSError.

    Returns the child's pid in the parent, and 0 in the child.
    """
    number, raw_flags = _CLONE[os.uname().machine], ctypes.c_ulong(flags | _SIGCHLD)
    return _check(_libc().syscall(number, raw_flags, None, None, None, None), "clone")


def refuse_threads() -> None:
    """Raise OSError if this process has several threads: a child of `clone` could hang."""
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise OSError(f"a process with {len(threads)} threads cannot be cloned into new namespaces")


def map_this_user(uid: int, gid: int) -> None:
    """Map the user `uid` and the group `gid` to themselves in this process's new user namespace."""
    texts = {"uid_map": f"{uid} {uid} 1", "setgroups": "deny", "gid_map": f"{gid} {gid} 1"}
    for name, text in texts.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount_proc() -> None:
    """Mount a /proc of this pid namespace, visible only in this mount namespace. Raises OSError."""
    mount("none", "/", "", _MS_REC | _MS_SLAVE)
    mount("proc", "/proc", "proc", 0)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2). Raises OSError."""
    texts = [os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc().mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def bind(source: str, target: str, *, read_only: bool) -> None:
    """Bind-mount `source`, with all mounts below it, at `target`. Raises OSError."""
    mount(source, target, "", _MS_BIND | _MS_REC)
    if read_only:
        attributes = (ctypes.c_uint64 * 4)(1)  # MOUNT_ATTR_RDONLY
        arguments = (_AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, ctypes.c_size_t(32))
        _check(_libc().syscall(_MOUNT_SETATTR, *arguments), f"mount --bind -r {target}")


def pivot_root(folder: str) -> None:
    """Make a mounted folder the root folder, and unmount the old one. Raises OSError."""
    os.chdir(folder)
    _check(_libc().syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc().umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")


def become_init(flags: int, uid: int, gid: int) -> None:
    """Make this process, the child of `clone(flags)`, the init of its new namespaces. Raises OSError.

    `uid` and `gid` are mapped to themselves, and /proc is mounted. With `flags` 0 there is no new
    namespace, and the process only adopts orphaned descendants, as an init does.
    """
    if flags & CLONE_NEWUSER:
        map_this_user(uid, gid)
    if flags:
        mount_proc()
    else:
        _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def set_name(name: str) -> None:
    """Set the command name that ps and top show, up to 15 bytes."""
    _libc().prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def set_title(title: str) -> None:
    """Set the command line that ps and top show, cut off at the length of the real one."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(") ")[2].split()
    arg_start, arg_end = int(fields[45]), int(fields[46])  # see proc(5)
    raw = title.encode("utf-8", "replace")[: arg_end - arg_start - 1]
    ctypes.memmove(arg_start, raw.ljust(arg_end - arg_start, b"\0"), arg_end - arg_start)


def keep_capabilities(numbers: tuple[int, ...]) -> None:
    """Keep only these capabilities, also in programs that this process executes. Raises OSError."""
    word = sum(1 << n for n in numbers)
    low, high = word & 0xFFFFFFFF, word >> 32
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)(low, low, low, high, high, high)
    _check(_libc().capset(header, sets), "capset")
    for number in numbers:
        result = _libc().prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number, 0, 0)
        _check(result, "prctl(PR_CAP_AMBIENT)")


def drop_privileges(*, can_map_root: bool = False) -> None:
    """Drop all capabilities, and let no exec gain any, not even of a setuid program. Raises OSError.

    `can_map_root` lets root keep CAP_SETFCAP, which the user namespace of a sandbox requires.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    permitted = (ctypes.c_uint32 * 6)()
    _libc().capget(header, permitted)
    kept_bits = permitted[1] & 1 << _CAP_SETFCAP if can_map_root and os.geteuid() == 0 else 0
    _libc().prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _check(_libc().capset(header, (ctypes.c_uint32 * 6)(kept_bits, kept_bits)), "capset")
    refuse_new_privileges()


def refuse_new_privileges() -> None:
    """Set no_new_privs (seccomp and Landlock require it): no exec gains privileges. Raises OSError."""
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def forget_pages(start: int, length: int) -> None:
    """Discard the content of pages (MADV_DONTNEED). Anonymous pages contain zeros afterwards."""
    _check(_libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED), "madvise")


def getrandom(size: int) -> bytes:
    """Return random bytes of the kernel. Raises OSError.

    The function `getrandom` of glibc >= 2.41 is not used: its bytes may repeat after a resume.
    """
    number = {"x86_64": 318, "aarch64": 278}[os.uname().machine]
    buffer = ctypes.create_string_buffer(size)
    got = _check(_libc().syscall(number, buffer, ctypes.c_size_t(size), 0), "getrandom")
    if got != size:
        raise OSError(f"getrandom returned only {got} of {size} bytes")
    return buffer.raw
