"""Converted checkpoints give transformers' logits and tokenizers' token ids, or are refused."""

import gzip
import json
import os
import struct
from functools import partial

import gguf as gguf_package
import numpy as np
import pytest
from made_checkpoints import (
    GOLDEN,
    KEPT,
    golden,
    make_checkpoint,
    safetensors,
    tiny_byte_level,
    token_ids,
    weights,
)
from nasty_strings import digest, nasty_strings
from raw_logits import loaded, read

from edgeinfer.errors import (
    ConversionError,
    InvalidGgufError,
    ModelNotPulledError,
    SourceNotFoundError,
    UsageError,
)
from edgeinfer.models import gguf, store
from edgeinfer.models.converting.convert import convert
from edgeinfer.models.converting.families import FAMILIES
from edgeinfer.models.progress import Job
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import resolve
from edgeinfer.runtime.llama.vocab import Vocab

from ..conftest import HASTY

MADE = sorted(path.stem for path in GOLDEN.glob("*.json"))
TOKENIZERS = json.loads(gzip.decompress((GOLDEN / "tokenizers.json.gz").read_bytes()))
REPO = "someone/Tiny-3.2-1B"


@pytest.fixture(scope="module")
def logits():
    return np.load(GOLDEN / "logits.npz")


@pytest.mark.parametrize("name", MADE)
def test_logits_are_those_of_transformers(name, logits, tmp_path) -> None:
    """Compare float32 results; only Gemma's GELU is a float16 table in llama.cpp."""
    folder = make_checkpoint(name, tmp_path / "made", shards=3)
    convert(folder, tmp_path / "made.gguf", "F32", Job())
    computed = read(tmp_path / "made.gguf", token_ids())[list(KEPT)]
    expected = logits[name]
    assert np.linalg.norm(computed - expected) <= 1e-3 * np.linalg.norm(expected)


def test_every_family_of_the_table_is_made() -> None:
    converted = {golden(name)["config"]["architectures"][0] for name in MADE}
    for family in FAMILIES:
        assert converted & set(family.checkpoints), family.title
    assert converted <= {word for family in FAMILIES for word in family.checkpoints}


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_token_ids_are_those_of_tokenizers(name, tmp_path) -> None:
    recorded = TOKENIZERS[name]
    folder = make_checkpoint("llama2", tmp_path / "made")
    config = json.loads((folder / "config.json").read_text())
    tokens = recorded["tokenizer"]["model"]["vocab"]
    config["vocab_size"] = n_vocab = len(tokens) + len(recorded["tokenizer"]["added_tokens"])
    (folder / "config.json").write_text(json.dumps(config))
    shapes = golden("llama2")["tensors"]
    for tensor_name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[tensor_name] = [n_vocab, shapes[tensor_name][1]]
    tensors = {tensor_name: weights(tensor_name, tuple(shape)) for tensor_name, shape in shapes.items()}
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    (folder / "tokenizer.json").write_text(json.dumps(recorded["tokenizer"]))
    convert(folder, tmp_path / "made.gguf", "F16", Job())
    with loaded(tmp_path / "made.gguf", vocab_only=True) as model:
        vocab = Vocab(model)
        texts = nasty_strings()
        token_ids = [digest(vocab.tokenize(text, parse_special=True)) for text in texts]
    pairs = zip(texts, token_ids, recorded["ids"], strict=True)
    assert [text for text, ids, recorded_ids in pairs if ids != recorded_ids] == []


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_values_are_kept_in_each_type(kind, tmp_path) -> None:
    """Compare a tensor that is not reordered with the values that were written."""
    folder = make_checkpoint("qwen2", tmp_path / "made", bf16=True)
    convert(folder, tmp_path / "made.gguf", kind, Job())
    reader = gguf_package.GGUFReader(tmp_path / "made.gguf")
    tensor = next(candidate for candidate in reader.tensors if candidate.name == "blk.1.ffn_up.weight")
    assert tensor.tensor_type.name == kind
    values = gguf_package.quants.dequantize(tensor.data, tensor.tensor_type)
    expected = weights("model.layers.1.mlp.up_proj.weight", (48, 32))
    step = np.abs(expected).max() / 127 if kind == "Q8_0" else 0
    assert np.abs(values - expected).max() <= step
    assert gguf.read_model_header(tmp_path / "made.gguf").quantization == kind


def test_repository_is_pulled_and_stored_in_the_type_that_is_named(
    server, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    folder = make_checkpoint("llama3", tmp_path / "made", shards=2, bf16=True)
    server.repos[REPO] = {path.name: path.read_bytes() for path in folder.iterdir()}
    options = PullOptions(retry_policy=HASTY)
    record = pull(f"{REPO}:Q8_0", options=options)
    assert (record.name, record.quantization) == ("someone.tiny-3.2-1b-q8_0", "Q8_0")
    assert resolve(f"{REPO}:Q8_0").files().paths == tuple(map(str, record.paths))
    # the default, Q4_K_M, needs llama.cpp's quantizer
    assert pull(REPO, options=options).requantized_from == "BF16"
    asked = len(server.seen)
    assert pull(f"{REPO}:Q8_0", options=options) == record
    assert len(server.seen) == asked


def test_repository_that_lacks_a_shard_says_which(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    folder = make_checkpoint("llama3", tmp_path / "made", shards=3)
    files = [path for path in folder.iterdir() if "00002-of" not in path.name]
    server.repos[REPO] = {path.name: path.read_bytes() for path in files}
    with pytest.raises(SourceNotFoundError, match="model-00002-of-00003"):
        pull(REPO, options=PullOptions(retry_policy=HASTY))
    assert store.list_pulled() == []


def test_folder_is_pulled_under_its_name_and_left_as_it_is(tmp_path) -> None:
    folder = make_checkpoint("llama3", tmp_path / "My-Model-1.5", bf16=True)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(ModelNotPulledError, match="is a folder"):
        resolve(str(folder)).files()
    record = pull(str(folder))
    assert (record.name, record.quantization, record.in_place) == ("my-model-1.5", "BF16", False)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


SHARD = "model-00001-of-00002.safetensors"
DEEP = b'{"a":' + b"[" * 100_000


def with_shard(folder, header: bytes, length: int = 0) -> None:
    """Write a shard with this header; `length` is the stated length, if not the real one."""
    (folder / SHARD).write_bytes(struct.pack("<Q", length or len(header)) + header + bytes(64))


def with_a_shard_cut_off(folder) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 100)


def config_with(folder, **changes) -> None:
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | changes))


def with_a_tensor_too_many(folder) -> None:
    extra = {"model.layers.0.self_attn.novelty.weight": weights("x", (4, 4))}
    for weights_file in folder.glob("*.safetensors"):
        weights_file.unlink()
    recorded = golden("llama3")["tensors"]
    tensors = {name: weights(name, tuple(shape)) for name, shape in recorded.items()}
    (folder / "model.safetensors").write_bytes(safetensors(tensors | extra))


def with_pickles(folder) -> None:
    for weights_file in folder.glob("*.safetensors*"):
        weights_file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")


def with_other_splits(folder) -> None:
    tokenizer = tiny_byte_level()
    pattern = {"Regex": "x+"}
    tokenizer["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def with_tensors_that_overlap(folder) -> None:
    first = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    with_shard(folder, json.dumps({"a": first, "b": first | {"data_offsets": [4, 12]}}).encode())


def with_torn_merges(folder) -> None:
    tokenizer = tiny_byte_level()
    tokenizer["model"]["merges"] = [["a"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def with_no_vocabulary(folder) -> None:
    tokenizer = tiny_byte_level()
    del tokenizer["model"]["vocab"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def with_a_pipe_for_config(folder) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


REFUSED = {
    "config.json is not a valid JSON object": lambda folder: (folder / "config.json").write_bytes(DEEP),
    "tokenizer.json is not a valid JSON": lambda folder: (folder / "tokenizer.json").write_bytes(DEEP),
    "not a valid safetensors file: its header": partial(with_shard, header=DEEP),
    "the header is": partial(with_shard, header=b"{}", length=1 << 40),
    "a and b overlap": with_tensors_that_overlap,
    "bytes past the end of the file": with_a_shard_cut_off,
    "1 of 2 shards are missing: model-00001": lambda folder: (folder / SHARD).unlink(),
    "cannot be converted: .*: ValueError": with_torn_merges,
    "cannot be converted: its files lack 'vocab'": with_no_vocabulary,
    "is not a checkpoint: it has no config.json": with_a_pipe_for_config,
    "novelty.weight: llama.cpp has no name for this tensor": with_a_tensor_too_many,
    "can run any program": with_pickles,
    "does not support the pre-tokenizer of tokenizer.json: 'x\\+'": with_other_splits,
}
CONFIGS = {
    "float too large": {"rope_parameters": {"rope_theta": 1e308}},
    "head_dim is -1": {"head_dim": -1},
    "num_key_value_heads is 0": {"num_key_value_heads": 0},
    f"vocab_size must be between 1 and .*, not {1 << 40}": {"vocab_size": 1 << 40},
    "says 129 tokens, but the embedding has 128 rows": {"vocab_size": 129},
    "says 64 tokens, but the embedding": {"vocab_size": 64},
    "architecture NovelForCausalLM, which is not supported; supported: LlamaForCausalLM": {
        "architectures": ["NovelForCausalLM"]
    },
    "quantized with gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "the activation is 'relu'": {"hidden_act": "relu"},
    "rope scaling 'novel'": {"rope_parameters": {"rope_type": "novel"}},
    "num_hidden_layers must be between": {"num_hidden_layers": None},
}
REFUSED |= {message: partial(config_with, **changes) for message, changes in CONFIGS.items()}


@pytest.mark.parametrize("message", REFUSED)
def test_converter_refuses_and_leaves_nothing(message, tmp_path) -> None:
    folder = make_checkpoint("llama3", tmp_path / "made", shards=2)
    REFUSED[message](folder)
    with pytest.raises((ConversionError, SourceNotFoundError), match=message):
        pull(str(folder))
    assert store.list_pulled() == []
    assert not list((tmp_path / "made").glob("*.part"))


@pytest.mark.parametrize(
    ("magic", "message"), [(b"tjgg", "older than GGUF"), (b"PK\x03\x04", "PyTorch pickle file")]
)
def test_other_programs_files_are_called_what_they_are(magic, message, tmp_path) -> None:
    old_file = tmp_path / "old.bin"
    old_file.write_bytes(magic + bytes(100))
    with pytest.raises(InvalidGgufError, match=message) as caught:
        pull(f"file:{old_file}")
    assert caught.value.hint is not None
    assert "edgeinfer pull" in caught.value.hint


def test_file_of_weights_alone_names_its_folder(tmp_path) -> None:
    folder = make_checkpoint("llama3", tmp_path / "made")
    with pytest.raises(UsageError, match="only weights") as caught:
        pull(str(folder / "model.safetensors"))
    assert str(folder) in caught.value.hint
