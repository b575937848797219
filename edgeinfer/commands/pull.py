"""`edgeinfer pull`: fetch, verify and store a model."""

from __future__ import annotations

import argparse
import time
from typing import ClassVar

from edgeinfer.catalog import pull as catalog_pull
from edgeinfer.catalog.models import load_catalog
from edgeinfer.catalog.progress import FETCHED_IS_KEPT, PullProgress
from edgeinfer.catalog.progress_bar import progress_on
from edgeinfer.catalog.pull import PullOptions
from edgeinfer.config import offline
from edgeinfer.errors import InterruptedByUser
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.units import format_bytes

#: What to type next, by what a model is for.
_TRIES = {
    "chat": 'edgeinfer run {} "Name three colours."',
    "base": 'edgeinfer run {} "The sea is"',
    "code": 'edgeinfer run {} "Write a Python function that reverses a string."',
    "embedding": "edgeinfer serve {}",
    "reranker": "edgeinfer serve {}",
}


class PullResult(Result, frozen=True, kw_only=True):
    """A model that is here now. `sha256` of a split model is that of its files' digests."""

    kind: ClassVar[str] = "pull"

    name: str
    title: str
    files: tuple[str, ...]
    size_bytes: int
    sha256: str
    quantization: str
    purpose: str
    licence: str
    source: str
    was_here: bool
    wall_s: float

    def human(self) -> str:
        state = "was already here" if self.was_here else "is here"
        licence = f"; licence {self.licence}" if self.licence else ""
        return (
            f"{self.name} {state}: {format_bytes(self.size_bytes)}, {self.quantization}, sha256 "
            f"{self.sha256[:12]}…{licence}\n"
            f"try it: {_TRIES.get(self.purpose, _TRIES['chat']).format(self.name)}"
        )


def pull(options: argparse.Namespace, host: Host) -> PullResult:
    """Raises what `catalog.pull.pull` raises; Ctrl-C keeps what was fetched."""
    began = time.monotonic()
    wish = PullOptions(
        name=options.name, in_place=options.in_place, again=options.again, offline=offline(host.config)
    )
    fetched = False

    def heard(now: PullProgress) -> None:
        nonlocal fetched
        fetched |= now.stage == "done"
        report(now)

    with progress_on(quiet=options.quiet) as report:
        try:
            record = catalog_pull.pull(options.model or host.config.default_model, heard, options=wish)
        except KeyboardInterrupt as error:
            raise InterruptedByUser(
                f"stopped; {FETCHED_IS_KEPT}",
                hint="type the same command again: it goes on where it stopped",
            ) from error
    entry = load_catalog().get(record.base)
    return PullResult(
        name=record.name,
        title=entry.title if entry else record.name,
        files=tuple(map(str, record.paths)),
        size_bytes=record.size_bytes,
        sha256=record.sha256,
        quantization=record.quantization,
        purpose=entry.purpose if entry else "chat",
        licence=entry.licence if entry else "",
        source=record.source,
        was_here=not fetched,
        wall_s=round(time.monotonic() - began, 3),
    )
