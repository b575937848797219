"""Pull a model: fetch its files, verify them, and store them.

A wrong file is never stored. A pull locks the model, fetches partial files, compares their SHA-256 with
each known digest (catalogue, hub, first pull), checks headers, quantizes if requested, renames files,
and writes the record of the model. After an error, fetched data stays for the next attempt.
"""

from __future__ import annotations

import shutil
import threading
from itertools import chain
from pathlib import Path

import msgspec

from edgeinfer.errors import CatalogError, ChecksumError, DownloadError, InvalidGgufError, UsageError
from edgeinfer.models import gguf, names, projectors, sources, store
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.converting.checkpoint_files import DIRECT
from edgeinfer.models.fetching.fetch import fetch, offered_digests
from edgeinfer.models.gguf import parse_file_type
from edgeinfer.models.progress import FETCHED_IS_KEPT, Job, OnProgress, RetryPolicy
from edgeinfer.models.pull_plan import FetchedFile, PullPlan, plan_pull
from edgeinfer.models.store import PulledModel, locked_work_folder
from edgeinfer.platform.disk import sha256_of
from edgeinfer.platform.paths import is_model_path

_ANOTHER_NAME = "give this one another name (`--name NAME`)"


class PullOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a pull; `quantize` and `sha256` override the catalogue's.

    The model is stored as `name`; None makes a name from the source. `in_place` uses a local file where
    it is; `again` fetches a model that is already stored. `for_client`: a client of the endpoint has
    asked for the pull. A client may pull a model again by name only if the model is from Hugging Face.
    """

    name: str | None = None
    quantize: str = ""
    sha256: str = ""
    in_place: bool = False
    again: bool = False
    for_client: bool = False
    retry_policy: RetryPolicy = RetryPolicy()


def pull(
    text: str,
    progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
    options: PullOptions | None = None,
) -> PulledModel:
    """Fetch and store a model, unless it is stored already; return its record.

    `text` is a name, a file, or a source such as `hf:ORG/REPOSITORY` or a URL.

    If the catalogue lacks the name `text`, but a pulled model has it, that model's source is used.
    Raises UsageError, UnknownModelError, ModelBusyError, OfflineError, DownloadError and its
    subclasses, ChecksumError, InvalidGgufError, ConversionError, QuantizeError, DiskFullError,
    InterruptedByUser.
    """
    options, catalog = options or PullOptions(), load_catalog()
    job = Job(progress, cancel, options.retry_policy)
    is_source = is_model_path(text) or sources.looks_like_source(text)
    if not is_source and names.plain_name(text).partition(":")[0] not in catalog:
        text, options = _earlier_pull(text, options)
    plan = _with_type(plan_pull(text, catalog, options.name), options.quantize)
    if options.sha256:
        plan = msgspec.structs.replace(plan, sha256=names.parse_digest(options.sha256), size_bytes=0)
    with locked_work_folder(plan.ref, FETCHED_IS_KEPT) as work:
        pulled = None if options.again else _find_unchanged(plan, job)
        if pulled is not None and (not options.sha256 or pulled.sha256 == plan.sha256):
            if not (options.name or is_source):  # the stored files count, not newer sources
                plan = msgspec.structs.replace(plan, candidates=())
            if accepted := _accept(pulled, plan, options, job):
                return accepted
        fetched, source = fetch_first_working(plan, work, job, options)
        if fetched[0].checkpoint and not plan.quantize:
            plan = _with_type(plan, _type_in_source(plan))
        return _publish(plan, fetched, source, work, job)


def _earlier_pull(name: str, options: PullOptions) -> tuple[str, PullOptions]:
    """Return source and options of an earlier pull of `name`; the arguments if it was not pulled.

    Raises UsageError if the model was quantized here, or a client may not repeat its pull.
    """
    record = store.find_pulled(name)
    if record is None:
        return name, options
    origin = record.source.removeprefix(store.QUANTIZED_FROM)
    if origin != record.source:
        typed = f"edgeinfer quantize {origin} {record.quantization}"
        problem = f"{record.name} was not pulled, but {record.source}"
        raise UsageError(problem, hint=f"quantize it again: `{typed} --name {record.name}`")
    if options.for_client and not record.source.startswith("hf:"):
        command = f"pull it again on the server: `edgeinfer pull {record.name}`"
        problem = f"clients may repeat only pulls from Hugging Face; {record.name} has another source"
        raise UsageError(problem, hint=command)
    type_name = options.quantize or (record.quantization if record.requantized_from else "")
    options = msgspec.structs.replace(
        options,
        name=options.name or record.name,
        quantize=type_name,
        in_place=options.in_place or record.in_place,
    )
    return record.source.removeprefix("file:"), options


def _accept(pulled: PulledModel, plan: PullPlan, options: PullOptions, job: Job) -> PulledModel | None:
    """Return the stored model if it is what `plan` asks for, or None if it must be stored anew.

    A new source of the same files is recorded. A file in place is stored anew if it has moved, or if a
    copy is asked for. Raises UsageError if the stored model has another type or other files, or is a
    copy although `options.in_place`.
    """
    if options.quantize and pulled.quantization != options.quantize.upper():
        way = f"quantize it: `edgeinfer quantize {pulled.name} {options.quantize}`"
        raise _difference_error(pulled, f"in {pulled.quantization}", way)
    typed = [_source_text(parts) for parts in plan.candidates]
    new_source = ""
    if typed and {pulled.source, *pulled.more_sources}.isdisjoint(typed):
        new_source = _source_of_same_files(pulled, plan, job)
    if options.in_place and not pulled.in_place:
        raise _difference_error(pulled, "as a copy")
    if pulled.in_place and (new_source if options.in_place else _is_local(plan)):
        return None
    if new_source:
        if options.sha256 and not _is_local(plan):
            reason = f"{pulled.name} has this SHA-256, and gets the address as a further source"
            job.note(f"{new_source} was not fetched: {reason}")
        more_sources = (*pulled.more_sources, new_source)
        pulled = msgspec.structs.replace(pulled, more_sources=more_sources)
        store.write_record(pulled)
    return pulled


def _source_of_same_files(pulled: PulledModel, plan: PullPlan, job: Job) -> str:
    """Return the source of `plan` that has the stored model's files. Raises UsageError if none has."""
    pins = store.read_pins(plan.ref).pins
    stored_digests = {pin.sha256 for pin in pins if pin.source == pulled.source}
    stored_digests |= {file.sha256 for file in pulled.files}
    digests: list[str] = []
    for parts in plan.candidates:
        digests = offered_digests(parts, plan, job)
        if digests and stored_digests.issuperset(digests):
            return _source_text(parts)
    problem = "has another file" if digests else "has no SHA-256 to compare"
    difference = f"from {pulled.source}; {_source_text(plan.candidates[-1])} {problem}"
    same = f"if it is the same file: `--sha256 {pulled.sha256}`; otherwise " * (not digests)
    raise _difference_error(pulled, difference, same + _ANOTHER_NAME)


def _is_local(plan: PullPlan) -> bool:
    return any(isinstance(parts[0], sources.LocalFile) for parts in plan.candidates)


def _difference_error(pulled: PulledModel, difference: str, way: str = _ANOTHER_NAME) -> UsageError:
    hint = f"{way}, or fetch it again: --again"
    return UsageError(f"{pulled.name} is here already, {difference}", hint=hint)


def _source_text(parts: tuple[sources.Source, ...]) -> str:
    return " + ".join(map(str, parts))


def _with_type(plan: PullPlan, type_name: str) -> PullPlan:
    if not type_name:
        return plan
    parse_file_type(type_name)
    return msgspec.structs.replace(plan, quantize=type_name.upper())


def _type_in_source(plan: PullPlan) -> str:
    """Return TYPE if the source is `OWNER/REPO:TYPE`, otherwise ""."""
    parts = chain(*plan.candidates)
    return next((source.quant for source in parts if isinstance(source, sources.HubQuant)), "")


def _find_unchanged(plan: PullPlan, job: Job) -> PulledModel | None:
    """Return the stored model; None if there is none, or if a file is missing or has changed.

    A file whose mtime differs from the recorded one is hashed.
    """
    record = store.read_record(names.pulled_folder(plan.ref))
    if record is None:
        return None
    fresh = []
    for file in record.all_files:
        path = record.folder / file.path
        try:
            info = path.stat()
        except OSError:
            return None
        if info.st_size != file.size_bytes:
            return None
        if info.st_mtime_ns != file.mtime_ns:
            job.begin("verifying", path.name, total=info.st_size)
            if sha256_of(path, job.report) != file.sha256:
                return None
        fresh.append(msgspec.structs.replace(file, mtime_ns=info.st_mtime_ns))
    if tuple(fresh) != record.all_files:
        encoder = fresh.pop() if record.projector is not None else None
        record = msgspec.structs.replace(record, files=tuple(fresh), projector=encoder)
        store.write_record(record)
    return record


def fetch_first_working(
    plan: PullPlan, work: Path, job: Job, options: PullOptions
) -> tuple[list[FetchedFile], str]:
    """Fetch and verify the files of the first source that works; return them and the source as text.

    If no source works, the error (DownloadError, ChecksumError, InvalidGgufError) names every failure.
    """
    failures: list[CatalogError] = []
    for parts in plan.candidates:
        source = _source_text(parts)
        try:
            fetched = fetch(parts, plan, work, job, in_place=options.in_place)
            if plan.projector is not None:
                fetched.append(_projector(plan, plan.projector, work, job))
            _verify(fetched, plan, source, work, job, options.sha256)
            return fetched, source
        except (DownloadError, ChecksumError, InvalidGgufError) as error:
            failures.append(error)
            if len(failures) < len(plan.candidates):
                job.note(f"{error.message}; trying the next source")
    raise _summary(failures)


def _projector(plan: PullPlan, source: sources.Source, work: Path, job: Job) -> FetchedFile:
    projector_plan = PullPlan(ref=plan.ref, candidates=(), projector=source)
    *_, fetched_file = fetch((source,), projector_plan, work, job, in_place=False)
    fetched_file.is_projector = True
    return fetched_file


def _summary(failures: list[CatalogError]) -> CatalogError:
    if len(failures) == 1:
        return failures[0]
    # if a source sent a wrong file, raise ChecksumError: that is worse than an unreachable server
    worst = next((error for error in failures if isinstance(error, ChecksumError)), failures[-1])
    return type(worst)("; ".join(error.message for error in failures), hint=worst.hint)


def _verify(
    fetched: list[FetchedFile], plan: PullPlan, source: str, work: Path, job: Job, wanted_sha256: str
) -> None:
    """Compare the files with every known digest and check their headers.

    A wrong file is renamed to `.bad`; a projector that does not fit is removed with a note.
    """
    n_files = sum(not file.is_projector for file in fetched)
    if wanted_sha256 and (fetched[0].checkpoint or n_files > 1):
        problem = f"--sha256 is for one file, but {source} has several"
        raise UsageError(problem, hint="leave out --sha256")
    for index, file in enumerate(list(fetched)):
        if file.path.is_dir():
            continue
        job.begin("verifying", file.file_name, total=file.size_bytes, index=index, n_files=n_files)
        pin = store.pinned_digest(plan.ref, source, file.file_name) if file.pinned else ""
        promises = {"its source": file.sha256, "its first pull": pin}
        size_bytes = 0
        # the catalogue has sizes and digests only of models with a single file
        if n_files == 1 and not file.is_projector:
            size_bytes = plan.size_bytes
            promises = {"--sha256" if wanted_sha256 else "the catalogue": plan.sha256} | promises
        if problem := _difference(file, size_bytes, promises, job):
            raise ChecksumError(f"{file.file_name} of {source} {problem}; {_set_aside(file, work)}")
        try:
            if file.is_projector:
                projectors.check_fits(file.path, gguf.read_header(fetched[0].path))
            elif not file.checkpoint:
                gguf.check_part(gguf.read_model_header(file.path), file.file_name, index, n_files)
        except InvalidGgufError as error:
            if file.is_projector:
                job.note(f"{source}: the projector is left out, so no pictures: {error.message}")
                file.path.unlink()
                fetched.remove(file)
                continue
            outcome = _set_aside(file, work)
            raise InvalidGgufError(f"{source}: {error.message}; {outcome}", hint=error.hint) from error


def _difference(file: FetchedFile, size_bytes: int, promises: dict[str, str], job: Job) -> str:
    """Hash a file; return how it differs from the expected size or SHA-256, "" if it does not."""
    if size_bytes and file.size_bytes != size_bytes:
        return f"has {file.size_bytes} bytes, not {size_bytes}"
    file.found_sha256 = sha256_of(file.path, job.report)
    for origin, sha256 in promises.items():
        if sha256 and sha256 != file.found_sha256:
            return f"has SHA-256 {file.found_sha256}, not {sha256} as {origin} says"
    return ""


def _set_aside(file: FetchedFile, work: Path) -> str:
    if not file.is_ours:
        return "the file was not changed"
    if not file.pinned:  # this is a copy, and the local file still exists
        file.path.unlink()
        return "the copy was removed"
    bad = work / (file.file_name + ".bad")
    file.path.replace(bad)
    return f"the file is kept as {bad}"


def _publish(
    plan: PullPlan, fetched: list[FetchedFile], source: str, work: Path, job: Job
) -> PulledModel:
    store.pin_files(plan.ref, source, fetched)
    if fetched[0].checkpoint:
        direct = plan.quantize if plan.quantize in DIRECT else ""
        from edgeinfer.models.converting.fetched import convert_fetched  # slow import: 150 ms

        fetched = convert_fetched(fetched, direct, work, job)
    projector = next((file for file in fetched if file.is_projector), None)
    fetched = [file for file in fetched if file is not projector]
    original = gguf.read_model_header(fetched[0].path).quantization
    requantized_from = ""
    if plan.quantize and original != plan.quantize:
        from edgeinfer.models.quantizing import quantize_fetched

        fetched = quantize_fetched(fetched, plan.quantize, work, job)
        requantized_from = original
    record = store.publish(
        plan.ref,
        fetched,
        base=plan.ref.name,
        source=source,
        requantized_from=requantized_from,
        projector=projector,
    )
    shutil.rmtree(work, ignore_errors=True)
    job.begin("done", fetched[0].file_name, done=record.size_bytes, total=record.size_bytes)
    return record
