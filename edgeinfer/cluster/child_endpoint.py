"""`python -m edgeinfer.cluster.child_endpoint PARENT FD ARGUMENT…`: run edgeinfer as a child process.

The child is killed if its parent (pid PARENT) dies. FD is a listening socket, which `edgeinfer serve`
gets as if systemd had passed it (sd_listen_fds(3)).
"""

from __future__ import annotations

import os
import sys

from edgeinfer import launcher
from edgeinfer.platform import process

_FIRST_LISTENER = 3


def main() -> int:
    """Run `edgeinfer ARGUMENT…`; return its exit status, or 1 if the parent is already dead."""
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
