"""Quantize stored and fetched models, and measure the loss.

A quantized model is stored beside the one it was made from, as `NAME:TYPE`, and keeps its base's chat
template, stop strings and sampling defaults.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import msgspec

from edgeinfer.errors import UsageError
from edgeinfer.models import gguf, names, store
from edgeinfer.models.fetching.fetch import copy_into
from edgeinfer.models.gguf import FILE_TYPES, FULL_PRECISION, parse_file_type
from edgeinfer.models.names import Reference
from edgeinfer.models.progress import Job, OnProgress
from edgeinfer.models.pull_plan import Fetched
from edgeinfer.models.quantizing import helpers
from edgeinfer.models.quantizing.helpers import (
    MAKE_IMATRIX,
    QuantizeOptions,
    checked_text,
    run_quantizer,
    scored,
)
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import PulledModel, changing

#: Tokens of a user's text that are scored, and so not read for an importance matrix.
_SCORED_TOKENS = 1024


class Quantized(msgspec.Struct, frozen=True, kw_only=True):
    """The result beside its source. Perplexities are of the shipped text, None if not measured.

    `divergence` is the mean KL divergence of the result from the source, in nats a token; `same_top`
    the share of tokens of which both think the same is likeliest.
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
) -> Quantized:
    """Quantize the pulled model (or GGUF file) `text` to `type_name` and store the result.

    Raises what `ModelRef.files` raises, UsageError, ModelBusyError, QuantizeError, DiskFullError,
    InterruptedByUser.
    """
    options = options or QuantizeOptions()
    job = Job(progress, cancel)
    model = resolve(text)
    source = model.files()
    kind = parse_file_type(type_name)
    origin = model.pulled
    ref = _reference(text, FILE_TYPES[kind], origin, options)
    with changing(ref) as work:
        before = gguf.check(source.paths[0])
        record = store.read_record(names.folder(ref)) if options.keep else None
        if record is None:
            target = work / f"{ref.name}-{FILE_TYPES[kind]}.gguf.part"
            options = _with_imatrix(Path(source.paths[0]), work, job, options)
            run_quantizer(Path(source.paths[0]), target, kind, job, options)
            made = Fetched.made_here(target, job)
            record = store.publish(
                ref,
                [made],
                base=origin.base if origin else ref.name,
                source=f"quantized from {source.name}",
                requantized_from=before.quantization,
                projector=_own_projector(source.projector, work, job) if source.projector else None,
            )
            shutil.rmtree(work, ignore_errors=True)
    score = {}
    if options.perplexity:
        score = scored(str(record.paths[0]), job, options, compared=source.paths[0])
    return Quantized(
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


def _own_projector(path: str, work: Path, job: Job) -> Fetched:
    """Give the result a link or a copy of its own: its source may be removed."""
    target = work / "mmproj.gguf.part"
    try:
        os.link(path, target)
    except OSError:
        copy_into(work, Path(path), job).rename(target)
    return Fetched.made_here(target, job)


def _with_imatrix(source: Path, work: Path, job: Job, options: QuantizeOptions) -> QuantizeOptions:
    if options.imatrix != MAKE_IMATRIX:
        return options
    made = work / "imatrix.gguf"
    text = checked_text(options.text) if options.text else helpers.calibration_text()
    helpers.make_imatrix(source, text, made, job, _SCORED_TOKENS if options.text else 0)
    return msgspec.structs.replace(options, imatrix=str(made))


def _reference(
    text: str, type_name: str, origin: PulledModel | None, options: QuantizeOptions
) -> Reference:
    if options.name:
        ref = names.parse_reference(options.name)
    elif origin is not None:
        ref = Reference(origin.reference.name, type_name)
    else:
        raise UsageError(
            "a quantized file needs a name in the store", hint="give it one: `--name NAME`"
        )
    if origin is not None and ref == origin.reference:
        raise UsageError(
            f"{text} would be quantized over itself", hint="give the result a name: `--name NAME`"
        )
    return ref


def quantize_fetched(fetched: list[Fetched], type_name: str, work: Path, job: Job) -> list[Fetched]:
    """Quantize a verified download to the type that is wanted. Raises what `quantize` does."""
    kind = parse_file_type(type_name)
    first = fetched[0]
    # llama.cpp finds the other parts of a split by their names
    for one in fetched:
        one.path = one.path.rename(one.path.with_name(one.file_name)) if one.ours else one.path
    stem = names.file_name(first.file_name).removesuffix(".gguf")
    target = work / f"{stem}-{FILE_TYPES[kind]}.gguf.part"
    try:
        run_quantizer(first.path, target, kind, job, QuantizeOptions())
    finally:
        for one in fetched:  # what was fetched is kept under the name the next pull looks for
            if one.ours and one.path.suffix != ".part":
                one.path = one.path.rename(one.path.with_name(one.file_name + ".part"))
    return [Fetched.made_here(target, job)]
