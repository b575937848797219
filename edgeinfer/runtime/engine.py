"""The in-process engine: `load_engine` loads a model, `LlamaEngine` serves its requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from itertools import takewhile
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from edgeinfer.errors import InvalidRequestError
from edgeinfer.platform.machine import read_machine
from edgeinfer.runtime.chat_format.chat_format import ChatFormat, TemplateFacts, load_chat_format
from edgeinfer.runtime.embeddings import Embedder
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.gpu_offload import GpuOffloader
from edgeinfer.runtime.llama import libllama, streaming
from edgeinfer.runtime.llama.backends import OffloadRequest
from edgeinfer.runtime.llama.lora import LoraAdapters
from edgeinfer.runtime.llama.model import LlamaModel, load_model
from edgeinfer.runtime.llama.weights import Progress
from edgeinfer.runtime.loop import DecodeLoop
from edgeinfer.runtime.memory_plan import make_plan
from edgeinfer.runtime.model_users import ModelUsers
from edgeinfer.runtime.options import Adapter, EngineInfo, EngineMetrics, LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore, Traffic
from edgeinfer.runtime.prefix_cache.cache import PrefixCache
from edgeinfer.runtime.prefix_cache.roundtrip_check import RoundtripCheck
from edgeinfer.runtime.requests import (
    GenerateRequest,
    Sampling,
    check_length,
    default_sampling,
    limit_preparation,
)
from edgeinfer.runtime.sampling.draft_model import DraftModel
from edgeinfer.runtime.sampling.grammar import Constraints
from edgeinfer.runtime.scheduler.batch_invariance import why_irreproducible
from edgeinfer.runtime.scheduler.engine_core import EngineCore
from edgeinfer.runtime.scheduler.input_processor import InputProcessor
from edgeinfer.runtime.scheduler.observer import RequestObserver
from edgeinfer.runtime.scheduler.prefixes import FLUSH_S
from edgeinfer.runtime.vision import open_vision

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("edgeinfer.engine")
#: How long (s) `close` waits for a GPU's driver to end a step, and then to free the model.
_DRIVER_PATIENCE_S = 10.0


def load_engine(
    files: ModelFiles, options: LoadOptions, progress: Progress | None = None
) -> LlamaEngine:
    """Load a model into this process. Raises ModelLoadError, OutOfMemoryError, UsageError."""
    with ExitStack() as on_error:
        draft = DraftModel(files, options)
        on_error.callback(draft.free)
        loaded = load_model(files, options, progress, draft.shape)
        on_error.callback(loaded.free)
        draft.open(loaded)
        engine = LlamaEngine(files, options, loaded, draft)
        on_error.pop_all()
        return engine


def _uses_model(
    method: Callable[Concatenate[LlamaEngine, P], T],
) -> Callable[Concatenate[LlamaEngine, P], T]:
    """Have `close` wait for running calls of `method`; later calls raise EngineClosedError."""

    @wraps(method)
    def call(self: LlamaEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._users:
            return method(self, *args, **kwargs)

    return call


class LlamaEngine:
    """An `Engine` in this process, over llama.cpp. The first request starts its decode thread."""

    def __init__(
        self, files: ModelFiles, options: LoadOptions, loaded: LlamaModel, draft: DraftModel
    ) -> None:
        self._loaded, self._draft = loaded, draft
        self._context = loaded.llama_context()
        self._lora = LoraAdapters(loaded.model, self._context, options.adapters(files))
        self._chat_format = load_chat_format(template_facts(files, options, loaded))
        self._constraints = Constraints()
        self._core = EngineCore(loaded, self._context, self._lora)
        self._loop = DecodeLoop(self._core, capacity=loaded.n_parallel + options.max_queue)
        self._embedder = Embedder(loaded, options, self._loop.call)
        self._vision, vision_error = open_vision(files, loaded)
        if self._vision is not None:
            self._vision.block_folder = lambda: (
                None if self._prefix_cache is None else self._prefix_cache.folder
            )
        info = make_info(files, loaded, self._lora, self._chat_format, self._embedder)
        self._info = msgspec.structs.replace(info, can_see=self._vision is not None)
        self._input_processor = InputProcessor(
            files=files,
            vocab=loaded.vocab,
            chat_format=self._chat_format,
            constraints=self._constraints,
            n_ctx=loaded.n_ctx,
            can_shift=loaded.can_shift,
            n_ctx_train=loaded.n_ctx_train,
            vision=self._vision,
            vision_error=vision_error,
            draft_model=draft,
        )
        self._gpu = GpuOffloader(
            files,
            options,
            loaded,
            self._context,
            self._lora,
            self._core,
            self._loop.call,
            self._vision,
            self._enter_model,
        )
        self._files, self._options = files, options
        self._choices_at_load = self._info.choices
        #: Called with all loaded adapters after `use_adapters` has changed them.
        self.on_new_adapters: Callable[[tuple[Adapter, ...]], None] = lambda adapters: None
        self._check_outcome = ""
        self._users = ModelUsers()

    @property
    def is_open(self) -> bool:
        return not (self._users.refused or self._loop.failure)

    def health(self) -> str:
        return self._loop.failure

    @property
    def info(self) -> EngineInfo:
        loaded = self._gpu.loaded
        if loaded.choices["gpu_layers"] is not self._info.choices["gpu_layers"]:
            choices = self._choices_at_load | loaded.choices
            self._info = msgspec.structs.replace(self._info, choices=choices, n_ctx=loaded.n_ctx)
        if self._lora.named_adapters != self._info.lora:
            self._info = msgspec.structs.replace(self._info, lora=self._lora.named_adapters)
        return self._info

    @_uses_model
    def submit(self, request: GenerateRequest) -> EventStream:
        """Validate and queue a request, as `Engine.submit` says."""
        if not self._loaded.can_generate:
            problem = f"{self._info.model} is an embedding model; it cannot generate"
            hint = "choose a chat model: `edgeinfer list`"
            raise InvalidRequestError(problem, param="model", hint=hint)
        seq = self._input_processor.make_sequence(request)
        if seq.recorder is not None:
            seq.recorder.why_irreproducible = self._why_irreproducible
        try:
            with self._lora.lock:
                seq.adapters = self._lora.key(request.lora)
                if seq.recorder is not None:
                    seq.recorder.adapters = self._lora.with_scales(seq.adapters)
                self._loop.submit(seq)
        except BaseException:
            seq.sampler.close()
            raise
        return seq.stream

    def _why_irreproducible(self) -> str:
        if str(self._gpu.loaded.choices["gpu_layers"].value) != "none":
            return "layers of the model are on a GPU"
        if self._lora.named_adapters and not self._lora.has_kernels:
            return "llama.cpp computes the LoRA adapters, with results that depend on the batch"
        return why_irreproducible(self._loaded)

    @_uses_model
    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        check_length(len(text), self._loaded.n_ctx, "content")
        return self._loaded.vocab.tokenize(text, add_special=add_special, parse_special=parse_special)

    @_uses_model
    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of `tokens`. Raises InvalidRequestError for an unknown token."""
        try:
            return self._loaded.vocab.detokenize(tokens)
        except IndexError as error:
            raise InvalidRequestError(str(error), param="tokens") from error

    @_uses_model
    def tokenize_chat(self, request: GenerateRequest) -> list[int]:
        with limit_preparation():
            text = self._chat_format.render(request)
        check_length(len(text), self._input_processor.n_ctx, "messages", self._loaded.n_ctx_train)
        return self._input_processor.tokenize_chat(request, text, [])

    @_uses_model
    def embed(self, texts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        return self._embedder.embed(texts)

    @_uses_model
    def rerank(self, query: str, documents: Sequence[str]) -> list[float]:
        return self._embedder.rerank(query, documents)

    @_uses_model
    def use_threads(self, n_threads: int) -> None:
        """Decode with `n_threads` from the next step on."""
        self._loop.call(lambda: self._set_threads(n_threads))

    @_uses_model
    def use_adapters(self, adapters: Sequence[Adapter]) -> tuple[Adapter, ...]:
        if not self._loaded.can_generate:
            problem = f"{self._info.model} is an embedding model; it does not support LoRA adapters"
            raise InvalidRequestError(problem, param="lora", hint="leave out the adapters")
        self._loop.call(lambda: self._lora.change(adapters))
        while not self._loop.call(self._unload_removed_adapters):
            continue  # requests still use a removed adapter: try again after the next step
        self.on_new_adapters(self._lora.named_adapters)
        return self._lora.named_adapters

    def _unload_removed_adapters(self) -> bool:
        removed = self._lora.removed_stamps()
        if removed and not self._core.drop_sequences_with(removed):
            return False
        self._lora.release()
        return True

    def metrics(self) -> EngineMetrics:
        core = self._core
        running = len(core.queue.running)
        traffic = self._prefix_cache.folder.traffic if self._prefix_cache is not None else Traffic()
        return core.counters.copy_with(
            queued=max(0, self._loop.n_requests - running),
            running=running,
            kv_used_tokens=core.kv.used_cells,
            kv_total_tokens=core.kv.n_cells,
            block_bytes_written_total=traffic.bytes_written,
            block_bytes_read_total=traffic.bytes_read,
            blocks_pruned_total=traffic.pruned,
            blocks_damaged_total=traffic.damaged,
            **msgspec.structs.asdict(streaming.statistics()),
        )

    @property
    def _prefix_cache(self) -> PrefixCache | None:
        return self._core.prefixes.prefix_cache

    def open_prefix_cache(self, store: BlockStore) -> None:
        """Use the on-disk prefix cache in `store`, unless the model is an encoder. Raises OSError."""
        if self._loaded.can_generate and self._prefix_cache is None:
            parts = (self._files, self._options, self._context, self._core.kv)
            make_cache = partial(PrefixCache, store, *parts)
            self._core.prefixes.open_cache(make_cache, self._gpu.loaded, self._check_outcome)

    def add_observer(self, observer: RequestObserver) -> None:
        """Let `observer` record all later requests. The engine's `close` closes the observer."""
        self._core.queue.observers += (observer,)

    def attach_devices(self, request: OffloadRequest) -> None:
        """Move layers to GPUs in the background, while the CPU decodes. Once per engine."""
        if self._loaded.can_generate:
            self._gpu.begin(request)

    def _enter_model(self, loaded: LlamaModel) -> None:
        self._input_processor.n_ctx = loaded.n_ctx

    def wait_for_devices(self, timeout_s: float | None = None) -> bool:
        """Wait until `attach_devices` has succeeded or failed; return False after the timeout."""
        return self._gpu.wait(timeout_s)

    def flush_blocks(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until pending KV blocks are on disk; return False after the timeout.

        Ends the decode thread, which the next request starts again. Raises EngineError while requests
        run or wait.
        """
        if self._prefix_cache is None:
            return True
        self._loop.stop()
        return self._prefix_cache.folder.flush(timeout_s)

    def agent_prefix(self, agent: str, salt: str = "") -> list[int]:
        if self._prefix_cache is None:
            return []
        tokens = self._prefix_cache.folder.agent_prefix(agent, self._lora.key(None), salt)
        return list(takewhile(lambda token: token >= 0, tokens))  # rows of pictures are negative

    def store_blocks_before_exit(self) -> None:
        """Store pending KV blocks before the process ends, unless requests run or wait.

        The blocks are stored even if the check that a restored block is bit-identical has not run.
        """
        if self._prefix_cache is not None and not self._loop.n_requests:
            self._prefix_cache.saver.is_exiting = True
            self.flush_blocks()

    @_uses_model
    def warm_up(self) -> None:
        """Prepare what the first request needs: token table, round-trip check, step costs."""
        if self._loaded.can_generate:
            self._constraints.token_table(self._loaded.vocab)
            self._chat_format.warm_up()
            libllama.build_info()  # read once now, for the prefix cache
            # on the decode thread: OpenMP starts a team of threads for each thread that computes
            self._check_outcome = self._loop.call(RoundtripCheck(self._options, self._loaded).run)
            self._loop.call(lambda: self._core.profile_steps(max(self._loaded.vocab.bos, 0)))
        else:
            self._embedder.warm_up()

    @_uses_model
    def prefill_system(self, text: str) -> int:
        """Prefill and pin a system prompt ("": the chat template's own); return its length (tokens).

        Returns 0 if there is no prompt, or one that fills the context. Call this while no request runs.
        """
        tokens = self._input_processor.system_prefix(text)
        if not tokens or len(tokens) >= self._loaded.n_ctx:
            return 0
        return self._loop.call(lambda: self._core.pin(tokens, self._lora.key(None)))

    def park(self) -> None:
        """End the decode thread and drop every sequence except the pinned one, before a dump.

        The next request starts the thread again. Raises EngineError while requests run or wait.
        """
        self._loop.stop()
        if self._vision is not None:
            self._vision.park()
            self._core.executor.batch.clear()  # the batch may hold rows of a picture
        self._core.prefixes.close_cache()
        self._core.kv.drop_idle()
        self._embedder.close()
        streaming.stop(self._loaded)
        self._draft.park()

    def resume(self, n_threads: int = 0, entropy: bytes = b"") -> None:
        """Prepare a restored engine: use `n_threads` (0: as before), and mix `entropy` into seeds.

        If the weights did not all fit into memory, streaming them from disk starts again, with a plan
        for the memory that is free now.
        """
        self._input_processor.entropy = entropy
        if self._loaded.plan.from_disk:
            plan = make_plan(self._loaded.shape, self._options, read_machine(), self._draft.shape)
            streaming.start(self._loaded, self._files.paths, plan.streaming)
        if n_threads:
            self._set_threads(n_threads)

    def _set_threads(self, n_threads: int) -> None:
        self._loaded.n_threads = n_threads
        self._context.set_threads(n_threads)
        self._embedder.set_threads(n_threads)
        if self._draft.shape is not None:
            self._draft.context.set_threads(n_threads)

    def between_steps(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the decode thread between two steps, and return its result."""
        return self._loop.call(work)

    def close(self) -> None:
        """Cancel all requests and free the model, once no other thread tokenizes. Idempotent.

        If a GPU's driver hangs, `close` returns, and a thread frees the model when the driver answers.
        """
        if not self._users.refuse():
            return
        if self._prefix_cache is not None:
            self._prefix_cache.saver.is_exiting = True
        patience_s = _DRIVER_PATIENCE_S if self._gpu.stop() else None
        self._loop.close(patience_s)
        for observer in self._core.queue.observers:
            observer.close()
        self._core.prefixes.close_cache()
        if patience_s is None:
            self._free()
            return
        thread = threading.Thread(target=self._free, name="edgeinfer-free", daemon=True)
        thread.start()
        thread.join(patience_s)
        if thread.is_alive():
            _log.warning("a GPU does not answer: %s stays in memory until it does", self._info.model)

    def _free(self) -> None:
        self._loop.close()
        self._users.wait()
        self._gpu.close()
        if self._vision is not None:
            self._vision.close()
        self._embedder.close()
        self._lora.close()
        self._draft.free()
        self._loaded.free()


def make_info(
    files: ModelFiles,
    loaded: LlamaModel,
    lora: LoraAdapters,
    chat_format: ChatFormat,
    embedder: Embedder,
) -> EngineInfo:
    meta = loaded.meta
    return EngineInfo(
        model=files.name,
        sha256=files.sha256,
        description=loaded.description,
        architecture=meta.get("general.architecture", ""),
        n_params=loaded.n_params,
        n_vocab=loaded.vocab.n_vocab,
        n_ctx=loaded.n_ctx,
        n_ctx_train=loaded.n_ctx_train,
        n_parallel=loaded.n_parallel,
        n_embd=loaded.n_embd,
        n_ctx_embed=embedder.max_tokens,
        weights_bytes=loaded.shape.weights_bytes,
        kv_bytes=loaded.kv_bytes,
        compute_bytes=loaded.compute_bytes,
        least_kv_bytes=loaded.plan.least_kv_bytes,
        chat_template=files.chat_template or loaded.chat_template(),
        eos_token=loaded.vocab.text(loaded.vocab.eos),
        can_generate=loaded.can_generate,
        can_embed=embedder.can_embed,
        can_rerank=embedder.can_rerank,
        can_infill=loaded.can_generate and loaded.vocab.fim is not None,
        can_think=chat_format.can_think,
        can_shift=loaded.can_shift,
        tool_format=chat_format.tool_format,
        system_prompt=files.system_prompt,
        sampling=default_sampling(loaded.n_params) if files.sampling == Sampling() else files.sampling,
        lora=lora.named_adapters,
        choices={**loaded.choices, **chat_format.choices, "pooling": embedder.pooling},
        load_ms=loaded.load_ms,
        warnings=loaded.warnings,
    )


def template_facts(files: ModelFiles, options: LoadOptions, loaded: LlamaModel) -> TemplateFacts:
    vocab, meta = loaded.vocab, loaded.meta
    return TemplateFacts(
        template=files.chat_template or loaded.chat_template(),
        tool_template="" if files.chat_template else loaded.chat_template("tool_use"),
        architecture=meta.get("general.architecture", ""),
        name=files.name,
        bos_text=vocab.text(vocab.bos),
        eos_text=vocab.text(vocab.eos),
        vocab=vocab,
        add_bos=vocab.adds_bos,
        escape_content=options.special_tokens_in_content == "off",
    )
