"""Quantize models, and measure how much quality that costs.

The result is stored next to its source as `NAME:TYPE`, with the same chat template, stop strings and
sampling defaults. Quantizing and scoring run in child processes, which a cancellation ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.errors import CatalogError, DiskFullError, InvalidGgufError, QuantizeError, UsageError
from edgeinfer.models import gguf, names, store
from edgeinfer.models.fetching.fetch import copy_into
from edgeinfer.models.gguf import FILE_TYPES, FULL_PRECISION, TensorInfo, parse_file_type
from edgeinfer.models.names import Reference
from edgeinfer.models.progress import Job, OnProgress
from edgeinfer.models.pull_plan import FetchedFile
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import PulledModel, locked_work_folder
from edgeinfer.platform import paths
from edgeinfer.platform.disk import free_bytes
from edgeinfer.platform.process import child_command, describe_exit, start_child


class QuantizeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `quantize`: the result's `name`, and the path of an importance matrix (`imatrix`).

    With `name` None, the result is named after the pulled source and its new type. With `keep`, a
    result that is already stored is not made again. With `perplexity`, the result is scored on a text,
    of which `score_tokens` are used (0: all).
    """

    name: str | None = None
    keep: bool = False
    imatrix: str = ""
    perplexity: bool = True
    score_tokens: int = 0


class QuantizeResult(msgspec.Struct, frozen=True, kw_only=True):
    """A quantized model, compared with its source. A figure is None if it was not measured.

    Perplexities are of the text in data/perplexity.txt. `divergence` is the mean KL divergence from the
    source (nats per token), `same_top` the share of tokens for which both predict the same most likely
    token.
    """

    model: PulledModel
    source_bytes: int
    source_type: str
    source_perplexity: float | None = None
    perplexity: float | None = None
    divergence: float | None = None
    same_top: float | None = None
    n_scored_tokens: int = 0
    quantized_twice: bool = False


def quantize(
    text: str,
    type_name: str,
    progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
    options: QuantizeOptions | None = None,
) -> QuantizeResult:
    """Quantize the model (or GGUF file) `text` to `type_name`; store and score the result.

    Raises UsageError, ModelBusyError, QuantizeError, DiskFullError, InterruptedByUser, and the errors
    of `ModelRef.files`.
    """
    options = options or QuantizeOptions()
    job = Job(progress, cancel)
    model = resolve(text)
    source = model.files()
    kind = parse_file_type(type_name)
    origin = model.pulled
    ref = _reference(text, FILE_TYPES[kind], origin, options)
    with locked_work_folder(ref) as work:
        before = gguf.read_model_header(source.paths[0])
        earlier = store.read_record(names.pulled_folder(ref))
        if earlier and earlier.source != store.QUANTIZED_FROM + source.name:
            hint = f"choose another --name, or remove it first: `edgeinfer rm {earlier.name}`"
            raise UsageError(f"{earlier.name} is here already, from another source", hint=hint)
        record = earlier if options.keep else None
        if record is None:
            target = work / f"{ref.name}-{FILE_TYPES[kind]}.gguf.part"
            run_quantizer(Path(source.paths[0]), target, kind, job, options)
            quantized = FetchedFile.hash_result(target, job)
            record = store.publish(
                ref,
                [quantized],
                base=origin.base if origin else ref.name,
                source=store.QUANTIZED_FROM + source.name,
                requantized_from=before.quantization,
                projector=_own_projector(source.projector, work, job) if source.projector else None,
            )
            shutil.rmtree(work, ignore_errors=True)
    score = {}
    if options.perplexity:
        score = score_model(str(record.paths[0]), job, options, compared=source.paths[0])
    return QuantizeResult(
        model=record,
        source_bytes=sum(Path(path).stat().st_size for path in source.paths),
        source_type=before.quantization,
        source_perplexity=score.get("compared_perplexity"),
        perplexity=score.get("perplexity"),
        divergence=score.get("divergence"),
        same_top=score.get("same_top"),
        n_scored_tokens=int(score.get("n_tokens", 0)),
        quantized_twice=before.quantization not in FULL_PRECISION,
    )


def _own_projector(path: str, work: Path, job: Job) -> FetchedFile:
    """Link or copy the source's projector, since the source may be removed later."""
    target = work / "mmproj.gguf.part"
    try:
        os.link(path, target)
    except OSError:
        copy_into(work, Path(path), job).rename(target)
    return FetchedFile.hash_result(target, job)


def _reference(
    text: str, type_name: str, origin: PulledModel | None, options: QuantizeOptions
) -> Reference:
    hint = "give the result a name: `--name NAME`"
    if options.name:
        ref = names.parse_reference(options.name)
    elif origin is not None:
        ref = Reference(origin.reference.name, type_name)
    else:
        raise UsageError("the quantized model needs a name, since its source has none", hint=hint)
    if origin is not None and ref == origin.reference:
        raise UsageError(f"the quantized model would replace {text} itself", hint=hint)
    return ref


def quantize_fetched(
    fetched: list[FetchedFile], type_name: str, work: Path, job: Job
) -> list[FetchedFile]:
    """Quantize files that a pull has fetched; return the result. Raises what `run_quantizer` raises."""
    kind = parse_file_type(type_name)
    first = fetched[0]
    # remove the suffix .part meanwhile: llama.cpp finds the files of a split model by their names
    for file in fetched:
        file.path = file.path.rename(file.path.with_name(file.file_name)) if file.is_ours else file.path
    stem = names.check_file_name(first.file_name).removesuffix(".gguf")
    target = work / f"{stem}-{FILE_TYPES[kind]}.gguf.part"
    try:
        run_quantizer(first.path, target, kind, job, QuantizeOptions())
    finally:
        for file in fetched:  # after an error, the next pull looks for FILE.part
            if file.is_ours and file.path.suffix != ".part":
                file.path = file.path.rename(file.path.with_name(file.file_name + ".part"))
    return [FetchedFile.hash_result(target, job)]


def run_child(module: str, *args: str, job: Job, failure: str = "") -> dict[str, Any]:
    """Run `module` in a child process, report its progress, and return its last message.

    The message is {"event": "done" or "error", …}. Raises InterruptedByUser, and QuantizeError if the
    child ends without a message. Unless `failure` is "", the event "error" raises QuantizeError, too;
    `failure` begins the text of that error.
    """
    event: dict[str, Any] = {}
    with tempfile.TemporaryFile() as complaints:
        with start_child(
            child_command(module, *args),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
        ) as process:
            assert process.stdout is not None
            try:
                with job.call_on_cancel(process.kill):
                    for line in process.stdout:
                        event = msgspec.json.decode(line, type=dict[str, Any])
                        if event["event"] == "progress":
                            job.report(event["done"], event["total"])
                job.check()
            except BaseException:
                process.kill()
                raise
        if failure and event.get("event") == "error":
            raise QuantizeError(f"{failure}: {event['message']}", hint="run `edgeinfer doctor`")
        if event.get("event") in ("done", "error"):
            return event
        complaints.seek(0)
        said = complaints.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
    ending = f"ended with {describe_exit(process.returncode)}"
    problem = f"the helper process {module} {ending}: {said or 'it printed nothing'}"
    raise QuantizeError(problem, hint="free some memory, then try again")


_SUMS, _COUNTS = ".in_sum2", ".counts"

#: Position of a tensor's statistics in an importance matrix: name of the tensor, offset (bytes) and
#: number of its sums, offset (bytes) and number of its counts.
Span = tuple[str, int, int, int, int]


def imatrix_spans(path: Path) -> list[Span]:
    """Return the positions of sums and counts in an importance matrix. Raises InvalidGgufError."""
    header = gguf.read_header(path)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    spans = [
        _span(name.removesuffix(_SUMS), sums, tensors.get(name.removesuffix(_SUMS) + _COUNTS), path)
        for name, sums in tensors.items()
        if name.endswith(_SUMS)
    ]
    if not spans:
        problem = f"{path} is not an importance matrix: it has no tensors called …{_SUMS}"
        raise InvalidGgufError(problem, hint="use an importance matrix in GGUF format (imatrix.gguf)")
    return spans


def _span(name: str, sums: TensorInfo, counts: TensorInfo | None, path: Path) -> Span:
    fits = counts is not None and counts.n_elements > 0 and sums.n_elements % counts.n_elements == 0
    if counts is None or not fits or (sums.type, counts.type) != ("F32", "F32"):
        problem = f"{path}: the sums and counts of {name} do not match"
        raise InvalidGgufError(problem, hint="use another importance matrix")
    return name, sums.offset, sums.n_elements, counts.offset, counts.n_elements


#: Types to which llama.cpp quantizes only with an importance matrix.
NEEDS_IMATRIX = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K_S"})


def run_quantizer(source: Path, target: Path, kind: int, job: Job, options: QuantizeOptions) -> None:
    """Quantize the GGUF `source` to the file `target`; `kind` is a llama_ftype.

    Raises QuantizeError, DiskFullError or InterruptedByUser; then there is no `target`.
    """
    wish = {
        "source": str(source),
        "target": str(target),
        "ftype": kind,
        "imatrix": options.imatrix,
        "spans": imatrix_spans(Path(options.imatrix)) if options.imatrix else [],
    }
    job.begin("quantizing", f"{source.name} → {FILE_TYPES[kind]}")
    child = "edgeinfer.runtime.llama.helpers.quantizer"
    try:
        event = run_child(child, msgspec.json.encode(wish).decode(), job=job)
        if event["event"] == "error":
            raise _quantizer_error(event, target, kind)
        gguf.read_model_header(target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _quantizer_error(event: dict[str, object], target: Path, kind: int) -> CatalogError | DiskFullError:
    message = str(event["message"])
    free = free_bytes(target.parent)
    failed_write = "iostream error" in message  # llama.cpp's only message if a write fails
    if event["kind"] == "no-room" or failed_write or (free < 1 << 24 and "imatrix" not in message):
        problem = f"the disk of {target.parent} is full: the {FILE_TYPES[kind]} file does not fit"
        return DiskFullError(f"{problem}: {message}")
    if "imatrix" in message or "importance matrix" in message:
        return QuantizeError(
            f"{FILE_TYPES[kind]} needs an importance matrix with every tensor",
            hint="use a published one: --imatrix FILE.gguf; types that need none: "
            "Q2_K, Q3_K_M, IQ4_XS, Q4_K_M, Q8_0",
        )
    return QuantizeError(f"llama.cpp refuses to quantize to {FILE_TYPES[kind]}: {message}")


def score_model(model: str, job: Job, options: QuantizeOptions, compared: str = "") -> dict[str, float]:
    """Measure a model's perplexity and, unless `compared` is "", its divergence from that model.

    `model` and `compared` are paths. Returns figures by name ("perplexity", …). Raises QuantizeError.
    """
    text = paths.shipped_file("perplexity.txt")
    limit = str(options.score_tokens or 0)
    job.begin("scoring", Path(model).name)
    child = "edgeinfer.runtime.llama.helpers.perplexity"
    failure = f"the perplexity of {Path(model).name} cannot be measured"
    event = run_child(child, model, str(text), limit, compared, job=job, failure=failure)
    return {name: float(value) for name, value in event.items() if name != "event"}
