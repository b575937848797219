"""`make bench-importance`: what an importance matrix that is made here keeps of a model, by type.

The tests' small model (a Q4_1 file) is quantized again with and without; both are compared with the file they are
made of on the shipped text, which the matrix is not made with.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import add_out, model_path, write_figure

from edgeinfer.models import quantizing
from edgeinfer.models.gguf import file_type
from edgeinfer.models.progress import Job
from edgeinfer.models.quantizing import NEEDS_IMATRIX, QuantizeOptions, run_quantizer, scored


def figures(source: Path, kind: str, matrix: str, folder: Path) -> tuple[str, str, str]:
    """Perplexity, KL divergence (nats a token) and the share of the same likeliest token."""
    number = file_type(kind)
    assert number is not None
    target = folder / "made.gguf"
    run_quantizer(source, target, number, Job(), QuantizeOptions(imatrix=matrix))
    found = scored(str(target), Job(), QuantizeOptions(), compared=str(source))
    target.unlink()
    return f"{found['perplexity']:.2f}", f"{found['divergence']:.3f}", f"{found['same_top']:.0%}"


def main() -> None:
    """Write OUT/importance.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", default="Q4_0,IQ4_NL,Q3_K_M,IQ3_XXS,Q2_K,IQ2_XS")
    add_out(parser)
    options = parser.parse_args()
    source = model_path("smollm2")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        matrix = folder / "imatrix.gguf"
        quantizing.make_imatrix(source, quantizing.calibration_text(), matrix, Job())
        for kind in options.types.split(","):
            without = ("refused",) * 3 if kind in NEEDS_IMATRIX else figures(source, kind, "", folder)
            pairs = zip(without, figures(source, kind, str(matrix), folder), strict=True)
            rows.append(f"| {kind} | {' | '.join(f'{a} → {b}' for a, b in pairs)} |")
    head = "| SmolLM2 135M, from Q4_1, to | perplexity | KL divergence, nats a token | the same likeliest token |"
    table = "\n".join([head, "| --- | --- | --- | --- |", *rows]) + "\n"
    print(write_figure(options.out, "importance", table))


if __name__ == "__main__":
    main()
