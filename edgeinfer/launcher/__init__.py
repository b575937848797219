"""Resume a warmed process or start a cold one for a verb, and stand in for it.

A verb that needs a model in memory (`chat`, `run`, `serve`, `batch`) becomes a launch request, sent
over a socket of this launch to a process resumed from a snapshot, or to a fresh
interpreter when there is none that fits. This process then passes signals on, stops and continues with
its app, starts workers for other models when the app asks, keeps `serve`'s listening socket across
crashes, and ends as the app ended. Every other verb runs here.

Nothing here imports more than the standard library, and of that only what is cheap: each import
is paid at every launch (docs/decisions/042-what-the-launcher-imports.md).
"""

from __future__ import annotations

import gc
import sys
import time

from edgeinfer.launcher.argv import LAUNCH_VERBS, with_verb
from edgeinfer.platform import process

_HELP = ("-h", "--help", "--help-all")


def main() -> int:
    """Run the console command; return its exit code."""
    main_ns = time.monotonic_ns()
    # what this process has computed since exec: it has hardly waited
    exec_ns = main_ns - time.process_time_ns()
    process.open_missing_streams()
    argv = with_verb(sys.argv[1:])
    if sys.platform == "linux" and argv[0] in LAUNCH_VERBS and not any(word in _HELP for word in argv):
        gc.disable()  # a launch leaves no garbage, and to look for it costs 0.7 ms
        from edgeinfer.launcher.launch import launch  # Linux only

        launch(argv, exec_ns, main_ns)
    if getattr(sys, "frozen", False):
        # the shipped file's launcher has no command line, its application has (shipping.shipped)
        import os  # built in

        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    from edgeinfer.cli.main import main  # 60 ms: not on the way of a launch

    return main(argv)
