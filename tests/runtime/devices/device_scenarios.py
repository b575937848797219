"""device_scenarios.py MODEL SCENARIO...: what engines do with devices, in one process that can be told how
a device fails (tests/made/failing_vulkan.c). Prints a JSON object, a scenario a key.

A process of its own, because one that has opened a Vulkan driver keeps its threads, and one alone because
the software device compiles its pipelines in seconds.
"""

import io
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from PIL import Image

from edgeinfer.errors import ContextLengthError, DecodeError
from edgeinfer.media.pictures import join_parts
from edgeinfer.runtime import engine as engine_module
from edgeinfer.runtime import gpu_offload, memory_plan
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.event_stream import EventStream
from edgeinfer.runtime.events import TextDelta
from edgeinfer.runtime.gpu_offload import DeviceContext
from edgeinfer.runtime.layer_plan import Device, LayerPlan, make_layer_plan
from edgeinfer.runtime.llama import backends
from edgeinfer.runtime.llama.backends import OffloadRequest
from edgeinfer.runtime.llama.state import make_states
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.prefix_cache import block_saver
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.retention import CacheLimits
from edgeinfer.runtime.requests import GenerateRequest, Message, Sampling
from edgeinfer.runtime.vision import Span

PROMPT = "The three primary colours are"
_CHOOSE = OffloadRequest.choose
_PATIENCE_S = 240.0
said: list[str] = []


class _Said(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())


def fail(how: str) -> None:
    """Have the device fail from now on, or work again with ""."""
    if path := os.environ.get("FAILING_VULKAN"):
        Path(path).write_text(how)


@contextmanager
def engine(n_ctx: int = 512) -> Iterator[LlamaEngine]:
    path = sys.argv[1]
    opened = load_engine(
        ModelFiles(name="m", paths=(path,), projector=os.environ.get("PROJECTOR", "")),
        LoadOptions(n_ctx=n_ctx, n_parallel=2, n_batch=64),
    )
    try:
        yield opened
    finally:
        opened.close()
        fail("")


def ask(opened: LlamaEngine, n: int = 8, prompt: str | tuple[int, ...] = PROMPT) -> EventStream:
    greedy = Sampling(temperature=0.0)
    return opened.submit(GenerateRequest(prompt=prompt, max_tokens=n, ignore_eos=True, sampling=greedy))


def text(stream: EventStream) -> str:
    return "".join(event.text for event in stream if isinstance(event, TextDelta))


def attach(opened: LlamaEngine, **wanted: Any) -> None:
    """Attach devices, and wait until the engine uses them or has given up."""
    opened.attach_devices(OffloadRequest(**wanted))
    assert opened.wait_for_devices(_PATIENCE_S)


def place(opened: LlamaEngine) -> str:
    return str(opened.info.choices["gpu_layers"].value)


def with_layers(layers: int | str, **options: Any) -> dict[str, object]:
    """The same question before and after devices are attached, and one more."""
    with engine() as opened:
        before = text(ask(opened))
        attach(opened, layers=layers, **options)
        cached = opened.metrics().cached_tokens_total
        after = text(ask(opened))
        cached = opened.metrics().cached_tokens_total - cached
        other = text(ask(opened, prompt="Roses"))
        return {
            "texts": [before, after, other],
            "place": place(opened),
            "reason": opened.info.choices["gpu_layers"].reason,
            "cached": cached,
            "opened": "libvulkan.so" in Path("/proc/self/maps").read_text(),
        }


def limit_free_bytes(n_bytes: int) -> None:
    """Let each device report `n_bytes` of free memory from now on."""
    OffloadRequest.choose = lambda self, devices: tuple(  # type: ignore[method-assign]
        structs.replace(device, free_bytes=n_bytes) for device in _CHOOSE(self, devices)
    )


def with_room(n_bytes: int) -> dict[str, object]:
    """`with_layers` on a device of which other programs leave `n_bytes` free."""
    limit_free_bytes(n_bytes)
    try:
        return with_layers("auto", devices=("Vulkan0",))
    finally:
        OffloadRequest.choose = _CHOOSE  # type: ignore[method-assign]


def while_answering(layers: int) -> dict[str, object]:
    """An answer that begins on the CPU and ends on the device."""
    with engine() as opened:
        stream = iter(ask(opened, 64))
        first = next(event.text for event in stream if isinstance(event, TextDelta))
        attach(opened, layers=layers)
        rest = "".join(event.text for event in stream if isinstance(event, TextDelta))
        return {"texts": [first + rest], "place": place(opened)}


def lost(layers: int) -> dict[str, object]:
    """A device that is lost in the middle of an answer, and the next answer."""
    with engine() as opened:
        attach(opened, layers=layers)
        before = place(opened)
        fail("submit 40")
        found = text(ask(opened, 64))
        report = {"texts": [found, text(ask(opened))], "before": before, "place": place(opened)}
        return report | {"failed": opened.metrics().cancelled_total}


def failing(how: str, layers: int | str) -> dict[str, object]:
    """A device that fails while it is attached."""
    fail(how)
    return with_layers(layers)


def store_and_restore(layers: int) -> dict[str, object]:
    """Two engines, one after the other, with some layers on the device and blocks on the disk.

    `disk` is how many of 300 tokens the second one has read from there.
    """
    answers, prompt = [], tuple(32 + i % 90 for i in range(300))
    block_saver._MIN_PREFILL_S = 0.0  # a tiny model prefills too fast to be stored otherwise
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with engine() as opened:
                opened.open_prefix_cache(BlockStore(Path(folder, "blocks"), CacheLimits(4 << 30, 0)))
                attach(opened, layers=layers)
                answers.append(text(ask(opened, prompt=prompt)))
                disk = opened.metrics().cached_disk_tokens_total
                answers.append(text(ask(opened, prompt="Roses")))
                assert opened.flush_blocks()
        return {"texts": answers, "disk": disk, "place": place(opened)}


def lost_after(n: int) -> dict[str, object]:
    """A device lost after `n` submits: in load, warm-up, switch, prompt, answer, a block that is written
    or read, or at the end. Texts, where the layers were before and after them.
    """
    block_saver._MIN_PREFILL_S = 0.0  # a tiny model prefills too fast to be stored otherwise
    with tempfile.TemporaryDirectory() as folder:
        with engine() as opened:
            opened.open_prefix_cache(BlockStore(Path(folder, "blocks"), CacheLimits(4 << 30, 0)))
            fail(f"submit {n}")
            attach(opened, layers="all")
            before = place(opened)
            texts = [text(ask(opened, prompt=PROMPT * 4)), text(ask(opened))]
            assert opened.flush_blocks()
            after, reason = place(opened), opened.info.choices["gpu_layers"].reason
            fail("submit 0")  # the end frees what is on it
            opened.close()
        with engine() as another:  # of the same process
            attach(another, layers="all")
            texts.append(text(ask(another)))
        return {"texts": texts, "before": before, "place": after, "reason": reason}


def lost_in_blocks() -> dict[str, object]:
    """A device that is lost while a block is read from it, written to it, and when all is freed."""
    errors = []
    with engine() as opened:
        attach(opened, layers="all")
        texts = [text(ask(opened))]
        before = place(opened)
        states = make_states(opened._gpu.loaded, opened._context)
        (cached_seq,) = opened._core.kv.cached_sequences
        state = opened.between_steps(lambda: states.save(cached_seq.seq_id, 0, 4))
        fail("submit 0")
        for work in (
            lambda: states.save(cached_seq.seq_id, 0, 4),
            lambda: states.restore(cached_seq.seq_id, state),
        ):
            try:
                opened.between_steps(work)
            except DecodeError as error:
                errors.append(error.message)
        texts.append(text(ask(opened)))
        after = place(opened)
    with engine() as other:
        texts.append(text(ask(other)))
    return {"texts": texts, "before": before, "place": after, "errors": errors}


def freed_lost() -> dict[str, object]:
    """A device that is lost before the engine ends."""
    with engine() as opened:
        attach(opened, layers="all")
        texts, before = [text(ask(opened))], place(opened)
        fail("submit 0")
    with engine() as other:
        return {"texts": [*texts, text(ask(other))], "before": before}


def close_during_a_hang() -> dict[str, object]:
    """A device that stops answering in the middle of an answer, and answers once the engine is closed."""
    engine_module._DRIVER_PATIENCE_S = 1.0
    with engine() as opened:
        attach(opened, layers="all")
        stream = iter(ask(opened, 400))
        next(stream)
        fail("hang 0")
        while not Path(os.environ["FAILING_VULKAN"] + ".hangs").exists():
            time.sleep(0.01)
        opened.close()
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "edgeinfer-free"]
        is_freed = [not opened._loaded.model]
        fail("")
        thread.join(_PATIENCE_S)
        return {"is_freed": [*is_freed, not opened._loaded.model]}


def least_room(opened: LlamaEngine, suits: Callable[[LayerPlan], bool]) -> int:
    """Return the least bytes of a card for which the plan `suits`."""
    loaded, card = opened._loaded, Device(name="d", description="", kind="gpu", backend="vulkan")

    def plan(n_bytes: int) -> LayerPlan:
        devices = [structs.replace(card, free_bytes=n_bytes)]
        return make_layer_plan(loaded.shape, loaded.plan, devices, "auto")

    return next(n for n in range(256 << 20, 1 << 30, 4096) if suits(plan(n)))


def has_all_layers(plan: LayerPlan) -> bool:
    return plan.n_layers == plan.n_all


def full() -> dict[str, object]:
    """A card on which another program takes memory between the plan and the load."""
    with engine() as opened:
        room = least_room(opened, has_all_layers)
    gpu_offload._SMALLER = 1 - 2 * 4096 / room
    fail("memory -2")
    return with_room(room)


def next_backend() -> dict[str, object]:
    """A first backend without code for the card, and a second one with it."""
    real_warm_up = DeviceContext.warm_up

    def find_devices(*arguments: Any) -> Iterator[tuple[Device, ...]]:
        (devices,) = backends.find_devices(*arguments)
        yield from ((device,) for device in devices)

    def warm_up(self: DeviceContext, n_tokens: int) -> None:
        if self.layer_plan.devices == ("Vulkan0",):
            raise DecodeError("CUDA error: no kernel image is available for execution on the device")
        real_warm_up(self, n_tokens)

    vars(gpu_offload)["find_devices"] = find_devices
    DeviceContext.warm_up = warm_up  # type: ignore[method-assign]
    return with_layers("all")


def shorter() -> dict[str, object]:
    """A device that holds all layers with a shorter context only, while a longer request runs."""
    memory_plan._MIN_DEVICE_CELLS = 256
    with engine(n_ctx=0) as opened:
        loaded = opened._loaded
        limit_free_bytes(least_room(opened, lambda plan: plan.n_cells == 256))
        n_ctx = [opened.info.n_ctx]
        texts = [text(ask(opened, 64, PROMPT * 12))]
        stream = iter(ask(opened, 64, PROMPT * 12))
        first = next(event.text for event in stream if isinstance(event, TextDelta))
        opened.attach_devices(OffloadRequest(devices=("Vulkan0",)))
        texts += [first + text(stream), text(ask(opened))]  # type: ignore[arg-type]
        assert opened.wait_for_devices(_PATIENCE_S)
        texts.append(text(ask(opened)))
        attached, n_ctx = place(opened), [*n_ctx, opened.info.n_ctx]
        kv_total = opened.metrics().kv_total_tokens
        refused = ""
        try:
            ask(opened, 8, PROMPT * 12)
        except ContextLengthError as error:
            refused = error.message
        fail("submit 0")
        texts += [text(ask(opened)), text(ask(opened, 64, PROMPT * 12))]
        n_ctx.append(opened.info.n_ctx)
        report = {"texts": texts, "place": attached, "n_ctx": n_ctx, "cells": kv_total}
        return report | {"refused": refused, "reason": loaded.choices["n_ctx"].reason}


def experts() -> dict[str, object]:
    """The least room that holds all layers, but not all of their experts."""
    with engine() as opened:
        room = least_room(opened, has_all_layers)
    return with_room(room)


def pictures(how: str) -> dict[str, object]:
    """Rows of a picture on the CPU, on the device, and while that fails as `how` says."""
    y, x = np.mgrid[:200, :300]
    pixels = np.stack([x * 255 / 300, y * 255 / 200, (x // 20 + y // 20) % 2 * 255], -1)
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG")
    content, files = join_parts((out.getvalue(), "What is in it?"))
    message = Message(role="user", content=content, pictures=files)
    request = GenerateRequest(messages=(message,), cache_prompt=False)
    with engine() as opened:
        vision = opened._vision
        assert vision is not None

        def encode() -> np.ndarray:
            # no step computes them: Mesa's device does not outlive steps without an output
            vision.park()  # forgets rows
            spans: list[Span] = []
            opened._input_processor.tokenize_chat(request, opened._chat_format.render(request), spans)
            return vision.encode(spans[0]).result()[0]

        cpu, before = encode(), vision.on_device
        attach(opened, layers="all")
        is_moved = vision.on_device is not None
        device = encode()
        fail(how)
        after_failure = encode()
        return {
            "moved": [before is not None, is_moved, vision.on_device is not None],
            "reason": opened.info.choices["gpu_layers"].reason,
            "difference": float(np.abs(cpu - device).max() / np.abs(cpu).max()),
            "is_equal": [bool((cpu == device).all()), bool((cpu == after_failure).all())],
        }


def pictures_without_room() -> dict[str, object]:
    """A device that holds the layers, but not the projector."""
    gpu_offload._ENCODER_BYTES = 1 << 50
    return pictures("")


SCENARIOS = {
    "pictures": lambda: pictures("submit 2"),
    "pictures without room": pictures_without_room,
    "cpu": lambda: with_layers("none"),
    "long": lambda: while_answering(0),
    "all": lambda: with_layers("all"),
    "one": lambda: with_layers(1),
    "auto": lambda: with_layers("auto"),
    "small": lambda: with_room(1 << 20),
    "fits": lambda: with_layers("auto", devices=("Vulkan0",)),
    "named": lambda: with_layers(1, devices=("Vulkan9",)),
    "while": lambda: while_answering(1),
    "no device": lambda: failing("create 0", 1),
    "no memory": lambda: failing("memory 0", 2),
    "experts": experts,
    "two": lambda: with_layers("all"),
    "shorter": shorter,
    "lost in blocks": lost_in_blocks,
    "freed": freed_lost,
    "unanswered": close_during_a_hang,
    "full": full,
    "next": next_backend,
    "lost": lambda: lost(1),
} | {f"stored {n}": partial(store_and_restore, n) for n in range(4)}


def main() -> None:
    logging.getLogger("edgeinfer.gpu").addHandler(_Said())
    logging.getLogger("edgeinfer.gpu").propagate = False
    results = {}
    for name in sys.argv[2:]:
        said.clear()
        kind, _, number = name.partition(" after ")
        scenario = SCENARIOS[kind] if not number else lambda n=int(number): lost_after(n)
        results[name] = scenario() | {"said": list(said)}
    print(json.dumps(results), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
