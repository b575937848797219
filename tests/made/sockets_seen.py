"""Run a program and record every internet socket that it or a child creates or connects.

The kernel tells (a seccomp filter with a listener): nothing in the program is patched, native libraries
and children are seen too. Linux on x86-64.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

AF_INET, AF_INET6 = 2, 10
_SOCKET = 41
_CONNECT = 42
_SECCOMP = 317
_NO_NEW_PRIVS = 38
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE = 0xC0502100
_ANSWER = 0xC0182101
_CONTINUE = 1
_libc = ctypes.CDLL(None, use_errno=True)


def run_seen(start: Callable[[], subprocess.Popen[str]]) -> tuple[subprocess.Popen[str], Watch]:
    """Start a program with `start` and watch its sockets; return the program and the watch."""
    parts: list[Any] = []

    def begin() -> None:  # the filter holds for this thread and what it starts
        parts.append(_install())
        parts.append(start())

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    return parts[1], Watch(parts[0])  # its thread is started by this one, which has no filter


class Watch(threading.Thread):
    """Collects `seen`, `socket FAMILY TYPE` and `connect FAMILY ADDRESS`, until the last process ends."""

    def __init__(self, listener: int) -> None:
        super().__init__(daemon=True)
        self._listener = listener
        self.seen: list[str] = []
        self.start()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while True:
            ((_, events),) = poll.poll()
            if not events & select.POLLIN:
                os.close(self._listener)
                return
            request = bytearray(80)
            try:
                fcntl.ioctl(self._listener, _RECEIVE, request)
                self._note(request)
                answer = struct.pack("<QqiI", *struct.unpack_from("<Q", request), 0, 0, _CONTINUE)
                fcntl.ioctl(self._listener, _ANSWER, bytearray(answer))
            except FileNotFoundError:  # the process was killed meanwhile
                continue

    def _note(self, request: bytearray) -> None:
        pid, number = struct.unpack_from("<8xI4xi", request)
        first, second = struct.unpack_from("<2Q", request, 32)
        if number == _SOCKET:
            self.seen.append(f"socket {first} {second & 0xF}")
            return
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(second)
            address = memory.read(8)
        (family,) = struct.unpack_from("<H", address)
        if family in (AF_INET, AF_INET6):
            self.seen.append(f"connect {family} {'.'.join(map(str, address[4:8]))}")


def _install() -> int:
    """Report this thread's socket() calls of the internet and all its connect() calls to a listener; return that."""
    load = struct.Struct("<HBBI").pack
    program = b"".join(
        (
            load(0x20, 0, 0, 0),  # the system call's number
            load(0x15, 4, 0, _CONNECT),
            load(0x15, 0, 4, _SOCKET),
            load(0x20, 0, 0, 16),  # its first argument: the family
            load(0x15, 1, 0, AF_INET),
            load(0x15, 0, 1, AF_INET6),
            load(0x06, 0, 0, _NOTIFY),
            load(0x06, 0, 0, _ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    whole = struct.pack("<H6xQ", len(program) // 8, ctypes.addressof(code))
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    listener = int(_libc.syscall(_SECCOMP, 1, 8, ctypes.create_string_buffer(whole, len(whole))))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return listener
