"""What happens to the encoder of pictures if the device is lost, or the engine closed, while it is opened."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import EngineClosedError
from edgeinfer.media.pictures import Picture
from edgeinfer.runtime import gpu_offload
from edgeinfer.runtime.gpu_offload import GpuOffloader
from edgeinfer.runtime.layer_plan import Device
from edgeinfer.runtime.llama import backend_loading
from edgeinfer.runtime.llama.mtmd import Chunk
from edgeinfer.runtime.vision import Source, Span, Vision

DEVICE = Device(name="CUDA0", description="a card", kind="gpu", backend="cuda", free_bytes=1 << 40)


class Moves:
    """An offload to a device, at the moment when pictures move; `opened` counts projectors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, projector: str) -> None:
        self.opened = 0
        self.on_encode = lambda: None
        monkeypatch.setattr(backend_loading, "read_device", lambda *_: DEVICE)
        monkeypatch.setattr(gpu_offload, "Projector", self.open)
        offloader: Any = GpuOffloader.__new__(GpuOffloader)
        self.offloader = offloader
        offloader.files = SimpleNamespace(projector=projector)
        offloader.cpu = SimpleNamespace(model=None, n_threads=1)
        offloader.call = lambda work: work()
        offloader._closing = threading.Event()
        self.on = SimpleNamespace(device=DEVICE, loaded=SimpleNamespace(choices={}))
        offloader._device_context = self.on
        self.vision = SimpleNamespace(on_device=None)

    def open(self, *_: object) -> SimpleNamespace:
        self.opened += 1
        return SimpleNamespace(encode=lambda _picture: self.on_encode())

    def lose(self) -> None:
        self.offloader._device_context = None

    def move(self) -> bool:
        self.offloader._move_encoder(self.vision, self.on)
        return self.vision.on_device is not None


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    return Moves(monkeypatch, __file__)


def test_pictures_move(moves: Moves) -> None:
    assert moves.move()


def test_nothing_is_opened_on_a_lost_device_or_while_closing(moves: Moves) -> None:
    moves.offloader._closing.set()
    assert not moves.move()
    moves.offloader._closing.clear()
    moves.lose()
    assert not moves.move()
    assert moves.opened == 0


def test_device_that_is_lost_meanwhile_gets_no_pictures(moves: Moves) -> None:
    moves.on_encode = moves.lose
    assert not moves.move()
    assert moves.opened == 1


def test_an_engine_that_is_closed_meanwhile_can_free_the_projector(moves: Moves) -> None:
    def refuse(_work: object) -> None:
        raise EngineClosedError("the engine is closed")

    moves.offloader.call = refuse
    assert moves.move()


@pytest.mark.parametrize("is_cached", [False, True])
def test_rows_of_a_device_are_never_stored_for_the_cpu(is_cached: bool) -> None:
    """A request that came before a device was attached is encoded after that."""
    stored: list[str] = []

    def folder(name: str) -> Any:
        names = SimpleNamespace(rows=lambda digest: digest, identity=b"")
        write = lambda _block: stored.append(name)  # noqa: E731
        return SimpleNamespace(names=names, read=lambda _: None, has=lambda _: False, write=write)

    rows = [np.zeros((2, 4), np.float32)]
    projector: Any = SimpleNamespace(encode=lambda _pixels: rows, free=lambda: None)
    vision = Vision(projector, "key", max_rows=8)
    cpu, device = folder("CPU"), folder("device")
    spans = [
        Span(0, Source(b"digest", b"", (1, 1), place, is_stored=True), 0, Chunk(n_rows=2))
        for place in (cpu, device)
    ]
    vision._pixels[b"digest"] = Picture(1, 1, b"rgb")
    vision.block_folder = lambda: device
    vision.on_device = projector
    if is_cached:
        vision.encode(spans[1]).result()
    vision.encode(spans[0]).result()
    assert stored == ["device"] * is_cached
    vision.close()


def test_projector_that_was_removed_leaves_pictures_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not Moves(monkeypatch, "/nowhere/projector.gguf").move()
    assert "CUDA0 cannot encode pictures, so the CPU does" in caplog.text
