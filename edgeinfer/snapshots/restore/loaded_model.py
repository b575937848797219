"""The engine that a parked process has loaded, and that a launch resumes."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import msgspec

from edgeinfer.config.load_options import first_difference, snapshot_options
from edgeinfer.errors import EngineClosedError
from edgeinfer.platform.machine import read_memory, read_processors
from edgeinfer.platform.page_cache import is_cached, is_cold
from edgeinfer.runtime.events import TextDelta, TokenLogprobs
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.llama.mappings import HUGEPAGE, Area, Range, advise
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.requests import GenerateRequest, Sampling
from edgeinfer.snapshots import inputs
from edgeinfer.snapshots.inputs import ProcessDescription

if TYPE_CHECKING:
    from edgeinfer.runtime.engine import LlamaEngine

CANARY_TOKENS = 4
_CANARY_PROMPTS = (
    "The quick brown fox",
    "jumps over the lazy dog, und der Hund schläft weiter; ни звука не слышно.",
    "1, 2, 4, 8, 16, 32, 64, 128,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
#: Bytes that a prefetch reads at a time: the size of a huge page.
STEP_BYTES = 2 << 20


class LoadedModel:
    """A loaded engine, and the description of its load.

    `droppable` are the memory ranges with states of random generators, which `app_process.reseed`
    clears; `weights` are the areas of memory to which the model files are mapped.
    """

    def __init__(self, engine: LlamaEngine, description: ProcessDescription) -> None:
        self.engine = engine
        self.description = description
        self.model = description.model
        self._entropy = b""
        self.droppable: list[Range] = []
        self.weights: list[Area] = []

    @property
    def is_open(self) -> bool:
        return self.engine.is_open

    def serves(self, model: str, options: LoadOptions, *, is_named: bool = False) -> bool:
        """Return whether the engine has this model and these options.

        If the launch names the snapshot (`is_named`), only the launch's options that differ from the
        default are compared.
        """
        if not self.is_open or model != self.model:
            return False
        requested = snapshot_options(self.description.options)
        actual = chosen_values(self.engine)
        return not first_difference(snapshot_options(options), requested, actual, is_named=is_named)

    def engine_for(self, options: LoadOptions) -> LlamaEngine:
        """Return the engine, set to the number of threads in `options` unless that is 0.

        Raises EngineClosedError if the engine was closed.
        """
        if not self.is_open:
            raise EngineClosedError(f"the engine of {self.model} was closed")
        if options.n_threads:
            self.engine.resume(options.n_threads, self._entropy)
        return self.engine

    def resume(self, entropy: bytes) -> None:
        """Start the engine's threads again, one for each core, and a prefetch of weights from the disk.

        The random bytes `entropy` seed the samplers.
        """
        from edgeinfer.runtime.memory_plan import choose_threads  # imported before parking

        self._entropy = entropy
        self.engine.resume(choose_threads(0, read_processors()).value, entropy)
        start_prefetch(self.weights)

    def canary(self) -> bytes:
        """Return token scores, embeddings or rerank scores of fixed prompts (msgpack).

        If a resume is correct, the bytes are equal to those from before the dump.
        """
        info = self.engine.info
        if info.can_rerank:
            return msgspec.msgpack.encode(self.engine.rerank(_CANARY_PROMPTS[0], _CANARY_PROMPTS[1:]))
        if info.can_generate:
            return msgspec.msgpack.encode([self._canary_tokens(prompt) for prompt in _CANARY_PROMPTS])
        return msgspec.msgpack.encode(self.engine.embed(_CANARY_PROMPTS))

    def _canary_tokens(self, prompt: str) -> list[TokenLogprobs]:
        request = GenerateRequest(
            prompt=prompt,
            max_tokens=CANARY_TOKENS,
            ignore_eos=True,
            logprobs=1,
            cache_prompt=False,
            sampling=Sampling(temperature=0.0, seed=1),
        )
        deltas = [event for event in self.engine.submit(request) if isinstance(event, TextDelta)]
        return [token for delta in deltas for token in delta.logprobs]


def chosen_values(engine: Engine) -> dict[str, str]:
    """Return option → value with which `engine` was loaded, for options that select a snapshot."""
    info = engine.info
    chosen = {name: str(choice.value) for name, choice in info.choices.items()}
    sizes = {"n_ctx": str(info.n_ctx), "n_parallel": str(info.n_parallel)}
    return chosen | sizes | {"lora": inputs.adapters_text(info.lora)}


def start_prefetch(mapped: list[Area]) -> None:
    """Read the mapped files into the page cache in a thread, if they all fit into free memory.

    Files that are cached already are not read.
    """
    cold = []
    with contextlib.suppress(OSError):  # without a prefetch, page faults read the file
        cold = [area for area in mapped if is_cold(area.path)]
    n_bytes = sum(area.high - area.low for area in mapped)
    if cold and n_bytes <= read_memory().available_bytes:
        threading.Thread(target=_read_all, args=[cold], name="prefetch", daemon=True).start()


def _read_all(cold: list[Area]) -> None:
    advise((Range(area.low, area.high) for area in cold), HUGEPAGE)
    with contextlib.suppress(OSError):
        for area in cold:
            read_ahead(area)


def read_ahead(area: Area) -> int:
    """Read the uncached pages of an area from its file; return the bytes read. Raises OSError."""
    into, n_bytes = memoryview(bytearray(STEP_BYTES)), 0
    stop = area.offset + area.high - area.low
    with open(area.path, "rb", buffering=0) as file:
        for offset in range(area.offset, stop, STEP_BYTES):
            size = min(STEP_BYTES, stop - offset)
            if not is_cached(file.fileno(), offset + size - 1):
                n_bytes += os.preadv(file.fileno(), [into[:size]], offset)
    return n_bytes
