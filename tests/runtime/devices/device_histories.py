"""device_histories.py MODEL SEED N: N random operations on cached sequences whose layers are half on the device.

The same operations run on the CPU's context, and each step's logits are compared. Each step has an output: on
steps without one, Mesa's software device ends the process in a thread of its own. Prints a JSON object.
"""

import json
import os
import sys
from typing import Any

import numpy as np
from cache_histories import CountingMemory, Histories

from edgeinfer.runtime.kv_cache import CachedSequence, KvCache
from edgeinfer.runtime.layer_plan import make_layer_plan
from edgeinfer.runtime.llama.backend_loading import load_after_probe
from edgeinfer.runtime.llama.backends import OffloadRequest, find_devices
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.libllama import L
from edgeinfer.runtime.llama.model import load_model, open_context
from edgeinfer.runtime.llama.weights import Placement, open_model
from edgeinfer.runtime.options import LoadOptions, ModelFiles

N_CELLS, N_BATCH = 768, 128
N_SEQUENCES = 6
OPTIONS = LoadOptions(n_ctx=N_CELLS, n_parallel=1, n_batch=N_BATCH, flash_attention="on")


class TwoMemories(CountingMemory):
    """Counts, and does the same in two contexts."""

    def __init__(self, contexts: tuple[LlamaContext, ...]) -> None:
        super().__init__()
        self.contexts = contexts

    def remove(self, seq_id: int, start: int, stop: int) -> bool:
        for context in self.contexts:
            assert context.remove(seq_id, start, stop)
        return super().remove(seq_id, start, stop)

    def copy(self, source: int, target: int, stop: int) -> None:
        for context in self.contexts:
            context.copy(source, target, stop)
        super().copy(source, target, stop)

    def shift(self, seq_id: int, start: int, delta: int) -> None:
        for context in self.contexts:
            context.shift(seq_id, start, delta)
        super().shift(seq_id, start, delta)


class DeviceHistories(Histories):
    """Random operations whose tokens are computed by both contexts. `differences` are of their logits."""

    def __init__(self, seed: int, contexts: tuple[LlamaContext, ...], n_vocab: int) -> None:
        memory = TwoMemories(contexts)
        super().__init__(seed, "text", KvCache(memory, n_cells=400, n_seq_max=N_SEQUENCES), memory)
        self.batches = [Batch.of(context, max_outputs=1) for context in contexts]
        self.n_vocab = n_vocab
        self.differences: list[float] = []

    def compute(self, seq: CachedSequence, pieces: list[int]) -> None:
        start = len(seq.tokens)
        super().compute(seq, pieces)
        rows = []
        for context, batch in zip(self.memory.contexts, self.batches, strict=True):
            batch.clear()
            batch.add(seq.tokens[start:], start, seq.seq_id, outputs=1)
            assert batch.decode(context) == 0
            rows.append(np.array(context.all_logits(1, self.n_vocab)[0]))
        self.differences.append(float(np.abs(rows[0] - rows[1]).max() / np.abs(rows[0]).max()))

    def check(self) -> None:
        super().check()
        for context in self.memory.contexts:
            for seq in self.kv.cached_sequences:
                assert L.llama_memory_seq_pos_max(context.memory, seq.seq_id) == len(seq.tokens) - 1


def open_both(path: str) -> tuple[tuple[LlamaContext, ...], str, int]:
    """A context on the CPU, and one with half of the layers on the first device."""
    cpu = load_model(ModelFiles(name="m", paths=(path,)), OPTIONS)
    request = OffloadRequest(layers=(cpu.shape.n_layer + 2) // 2)
    (device,) = next(find_devices(request, load_after_probe))
    layer_plan = make_layer_plan(cpu.shape, cpu.plan, [device], request.layers)
    placement = Placement([device.pointer], layer_plan)
    limits: dict[str, Any] = {"n_cells": N_CELLS, "n_batch": N_BATCH, "n_seq_max": N_SEQUENCES}
    contexts = tuple(
        open_context(model, OPTIONS, n_threads=1, n_outputs=N_SEQUENCES, **limits)
        for model in (cpu.model, open_model((path,), placement=placement))
    )
    return contexts, str(layer_plan), cpu.vocab.n_vocab


def main() -> None:
    path, (seed, n_operations) = sys.argv[1], map(int, sys.argv[2:])
    contexts, place, n_vocab = open_both(path)
    histories = DeviceHistories(seed, contexts, n_vocab)
    for _ in range(n_operations):
        histories.act()
        histories.check()
    for seq in list(histories.active):
        histories.kv.release(seq, keep=False)
    histories.kv.drop_idle(include_pinned=True)
    assert histories.memory.cells == 0
    steps, largest = len(histories.differences), max(histories.differences)
    print(json.dumps({"place": place, "steps": steps, "largest": largest}), flush=True)
    os._exit(0)  # threads of the driver would go on


if __name__ == "__main__":
    main()
