"""The launcher: resume a snapshot or start a cold process for a verb; relay signals and exit status.

A verb that needs a model in memory (`chat`, `run`, `serve`, `batch`) becomes a launch request. The
launcher sends the request to the app: a process resumed from a snapshot, or a new interpreter if no
snapshot fits. Then the launcher forwards signals to the app, stops and continues when the app does,
starts workers for the app, keeps the listening sockets of `serve` across crashes, and ends with the
app's exit status or signal. Every other verb runs in the launcher's own process.

Modules of this package import only cheap modules of the standard library: each import delays a launch
(docs/decisions/042-what-the-launcher-imports.md).
"""

from __future__ import annotations

import gc
import sys
import time

from edgeinfer.platform.early_ctrl_c import end_quietly

_HELP = ("-h", "--help", "--help-all")


def main() -> int:
    """Run the console command; return its exit code."""
    main_ns = time.monotonic_ns()
    end_quietly()
    # imported after `end_quietly`, so that Ctrl-C during the imports prints no traceback
    from edgeinfer.launcher.argv import LAUNCH_VERBS, CommandLine, with_verb
    from edgeinfer.platform import process

    # Python has no call for the time of exec. This process has hardly waited yet, so its CPU time is
    # about its age
    exec_ns = main_ns - time.process_time_ns()
    process.open_missing_streams()
    argv = with_verb(sys.argv[1:])
    if sys.platform == "linux" and argv[0] in LAUNCH_VERBS and not any(word in _HELP for word in argv):
        gc.disable()  # a launch makes no garbage, and each collection would take 0.7 ms
        from edgeinfer.launcher.launch import Launcher  # this module works only on Linux

        Launcher(CommandLine(argv), exec_ns, main_ns).run()
    if getattr(sys, "frozen", False):
        # the one-file program contains this launcher and the application. Only the application has the
        # modules of `cli`, so execute it (shipping.shipped)
        import os

        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    from edgeinfer.cli.main import main  # slow import (60 ms): a launch does not need this module

    return main(argv)
