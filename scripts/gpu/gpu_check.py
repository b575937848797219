"""Check GPU offload, one check per process: `gpu_check.py CHECK [ARGUMENT...]`. Prints JSON lines.

    probe BACKEND         load the backend: time, devices, memory
    texts MODEL           compare greedy texts with no layers, all and half of the layers on the device
    logits MODEL [KV]     compare logits of 129 tokens, with all and half of the layers, with the CPU's
    plan MODEL            compare planned bytes with those that llama.cpp allocates, by context, KV type
    blocks MODEL          count the tokens that a second engine reads from KV blocks on disk, with no
                          layers, all and half of the layers on the device
    full WHEN MODEL       let another process take the device's memory "before" or "after" the attaching
    lost WHEN MODEL       destroy this process's CUDA context in an "answer", "idle" or at "close", as a
                          suspend does, by a kernel that writes to an illegal address
    split MODEL           spread all layers over every device (GGML_CUDA_DEVICES=2 makes two of one)

GPU_KIT_BACKEND is cuda (the default) or vulkan, GPU_KIT_DEVICES a comma list of devices to use, and
GPU_KIT_SMALL is set for a software device, which is slow.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import TextDelta
from edgeinfer.runtime.layer_plan import make_layer_plan
from edgeinfer.runtime.llama import backend_loading, libllama
from edgeinfer.runtime.llama.backends import OffloadRequest, find_devices
from edgeinfer.runtime.llama.context import Batch, LlamaContext
from edgeinfer.runtime.llama.model import load_model, open_context
from edgeinfer.runtime.llama.weights import Placement, free_model, open_model
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache import block_saver
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.runtime.requests import GenerateRequest, Sampling

BACKEND = os.environ.get("GPU_KIT_BACKEND", "cuda")
IS_SMALL = bool(os.environ.get("GPU_KIT_SMALL"))
PATIENCE_S = 120.0
N_CTX = 512 if IS_SMALL else 4096
PROMPTS = (
    "The three primary colours are",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
    "To make a pancake you need flour, milk and",
)[: 2 if IS_SMALL else 4]
N_ANSWER = 8 if IS_SMALL else 64
messages: list[str] = []


class _Collector(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        messages.append(record.getMessage())


def report(check: str, **fields: Any) -> None:
    print(json.dumps({"check": check, **fields}, default=str), flush=True)


def make_request(layers: int | str) -> OffloadRequest:
    names = filter(None, os.environ.get("GPU_KIT_DEVICES", "").split(","))
    return OffloadRequest(layers=layers, devices=tuple(names))


@contextmanager
def open_engine(path: str, **options: Any) -> Iterator[LlamaEngine]:
    defaults = {"n_ctx": N_CTX, "n_parallel": 2, "n_batch": 64 if IS_SMALL else 512}
    files = ModelFiles(name="model", paths=(path,))
    engine = load_engine(files, LoadOptions(**{**defaults, **options}))
    try:
        yield engine
    finally:
        engine.close()


def layer_counts(engine: LlamaEngine) -> dict[str, int | str]:
    """Return the numbers of layers that the checks compare: none, all, and half, but at least 2."""
    return {"none": "none", "all": "all", "half": max(2, (engine._loaded.shape.n_layer + 1) // 2)}


def attach(engine: LlamaEngine, layers: int | str) -> dict[str, Any]:
    began = time.perf_counter()
    if layers != "none":
        engine.attach_devices(make_request(layers))
        assert engine.wait_for_devices(PATIENCE_S), "the device was not attached in time"
    choice = engine.info.choices["gpu_layers"]
    seconds = round(time.perf_counter() - began, 3)
    return {"layers": str(choice.value), "reason": choice.reason, "attach_s": seconds}


def submit(engine: LlamaEngine, prompt: str | tuple[int, ...], n: int) -> EventStream:
    greedy = Sampling(temperature=0.0)
    request = GenerateRequest(prompt=prompt, max_tokens=n, ignore_eos=True, sampling=greedy)
    return engine.submit(request)


def answer(engine: LlamaEngine, prompt: str | tuple[int, ...], n: int = N_ANSWER) -> str:
    stream = submit(engine, prompt, n)
    return "".join(event.text for event in stream if isinstance(event, TextDelta))


def random_tokens(seed: int, n: int, n_vocab: int) -> tuple[int, ...]:
    low, high = (200, 3000) if n_vocab > 3000 else (3, min(n_vocab, 250))
    return tuple(random.Random(seed).choices(range(low, high), k=n))


def probe(name: str) -> None:
    libllama.lib()
    began = time.perf_counter()
    loaded = backend_loading.load(name)
    report(
        "probe", backend=name, ms=round(1000 * (time.perf_counter() - began), 1), result=repr(loaded)
    )


def texts(path: str) -> None:
    expected: list[str] = []
    for name in ("none", "all", "half"):
        with open_engine(path) as engine:
            offload = attach(engine, layer_counts(engine)[name])
            answers = [answer(engine, prompt) for prompt in PROMPTS]
        expected = expected or answers
        n_equal = sum(a == b for a, b in zip(expected, answers, strict=True))
        report("texts", side=name, **offload, equal=n_equal, prompts=len(PROMPTS), messages=messages)


def _logits(context: LlamaContext, n_vocab: int, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Return the log-probabilities at every position; the last token is decoded by itself."""
    batch = Batch.of(context, max_outputs=len(tokens) - 1)
    rows = []
    for start, stop in ((0, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
        batch.clear()
        batch.add(tokens[start:stop], start, 0, outputs=stop - start)
        assert not batch.decode(context)
        rows.append(np.array(context.all_logits(stop - start, n_vocab), np.float64))
    logits = np.concatenate(rows)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def logits(path: str, kv_type: str = "f16") -> None:
    options = LoadOptions(n_ctx=1024, n_parallel=1, kv_type=kv_type, flash_attention="on")
    cpu = load_model(ModelFiles(name="model", paths=(path,)), options)
    tokens = list(random_tokens(3, 17 if IS_SMALL else 129, cpu.vocab.n_vocab))
    devices = next(find_devices(make_request("all"), backend_loading.load_after_probe))

    def compute(model: Any) -> npt.NDArray[np.float64]:
        limits = {"n_cells": 1024, "n_batch": 512, "n_seq_max": 2, "n_threads": cpu.n_threads}
        context = open_context(model, options, n_outputs=len(tokens), **limits)
        try:
            return _logits(context, cpu.vocab.n_vocab, tokens)
        finally:
            context.free()

    expected = compute(cpu.model)
    for layers in ("all", (cpu.shape.n_layer + 1) // 2):
        layer_plan = make_layer_plan(cpu.shape, cpu.plan, devices, layers)
        used = [device.pointer for device in devices if device.name in layer_plan.devices]
        placement = Placement(used, layer_plan)
        model = open_model((path,), placement=placement)
        computed = compute(model)
        free_model(model)
        divergence = (np.exp(expected) * (expected - computed)).sum(-1)
        same_best = (expected.argmax(-1) == computed.argmax(-1)).mean()
        report(
            "logits",
            kv=kv_type,
            layers=str(layer_plan),
            largest_difference=float(np.abs(expected - computed).max()),
            kl_mean=float(divergence.mean()),
            kl_largest=float(divergence.max()),
            same_best=float(same_best),
        )


def plan(path: str) -> None:
    cases = ((512, "f16"),) if IS_SMALL else ((4096, "f16"), (16_384, "q8_0"), (65_536, "q8_0"))
    for n_ctx, kv_type in cases:
        with open_engine(path, n_ctx=n_ctx, kv_type=kv_type) as engine:
            with libllama.listening() as lines:
                attached = attach(engine, "all")
            context = engine._gpu._device_context
            layer_plan = context.layer_plan if context else None
            sizes = {}
            pattern = r"(\S+) (model|KV|RS|compute|output) buffer size *= *([\d.]+) MiB"
            for match in filter(None, (re.search(pattern, line) for line in lines)):
                key = f"{match[1]} {match[2]}"
                sizes[key] = round(sizes.get(key, 0.0) + float(match[3]), 1)
            kinds = ("weights", "kv", "compute") if layer_plan else ()
            planned = {kind: round(getattr(layer_plan, f"{kind}_bytes") / 2**20, 1) for kind in kinds}
            report(
                "plan", n_ctx=n_ctx, kv=kv_type, **attached, planned_mib=planned, allocated_mib=sizes
            )


def blocks(path: str) -> None:
    block_saver._MIN_PREFILL_S = 0.0  # a device prefills so fast that otherwise no block is stored
    for name in ("none", "all", "half"):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            answers, n_disk = [], 0
            for _ in range(2):
                with open_engine(path) as engine:
                    engine.open_prefix_cache(
                        BlockStore(Path(folder, "blocks"), CacheLimits(4 << 30, 0))
                    )
                    offload = attach(engine, layer_counts(engine)[name])
                    prompt = random_tokens(11, N_CTX // 2, engine._loaded.vocab.n_vocab)
                    answers.append(answer(engine, prompt, 8))
                    assert engine.flush_blocks()
                    n_disk = engine.metrics().cached_disk_tokens_total
            report(
                "blocks",
                side=name,
                **offload,
                from_disk=n_disk,
                prompt=len(prompt),
                equal=answers[0] == answers[1],
                messages=messages,
            )


#: Program that allocates all but argv[1] MiB of the device's memory, and frees it when stdin ends.
_HOG = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, held = ctypes.c_int(), ctypes.c_void_p(), []
free, total = ctypes.c_size_t(), ctypes.c_size_t()
cuda.cuInit(0); cuda.cuDeviceGet(ctypes.byref(device), 0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device); cuda.cuCtxSetCurrent(context)
size = 1 << 30
while size >= 1 << 20:
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    pointer = ctypes.c_uint64()
    if free.value < (int(sys.argv[1]) << 20) + size or cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)):
        size >>= 1
print(free.value >> 20, flush=True)
sys.stdin.read()
"""


@contextmanager
def full_device(left_mib: int) -> Iterator[None]:
    command = [sys.executable, "-c", _HOG, str(left_mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        report("hog", left_mib=process.stdout.readline().strip())
        yield
        process.stdin.close()


def full(when: str, path: str) -> None:
    with open_engine(path, kv_type="f16" if when == "before" else "q8_0") as engine:
        expected = answer(engine, PROMPTS[0], 16)
        if when == "before":
            with full_device(200):
                attached = attach(engine, "auto")
                after = answer(engine, PROMPTS[0], 16)
        else:
            attached = attach(engine, "all")
            with full_device(8):
                answer(engine, random_tokens(2, N_CTX - 32, engine._loaded.vocab.n_vocab), 8)
                after = answer(engine, PROMPTS[0], 16)
        _report_end("full", when, engine, attached, same_text=expected == after)


def _report_end(
    check: str, when: str, engine: LlamaEngine, attached: dict[str, Any], **more: Any
) -> None:
    choice = engine.info.choices["gpu_layers"]
    ending = {"layers_after": choice.value, "reason_after": choice.reason, "messages": messages}
    report(check, when=when, **attached, **ending, **more)


_PTX = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry fault() {
    .reg .u64 %a; .reg .u32 %v;
    mov.u64 %a, 8; mov.u32 %v, 1; st.global.u32 [%a], %v; ret;
}
"""


def lose_context() -> None:
    """Write to an illegal address in the primary CUDA context, so that all later calls of ggml fail."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, module, kernel = ctypes.c_int(), *(ctypes.c_void_p() for _ in range(3))
    cuda.cuInit(0)
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxSetCurrent(context)
    cuda.cuModuleLoadData(ctypes.byref(module), _PTX)
    cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"fault")
    cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    report("fault", code=cuda.cuCtxSynchronize())


def lost(when: str, path: str) -> None:
    block_saver._MIN_PREFILL_S = 0.0
    temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as folder, open_engine(path) as engine:
        expected = answer(engine, PROMPTS[0], 16)
        engine.open_prefix_cache(BlockStore(Path(folder, "blocks"), CacheLimits(4 << 30, 0)))
        attached = attach(engine, "all")
        if when != "close":
            for number, _ in enumerate(submit(engine, PROMPTS[1], 200)):
                if when == "answer" and number == 20:
                    lose_context()
        if when != "answer":
            engine.between_steps(lose_context)
        if when != "close":
            engine.flush_blocks()
            after = answer(engine, PROMPTS[0], 16)
            _report_end("lost", when, engine, attached, same_text=expected == after)
    report("lost", when=when, closed=True)


def split(path: str) -> None:
    with open_engine(path) as engine:
        expected = [answer(engine, prompt) for prompt in PROMPTS]
        attached = attach(engine, "all")
        n_equal = sum(answer(engine, p) == text for p, text in zip(PROMPTS, expected, strict=True))
        report("split", **attached, equal=n_equal, prompts=len(PROMPTS), messages=messages)


CHECKS: dict[str, Callable[..., None]] = {
    check.__name__: check for check in (probe, texts, logits, plan, blocks, full, lost, split)
}


def main() -> None:
    logging.getLogger("edgeinfer").addHandler(_Collector())
    name, *arguments = sys.argv[1:]
    began = time.perf_counter()
    try:
        CHECKS[name](*arguments)
    except BaseException as error:
        report(name, arguments=arguments, error=f"{type(error).__name__}: {error}", messages=messages)
        raise
    report("seconds", of=name, seconds=round(time.perf_counter() - began, 1))
    os._exit(0)  # a normal exit would wait for threads of the driver, which may never end


if __name__ == "__main__":
    main()
