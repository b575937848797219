"""Load options of a model, and the description and metrics of a loaded engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from edgeinfer.config import load_options as table
from edgeinfer.runtime.requests import Sampling


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A pulled model: the absolute paths of its files, and its settings in models.toml.

    `paths` are the GGUF files in order, several for a split model. `quantization` is, for example,
    "Q4_K_M"; "" if it is not recorded. `chat_template` replaces the template in the file. `lora` is
    used if `LoadOptions.lora` is "". `draft` is the name of the draft model, `draft_paths` its files;
    `no_draft` says why there is no draft model. `projector` is the path of the GGUF file that encodes
    pictures, "" if there is none.
    """

    name: str
    paths: tuple[str, ...]
    sha256: str = ""
    quantization: str = ""
    chat_template: str | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    system_prompt: str = ""
    lora: str = ""
    projector: str = ""
    draft: str = ""
    draft_paths: tuple[str, ...] = ()
    no_draft: str = ""


#: Largest accepted alpha of a LoRA adapter; usual values are some hundreds at most.
MOST_ALPHA = 65_536.0
OTHER_PROJECTOR = "use the projector (mmproj-….gguf) that was made for this model"


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter: its name in requests, its file, and its default scale.

    `sha256` is the digest of the loaded file, "" before it is loaded.
    """

    name: str
    path: str
    scale: float = 1.0
    sha256: str = ""


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for loading a model. `config.load_options` documents each field and its range.

    For 0 or "auto", the engine chooses a value; `EngineInfo.choices` has the value and the reason.
    `max_queue` limits the number of waiting requests. `is_counted`: the answers are recorded for
    `edgeinfer drift` and `ps --usage`.
    """

    n_ctx: int = table.N_CTX.default
    n_parallel: int = table.N_PARALLEL.default
    n_threads: int = table.N_THREADS.default
    n_batch: int = table.N_BATCH.default
    kv_type: str = table.KV_TYPE.default
    flash_attention: str = table.FLASH_ATTENTION.default
    gpu_layers: int | str = table.GPU_LAYERS.default
    special_tokens_in_content: str = table.CONTENT_TOKENS.default
    lora: str = table.LORA.default
    draft: str = table.DRAFT.default
    max_queue: int = 4096
    is_counted: bool = True

    def adapters(self, files: ModelFiles) -> tuple[Adapter, ...]:
        """Return the LoRA adapters to load: those of `--lora`, otherwise those of models.toml."""
        return parse_adapters(self.lora or files.lora)

    def adapter_paths(self, files: ModelFiles) -> tuple[str, ...]:
        return tuple(adapter.path for adapter in self.adapters(files))

    def for_another_model(self) -> LoadOptions:
        """Return these options without adapters and draft model, which fit only one model."""
        draft = self.draft if self.draft == table.NO_DRAFT else ""
        return msgspec.structs.replace(self, lora="", draft=draft)


def parse_adapters(text: str) -> tuple[Adapter, ...]:
    """Return the adapters in a value of `--lora` that `LORA.parse` has checked."""
    return tuple(Adapter(name, *settings) for name, settings in table.adapters_of(text).items())


class Chosen(msgspec.Struct, frozen=True):
    """The value that the engine chose for an option, and why."""

    value: Any
    reason: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a loaded model.

    Texts of up to `n_ctx_embed` tokens can be embedded. `least_kv_bytes` is the smallest useful size of
    the KV cache. `can_see`: messages may have pictures. `lora` are the loaded adapters. `choices` maps
    names of options to the chosen values. `warnings` are sentences for the user.
    """

    model: str
    sha256: str = ""
    description: str = ""
    architecture: str = ""
    n_params: int = 0
    n_vocab: int = 0
    n_ctx: int = 0
    n_ctx_train: int = 0
    n_parallel: int = 1
    n_embd: int = 0
    n_ctx_embed: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    least_kv_bytes: int = 0
    chat_template: str = ""
    eos_token: str = ""
    can_generate: bool = True
    can_embed: bool = False
    can_rerank: bool = False
    can_infill: bool = False
    can_think: bool = False
    can_shift: bool = False
    can_see: bool = False
    tool_format: str = ""
    system_prompt: str = ""
    sampling: Sampling = Sampling()
    lora: tuple[Adapter, ...] = ()
    choices: dict[str, Chosen] = {}
    load_ms: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """First 12 hex digits of the file's SHA-256, which tell clients that a model has changed."""
        return self.sha256[:12]

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model's file has a chat template; a base model's has none."""
        return bool(self.chat_template)


class StreamingStatistics(msgspec.Struct):
    """Statistics of weights streamed from disk. native/streaming.cpp relies on the order of the fields.

    Totals since the start: bytes read, seconds that threads waited, weights evicted from memory. At
    present: bytes of pinned weights, of streamed weights, and of cached experts.
    """

    streamed_bytes_total: int = 0
    streaming_wait_seconds_total: float = 0.0
    moved_weights_total: int = 0
    pinned_bytes: int = 0
    streamed_bytes: int = 0
    expert_slot_bytes: int = 0


class EngineTotals(StreamingStatistics, kw_only=True):
    """Totals of requests, tokens, steps and times (s) since the engine started."""

    requests_total: int = 0
    cancelled_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    cached_disk_tokens_total: int = 0
    completion_tokens_total: int = 0
    prefill_seconds_total: float = 0.0
    decode_seconds_total: float = 0.0
    constraint_seconds_total: float = 0.0
    python_seconds_total: float = 0.0
    steps_total: int = 0
    draft_tokens_total: int = 0
    draft_accepted_total: int = 0


class EngineMetrics(EngineTotals, kw_only=True):
    """Counters and gauges of an engine at one moment, for `/metrics`."""

    queued: int = 0
    running: int = 0
    block_bytes_written_total: int = 0
    block_bytes_read_total: int = 0
    blocks_pruned_total: int = 0
    blocks_damaged_total: int = 0
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0
    ttft_ms: tuple[float, ...] = ()
    inter_token_ms: tuple[float, ...] = ()

    @classmethod
    def sum(cls, parts: Iterable[EngineMetrics]) -> EngineMetrics:
        """Return the sums of several engines' metrics, with the latency samples of all."""
        total = cls()
        for metrics in parts:
            sums = {
                name: getattr(total, name) + getattr(metrics, name) for name in cls.__struct_fields__
            }
            total = cls(**sums)
        return total


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of a model, in a separate process.

    `number` counts from 1 and is never reused. `how` is the kind of its start: "resumed" or "cold".
    `requests` is the number of running and waiting requests.
    """

    number: int
    how: str
    n_threads: int
    requests: int
    completion_tokens_total: int


class LayersInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Which layers are on devices now: "29 of 29 on CUDA0", "none"."""

    model: str
    layers: str


class ReplicasInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a model. `count` is the target number of replicas; `reason` explains it."""

    model: str
    count: int
    running: tuple[ReplicaInfo, ...]
    reason: str
    crashed_total: int = 0

    @property
    def summary(self) -> str:
        """The number of running replicas with the reason: "2 of 3 replicas: as configured"."""
        return f"{len(self.running)} of {self.count} replicas: {self.reason}"


#: Number of latest samples that are retained of each latency, such as the time to the first token.
_SAMPLES = 1024


def _make_ring() -> deque[float]:
    return deque(maxlen=_SAMPLES)


class Counters(EngineTotals, kw_only=True):
    """Counters of a running engine, and its latest latencies (ms)."""

    ttft_ms: deque[float] = msgspec.field(default_factory=_make_ring)
    inter_token_ms: deque[float] = msgspec.field(default_factory=_make_ring)

    def copy_with(self, **fields: float) -> EngineMetrics:
        """Return these counters as metrics, with `fields` that other components count."""
        latencies = {"ttft_ms": _copy(self.ttft_ms), "inter_token_ms": _copy(self.inter_token_ms)}
        return EngineMetrics(**msgspec.structs.asdict(self) | latencies | fields)


def _copy(ring: deque[float]) -> tuple[float, ...]:
    while True:
        try:
            return tuple(ring)
        except RuntimeError:  # the decode thread added a sample meanwhile
            continue
