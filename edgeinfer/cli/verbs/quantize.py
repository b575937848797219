"""`edgeinfer quantize`: make a smaller copy of a model, and measure its loss."""

from __future__ import annotations

import argparse
import time

import msgspec

from edgeinfer.cli.options import add_quiet
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import stoppable, table
from edgeinfer.host import Host
from edgeinfer.models.progress import progress_on
from edgeinfer.models.quantizing.helpers import QuantizeOptions
from edgeinfer.models.quantizing.quantize import quantize
from edgeinfer.units import format_bytes


class QuantizeResult(Result, frozen=True, kw_only=True):
    """Source and result. Perplexities over `n_scored_tokens` of a text; None: unknown.

    `divergence` (nats per token) and `same_top` (share of 1) compare the result with the source.
    """

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
    divergence: float | None
    same_top: float | None
    n_scored_tokens: int
    text: str
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
            whose = self.text or "the text shipped with edgeinfer"
            text += f"\n\nperplexity over {self.n_scored_tokens} tokens of {whose}; lower is better"
        if self.divergence is not None and self.same_top is not None:
            text += (
                f"\nbeside {self.source}: KL divergence {self.divergence:.4f} nats a token, the same "
                f"likeliest token {self.same_top:.1%} of the time"
            )
        if self.quantized_twice:
            text += (
                f"\nnote: {self.source} was quantized already ({self.source_type}); "
                "a copy made from an F16 or BF16 file would be better"
            )
        return text


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from edgeinfer.models.gguf import FILE_TYPES

    parser.add_argument("model", metavar="MODEL", help="a pulled model, or FILE.gguf (with --name)")
    types = tuple(FILE_TYPES.values())
    parser.add_argument(
        "type", metavar="TYPE", type=str.upper, choices=types, help=f"one of {', '.join(types)}"
    )
    parser.add_argument(
        "--text",
        default="",
        metavar="FILE",
        help="text for the perplexity and the importance matrix (default: the shipped one)",
    )
    parser.add_argument("--name", help="store it under this name instead of MODEL:TYPE")
    parser.add_argument(
        "--imatrix",
        default="",
        metavar="FILE|make",
        help="importance matrix in GGUF form; make: compute one from --text or the shipped text; some "
        "types need one, small ones gain most",
    )
    parser.add_argument(
        "--no-perplexity", action="store_true", help="do not measure the perplexity of both"
    )
    add_quiet(parser)


def run(options: argparse.Namespace, _host: Host) -> QuantizeResult:
    """Quantize a model. Raises what `quantize` raises, and InterruptedByUser."""
    start_s = time.monotonic()
    quantize_options = QuantizeOptions(
        name=options.name,
        imatrix=options.imatrix,
        perplexity=not options.no_perplexity,
        text=options.text,
    )
    with progress_on(quiet=options.quiet) as report, stoppable("stopped; nothing was changed", ""):
        quantized = quantize(options.model, options.type, report, options=quantize_options)
    figures = msgspec.structs.asdict(quantized)
    model = figures.pop("model")
    return QuantizeResult(
        **figures,
        source=options.model,
        name=model.name,
        type=model.quantization,
        size_bytes=model.size_bytes,
        sha256=model.sha256,
        path=str(model.paths[0]),
        text=options.text,
        wall_s=round(time.monotonic() - start_s, 3),
    )
