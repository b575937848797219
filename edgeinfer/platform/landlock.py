"""Limit this process to some files, without a network: Landlock of Linux, for ordinary users too."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

#: System calls, the same on all processors.
_CREATE, _ADD = 444, 445
_RESTRICT = 446
_GET_VERSION, _PATH_BENEATH = 1, 1
#: Access rights: run, read a file, list a folder; those that a file can have.
_READ, _OF_FILES = 0b1101, 0b1100_0000_0000_0111
#: By version: how many rights there are, and the bytes of the attributes (files, TCP, scopes).
_RIGHTS = (13, 14, 15, 15, 16)
_SIZES = (8, 8, 8, 16, 16, 24)


def confine(writable: Sequence[str]) -> None:
    """Let this process, and what it starts, change files below `writable` alone; it may read all.

    It takes `linux.refuse_new_privileges`. Newer kernels refuse TCP, abstract sockets and signals to
    others as well. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def called(number: int, *arguments: object) -> int:
        result: int = libc.syscall(number, *arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
        return result

    version = called(_CREATE, None, ctypes.c_size_t(0), _GET_VERSION)
    rights = (1 << _RIGHTS[min(version, len(_RIGHTS)) - 1]) - 1
    size = _SIZES[min(version, len(_SIZES)) - 1]
    attributes = struct.pack("=QQQ", rights, 3, 3)[:size]
    rules = called(_CREATE, attributes, ctypes.c_size_t(size), 0)

    def allow(path: str, allowed: int) -> None:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        called(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, beneath), 0)
        os.close(beneath)

    allow("/", _READ)
    for path in writable:
        allowed = rights if os.path.isdir(path) else rights & _OF_FILES
        allow(path, allowed)
    called(_RESTRICT, rules, 0)
    os.close(rules)
