"""GGUF headers of real files are read as the gguf package reads them."""

from pathlib import Path

import pytest

from edgeinfer.errors import InvalidGgufError
from edgeinfer.models.gguf import FILE_TYPES, TENSOR_TYPES, ArrayInfo, read_header, read_model_header


def test_smollm2_header(smollm2: Path) -> None:
    header = read_model_header(smollm2)
    facts = header.architecture, header.quantization, header.n_layer, header.n_ctx_train
    assert facts == ("llama", "Q4_1", 30, 8192)
    assert (header.n_params, header.n_vocab, header.n_embd) == (134_515_008, 49_152, 576)
    assert header.file_bytes == smollm2.stat().st_size
    assert header.split == (0, 1)
    assert "assistant" in header.chat_template


def test_gemma_header_steps_over_a_large_vocabulary(gemma3: Path) -> None:
    header = read_model_header(gemma3)
    assert header.metadata["tokenizer.ggml.tokens"] == ArrayInfo(8, 262_144)
    assert header.n_vocab == 262_144
    assert header.number("gemma3.attention.sliding_window") == 512
    assert header.metadata["general.tags"] == ("gemma3", "gemma", "google", "text-generation")


def test_tensors_agree_with_the_gguf_package(smollm2: Path) -> None:
    from gguf import GGUFReader

    header = read_header(smollm2)
    reader = GGUFReader(smollm2)
    assert [(t.name, t.type, t.shape, t.offset, t.size_bytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, tuple(map(int, t.shape)), int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    ]


def test_tensor_types_agree_with_the_gguf_package() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for kind in GGMLQuantizationType:
        tensor_type = TENSOR_TYPES[kind.value]
        assert tensor_type.name == kind.name
        # the package counts two 32-bit floats in a block of Q8_1; ggml's block_q8_1 has two halves
        if kind.name != "Q8_1":
            assert (tensor_type.block, tensor_type.bytes) == GGML_QUANT_SIZES[kind]


def test_file_types_agree_with_llama_cpp() -> None:
    import llama_cpp

    prefix = "LLAMA_FTYPE_MOSTLY_"
    constants = {name: value for name, value in vars(llama_cpp).items() if name.startswith(prefix)}
    llama_types = {value: name.removeprefix(prefix) for name, value in constants.items()}
    assert {0: "F32", **llama_types} == FILE_TYPES


def test_file_that_is_not_there_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidGgufError, match="No such file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(InvalidGgufError, match="cannot be read"):
        read_header(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(InvalidGgufError, match="is empty"):
        read_header(tmp_path / "empty.gguf")
