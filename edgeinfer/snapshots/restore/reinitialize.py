"""Renew the state that every restore repeats: entropy, environment, folder, clock, limits.

Every process resumed from one image starts with the same memory. Whatever draws randomness must be
reseeded before anything else happens, and what belongs to the launch (environment, working directory,
umask, time zone, locale, processors, limits) comes with the launch request. No reseed, no service: an
error here ends the process.
"""

from __future__ import annotations

import contextlib
import locale
import os
import random
import resource
import ssl
import sys
import tempfile
import time

from edgeinfer.launcher.messages import LaunchRequest
from edgeinfer.launcher.process_env import LIMITS
from edgeinfer.platform import linux
from edgeinfer.runtime.llama.mappings import Range


def droppable_ranges(smaps: str) -> list[Range]:
    """Find the memory where glibc >= 2.41 keeps getrandom's vDSO state (flag `dp`)."""
    found: list[Range] = []
    current = Range(0, 0)
    for line in smaps.splitlines():
        head = line.split(None, 1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = head.split("-")
            current = Range(int(low, 16), int(high, 16))
        elif head == "VmFlags:" and "dp" in line.split()[1:]:
            found.append(current)
    return found


def read_droppable_ranges() -> list[Range]:
    """Find these ranges in this process."""
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        return droppable_ranges(file.read())


def forget_random_state(ranges: list[Range]) -> None:
    """Empty those ranges before a dump and after a restore, which CRIU 4.1 fills."""
    for low, high in ranges:
        linux.forget_pages(low, high - low)


def reseed(entropy: bytes, ranges: list[Range]) -> bytes:
    """Give every source of randomness a new state; returns entropy for the samplers.

    `entropy` comes from the launcher, and is mixed with what the kernel gives. Raises OSError when the
    kernel gives none.
    """
    forget_random_state(ranges)
    seed = linux.getrandom(64) + entropy
    ssl.RAND_add(seed, 64.0)
    random.seed(linux.getrandom(32) + entropy)
    tempfile._name_sequence = None  # type: ignore[attr-defined]  # it reseeds when the pid changes, and ours does not
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(list(linux.getrandom(64)))
    return linux.getrandom(32) + entropy


def adopt(request: LaunchRequest) -> None:
    """Adopt the launcher's environment, folder, umask, zone, locale, processors, soft limits."""
    os.environ.clear()
    for assignment in request.env:
        name, _, value = assignment.partition("=")
        if name:
            os.environ[name] = value
    time.tzset()
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "")
    with contextlib.suppress(OSError):  # gone: then we are where the parked process was, at /
        os.chdir(request.cwd)
    os.umask(request.umask)
    _take_processors(set(map(int, request.affinity)))
    for name, value in request.limits.items():
        if name in LIMITS:
            _limit(getattr(resource, name), int(value))
    if os.environ.get("EDGEINFER_DEBUG") != "1":  # prompts would be in a core file
        _limit(resource.RLIMIT_CORE, 0)


def _take_processors(numbers: set[int]) -> None:
    """Set the affinity of every thread: the engine's have that of the builder."""
    if not numbers:
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that ended, a processor taken offline
            os.sched_setaffinity(int(thread), numbers)


def _limit(which: int, soft: int) -> None:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > hard):
        soft = hard
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(which, (soft, hard))


def new_streams() -> None:
    """Open sys.stdin, stdout and stderr over 0, 1 and 2 as a fresh interpreter would."""
    encoding = locale.getencoding()
    # the C locale: Python reads it as UTF-8 too
    lenient = encoding.lower() in ("ascii", "ansi_x3.4-1968", "646")
    if lenient or sys.flags.utf8_mode:
        encoding = "utf-8"
    errors = "surrogateescape" if lenient else "strict"
    sys.stdin = sys.__stdin__ = _open(0, "r", encoding, errors)  # type: ignore[misc, assignment]
    sys.stdout = sys.__stdout__ = _open(1, "w", encoding, errors)  # type: ignore[misc, assignment]
    sys.stderr = sys.__stderr__ = _open(2, "w", encoding, "backslashreplace")  # type: ignore[misc, assignment]


def _open(fd: int, mode: str, encoding: str, errors: str) -> object:
    try:
        terminal = os.isatty(fd)
        return open(
            fd,
            mode,
            buffering=1 if terminal or fd == 2 else -1,
            encoding=encoding,
            errors=errors,
            closefd=False,
        )
    except OSError:  # a closed descriptor: None, as a fresh interpreter has it
        return None
