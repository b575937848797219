"""`edgeinfer snapshots take`: a snapshot of what a running process has loaded."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import ClassVar

from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import StageTalk, stoppable
from edgeinfer.errors import SnapshotError, UsageError
from edgeinfer.host import Host
from edgeinfer.snapshots import criu, fingerprint, format, running
from edgeinfer.snapshots.build.jobs import take as build
from edgeinfer.snapshots.registry import Details
from edgeinfer.snapshots.running import Description
from edgeinfer.units import format_bytes

_PS = "`edgeinfer ps` shows what runs"


class TakeResult(Result, frozen=True, kw_only=True):
    """The snapshot of process `pid`; `was_built`: it was not there already, with nothing changed."""

    kind: ClassVar[str] = "snapshots-take"

    pid: int
    snapshot: Details
    was_built: bool
    wall_s: float

    def human(self) -> str:
        d = self.snapshot
        size = f"{format_bytes(d.disk_bytes)} on disk"
        said = f"was taken of process {self.pid}"
        if not self.was_built:
            said = f"is what process {self.pid} has loaded, nothing has changed since it was built"
        lines = [f"{d.name} {said}; {size}, {self.wall_s:.1f} s"]
        if format.is_given(d.name, d.model, d.requested):
            lines.append(f"to start from it: edgeinfer serve --snapshot {d.name}")
        return "\n".join(lines)


def take(options: argparse.Namespace, host: Host) -> TakeResult:
    """Raises UsageError when it is not clear of what, and what `building.take` raises."""
    format.refuse_bad_name(options.name)
    pid = _chosen(options.which)
    found = _of(pid, options.model or _named_model(pid, options.which))
    began = time.monotonic()
    criu.available()
    talk = StageTalk(sys.stderr, quiet=options.quiet, note="in the background: idle cores only")
    with stoppable("stopped; nothing of the snapshot is kept"), talk:
        taken = build(found, options.name, host.config.snapshots, talk.say)
    return TakeResult(
        pid=pid,
        snapshot=taken.snapshot,
        was_built=taken.was_built,
        wall_s=round(time.monotonic() - began, 2),
    )


def _chosen(which: str | None) -> int:
    if which is not None and which.isdecimal():
        return _refuse_strangers(int(which))
    launches = running.processes()
    if which is None:
        found = [launch for launch in launches if launch.verb == "serve"]
        missing, several = "no endpoint runs", "several endpoints run"
    else:
        found = [one for one in launches if which in one.arguments or _has_loaded(one.pid, which)]
        missing, several = f"nothing that runs has {which}", f"several processes have {which}"
    if len(found) == 1:
        return _refuse_strangers(found[0].pid)
    if not found:
        raise UsageError(missing, hint=_PS)
    pids = ", ".join(str(one.pid) for one in found)
    raise UsageError(f"{several}: {pids}", hint="name one by its PID")


def _has_loaded(pid: int, model: str) -> bool:
    return any(_is_of(found, model) for found in running.loaded_below(pid))


def _named_model(pid: int, which: str | None) -> str | None:
    """What was typed, where it names a model that the process has loaded, and not the process."""
    return which if which is not None and _has_loaded(pid, which) else None


def _is_of(found: Description, model: str) -> bool:
    return model in (found.model, found.files.name)


def _refuse_strangers(pid: int) -> int:
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise UsageError(f"there is no process {pid}", hint=_PS) from None
    if owner != os.getuid():
        raise UsageError(
            f"process {pid} belongs to another user, whose snapshots are theirs alone",
            hint=f"as that user: `edgeinfer snapshots take {pid}`",
        )
    if not running.shares_folders(pid):
        raise UsageError(
            f"process {pid} keeps its data in another place",
            hint="set EDGEINFER_HOME (or HOME, XDG_CACHE_HOME) as it was set for that process",
        )
    return pid


def _of(pid: int, model: str | None) -> Description:
    everything = running.loaded_below(pid)
    found = [one for one in everything if model is None or _is_of(one, model)]
    own = [one for one in found if not one.is_worker] or found
    if not own:
        what = f"has not loaded {model}" if model and everything else "has loaded no model"
        raise UsageError(
            f"process {pid} {what}", hint=f"{_PS}; a model is loaded when it is first asked"
        )
    if len({one.model for one in own}) > 1:
        names = ", ".join(sorted(one.model for one in own))
        raise UsageError(f"process {pid} has several models: {names}", hint="name one with --model")
    if own[-1].program != fingerprint.program_tag():
        raise SnapshotError(
            f"process {pid} is of another edgeinfer, which alone can resume what it takes",
            hint="type the same with the `edgeinfer` that started it",
        )
    return own[-1]
