"""Load a model's files with llama.cpp, and make its context as planned."""

from __future__ import annotations

import ctypes
import os
import re
import time
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from edgeinfer.config import load_options
from edgeinfer.errors import ModelLoadError, OutOfMemoryError, UsageError
from edgeinfer.platform.machine import Machine, read_machine, read_rate
from edgeinfer.runtime.llama import libllama, streaming
from edgeinfer.runtime.llama.cells import NO_CELLS, Buffer, CellMemory, cell_memory, sparse_buffers
from edgeinfer.runtime.llama.context import LlamaContext
from edgeinfer.runtime.llama.vocab import Vocab
from edgeinfer.runtime.llama.weights import Progress, free_model, open_model, tensor_sizes
from edgeinfer.runtime.memory_plan import MemoryPlan, disk_warning, make_exact_plan
from edgeinfer.runtime.model_shape import Shape, make_shape
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles

_FLASH = {"auto": -1, "off": 0, "on": 1}


@dataclass(slots=True)
class LlamaModel:
    """A loaded model and its main context. `model`, `context` and `memory` are llama.cpp's pointers.

    `plan` has the sizes that were chosen for the context, `cells` the memory of its KV cache.
    """

    model: Any
    context: Any
    memory: Any
    vocab: Vocab
    meta: dict[str, str]
    shape: Shape
    n_ctx: int
    n_cells: int
    n_parallel: int
    n_batch: int
    n_threads: int
    kv_bytes: int
    compute_bytes: int
    load_ms: float
    plan: MemoryPlan
    cells: CellMemory = NO_CELLS
    choices: dict[str, Chosen] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def can_generate(self) -> bool:
        """Return whether the model generates text; an encoder only embeds."""
        return bool(self.memory)

    @property
    def supports_truncation(self) -> bool:
        """Return whether sequences can be truncated to any length; those of recurrent models cannot."""
        return not self.shape.is_recurrent

    @property
    def sliding_window(self) -> int:
        """Size of the sliding window (positions), 0 if all layers attend to everything."""
        return int(libllama.L.llama_model_n_swa(self.model))

    @property
    def scratch_seq_id(self) -> int:
        """Sequence id through which `SequenceStates` copies states; no request gets it."""
        return self.plan.n_seq_max - 1

    @property
    def can_shift(self) -> bool:
        """Return whether llama.cpp can drop the oldest tokens of a full context."""
        return bool(self.memory and libllama.L.llama_memory_can_shift(self.memory))

    @property
    def n_params(self) -> int:
        return int(libllama.L.llama_model_n_params(self.model))

    @property
    def n_ctx_train(self) -> int:
        return int(libllama.L.llama_model_n_ctx_train(self.model))

    @property
    def n_embd(self) -> int:
        return int(libllama.L.llama_model_n_embd_out(self.model))

    @property
    def n_classes(self) -> int:
        """Number of outputs of a reranking head."""
        return int(libllama.L.llama_model_n_cls_out(self.model))

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        libllama.L.llama_model_desc(self.model, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def chat_template(self, name: str | None = None) -> str:
        """Return the file's chat template, or the template called `name`; "" if there is none."""
        text = libllama.L.llama_model_chat_template(self.model, name.encode() if name else None)
        return text.decode("utf-8", "replace") if text else ""

    def llama_context(self) -> LlamaContext:
        return LlamaContext(self.context, self.cells)

    def free(self) -> None:
        """Free context and model. Idempotent."""
        streaming.stop(self)
        self.llama_context().free()
        if self.model:
            free_model(self.model)
        self.context = self.model = self.memory = None


def load_model(
    files: ModelFiles,
    options: LoadOptions,
    progress: Progress | None = None,
    draft: Shape | None = None,
) -> LlamaModel:
    """Load a model, and make a context that leaves memory for a draft model of shape `draft`.

    Raises UsageError for an option that is out of range, ModelLoadError, OutOfMemoryError.
    """
    started = time.perf_counter()
    check_options(options)
    model = open_model(files.paths, progress)
    try:
        machine = _reserve_projector(read_machine(), files)
        meta = read_meta(model)
        _refuse_encoder_decoder(model, files.paths[0])
        shape, plan = make_exact_plan(
            model_shape(model, meta), options, machine, lambda: tensor_sizes(files.paths), draft
        )
        if plan.refusal:
            raise OutOfMemoryError(plan.refusal)
        if progress:
            progress("making a context", None)
        loaded = _with_context(model, meta, shape, options, plan)
        if 0 < loaded.n_ctx_train < loaded.n_ctx:
            trained = f"the model was trained on {loaded.n_ctx_train:,} tokens"
            worse = f"beyond them, a context of {loaded.n_ctx:,} gives worse answers"
            loaded.warnings = (f"{trained}; {worse}",)
        if plan.from_disk:
            loaded.warnings += (disk_warning(shape, machine, plan, read_rate(*files.paths)),)
            streaming.start(loaded, files.paths, plan.streaming)
    except BaseException:
        free_model(model)
        raise
    loaded.load_ms = (time.perf_counter() - started) * 1000.0
    return loaded


def _reserve_projector(machine: Machine, files: ModelFiles) -> Machine:
    """Return `machine` with the memory for the projector's weights subtracted."""
    if not files.projector or not os.path.isfile(files.projector):
        return machine
    return machine.without(os.path.getsize(files.projector))


def _refuse_encoder_decoder(model: Any, path: str) -> None:
    """Raise ModelLoadError for an encoder-decoder model (T5, BART)."""
    llama = libllama.lib()
    if llama.llama_model_has_encoder(model) and llama.llama_model_has_decoder(model):
        raise ModelLoadError(
            f"{path} is an encoder-decoder model, which is not supported",
            hint="use a decoder-only model, such as the chat models in `edgeinfer list`",
        )


def check_options(options: LoadOptions) -> None:
    """Raise UsageError if an option is out of range."""
    try:
        load_options.refuse_out_of_range(options)
    except ValueError as error:
        raise UsageError(str(error)) from None


def read_meta(model: Any) -> dict[str, str]:
    """Return the metadata of the model's file as text, without the vocabulary."""
    llama = libllama.lib()
    buffer = ctypes.create_string_buffer(1 << 16)
    meta = {}
    for i in range(llama.llama_model_meta_count(model)):
        if llama.llama_model_meta_key_by_index(model, i, buffer, len(buffer)) < 0:
            continue
        key = buffer.value.decode("utf-8", "replace")
        if key.startswith("tokenizer.ggml.") and key.endswith(
            ("tokens", "merges", "scores", "token_type")
        ):
            continue  # llama.cpp would take a second to write the vocabulary as text
        llama.llama_model_meta_val_str_by_index(model, i, buffer, len(buffer))
        meta[key] = buffer.value.decode("utf-8", "replace")
    return meta


def model_shape(model: Any, meta: dict[str, str]) -> Shape:
    """Return the `Shape` of a loaded model; upper bounds if the number of heads differs by layer."""
    llama = libllama.lib()
    metadata: dict[str, object] = {
        key: int(value) if value.isdecimal() else value for key, value in meta.items()
    }
    prefix = meta.get("general.architecture", "")
    n_heads = int(llama.llama_model_n_head(model))
    metadata.setdefault(f"{prefix}.attention.head_count", n_heads)
    if f"{prefix}.attention.head_count_kv" not in metadata:
        n_kv_heads = int(llama.llama_model_n_head_kv(model))
        metadata[f"{prefix}.attention.head_count_kv"] = n_kv_heads or n_heads
    shape = make_shape(
        metadata,
        n_vocab=int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))),
        n_params=int(llama.llama_model_n_params(model)),
        weights_bytes=int(llama.llama_model_size(model)),
    )
    is_recurrent = llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
    return msgspec.structs.replace(
        shape, is_recurrent=bool(is_recurrent), has_windows=llama.llama_model_n_swa(model) > 0
    )


def _with_context(
    model: Any, meta: dict[str, str], shape: Shape, options: LoadOptions, plan: MemoryPlan
) -> LlamaModel:
    llama = libllama.lib()
    options = msgspec.structs.replace(options, kv_type=plan.kv_type.value)
    params = context_params(
        options,
        n_cells=plan.n_cells.value,
        n_batch=plan.n_batch,
        n_seq_max=plan.n_seq_max,
        n_threads=plan.n_threads.value,
        n_outputs=plan.n_outputs,
    )
    context, lines, buffers = make_context(model, params)
    choices = {
        "n_threads": plan.n_threads,
        "n_parallel": plan.n_parallel,
        "n_ctx": plan.n_ctx,
        "n_cells": plan.n_cells,
        "kv_type": plan.kv_type,
        "gpu_layers": Chosen("none", "models are loaded for the CPU; devices are attached afterwards"),
        "flash_attention": _flash_choice(options, lines),
    }
    n_cells = int(llama.llama_n_ctx(context))
    return LlamaModel(
        model=model,
        context=context,
        memory=llama.llama_get_memory(context) if llama.llama_get_causal_attn(context) else None,
        vocab=Vocab(model),
        meta=meta,
        shape=shape,
        n_ctx=min(plan.n_ctx.value, n_cells),
        n_cells=n_cells,
        n_parallel=plan.n_parallel.value,
        n_batch=int(llama.llama_n_batch(context)),
        n_threads=plan.n_threads.value,
        kv_bytes=_sum_mib(lines, r"KV buffer size|RS buffer size"),
        compute_bytes=_sum_mib(lines, r"compute buffer size|output buffer size"),
        cells=_cells(buffers, lines, shape, n_cells, choices),
        load_ms=0.0,
        plan=plan,
        choices=choices,
    )


def with_another_context(
    loaded: LlamaModel, model: Any, options: LoadOptions, n_cells: int
) -> LlamaModel:
    """Return `model`, a copy of `loaded` on devices, with a new context of `n_cells` cells.

    Raises ModelLoadError, OutOfMemoryError, DecodeError.
    """
    llama = libllama.lib()
    choices = {name: loaded.choices[name].value for name in ("kv_type", "flash_attention")}
    params = context_params(
        msgspec.structs.replace(options, **choices),
        n_cells=n_cells,
        n_batch=loaded.plan.n_batch,
        n_seq_max=loaded.plan.n_seq_max,
        n_threads=loaded.n_threads,
        n_outputs=loaded.plan.n_outputs,
    )
    context, lines, buffers = make_context(model, params)
    n_ctx, reason = min(loaded.n_ctx, n_cells), "the longest that fits on the devices, with the layers"
    limits = {"n_ctx": Chosen(n_ctx, reason), "n_cells": Chosen(n_cells, reason)}
    return replace(
        loaded,
        model=model,
        context=context,
        memory=llama.llama_get_memory(context),
        n_ctx=n_ctx,
        n_cells=n_cells,
        choices=loaded.choices | (limits if n_cells < loaded.n_cells else {}),
        kv_bytes=_sum_mib(lines, r"KV buffer size|RS buffer size"),
        compute_bytes=_sum_mib(lines, r"compute buffer size|output buffer size"),
        cells=_cells(buffers, lines, loaded.shape, n_cells, loaded.choices),
    )


def context_params(
    options: LoadOptions,
    *,
    n_cells: int,
    n_batch: int,
    n_seq_max: int,
    n_threads: int,
    n_outputs: int = 0,
) -> Any:
    """Make a context's parameters. KV type "auto" is f16; `n_outputs=0` keeps llama.cpp's default."""
    llama = libllama.lib()
    kv_type = "f16" if options.kv_type == "auto" else options.kv_type
    params = llama.llama_context_default_params()
    params.n_ctx = n_cells
    params.n_batch = params.n_ubatch = n_batch
    params.n_seq_max = n_seq_max
    params.n_threads = params.n_threads_batch = n_threads
    params.n_outputs_max = n_outputs or params.n_outputs_max
    params.type_k = params.type_v = getattr(llama, f"GGML_TYPE_{kv_type.upper()}")
    params.flash_attn_type = _FLASH["on" if kv_type != "f16" else options.flash_attention]
    params.kv_unified = True
    # with pooling, llama.cpp aborts unless every token is an output
    params.pooling_type = llama.LLAMA_POOLING_TYPE_NONE
    # keep cells outside the sliding window, so that prefixes can be reused (decision 021)
    params.swa_full = True
    params.no_perf = True
    return params


def open_context(
    model: Any, options: LoadOptions, *, n_cells: int, pooling: int | None = None, **limits: int
) -> LlamaContext:
    """Make a context in addition to the main one; `limits` are arguments of `context_params`.

    With `pooling` (llama.cpp's number), the context computes embeddings. Raises ModelLoadError,
    OutOfMemoryError.
    """
    params = context_params(options, n_cells=n_cells, **limits)
    if pooling is not None:
        params.embeddings = True
        params.pooling_type = pooling
    context, lines, buffers = make_context(model, params)
    return LlamaContext(context, _kv_cells(buffers, lines, (), n_cells))


def make_context(model: Any, params: Any) -> tuple[Any, list[str], list[Buffer]]:
    """Make a context; return its pointer, llama.cpp's log lines, and the host buffers it allocated.

    Raises ModelLoadError, OutOfMemoryError.
    """
    llama = libllama.lib()
    with libllama.registry_lock:
        libllama.clear_log()
        with libllama.listening() as lines, sparse_buffers() as buffers:
            context = libllama.call(llama.llama_init_from_model, model, params)
    if context:
        return context, lines, buffers
    reason = libllama.recent_reason()
    if re.search(r"alloc|memory", reason):
        raise OutOfMemoryError(f"not enough memory for a context of {params.n_ctx} tokens: {reason}")
    problem = f"llama.cpp could not make a context: {reason}"
    raise ModelLoadError(problem, hint="leave out load options, such as `--ctx` and `--kv-type`")


def _cells(
    buffers: list[Buffer], lines: list[str], shape: Shape, n_cells: int, choices: dict[str, Chosen]
) -> CellMemory:
    """Describe the KV cache's memory; without flash attention V is transposed and has no known rows."""
    is_flash = choices["flash_attention"].value == "on"
    rows = shape.kv_row_bytes(choices["kv_type"].value) if is_flash else ()
    return _kv_cells(buffers, lines, rows, n_cells)


def _kv_cells(
    buffers: list[Buffer], lines: list[str], rows: tuple[int, ...], n_cells: int
) -> CellMemory:
    """Find the context's new buffers that are the KV cache, by the sizes in llama.cpp's log."""
    sizes = [m.group(1) for line in lines if (m := re.search(r"KV buffer size *= *([\d.]+) MiB", line))]
    kv = [b for b in buffers if f"{(b.memory.high - b.memory.low) / (1 << 20):.2f}" in sizes]
    return cell_memory(kv, rows, n_cells, is_all_on_host=len(kv) == len(sizes))


def _sum_mib(lines: list[str], pattern: str) -> int:
    matches = (re.search(rf"(?:{pattern}) *= *([\d.]+) MiB", line) for line in lines)
    return sum(int(float(match.group(1)) * (1 << 20)) for match in matches if match)


def _flash_choice(options: LoadOptions, lines: list[str]) -> Chosen:
    if options.kv_type != "f16":
        return Chosen("on", f"needed for a {options.kv_type} KV cache")
    if options.flash_attention != "auto":
        return Chosen(options.flash_attention, "as asked")
    off = any("Flash Attention" in line and "disabl" in line for line in lines)
    return Chosen("off" if off else "on", "llama.cpp's own choice for this model and device")
