"""`python -m edgeinfer.cluster.child_endpoint PARENT FD WORD…`: a command that dies with its parent.

PARENT is the pid of the starting process, FD a listening socket, which the command inherits as if
systemd had passed it (sd_listen_fds(3)).
"""

from __future__ import annotations

import os
import sys

from edgeinfer import launcher
from edgeinfer.platform import process

_FIRST_LISTENER = 3


def main() -> int:
    """Return the command's exit status, or 1 if the parent has already ended."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    process.die_with_parent()
    if os.getppid() != parent:
        return 1
    if descriptor != _FIRST_LISTENER:
        os.dup2(descriptor, _FIRST_LISTENER)
        os.close(descriptor)
    os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
    del sys.argv[1:3]
    return launcher.main()


if __name__ == "__main__":
    sys.exit(main())
