"""Converted vision encoders give transformers' embeddings, computed by our libmtmd."""

import json
import re

import numpy as np
import pytest
from made_checkpoints import GOLDEN, golden, make_checkpoint, picture
from made_projectors import IDEFICS3_TOKENS, copy_model
from raw_logits import loaded

from edgeinfer.media.pictures import Picture
from edgeinfer.models import gguf
from edgeinfer.models.converting.convert import convert
from edgeinfer.models.converting.vision import TOWERS, convert_tower
from edgeinfer.models.progress import Job, PullProgress
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import resolve
from edgeinfer.runtime.llama.mtmd import Projector

SEEING = sorted(
    path.stem for path in GOLDEN.glob("*.json") if "vision_config" in golden(path.stem)["config"]
)
#: Token of the tiny vocabulary → token that llama.cpp puts around a picture.
TOKENS = dict(zip("ABCD", [*IDEFICS3_TOKENS.values(), "ĊĊ"], strict=True))


@pytest.mark.needs("encoder")
@pytest.mark.parametrize("name", SEEING)
def test_rows_are_those_of_transformers(name, tmp_path) -> None:
    """Compare float32 results; only GELU is a float16 table in llama.cpp."""
    folder = make_checkpoint(name, tmp_path / "made")
    checkpoint = convert(folder, tmp_path / "text.gguf", "F32", Job())
    convert_tower(checkpoint, tmp_path / "mmproj.gguf", "F32", Job())
    model = copy_model(tmp_path / "model.gguf", tmp_path / "text.gguf", TOKENS)
    side = golden(name)["config"]["vision_config"].get("image_size", 128)
    with loaded(model) as native:
        projector = Projector(str(tmp_path / "mmproj.gguf"), native, 1)
        encoded = projector.encode(Picture(side, side, picture(side).tobytes()))
        projector.free()
    expected = np.load(GOLDEN / "logits.npz")[f"{name} rows"]
    assert encoded
    for row in encoded:  # SmolVLM encodes a tile and the whole picture, which are equal here
        assert row.shape == expected.shape
        assert np.linalg.norm(row - expected) <= 1e-3 * np.linalg.norm(expected)


def test_every_tower_of_the_table_is_made() -> None:
    converted = {golden(name)["config"]["architectures"][0] for name in SEEING}
    assert all(converted & set(tower.checkpoints) for tower in TOWERS)


def test_pulled_checkpoint_has_a_projector_and_keeps_it_quantized(tmp_path) -> None:
    folder = make_checkpoint("smolvlm", tmp_path / "smolvlm", bf16=True)
    about = {"image_mean": [0.4, 0.4, 0.4], "image_std": [0.3] * 3, "size": {"longest_edge": 256}}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    record = pull(str(folder), options=PullOptions(quantize="Q8_0"))
    assert record.projector is not None
    header = gguf.read_header(resolve("smolvlm").files().projector)
    assert header.quantization == "F16"
    assert header.number("clip.vision.preproc_image_size") == 256
    assert header.number("clip.vision.projection_dim") == 32
    assert header.metadata["clip.vision.image_mean"] == pytest.approx([0.4] * 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fullatt_block_indexes": [1, 2]}, "needs evenly spaced fullatt_block_indexes"),
        ({"window_size": 64}, "needs evenly spaced fullatt_block_indexes"),
        ({"spatial_merge_size": 4}, "needs a spatial_merge_size"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"num_hidden_layers": 1}, "layers\\.1.*: llama.cpp has no name .*idefics3"),
        ({"patch_size": 0}, "ZeroDivision|patch_size is 0"),
        ({"num_attention_heads": None}, "cannot be converted: .*: TypeError"),
    ],
)
def test_tower_that_is_refused_leaves_a_model_of_text(changes, message, tmp_path) -> None:
    fields = golden("smolvlm")["config"]["vision_config"].keys()
    name = "smolvlm" if changes.keys() <= fields else "qwen2.5-vl"
    folder = make_checkpoint(name, tmp_path / name)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config["vision_config"] |= changes
    config_file.write_text(json.dumps(config))
    notes: list[PullProgress] = []
    assert pull(str(folder), notes.append).projector is None
    note = next(progress.note for progress in notes if "accepts no pictures" in progress.note)
    assert re.search(message, note), note
