"""The launcher's side of a handoff: a resumed process continues an app that started cold.

The launcher writes `START` to the source, the app that started cold, when a snapshot fits, the source
answers `SourceIdle` between two requests, the target is resumed and answers `TargetReady`, and the
launcher writes `COMMIT` to the source, which ends. Any failure before that aborts: the source goes on.
A descriptor that comes with `SourceIdle` is for the target alone: a chat's end of a socket between the
two.

Standard library only, and of that what is cheap: the launcher imports this.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C part: `signal` costs 3 ms
import os
import sys
import time

from edgeinfer.errors import EdgeInferError
from edgeinfer.launcher.apps import App, Apps, Verb, quietly

#: What the launcher writes on the pipe of a source, a byte each.
START, COMMIT = b"s", b"c"
#: From a target's start until it is ready (s); one that takes longer is killed.
LIMIT_S = 60.0
#: How a target ends that found its source at work again, which is no error.
_WITHDRAWN = "exit 0"


class HandoffCoordinator:
    """At most one target at a time, for the app of the verb."""

    def __init__(self, verb: Verb, apps: Apps) -> None:
        self.target: App | None = None
        self._verb = verb
        self._apps = apps
        self._was_late = False

    def propose(self, source: App | None) -> None:
        """Write `START` to the app if there is a snapshot now that fits its launch."""
        self._verb.select_again()
        choice = self._verb.choice
        if source is None or source.handoff_fd is None or choice.resume == "never":
            return
        try:
            choice.find()
        except (EdgeInferError, OSError):
            return
        quietly(os.write, source.handoff_fd, START)

    def start(self, fds: list[int]) -> None:
        """Resume the verb a second time with the same listening sockets, and `fds` of its own."""
        if self.target is None:
            self._start(fds)
        for fd in fds:
            os.close(fd)

    def _start(self, fds: list[int]) -> None:
        self._apps.reset_clock()
        self._was_late = False
        verb = self._verb
        request = verb.request()
        request.is_handoff_target, request.has_channel = True, bool(fds)
        try:
            folder, manifest = verb.choice.find()
            self.target = self._apps.resume(folder, manifest, request, [*verb.fds, *fds])
        except (EdgeInferError, OSError) as error:
            self.abort(str(error))

    def wait_ms(self) -> int | None:
        """Return milliseconds until `check_time` is due; None while there is no target."""
        if self.target is None:
            return None
        return max(0, int(1000 * (self.target.started_s + LIMIT_S - time.monotonic()))) + 1

    def check_time(self) -> None:
        """Kill a target that is late; its end is reported as that of any other."""
        if self.target is not None and time.monotonic() > self.target.started_s + LIMIT_S:
            self._was_late = True
            quietly(os.kill, self.target.child.pid, _signal.SIGKILL)

    def commit(self, source: App | None) -> App | None:
        """Return the target, now the verb's app; the source ends once its clients have gone."""
        target, self.target = self.target, None
        if source is not None and source.handoff_fd is not None:
            quietly(os.write, source.handoff_fd, COMMIT)
        return target

    def abort(self, why: str, source: App | None = None) -> None:
        """Go on without a target. After one that withdrew, propose the next to `source`."""
        self.target = None
        if why == _WITHDRAWN:
            self.propose(source)
            return
        if self._was_late:
            why = f"the resumed process was not ready within {LIMIT_S:g} s"
        text = f"no handoff to the snapshot: {why[:300]}"
        if self._verb.argv[0] == "chat":  # the terminal is the app's
            from edgeinfer.launcher import builds  # only after a failure

            try:  # noqa: SIM105  contextlib costs 3 ms
                builds.log(text)
            except (EdgeInferError, OSError):
                pass
            return
        sys.stderr.write(f"edgeinfer: {text}\n")
        sys.stderr.flush()
