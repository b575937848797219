"""`edgeinfer show`: everything known of a model, and the memory it needs against what this
machine has.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import ClassVar

import msgspec

from edgeinfer.catalog import gguf, names, store
from edgeinfer.catalog.memory import Estimate, MachineMemory, engine_estimate, estimate, machine_memory
from edgeinfer.catalog.models import Model, load_catalog
from edgeinfer.catalog.store import PulledModel
from edgeinfer.commands.list import format_parameters
from edgeinfer.errors import EdgeInferError, OutOfMemoryError
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.runtime.loading.choices import (
    choose_cells,
    choose_context,
    choose_parallel,
    choose_threads,
    read_machine,
)
from edgeinfer.units import format_bytes


class FileShown(msgspec.Struct, frozen=True, kw_only=True):
    """One file on disk."""

    path: str
    size_bytes: int
    sha256: str = ""


class HeaderShown(msgspec.Struct, frozen=True, kw_only=True):
    """What the GGUF itself says."""

    architecture: str
    name: str
    quantization: str
    n_params: int
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    has_chat_template: bool
    licence: str
    tensor_types: dict[str, int]


class MemoryShown(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes, for the context the engine would take (or the one asked for), and why it would."""

    estimate: Estimate
    n_parallel: int
    n_ctx: int
    n_ctx_reason: str
    machine: MachineMemory
    fits: bool


class ShowResult(Result, frozen=True, kw_only=True):
    """`header`, `files` and `memory` are empty for a model that is not here. `notes` say what is wrong,
    if anything.
    """

    kind: ClassVar[str] = "show"

    name: str
    title: str
    pulled: bool
    licence: str
    purpose: str
    parameters: str
    context_length: int
    quantization: str
    sources: tuple[str, ...]
    pulled_from: str = ""
    pulled_at: str = ""
    requantized_from: str = ""
    chat_template: str = ""
    system_prompt: str = ""
    stop: tuple[str, ...] = ()
    sampling: dict[str, float] = msgspec.field(default_factory=dict)
    files: tuple[FileShown, ...] = ()
    header: HeaderShown | None = None
    memory: MemoryShown | None = None
    notes: tuple[str, ...] = ()
    template_only: bool = False

    def human(self) -> str:
        if self.template_only:
            return self.chat_template
        rows = [
            *_about(self),
            *_header_rows(self.header),
            *_file_rows(self),
            *_memory_rows(self.memory),
        ]
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {value}".rstrip() for label, value in rows]
        lines += [f"note: {note}" for note in self.notes]
        if not self.pulled:
            lines.append(f"\nnot here yet: edgeinfer pull {self.name}")
        return "\n".join(lines)


Rows = list[tuple[str, str]]


def _about(shown: ShowResult) -> Rows:
    rows = [
        ("name", shown.name),
        ("title", shown.title),
        ("for", shown.purpose),
        ("licence", shown.licence or "unknown"),
    ]
    rows += [("source", _short(source)) for source in shown.sources]
    if shown.pulled_from:
        rows.append(("pulled", f"{shown.pulled_at} from {_short(shown.pulled_from)}"))
    if shown.requantized_from:
        rows.append(("made from", shown.requantized_from))
    if shown.system_prompt:
        rows.append(("system prompt", shown.system_prompt))
    if shown.stop:
        rows.append(("stop strings", " ".join(map(repr, shown.stop))))
    if shown.sampling:
        rows.append(
            ("sampling", ", ".join(f"{key} {value:g}" for key, value in shown.sampling.items()))
        )
    if shown.header is None:
        rows += [
            ("parameters", shown.parameters or "unknown"),
            ("quantization", shown.quantization or "unknown"),
        ]
        rows.append(
            ("trained context", f"{shown.context_length} tokens" if shown.context_length else "unknown")
        )
    return rows


def _short(source: str) -> str:
    """A concatenated source by its first part: `--json` has them all."""
    first, *more = source.split(" + ")
    return f"{first} and {len(more)} more parts" if more else first


def _header_rows(header: HeaderShown | None) -> Rows:
    if header is None:
        return []
    types = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in header.tensor_types.items())
    return [
        ("architecture", f"{header.architecture}, {header.n_layer} layers, embedding {header.n_embd}"),
        ("parameters", f"{format_parameters(header.n_params)} ({header.n_params:,})"),
        ("quantization", f"{header.quantization} ({types})"),
        ("vocabulary", f"{header.n_vocab:,} tokens"),
        ("trained context", f"{header.n_ctx_train} tokens"),
        ("chat template", "yes" if header.has_chat_template else "none: a base model, or an encoder"),
    ]


def _file_rows(shown: ShowResult) -> Rows:
    rows = []
    for file in shown.files:
        rows.append(("file", f"{file.path} ({format_bytes(file.size_bytes)})"))
        if file.sha256:
            rows.append(("sha256", file.sha256))
    return rows


def _memory_rows(memory: MemoryShown | None) -> Rows:
    if memory is None:
        return []
    need, machine = memory.estimate, memory.machine
    verdict = "it fits" if memory.fits else "it does not fit"
    return [
        ("memory, weights", format_bytes(need.weights_bytes)),
        (
            "memory, KV cache",
            f"{format_bytes(need.kv_per_1000_bytes)} for 1,000 tokens ({need.kv_type})",
        ),
        ("context", f"{memory.n_ctx} tokens: {memory.n_ctx_reason}"),
        (
            "memory, context",
            f"{format_bytes(need.kv_bytes)} for {need.n_ctx} cells, {memory.n_parallel} sequences at "
            f"once",
        ),
        ("memory, compute", format_bytes(need.compute_bytes)),
        (
            "memory, together",
            f"{format_bytes(need.total_bytes)} of {format_bytes(machine.available_bytes)} available: "
            f"{verdict}",
        ),
    ]


def show(options: argparse.Namespace, host: Host) -> ShowResult:
    """Raises UnknownModelError, InvalidGgufError, CatalogError for an unreadable record."""
    text = options.model or host.config.default_model
    if names.is_path(text):
        path = Path(text).expanduser().absolute()
        parts = store.split_parts(path)
        return _shown(path.stem, None, None, parts, options, host)
    catalog = load_catalog()
    pulled = store.find_pulled(text)
    if pulled is not None:
        return _shown(pulled.name, pulled, catalog.get(pulled.base), list(pulled.paths), options, host)
    entry = catalog.get(names.reference(text).name) if "/" not in text else None
    if entry is None:
        raise store.missing(text, catalog)
    return _shown(str(names.reference(text)), None, entry, [], options, host)


def _shown(
    name: str,
    pulled: PulledModel | None,
    entry: Model | None,
    parts: list[Path],
    options: argparse.Namespace,
    host: Host,
) -> ShowResult:
    headers = [gguf.check(part) for part in parts]
    first = headers[0] if headers else None
    notes = _notes(pulled)
    return ShowResult(
        name=name,
        title=entry.title if entry else first.text("general.name") or name if first else name,
        pulled=bool(parts),
        licence=(entry.licence if entry else "") or (first.text("general.license") if first else ""),
        purpose=entry.purpose if entry else "chat",
        parameters=entry.parameters if entry else "",
        context_length=first.n_ctx_train if first else entry.context_length if entry else 0,
        quantization=first.quantization if first else entry.final_quantization if entry else "",
        sources=tuple(" + ".join(map(str, parts)) for parts in entry.parsed_sources()) if entry else (),
        pulled_from=pulled.source if pulled else "",
        pulled_at=pulled.pulled_at if pulled else "",
        requantized_from=pulled.requantized_from if pulled else "",
        chat_template=(entry.chat_template if entry else "") or (first.chat_template if first else ""),
        system_prompt=entry.system_prompt if entry else "",
        stop=entry.stop if entry else (),
        sampling=entry.sampling.given() if entry else {},
        files=_files(pulled, parts),
        header=_header(headers) if first else None,
        memory=_memory(headers, options, host) if first else None,
        notes=notes,
        template_only=options.template,
    )


def _notes(pulled: PulledModel | None) -> tuple[str, ...]:
    if pulled is None:
        return ()
    try:
        store.model_files(pulled.name)
    except EdgeInferError as error:
        return (error.message,)
    return ()


def _files(pulled: PulledModel | None, parts: list[Path]) -> tuple[FileShown, ...]:
    digests = [file.sha256 for file in pulled.files] if pulled else [""] * len(parts)
    return tuple(
        FileShown(path=str(part), size_bytes=part.stat().st_size, sha256=digest)
        for part, digest in zip(parts, digests, strict=True)
    )


def _header(headers: list[gguf.GgufHeader]) -> HeaderShown:
    first = headers[0]
    types: dict[str, int] = {}
    for header in headers:
        for tensor in header.tensors:
            types[tensor.type] = types.get(tensor.type, 0) + tensor.size_bytes
    return HeaderShown(
        architecture=first.architecture,
        name=first.text("general.name"),
        quantization=first.quantization,
        n_params=sum(header.n_params for header in headers),
        n_layer=first.n_layer,
        n_embd=first.n_embd,
        n_vocab=first.n_vocab,
        n_ctx_train=first.n_ctx_train,
        has_chat_template=bool(first.chat_template),
        licence=first.text("general.license"),
        tensor_types=dict(sorted(types.items(), key=lambda item: -item[1])),
    )


def _memory(headers: list[gguf.GgufHeader], options: argparse.Namespace, host: Host) -> MemoryShown:
    """The estimate for the context the engine would make: its own rules, on the header instead of a
    loaded model.
    """
    load, header, machine = host.config.load, headers[0], machine_memory()
    kv_type = options.kv_type or load.kv_type
    weights = sum(one.weights_bytes for one in headers)
    wanted = options.ctx if options.ctx is not None else load.ctx
    rough = estimate(header, wanted, kv_type, n_outputs=64, whole_windows=True)
    per_token = max(1, rough.kv_per_1000_bytes // 1000)
    free = max(0, machine.available_bytes - weights - weights // 4 - rough.compute_bytes)
    parallel = choose_parallel(
        load.parallel, choose_threads(load.threads, read_machine()).value, per_token, free
    ).value
    try:
        chosen = choose_context(wanted, header.n_ctx_train or 4096, per_token, free)
        n_ctx, reason = int(chosen.value), chosen.reason
    except OutOfMemoryError as error:
        n_ctx, reason = wanted or 4096, error.message
    cells = choose_cells(n_ctx, parallel, per_token, free).value
    need = engine_estimate(header, cells, kv_type, parallel, weights)
    fits = need.total_bytes <= machine.available_bytes
    return MemoryShown(
        estimate=need, n_parallel=parallel, n_ctx=n_ctx, n_ctx_reason=reason, machine=machine, fits=fits
    )
