"""Restrict this process to some files (Landlock) and system calls (seccomp), without root."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

from edgeinfer.platform import linux

#: Numbers of the system calls of Landlock: create a ruleset, add a rule, restrict this process.
_CREATE, _ADD = 444, 445
_RESTRICT = 446
_GET_VERSION, _PATH_BENEATH = 1, 1
#: Sets of Landlock's access rights. _READ: run and read files, list folders. _OF_FILES: all that apply
#: to files.
_READ, _OF_FILES = 0b1101, 0b1100_0000_0000_0111
#: Number of access rights in Landlock's versions 1, 2, …
_RIGHTS = (13, 14, 15, 15, 16)
#: Size (bytes) of landlock_ruleset_attr in versions 1, 2, …: one u64 each for files, TCP and scopes.
_SIZES = (8, 8, 8, 16, 16, 24)


def confine(writable: Sequence[str]) -> None:
    """Let this process and its children write only below `writable`; they may read all files.

    Linux 6.7 and newer also refuses TCP; 6.12 and newer also refuses abstract sockets of other
    processes, and signals to them. `linux.refuse_new_privileges` must have been called. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: object) -> int:
        result: int = libc.syscall(number, *arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
        return result

    version = call(_CREATE, None, ctypes.c_size_t(0), _GET_VERSION)
    rights = (1 << _RIGHTS[min(version, len(_RIGHTS)) - 1]) - 1
    size = _SIZES[min(version, len(_SIZES)) - 1]
    attributes = struct.pack("=QQQ", rights, 3, 3)[:size]
    rules = call(_CREATE, attributes, ctypes.c_size_t(size), 0)

    def allow(path: str, allowed: int) -> None:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, beneath), 0)
        os.close(beneath)

    allow("/", _READ)
    for path in writable:
        allowed = rights if os.path.isdir(path) else rights & _OF_FILES
        allow(path, allowed)
    call(_RESTRICT, rules, 0)
    os.close(rules)


_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
#: Instructions of a seccomp filter (linux/bpf_common.h): load a word, keep some of its bits, jump if it
#: is equal or has a bit, return.
_LOAD = 0x20
_AND = 0x54
_IF_EQUAL = 0x15
_IF_BITS = 0x45
_RETURN = 0x06
#: Offsets (bytes) in the struct seccomp_data: call number, architecture, lower halves of the first
#: three arguments.
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
_SECOND_ARGUMENT = 24
_THIRD_ARGUMENT = 32
_CLONE_THREAD = 0x00010000
#: Bit in the call numbers of x32, an alternative system call interface of x86-64.
_X32 = 0x40000000

#: Architecture → its audit number, the numbers of `clone` and `clone3`, and the numbers of the calls
#: that `allow_only_computation` allows: read write close fstat lseek mmap mprotect munmap brk
#: rt_sigaction rt_sigprocmask rt_sigreturn mremap madvise exit exit_group futex clock_gettime getrandom
#: gettid tgkill getpid sched_yield set_robust_list rseq.
_ARCHITECTURES = {
    "x86_64": (
        0xC000003E,
        (56, 435),
        "0 1 3 5 8 9 10 11 12 13 14 15 25 28 60 231 202 228 318 186 234 39 24 273 334",
    ),
    "aarch64": (
        0xC00000B7,
        (220, 435),
        "63 64 57 80 62 222 226 215 214 134 135 139 216 233 93 94 98 113 278 178 131 172 124 99 293",
    ),
}
#: Calls that `refuse_hidden_memory` refuses: memfd_create memfd_secret shmget add_key request_key
#: keyctl userfaultfd bpf perf_event_open io_uring_setup; openat2, whose arguments no filter can read.
_HIDDEN = {
    "x86_64": "319 447 29 248 249 250 323 321 298 425 437",
    "aarch64": "279 447 194 217 218 219 282 280 241 425 437",
}
#: Calls that set a file's mode, each with the index of the mode argument: chmod fchmod fchmodat
#: fchmodat2 open creat openat mknod mknodat. A setuid file would give its owner's rights to others.
_MODES = {
    "x86_64": ((90, 1), (91, 1), (268, 2), (452, 2), (2, 2), (85, 1), (257, 3), (133, 1), (259, 2)),
    "aarch64": ((52, 1), (53, 2), (452, 2), (56, 3), (33, 2)),
}
_SETUID_OR_SETGID = 0o6000
#: Call number of setsockopt, which must not set SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE or SO_RCVBUFFORCE:
#: socket buffers do not count as memory of the process.
_SET_OPTION = {"x86_64": 54, "aarch64": 208}
_OF_SOCKETS, _BUFFERS = 1, (7, 8, 32, 33)
#: Call numbers of socket and socketpair.
_SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}
#: Allowed socket families: inet, inet6 and netlink, which a network namespace confines. A unix socket
#: could reach a program that listens in the folder, vsock the host of a virtual machine.
_FAMILIES = (2, 10, 16)
#: Allowed types of a socketpair (stream, seqpacket), and the mask that leaves flags out of the type.
_PAIRS, _TYPE_BITS = (1, 5), 0xF


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def allow_only_computation() -> None:
    """Refuse all system calls from now on, except those that a computation and its threads need.

    Open descriptors stay usable, but no others can be opened, and no other process can be reached.
    Works on Linux on x86-64 and arm64, elsewhere it does nothing. Raises OSError.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if sys.platform == "linux" and architecture is not None:
        linux.refuse_new_privileges()
        _install(_filter(*architecture))


def refuse_hidden_memory() -> None:
    """Refuse calls for memory that is not counted for this process, and calls that exploits need.

    Also refused are setuid and setgid modes, larger socket buffers, and sockets that leave a network
    namespace. `linux.refuse_new_privileges` must have been called. Works on Linux on x86-64 and arm64,
    elsewhere it does nothing. Raises OSError.
    """
    machine = platform.machine()
    if sys.platform == "linux" and machine in _ARCHITECTURES:
        _install(_refusal_filter(machine))


def _install(code: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(code) // 8, code)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):  # these two mean: a kernel without seccomp
            raise OSError(number, f"prctl(PR_SET_SECCOMP): {os.strerror(number)}")


def _filter(architecture: int, clones: tuple[int, int], calls: str) -> bytes:
    """Return a filter that allows `calls` and refuses all others with EPERM.

    `clone` is allowed for threads. `clone3`, whose arguments a filter cannot read, gets ENOSYS: libc
    then uses `clone`.
    """
    clone, clone3 = clones
    steps = _of_architecture(architecture)
    for call in map(int, calls.split()):
        steps += [(_IF_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ALLOW)]
    steps += [
        (_IF_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_IF_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_IF_BITS, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    return _assemble(steps)


def _refusal_filter(machine: str) -> bytes:
    """Return a filter that refuses the calls of `refuse_hidden_memory` and allows all others."""
    socket, pair = _SOCKETS[machine]
    steps = _of_architecture(_ARCHITECTURES[machine][0])
    steps += [(_IF_BITS, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for call in map(int, _HIDDEN[machine].split()):
        steps += [(_IF_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for call, argument_index in _MODES[machine]:
        steps += [
            (_IF_EQUAL, 0, 4, call),
            (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * argument_index),
            (_IF_BITS, 0, 1, _SETUID_OR_SETGID),
            (_RETURN, 0, 0, _ERRNO | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    steps += [
        (_IF_EQUAL, 0, 5 + len(_BUFFERS), _SET_OPTION[machine]),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_IF_EQUAL, 0, 1 + len(_BUFFERS), _OF_SOCKETS),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        *((_IF_EQUAL, len(_BUFFERS) - n, 0, option) for n, option in enumerate(_BUFFERS)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    steps += [
        (_IF_EQUAL, 0, 6, pair),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_AND, 0, 0, _TYPE_BITS),
        (_IF_EQUAL, 2, 0, _PAIRS[0]),
        (_IF_EQUAL, 1, 0, _PAIRS[1]),
        (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
        (_IF_EQUAL, 1, 0, socket),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
    ]
    for family in _FAMILIES:
        steps += [(_IF_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    return _assemble([*steps, (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT)])


def _of_architecture(architecture: int) -> list[tuple[int, int, int, int]]:
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _assemble(steps: list[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
