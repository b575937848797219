"""`edgeinfer quantize`: make a smaller copy of a model, and measure what it costs."""

from __future__ import annotations

import argparse
import time
from typing import ClassVar

from edgeinfer.catalog.progress_bar import progress_on
from edgeinfer.catalog.quantize import QuantizeOptions, quantize
from edgeinfer.commands.table import table
from edgeinfer.errors import InterruptedByUser
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.units import format_bytes


class QuantizeResult(Result, frozen=True, kw_only=True):
    """Before and after. Perplexities are over `n_scored_tokens` of our text, None: unknown."""

    kind: ClassVar[str] = "quantize"

    source: str
    source_type: str
    source_bytes: int
    name: str
    type: str
    size_bytes: int
    sha256: str
    path: str
    source_perplexity: float | None
    perplexity: float | None
    n_scored_tokens: int
    quantized_twice: bool
    wall_s: float

    def human(self) -> str:
        rows = [
            ("", "TYPE", "SIZE", "PERPLEXITY"),
            (
                self.source,
                self.source_type,
                format_bytes(self.source_bytes),
                _figure(self.source_perplexity),
            ),
            (self.name, self.type, format_bytes(self.size_bytes), _figure(self.perplexity)),
        ]
        text = table(rows, right=frozenset({2, 3}))
        if self.n_scored_tokens:
            text += (
                f"\n\nperplexity over {self.n_scored_tokens} tokens of the text shipped with "
                "edgeinfer; lower is better"
            )
        if self.quantized_twice:
            text += (
                f"\nnote: {self.source} was quantized already ({self.source_type}); "
                "a copy made from an F16 or BF16 file would be better"
            )
        return text


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def quantize_model(options: argparse.Namespace, _host: Host) -> QuantizeResult:
    """Raises what `catalog.quantize.quantize` raises; Ctrl-C becomes InterruptedByUser."""
    began = time.monotonic()
    wish = QuantizeOptions(
        name=options.name,
        pure=options.pure,
        keep_output=options.keep_output,
        threads=options.threads,
        imatrix=options.imatrix,
        perplexity=not options.no_perplexity,
    )
    with progress_on(quiet=options.quiet) as report:
        try:
            done = quantize(options.model, options.type, report, options=wish)
        except KeyboardInterrupt as error:
            raise InterruptedByUser("stopped; nothing was changed", hint="") from error
    return QuantizeResult(
        source=options.model,
        source_type=done.before_type,
        source_bytes=done.before_bytes,
        name=done.model.name,
        type=done.model.quantization,
        size_bytes=done.model.size_bytes,
        sha256=done.model.sha256,
        path=str(done.model.paths[0]),
        source_perplexity=done.before_perplexity,
        perplexity=done.after_perplexity,
        n_scored_tokens=done.n_scored_tokens,
        quantized_twice=done.twice,
        wall_s=round(time.monotonic() - began, 3),
    )
