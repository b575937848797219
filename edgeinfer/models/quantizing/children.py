"""Run helper processes that answer with one JSON object a line; a cancellation ends them."""

from __future__ import annotations

import selectors
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import msgspec

from edgeinfer.errors import QuantizeError
from edgeinfer.models.progress import Job
from edgeinfer.system.process import child_command

_POLL_S = 0.2


def events(module: str, *args: str, job: Job) -> Generator[dict[str, Any]]:
    """Run `module` and yield what it says; end it when the generator is closed or ends.

    Raises InterruptedByUser, and QuantizeError when it dies of a signal or without an "error" or
    "done".
    """
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            child_command(module, *args),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
        )
        last: dict[str, Any] = {}
        try:
            for last in _lines(process, job):
                yield last
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()
        if last.get("event") not in ("done", "error"):
            complaints.seek(0)
            raise QuantizeError(f"{module} {_death(process.returncode)}: {_tail(complaints.read())}")


def follow(module: str, *args: str, job: Job) -> dict[str, Any]:
    """Report the progress of `module` and return its "error" or "done". Raises as `events`."""
    said: dict[str, Any] = {}
    with closing(events(module, *args, job=job)) as work:
        for said in work:
            if said["event"] == "progress":
                job.at(int(said["done"]), int(said["total"]))
    return said


def _lines(process: subprocess.Popen[bytes], job: Job) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            job.check()
            if not selector.select(_POLL_S):
                continue
            chunk = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]  # a BufferedReader, which typeshed calls IO
            if not chunk:
                return
            *whole, pending = (pending + chunk).split(b"\n")
            for line in whole:
                yield msgspec.json.decode(line, type=dict[str, Any])


def _death(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _tail(text: bytes) -> str:
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
