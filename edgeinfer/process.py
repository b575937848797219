"""How this program starts another Python process of itself: from a checkout, an installation, or the
frozen binary.
"""

from __future__ import annotations

import sys

#: What the frozen binary's entry point recognises: `edgeinfer --edgeinfer-module MODULE ARG...` runs
#: MODULE as `__main__`.
MODULE_SWITCH = "--edgeinfer-module"


def child_command(module: str, *args: str) -> list[str]:
    """The command that runs `module` (one of edgeinfer's with a `__main__` part) in a process of its
    own.
    """
    if getattr(sys, "frozen", False):
        return [sys.executable, MODULE_SWITCH, module, *args]
    return [sys.executable, "-m", module, *args]
