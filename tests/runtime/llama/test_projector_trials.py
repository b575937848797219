"""A projector is opened in a process of its own first: a wrong one costs the pictures, not the engine."""

import io
from contextlib import closing

import pytest
from made_projectors import make_projector

from edgeinfer.errors import DecodeError
from edgeinfer.media.pictures import PICTURE_MARK
from edgeinfer.models.gguf import read_header
from edgeinfer.runtime import vision
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.runtime.requests import GenerateRequest, Message

from ..conftest import answer, ask

Image = pytest.importorskip("PIL.Image")

_file = io.BytesIO()
Image.new("RGB", (64, 64), (255, 0, 0)).save(_file, "PNG")
QUESTION = Message(role="user", content=f"{PICTURE_MARK}What is it?", pictures=(_file.getvalue(),))


pytestmark = pytest.mark.needs("encoder")


@pytest.fixture(scope="module")
def projector(tmp_path_factory):
    return make_projector(tmp_path_factory.mktemp("projector") / "mmproj.gguf", "gemma3", 640)


def load_tiny(model, projector):
    files = ModelFiles(name="tiny", paths=(str(model),), projector=str(projector))
    return closing(load_engine(files, LoadOptions(n_ctx=1024, n_parallel=1)))


def test_a_projector_that_works_is_tried_once(gemma3, projector, monkeypatch):
    assert vision.projector_failure(str(projector), (str(gemma3),)) == ""
    monkeypatch.setattr(vision, "_HELPER", "no.such.module")
    assert vision.projector_failure(str(projector), (str(gemma3),)) == ""


def test_a_trial_that_dies_is_a_reason(gemma3, projector, tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "_HELPER", "no.such.module")
    copy = tmp_path / "mmproj.gguf"
    copy.write_bytes(projector.read_bytes())
    failure = vision.projector_failure(str(copy), (str(gemma3),))
    assert "its first picture ended with status 1" in failure


def with_nan(projector, path):
    """A copy of it with a weight that is no number."""
    data = bytearray(projector.read_bytes())
    weight = next(t for t in read_header(projector).tensors if t.name == "mm.input_projection.weight")
    data[weight.offset : weight.offset + 2] = b"\x00\x7e"
    path.write_bytes(data)
    return path


def test_rows_that_are_no_numbers_fail_the_trial(gemma3, projector, tmp_path):
    path = with_nan(projector, tmp_path / "mmproj.gguf")
    assert "NaN, infinite or huge" in vision.projector_failure(str(path), (str(gemma3),))


def test_rows_that_are_no_numbers_reach_no_other_stream(gemma3, projector, tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "projector_failure", lambda *files: "")
    with load_tiny(gemma3, with_nan(projector, tmp_path / "mmproj.gguf")) as engine:
        before = answer(engine, ask(logprobs=3, cache_prompt=False))
        with pytest.raises(DecodeError, match="NaN, infinite or huge"):
            list(engine.submit(GenerateRequest(messages=(QUESTION,))))
        assert answer(engine, ask(logprobs=3, cache_prompt=False)).logprobs == before.logprobs
