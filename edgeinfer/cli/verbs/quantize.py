"""`edgeinfer quantize`: make a smaller copy of a model, and measure the loss of quality."""

from __future__ import annotations

import argparse
import sys
from statistics import median

import msgspec

from edgeinfer.cli.options import add_quiet
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result, TimedResult
from edgeinfer.cli.terminal import stoppable, table
from edgeinfer.cli.verbs import eval
from edgeinfer.cli.verbs.eval_report import EvalResult
from edgeinfer.host import EngineHost
from edgeinfer.models.gguf import FILE_TYPES, parse_file_type
from edgeinfer.models.progress import progress_on
from edgeinfer.models.quantizing import QuantizeOptions, quantize
from edgeinfer.models.store import hidden_model_warning
from edgeinfer.platform import paths
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.units import format_bytes


class QuantizeResult(TimedResult, frozen=True, kw_only=True):
    """The source and its quantized copy. Perplexities are over `n_scored_tokens` of a text.

    `divergence` (KL, nats per token) and `same_top` (share of tokens with the same likeliest token, 0
    to 1) compare the copy with the source. A figure that was not measured is None.
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
    quantized_twice: bool

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
            text += f"\n\nperplexity over {self.n_scored_tokens} tokens of a text; lower is better"
        if self.divergence is not None and self.same_top is not None:
            text += (
                f"\ncompared with {self.source}: KL divergence {self.divergence:.4f} nats a token, the "
                f"same likeliest token {self.same_top:.1%} of the time"
            )
        if self.quantized_twice:
            text += (
                f"\nnote: {self.source} was quantized already ({self.source_type}); "
                "a copy made from an F16 or BF16 file would be better"
            )
        return text


class ComparedModel(msgspec.Struct, frozen=True):
    """A model in a comparison. Speeds (tokens/s) are medians of three runs.

    `divergence` and `same_top` compare it with the source, as in `QuantizeResult`; None for the source.
    """

    name: str
    type: str
    size_bytes: int
    divergence: float | None
    same_top: float | None
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class QuantizeCompareResult(Result, frozen=True, kw_only=True):
    """Copies compared with their source: the source is the first of `models` and of `evaluation`."""

    models: list[ComparedModel]
    evaluation: EvalResult

    def human(self) -> str:
        rows = [("", "SIZE", "PREFILL/s", "DECODE/s", "KL", "SAME TOP", "SCORE", "AGAINST THE FIRST")]
        for n, model in enumerate(self.models):
            speeds = f"{model.prefill_tokens_per_s:.0f}", f"{model.decode_tokens_per_s:.1f}"
            loss = "-", "-"
            if model.divergence is not None:
                loss = f"{model.divergence:.4f}", f"{model.same_top:.1%}"
            score = f"{self.evaluation.scores[n].value:.0%}", self.evaluation.compare_with_first(n)
            rows.append((model.name, format_bytes(model.size_bytes), *speeds, *loss, *score))
        notes = [
            f"KL: nats a token compared with {self.models[0].name}; score: {self.evaluation.set}, "
            f"{len(self.evaluation.items)} items, each in {self.evaluation.path}",
            "all are stored: `edgeinfer rm NAME` removes one",
        ]
        return "\n".join([table(rows, right=frozenset(range(1, 7))), "", *notes])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a pulled model, or FILE.gguf with --name")
    types = tuple(FILE_TYPES.values())
    task = parser.add_mutually_exclusive_group(required=True)
    help = f"one of {', '.join(types)}"
    task.add_argument("type", nargs="?", metavar="TYPE", type=str.upper, choices=types, help=help)
    help = "create missing types, then compare size, speed, loss and score with MODEL"
    add_option(task, "--compare TYPE,…", help)
    parser.add_argument("--name", help="name of the copy (default: MODEL:TYPE)")
    help = "importance matrix in GGUF format; some types need one, small types gain most"
    add_option(parser, "--imatrix FILE", help, default="")
    add_quiet(parser)


def run(options: argparse.Namespace, host: EngineHost) -> Result:
    """Quantize a model. Raises what `quantizing.quantize` raises, and InterruptedByUser."""
    quantize_options = QuantizeOptions(name=options.name, imatrix=options.imatrix)
    if options.compare is not None:
        return _compare(options, quantize_options, host)
    stopped = "stopped; the copy is kept if it was finished"
    with progress_on(quiet=options.quiet) as report, stoppable(stopped, ""):
        quantized = quantize(options.model, options.type, report, options=quantize_options)
    figures = msgspec.structs.asdict(quantized)
    model = figures.pop("model")
    sys.stderr.write(hidden_model_warning(model))
    return QuantizeResult(
        **figures,
        source=options.model,
        name=model.name,
        type=model.quantization,
        size_bytes=model.size_bytes,
        sha256=model.sha256,
        path=str(model.paths[0]),
    )


#: Number of tokens of prompt and answer in a measurement of speed.
_PROMPT_TOKENS, _ANSWER_TOKENS = 256, 32
#: Number of runs in a measurement of speed.
_ROUNDS = 3


def _compare(
    options: argparse.Namespace, quantize_options: QuantizeOptions, host: EngineHost
) -> QuantizeCompareResult:
    from edgeinfer.cli.parser import build_parser

    kinds = [FILE_TYPES[parse_file_type(kind)] for kind in options.compare.split(",")]
    quantized = []
    for kind in kinds:
        name = f"{options.name}:{kind}" if options.name else None
        kind_options = msgspec.structs.replace(quantize_options, name=name, keep=True)
        with progress_on(quiet=options.quiet) as report, stoppable("stopped; finished models are kept"):
            quantized.append(quantize(options.model, kind, report, options=kind_options))
    rows: list[tuple[str, str, int, float | None, float | None]]
    rows = [(options.model, quantized[0].source_type, quantized[0].source_bytes, None, None)]
    for result in quantized:
        row = result.model.name, result.model.quantization, result.model.size_bytes
        rows.append((*row, result.divergence, result.same_top))
    models = [ComparedModel(*row, *_speed(row[0], host)) for row in rows]
    quiet = ["--quiet"] if options.quiet else []
    typed = ["eval", "basics", *(model.name for model in models), *quiet]
    evaluation = eval.run(build_parser("eval").parse_args(typed), host)
    return QuantizeCompareResult(models=models, evaluation=evaluation)


def _speed(model: str, host: EngineHost) -> tuple[float, float]:
    """Measure prefill and decode (tokens/s) of a model. Raises what `EngineHost.engine` raises."""
    engine = host.engine(model, LoadOptions(n_ctx=2 * _PROMPT_TOKENS, n_parallel=1, is_counted=False))
    try:
        text = paths.shipped_file("perplexity.txt").read_text("utf-8")
        request = GenerateRequest(
            prompt=tuple(engine.tokenize(text)[:_PROMPT_TOKENS]),
            max_tokens=_ANSWER_TOKENS,
            ignore_eos=True,
            cache_prompt=False,
            speculative="off",
        )
        events = [event for _ in range(_ROUNDS) for event in engine.submit(request)]
    finally:
        engine.close()
    runs = [event for event in events if isinstance(event, Finished)]
    return (
        median(run.usage.prompt_tokens * 1000 / run.timings.prefill_ms for run in runs),
        median(run.timings.decode_tokens_per_s(run.usage.completion_tokens) for run in runs),
    )
