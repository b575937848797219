"""Quantize one file into another and measure what that costs, in helper processes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec

from edgeinfer.errors import CatalogError, DiskFullError, QuantizeError, UsageError
from edgeinfer.models import gguf
from edgeinfer.models.ggml_types import FILE_TYPES
from edgeinfer.models.progress import Job
from edgeinfer.models.quantizing import children, imatrix
from edgeinfer.system import paths
from edgeinfer.system.disk import free_bytes

#: In place of an importance matrix: make one.
MAKE_IMATRIX = "make"
#: Types that llama.cpp refuses without an importance matrix.
NEEDS_IMATRIX = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K_S"})


class QuantizeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`pure` gives every tensor one type; `keep_output` leaves the output tensor as it is.

    `name` replaces `NAME:TYPE`; `imatrix` is a path, or MAKE_IMATRIX. `score_tokens` bounds the scored
    text; 0 takes all. `text` is a file to score, and to make the importance matrix of, instead of ours.
    """

    name: str | None = None
    pure: bool = False
    keep_output: bool = False
    threads: int = 0
    imatrix: str = ""
    perplexity: bool = True
    score_tokens: int = 0
    text: str = ""


def run_quantizer(source: Path, target: Path, kind: int, job: Job, options: QuantizeOptions) -> None:
    """Make `target` from the checked GGUF at `source`. On failure nothing is left at `target`.

    Raises QuantizeError, DiskFullError, InterruptedByUser.
    """
    wish = {
        "source": str(source),
        "target": str(target),
        "ftype": kind,
        "pure": options.pure,
        "keep_output": options.keep_output,
        "threads": options.threads,
        "imatrix": options.imatrix,
        "spans": imatrix.spans(Path(options.imatrix)) if options.imatrix else [],
    }
    job.begin("quantizing", f"{source.name} → {FILE_TYPES[kind]}")
    said: dict[str, object] = {}
    try:
        work = children.events(
            "edgeinfer.runtime.helpers.quantizer", msgspec.json.encode(wish).decode(), job=job
        )
        with closing(work):  # the process is gone before the target is, also when the report raises
            for said in work:
                if said["event"] == "tensor":
                    job.at(int(str(said["done"])), int(str(said["total"])))
        if said["event"] == "error":
            raise _error(said, target, kind)
        gguf.check(target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _error(said: dict[str, object], target: Path, kind: int) -> CatalogError | DiskFullError:
    message = str(said["message"])
    free = free_bytes(target.parent)
    torn = "iostream error" in message  # all that llama.cpp says when a write fails
    if said["kind"] == "no-room" or torn or (free < 1 << 24 and "imatrix" not in message):
        return DiskFullError(
            f"no room on the disk of {target.parent} for the {FILE_TYPES[kind]} file: {message}"
        )
    if "imatrix" in message or "importance matrix" in message:
        return QuantizeError(
            f"{FILE_TYPES[kind]} needs an importance matrix that knows every tensor",
            hint="--imatrix make makes one, --imatrix FILE.gguf takes one; types that do without: "
            "Q2_K, Q3_K_M, IQ4_XS, Q4_K_M, Q8_0",
        )
    return QuantizeError(f"llama.cpp refuses to quantize to {FILE_TYPES[kind]}: {message}")


def scored(model: str, job: Job, options: QuantizeOptions, compared: str = "") -> dict[str, float]:
    """What the helper says of a model, beside another of the same vocabulary where one is given."""
    text = checked_text(options.text) if options.text else paths.shipped_file("perplexity.txt")
    limit = str(options.score_tokens or 0)
    job.begin("scoring", Path(model).name)
    child = "edgeinfer.runtime.helpers.perplexity"
    said = children.follow(child, model, str(text), limit, compared, job=job)
    if said["event"] == "error":
        raise QuantizeError(
            f"the perplexity of {Path(model).name} cannot be measured: {said['message']}"
        )
    return {name: float(value) for name, value in said.items() if name != "event"}


def checked_text(text: str) -> Path:
    """The path of a text that somebody named. Raises UsageError where there is none."""
    if not Path(text).is_file():
        raise UsageError(f"there is no text {text}")
    return Path(text)
