"""`edgeinfer ps`: what runs."""

from __future__ import annotations

import argparse
from typing import ClassVar

from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.snapshots.running import Running, processes
from edgeinfer.units import format_bytes, format_duration


class PsResult(Result, frozen=True, kw_only=True):
    """This user's running launches."""

    kind: ClassVar[str] = "ps"

    running: tuple[Running, ...]

    def human(self) -> str:
        if not self.running:
            return "nothing is running"
        rows = [("PID", "AGE", "PRIVATE", "SHARED", "COMMAND")]
        for r in self.running:
            words = " ".join((r.verb, *r.arguments))
            age, private, shared = (
                format_duration(r.age_s),
                format_bytes(r.private_bytes),
                format_bytes(r.shared_bytes),
            )
            rows.append((str(r.pid), age, private, shared, words[:80]))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]])
            for row in rows
        )


def ps(_options: argparse.Namespace, _host: Host) -> PsResult:
    """Look; nothing is changed."""
    return PsResult(running=tuple(processes()))
