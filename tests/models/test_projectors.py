"""Which projector in a model's folder is used, and which headers are refused."""

import gguf
import numpy as np
import pytest
from made_families import finish
from made_gguf import gguf_bytes
from made_models import make_llama
from made_projectors import make_projector

from edgeinfer.errors import InvalidGgufError
from edgeinfer.models import projectors
from edgeinfer.models.gguf import GgufHeader, parse, read_header
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.quantizing import QuantizeOptions, quantize
from edgeinfer.models.reference import resolve
from edgeinfer.models.removal import remove_models

from .conftest import write_models_toml


def model_header(n_embd: int) -> GgufHeader:
    return parse(gguf_bytes({"llama.embedding_length": n_embd}))


def write(path, architecture="clip", **sizes):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_bool("clip.has_vision_encoder", True)
    for key, value in {"projection_dim": 64, "image_size": 64, "patch_size": 16, **sizes}.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    return finish(writer, path)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"image_size": 0}, "image_size is 0"),
        ({"image_size": 1 << 30}, "image_size is 1073741824"),
        ({"patch_size": 65}, "patch_size is 65, more than clip.vision.image_size"),
        ({"block_count": 1 << 20}, "block_count"),
        ({"preproc_image_size": 1 << 16}, "preproc_image_size is 65536"),
        ({"preproc_image_size": 513}, "more than 8 tiles per side"),
        ({"preproc_max_tiles": 1 << 20}, "preproc_max_tiles"),
        ({"image_min_pixels": 1 << 30}, "image_min_pixels"),
        ({"image_size": 4096, "embedding_length": 128}, "65536 patches .*allowed: 2048"),
        ({"image_min_pixels": 1 << 20, "embedding_length": 128}, "makes 4096 patches"),
        ({"attention.head_count": 0}, "head_count is 0"),
        ({"architecture": "llama"}, "a projector: architecture 'llama'"),
    ],
)
def test_header_that_no_projector_has_is_refused(tmp_path, sizes, said):
    with pytest.raises(InvalidGgufError, match=said):
        projectors.check(write(tmp_path / "mmproj.gguf", **sizes))


@pytest.mark.parametrize(
    ("image", "patch", "width"), [(896, 14, 1152), (1540, 14, 1024), (2048, 16, 1152)]
)
def test_the_largest_that_models_have_are_read(tmp_path, image, patch, width):
    """Read headers with the sizes of Gemma 3, Mistral Small 3.1 and HunyuanOCR."""
    sizes = {"image_size": image, "patch_size": patch, "embedding_length": width}
    projectors.check(write(tmp_path / "mmproj.gguf", **sizes))


def test_the_smallest_that_fits_the_models_width_is_chosen(tmp_path):
    wide = make_projector(tmp_path / "mmproj-wide.gguf", "gemma3", 1152)
    small = write(tmp_path / "mmproj-small.gguf", projection_dim=640)
    large = make_projector(tmp_path / "mmproj-large.gguf", "gemma3", 640)
    (tmp_path / "mmproj-broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    candidates = projectors.in_folder_of(tmp_path / "model.gguf")
    assert len(candidates) == 4
    assert projectors.find_fitting(candidates, model_header(640)) == str(small)
    assert projectors.find_fitting([large, wide], model_header(640)) == str(large)
    assert projectors.find_fitting(candidates, model_header(512)) == ""


def test_a_file_takes_the_projector_beside_it(tmp_path):
    model = make_llama(tmp_path / "model.gguf")
    assert resolve(str(model)).files().projector == ""
    width = read_header(model).n_embd
    path = make_projector(tmp_path / "mmproj-model-f16.gguf", "gemma3", width)
    assert resolve(str(model)).files().projector == str(path)


@pytest.mark.model
@pytest.mark.parametrize("link", [True, False])
def test_copied_and_quantized_models_keep_a_projector_of_their_own(tmp_path, monkeypatch, link):
    model = make_llama(tmp_path / "model.gguf")
    path = make_projector(tmp_path / "mmproj-model.gguf", "gemma3", read_header(model).n_embd)
    record = pull(str(model), options=PullOptions(name="sees"))
    assert record.projector is not None
    if not link:
        monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError("another disk")))
    content = path.read_bytes()
    small = quantize("sees", "Q8_0", options=QuantizeOptions(perplexity=False)).model
    options = QuantizeOptions(perplexity=False, name="other")
    other = quantize(str(model), "Q8_0", options=options).model
    remove_models(["sees"])
    path.unlink()
    for stored_model in (small, other):
        projector = resolve(stored_model.name).files().projector
        assert projector.startswith(str(stored_model.folder))
        with open(projector, "rb") as file:
            assert file.read() == content
        assert stored_model.size_bytes > len(content)


def test_the_catalogues_projector_is_pulled_with_the_model(tmp_path):
    model = make_llama(tmp_path / "model.gguf")
    width = read_header(model).n_embd
    make_projector(tmp_path / "mmproj-beside.gguf", "gemma3", width)
    named = make_projector(tmp_path / "elsewhere.gguf", "gemma3", width, image=128)
    write_models_toml("sees", f"file:{model}", projector=f"file:{named}")
    record = pull("sees")
    assert resolve("sees").files().projector == str(record.folder / named.name)
    assert (record.folder / named.name).read_bytes() == named.read_bytes()
    write_models_toml("sees", f"file:{model}", projector=str(named))
    assert resolve("sees").files().projector == str(named)
