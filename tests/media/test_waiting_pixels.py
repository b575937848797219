"""Pixels of pictures that wait to be encoded are bounded over all requests."""

import numpy as np
import pytest

from edgeinfer.media.pictures import Picture
from edgeinfer.runtime import vision as vision_module
from edgeinfer.runtime.llama.mtmd import Chunk
from edgeinfer.runtime.requests import GenerateRequest
from edgeinfer.runtime.vision import PromptPictures, Span, Vision


class _Pixels(bytes):
    """Counts the bytes of all pictures that are referenced."""

    alive = 0

    def __init__(self, *_: object) -> None:
        _Pixels.alive += len(self)

    def __del__(self) -> None:
        _Pixels.alive -= len(self)


def test_pixels_of_waiting_pictures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 white pictures in 1.4 MB of requests would hold 740 MiB until their turn comes."""

    class OneRow:
        def chunks(self, width: int, height: int) -> list[Chunk]:
            return [Chunk(n_rows=1)]

        def encode(self, picture: Picture) -> list[np.ndarray]:
            return [np.full((1, 4), picture.width, np.float32)]

    monkeypatch.setattr(vision_module, "decode", lambda file: Picture(1000, 1000, _Pixels(3_000_000)))
    vision = Vision(OneRow(), "key", max_rows=1)  # type: ignore[arg-type]
    spans: list[Span] = []
    for number in range(40):
        vision.append([], spans, b"%d" % number, GenerateRequest(prompt=""))
    assert len(spans) == 40
    assert _Pixels.alive <= 48 << 20
    request = PromptPictures(vision, spans)
    request.encode_after(-1)
    for span in spans:
        request.wait(span, 60)
        assert request.rows(span).max() == 1000
    assert _Pixels.alive == 0
    vision.park()
