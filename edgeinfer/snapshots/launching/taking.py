"""Snapshots that are taken of this launch while it runs, when its endpoint asks.

Standard library only, and of that what is cheap: the launcher imports this.
"""

from __future__ import annotations

import os

from edgeinfer.snapshots import frames
from edgeinfer.system import process


def start(fields: dict[str, bytes], fds: list[int]) -> int:
    """Start `edgeinfer snapshots take` outside the app's namespaces; return its pid.

    Its answer in JSON goes to the first of `fds`, which are closed. It dies with this process.
    """

    def prepare() -> None:
        process.die_with_parent()
        os.setsid()
        process.silence()
        os.dup2(fds[0], 1)

    own = ("snapshots", "take", str(os.getpid()), "--json", "--quiet")
    words = frames.split(fields["words"])
    pid = process.fork_and_exec(process.child_command("edgeinfer", *own, *words), prepare)
    for fd in fds:
        os.close(fd)
    return pid
