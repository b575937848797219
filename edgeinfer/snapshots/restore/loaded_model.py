"""The engine that a parked process has loaded, and how a launch uses it."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import msgspec

from edgeinfer.config.load_options import first_difference, first_mismatch, snapshot_options
from edgeinfer.errors import EngineClosedError
from edgeinfer.platform.machine import read_memory
from edgeinfer.platform.page_cache import is_cached, is_cold
from edgeinfer.runtime.events import TextDelta, TokenLogprobs
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.llama.mappings import HUGEPAGE, Area, Range, advise
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.requests import GenerateRequest, Sampling
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


class LoadedModel:
    """A loaded engine with the description of its load.

    `droppable` is the memory that `app_process.reseed` clears, `weights` the mapped model files.
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

    def serves(self, model: str, options: LoadOptions, *, named: bool = False) -> bool:
        """Return whether this engine is what a launch asks for.

        Options with default values match; if the snapshot was `named`, so do those the launch leaves
        out.
        """
        if not self.is_open or model != self.model:
            return False
        wished, requested = snapshot_options(options), snapshot_options(self.description.options)
        return not (first_difference if named else first_mismatch)(
            wished, requested, actual(self.engine)
        )

    def engine_for(self, options: LoadOptions) -> Engine:
        """Return the engine, set to the requested number of threads."""
        if not self.is_open:
            raise EngineClosedError("the resumed engine was closed")
        if options.n_threads:
            self.engine.resume(options.n_threads, self._entropy)
        return self.engine

    def resume(self, entropy: bytes) -> None:
        """Let the engine run again, with new entropy and a thread for each core of this launch."""
        # a parked process has already imported it
        from edgeinfer.platform.machine import read_processors
        from edgeinfer.runtime.memory_plan import choose_threads

        self._entropy = entropy
        self.engine.resume(choose_threads(0, read_processors()).value, entropy)
        start_prefetch(self.weights)

    def canary(self) -> bytes:
        """Return log-probabilities, embeddings or scores of fixed prompts, which a resume must not
        change.
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


def actual(engine: Engine) -> dict[str, str]:
    """Return the values that the load chose, for the options that select a snapshot."""
    info = engine.info
    chosen = {name: str(choice.value) for name, choice in info.choices.items()}
    return chosen | {"n_ctx": str(info.n_ctx), "n_parallel": str(info.n_parallel)}


#: Bytes per read: the size of a huge page.
STEP_BYTES = 2 << 20


def start_prefetch(mapped: list[Area]) -> None:
    """Read the uncached parts of mapped files in a thread, if all of them fit into free memory."""
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
    """Read those bytes of a mapped file that are not cached; return their number. Raises OSError."""
    into, n_bytes = memoryview(bytearray(STEP_BYTES)), 0
    stop = area.offset + area.high - area.low
    with open(area.path, "rb", buffering=0) as file:
        for offset in range(area.offset, stop, STEP_BYTES):
            size = min(STEP_BYTES, stop - offset)
            if not is_cached(file.fileno(), offset + size - 1):
                n_bytes += os.preadv(file.fileno(), [into[:size]], offset)
    return n_bytes
