"""`edgeinfer merge`: a model with adapters in its weights."""

from __future__ import annotations

import argparse
import time
from typing import ClassVar

from edgeinfer.cli.options import add_quiet
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import stoppable
from edgeinfer.host import Host
from edgeinfer.models.adapters import merge_model
from edgeinfer.models.progress import progress_on
from edgeinfer.units import format_bytes


class MergeResult(Result, frozen=True, kw_only=True):
    """The merged model."""

    kind: ClassVar[str] = "merge"

    name: str
    source: str
    type: str
    size_bytes: int
    sha256: str
    path: str
    wall_s: float

    def human(self) -> str:
        return (
            f"{self.name} is here: {self.source}, {self.type}, {format_bytes(self.size_bytes)}\n"
            f'try it: edgeinfer run {self.name} "Name three colours."'
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a pulled model, or FILE.gguf")
    parser.add_argument(
        "adapters",
        metavar="ADAPTER[:SCALE]",
        nargs="+",
        help="a pulled adapter's NAME, FILE.gguf, or a FOLDER of PEFT's",
    )
    parser.add_argument("--name", required=True, help="store it under this name")
    parser.add_argument(
        "--quantize",
        default="",
        metavar="TYPE",
        help="type of the merged model (default: each tensor keeps its own)",
    )
    add_quiet(parser)


def run(options: argparse.Namespace, _host: Host) -> MergeResult:
    """Merge adapters into a model. Raises what `merge_model` raises, and InterruptedByUser."""
    start_s = time.monotonic()
    with progress_on(quiet=options.quiet) as report, stoppable("stopped; nothing was changed", ""):
        adapters = ",".join(options.adapters)
        merged = merge_model(options.model, adapters, options.name, options.quantize, report)
    return MergeResult(
        name=merged.name,
        source=merged.source,
        type=merged.quantization,
        size_bytes=merged.size_bytes,
        sha256=merged.sha256,
        path=str(merged.paths[0]),
        wall_s=round(time.monotonic() - start_s, 3),
    )
