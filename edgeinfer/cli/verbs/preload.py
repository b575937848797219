"""`edgeinfer warm --preload`: bring a model's files into memory before they are needed."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import ClassVar

from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import stoppable
from edgeinfer.errors import EdgeInferError
from edgeinfer.host import Host
from edgeinfer.models.progress import Job, progress_on
from edgeinfer.platform.machine import read_memory
from edgeinfer.platform.page_cache import read_in, resident_bytes
from edgeinfer.snapshots.format import generations, read_manifest
from edgeinfer.units import format_bytes


class PreloadResult(Result, frozen=True, kw_only=True):
    """Files in the order they are loaded. `was_resident_bytes` were in memory before."""

    kind: ClassVar[str] = "preload"

    name: str
    files: tuple[str, ...]
    size_bytes: int
    was_resident_bytes: int
    available_bytes: int
    wall_s: float

    def human(self) -> str:
        read = self.size_bytes - self.was_resident_bytes
        rate = f", {format_bytes(int(read / self.wall_s))}/s" if read and self.wall_s else ""
        text = (
            f"{self.name} is in the page cache: {format_bytes(self.size_bytes)} in {len(self.files)} "
            f"files, {format_bytes(read)} read in {self.wall_s:.1f} s{rate}"
        )
        if self.size_bytes > self.available_bytes:
            text += (
                f"\nnote: {format_bytes(self.available_bytes)} of memory are available: what was read "
                "first may be out again"
            )
        return text


def preload(options: argparse.Namespace, host: Host) -> PreloadResult:
    """Raises what `Host.files` raises, and InterruptedByUser."""
    began = time.monotonic()
    model = host.files(options.model or host.config.default_model)
    files = _in_load_order(model.name, [Path(path) for path in (*model.paths, *model.draft_paths)])
    size = sum(path.stat().st_size for path in files)
    resident = sum(map(resident_bytes, files))
    available = read_memory().available_bytes
    stopped = "stopped; what was read stays in memory"
    with progress_on(quiet=options.quiet) as report, stoppable(stopped, ""):
        job = Job(report)
        job.begin("reading", model.name, total=size)
        read_in(files, job.at)
    return PreloadResult(
        name=model.name,
        files=tuple(map(str, files)),
        size_bytes=size,
        was_resident_bytes=resident,
        available_bytes=available,
        wall_s=round(time.monotonic() - began, 3),
    )


def _in_load_order(model: str, own: list[Path]) -> list[Path]:
    for folders in generations().values():
        try:
            manifest = read_manifest(folders[0])
        except EdgeInferError:
            continue  # `snapshots list` says what is wrong with it
        if manifest.model != model:
            continue
        images = [Path(folders[0]) / name for name in manifest.images]
        holds_weights = manifest.actual.get("repack") == "on"
        return images if holds_weights else [*images, *own]
    return own
