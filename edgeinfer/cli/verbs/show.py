"""`edgeinfer show`: describe a model, and compare its memory needs with this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgeinfer import typed_options
from edgeinfer.cli.options import add_load_option, add_model, number_between
from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.config.config_file import GpuConfig
from edgeinfer.config.load_options import GPU_LAYERS, KV_TYPE, N_CTX
from edgeinfer.config.sampling_options import BY_FIELD
from edgeinfer.errors import EdgeInferError
from edgeinfer.host import EngineHost
from edgeinfer.models import gguf
from edgeinfer.models.catalog import Model, SamplingDefaults, parameter_count
from edgeinfer.models.external_stores import stores
from edgeinfer.models.external_stores.reader import ExternalFile, ExternalModel
from edgeinfer.models.fits import Estimator, header_plan
from edgeinfer.models.reference import ModelRef, resolve
from edgeinfer.models.store import PulledModel
from edgeinfer.platform.machine import Memory, read_machine, read_rate
from edgeinfer.runtime.layer_plan import LayerPlan, make_layer_plan
from edgeinfer.runtime.llama.backends import OffloadRefused, OffloadRequest, find_devices
from edgeinfer.runtime.memory_plan import MemoryPlan, disk_warning
from edgeinfer.runtime.model_shape import Buffers, Shape
from edgeinfer.runtime.requests import Sampling, default_sampling
from edgeinfer.units import format_bytes, format_parameters


class HeaderShown(msgspec.Struct, frozen=True, kw_only=True):
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


def _plan_layers(
    shape: Shape, plan: MemoryPlan, layers: int | str, config: GpuConfig
) -> LayerPlan | None:
    """Plan which layers GPUs get; None without GPUs, or if they are switched off."""
    request = OffloadRequest(layers=layers, devices=config.devices)
    if not request.opens_backends():
        return None
    try:
        return make_layer_plan(shape, plan, next(find_devices(request)), layers)
    except OffloadRefused as refused:
        return LayerPlan(n_layers=0, n_all=shape.n_layer + 1, reason=str(refused))


#: Attention head sizes for which llama.cpp's CUDA backend has a kernel.
_CUDA_HEADS = frozenset((40, 64, 72, 80, 96, 112, 128, 256, 512))


def attention_note(shape: Shape, devices: LayerPlan | None) -> str:
    """Explain why CUDA is slow with this model's attention; "" if CUDA is not used, or not slow."""
    lengths = sorted(set(shape.head_lengths) - _CUDA_HEADS)
    if devices is None or not lengths or not any(name.startswith("CUDA") for name in devices.devices):
        return ""
    return f"CUDA has no attention kernel for heads of {lengths[0]}: the CPU computes attention, slowly"


class MemoryShown(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a model needs (bytes), with the context of `--ctx` or that of the engine's choice.

    `from_disk`: the weights do not fit, and `warning` estimates the speed. `devices` is None without
    GPUs; `attention` says why CUDA is slow with this model.
    """

    estimate: Buffers
    n_parallel: int
    n_ctx: int
    n_ctx_reason: str
    kv_type_reason: str
    machine: Memory
    fits: bool
    from_disk: bool = False
    warning: str = ""
    attention: str = ""
    devices: LayerPlan | None = None


class ShowResult(Result, frozen=True, kw_only=True):
    """A model. `notes` are its problems. If not pulled, `header`, `files` and `memory` are empty."""

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
    draft: str = ""
    system_prompt: str = ""
    stop: tuple[str, ...] = ()
    sampling: dict[str, float] = msgspec.field(default_factory=dict)
    files: tuple[ExternalFile, ...] = ()
    header: HeaderShown | None = None
    memory: MemoryShown | None = None
    notes: tuple[str, ...] = ()

    def human(self) -> str:
        rows = _about(self) + _header_rows(self.header) + _file_rows(self) + _memory_rows(self.memory)
        width = max(len(label) for label, _ in rows)
        # on one line: a line break in a file's name would look like another row
        lines = [f"{label:<{width}}  {' '.join(value.split())}".rstrip() for label, value in rows]
        lines += [f"note: {note}" for note in self.notes]
        if not self.pulled:
            lines.append(f"\nnot pulled yet: edgeinfer pull {self.name}")
        return "\n".join(lines)


Rows = list[tuple[str, str]]


def _about(shown: ShowResult) -> Rows:
    origin = _shorten_source(shown.pulled_from)
    context = f"{shown.context_length:,} tokens" if shown.context_length else ""
    rows = [
        ("name", shown.name),
        ("title", shown.title),
        ("for", shown.purpose),
        ("licence", shown.licence or "unknown"),
        *(("source", _shorten_source(source)) for source in shown.sources),
        (
            "pulled",
            f"{shown.pulled_at[:16].replace('T', ' ')} UTC from {origin}" if shown.pulled_at else "",
        ),
        ("here", f"from {origin}" if origin and not shown.pulled_at else ""),
        ("made from", shown.requantized_from),
        ("draft model", shown.draft),
        ("system prompt", shown.system_prompt),
        ("stop strings", " ".join(map(repr, shown.stop))),
        ("sampling", ", ".join(f"{key} {value:g}" for key, value in shown.sampling.items())),
    ]
    if shown.header is None:
        rows += [
            ("parameters", shown.parameters or "unknown"),
            ("quantization", shown.quantization or "unknown"),
            ("trained context", context or "unknown"),
        ]
    return [(label, value) for label, value in rows if value]


def _shorten_source(source: str) -> str:
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
        ("trained context", f"{header.n_ctx_train:,} tokens"),
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
    if memory.from_disk:
        verdict = "it runs from the disk"
    at_once = f"{memory.n_parallel} sequences at once"
    available = f"{format_bytes(machine.available_bytes)} available"
    kv_note = f"{need.kv_type}: {memory.kv_type_reason}"
    rows = [
        ("memory, weights", format_bytes(need.weights_bytes)),
        ("memory, KV cache", f"{format_bytes(need.kv_per_1000_bytes)} for 1,000 tokens ({kv_note})"),
        ("context", f"{memory.n_ctx} tokens: {memory.n_ctx_reason}"),
        ("memory, context", f"{format_bytes(need.kv_bytes)} for {need.n_ctx} cells, {at_once}"),
        ("memory, compute", format_bytes(need.compute_bytes)),
        ("memory, together", f"{format_bytes(need.total_bytes)} of {available}: {verdict}"),
    ]
    return rows + _device_rows(memory.devices)


def _device_rows(devices: LayerPlan | None) -> Rows:
    if devices is None:
        return []
    if not devices.n_layers:
        return [("layers on GPUs", str(devices))]
    sizes = (devices.weights_bytes, devices.kv_bytes, devices.compute_bytes)
    names = ("weights", "KV cache", "compute")
    split = ", ".join(f"{n} {format_bytes(s)}" for n, s in zip(names, sizes, strict=True))
    memory = f"{format_bytes(sum(sizes))}: {split}"
    return [("layers on GPUs", f"{devices}: {devices.reason}"), ("memory of GPUs", memory)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "NAME, NAME:QUANT or FILE.gguf (default: the configured one)")
    tokens = number_between(int, 0, N_CTX.high)
    add_option(parser, "--ctx TOKENS", "estimate memory for this context", dest="n_ctx", type=tokens)
    parser.add_argument("--kv-type", choices=KV_TYPE.choices, help=KV_TYPE.help)
    add_load_option(parser, GPU_LAYERS)


def run(options: argparse.Namespace, host: EngineHost) -> ShowResult:
    """Describe a model. Raises UnknownModelError, InvalidGgufError, CatalogError."""
    ref = resolve(options.model or host.config.default_model)
    if ref.external is not None:
        return _show_external(ref.external, options, host)
    if ref.kind == "absent" and ref.entry is None:
        raise ref.absence()
    name = Path(ref.name).stem if ref.kind == "file" else ref.name
    return _describe(name, ref, ref.entry, ref.parts, options, host)


def _show_external(
    external: ExternalModel, options: argparse.Namespace, host: EngineHost
) -> ShowResult:
    settings = stores.settings(external, stores.headers(external)[0])
    entry = Model(
        title="",
        sources=(),
        stop=settings.stop,
        system_prompt=settings.system_prompt,
        sampling=SamplingDefaults(**settings.sampling),
    )
    parts = list(map(Path, external.paths))
    shown = _describe(external.name, None, entry, parts, options, host)
    notes = [f"used in place, from {external.store}; edgeinfer never writes there"]
    notes += [f"from {external.store}: {', '.join(settings.used)}"] * bool(settings.used)
    notes += [f"not used: {setting}" for setting in settings.unused]
    return msgspec.structs.replace(
        shown,
        title=shown.header.name if shown.header and shown.header.name else external.name,
        pulled_from=external.store,
        files=external.files,
        notes=(*shown.notes, *notes),
    )


def _describe(
    name: str,
    ref: ModelRef | None,
    entry: Model | None,
    parts: list[Path],
    options: argparse.Namespace,
    host: EngineHost,
) -> ShowResult:
    headers = [gguf.read_model_header(path) for path in parts]
    first = headers[0] if headers else None
    header = _header(headers) if headers else None
    pulled = ref.pulled if ref is not None else None
    draft, notes = _check(ref) if ref is not None and pulled else ((), ())
    memory = _memory(headers, options, host, draft) if headers else None
    if memory is not None:
        notes += tuple(filter(None, (memory.warning, memory.attention)))
    elif entry is not None and not parts and (fit := Estimator().fit_of(entry)):
        needed = "" if fit.group == "too big" else f"needs {format_bytes(fit.needed_bytes)} of memory"
        speed = f"{fit.why}, ~{fit.tokens_per_s:g} tokens/s" if fit.why else ""
        notes += ("; ".join(filter(None, (needed, speed))),)
    entry = entry or Model(title=(header.name if header else "") or name, sources=())
    return ShowResult(
        name=name,
        title=entry.title,
        pulled=bool(parts),
        licence=entry.licence or (header.licence if header else ""),
        purpose=entry.purpose,
        parameters=entry.parameters,
        context_length=header.n_ctx_train if header else entry.context_length,
        quantization=header.quantization if header else entry.final_quantization,
        sources=(
            *(" + ".join(map(str, parts)) for parts in entry.parsed_sources()),
            *(pulled.more_sources if pulled else ()),
        ),
        pulled_from=pulled.source if pulled else "",
        pulled_at=pulled.pulled_at if pulled else "",
        requantized_from=pulled.requantized_from if pulled else "",
        chat_template=entry.chat_template or (first.chat_template if first else ""),
        draft=entry.draft,
        system_prompt=entry.system_prompt,
        stop=entry.stop,
        sampling=_sampling(entry, sum(header.n_params for header in headers)),
        files=_files(pulled, parts),
        header=header,
        memory=memory,
        notes=notes,
    )


def _sampling(entry: Model, n_params: int) -> dict[str, float]:
    """Return the model's sampling options that differ from the general defaults."""
    defaults = msgspec.structs.asdict(Sampling())
    of_size = default_sampling(n_params or parameter_count(entry.parameters))
    values = msgspec.structs.asdict(entry.sampling.over(of_size))
    return {name: values[name] for name in BY_FIELD if values[name] != defaults[name]}


def _check(ref: ModelRef) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the draft model's files, and notes on problems with the model's files."""
    try:
        files = ref.files()
    except EdgeInferError as error:
        return (), (error.message,)
    return files.draft_paths, (f"no draft model: {files.no_draft}",) if files.no_draft else ()


def _files(pulled: PulledModel | None, parts: list[Path]) -> tuple[ExternalFile, ...]:
    digests = [file.sha256 for file in pulled.files] if pulled else [""] * len(parts)
    files = zip(parts, digests, strict=True)
    return tuple(ExternalFile(path=str(p), size_bytes=p.stat().st_size, sha256=d) for p, d in files)


def _header(headers: list[gguf.GgufHeader]) -> HeaderShown:
    first = headers[0]
    types: dict[str, int] = {}
    for header in headers:
        for tensor in header.tensors:
            types[tensor.type] = types.get(tensor.type, 0) + tensor.size_bytes
    return HeaderShown(
        architecture=first.architecture,
        name=first.label("general.name"),
        quantization=first.quantization,
        n_params=sum(header.n_params for header in headers),
        n_layer=first.n_layer,
        n_embd=first.n_embd,
        n_vocab=first.n_vocab,
        n_ctx_train=first.n_ctx_train,
        has_chat_template=bool(first.chat_template),
        licence=first.label("general.license"),
        tensor_types=dict(sorted(types.items(), key=lambda item: -item[1])),
    )


def _memory(
    headers: list[gguf.GgufHeader], options: argparse.Namespace, host: EngineHost, draft: Sequence[str]
) -> MemoryShown:
    machine = read_machine()
    load_options = typed_options.load_options(options, host.config.load)
    draft_headers = [gguf.read_model_header(Path(path)) for path in draft]
    shape, plan = header_plan(headers, load_options, machine, draft_headers)
    devices = _plan_layers(shape, plan, load_options.gpu_layers, host.config.gpu)
    warning = ""
    if plan.from_disk and not plan.refusal:
        warning = disk_warning(shape, machine, plan, read_rate(*(header.path for header in headers)))
    return MemoryShown(
        estimate=plan.buffers,
        n_parallel=plan.n_parallel.value,
        n_ctx=plan.n_ctx.value,
        n_ctx_reason=plan.n_ctx.reason,
        kv_type_reason=plan.kv_type.reason,
        machine=machine.memory,
        fits=plan.fits,
        from_disk=plan.from_disk and not plan.refusal,
        warning=warning,
        attention=attention_note(shape, devices),
        devices=devices,
    )
