"""Importance matrices made here, on the real small model and on a mixture of experts."""

from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
from made_families import make_family

from edgeinfer.errors import QuantizeError, UsageError
from edgeinfer.models import quantizing
from edgeinfer.models.gguf import check
from edgeinfer.models.progress import Job
from edgeinfer.models.quantizing import QuantizeOptions, quantize
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def made(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An importance matrix of the small model for the text that comes with the program."""
    place = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    assert quantizing.make_imatrix(smollm2, quantizing.calibration_text(), place, Job()) > 2000
    return place


def test_matrix_that_is_made_has_what_goes_into_every_matrix(made: Path, smollm2: Path) -> None:
    """The sums of the first layer are those of its inputs, computed here from the file."""
    found = {name: (at, n) for name, at, n, _, _ in quantizing.imatrix_spans(made)}
    matrices = {
        t.name: t for t in check(smollm2).tensors if t.name.startswith("blk.") and len(t.shape) == 2
    }
    assert {name: n for name, (_, n) in found.items()} == {n: t.shape[0] for n, t in matrices.items()}

    reader = {t.name: t for t in gguf.GGUFReader(smollm2).tensors}
    vocab = load_engine(
        ModelFiles(name="x", paths=(str(smollm2),)), LoadOptions(n_ctx=64, n_parallel=1)
    )
    tokens = vocab.tokenize(quantizing.calibration_text().read_text())
    vocab.close()
    table = gguf.dequantize(reader["token_embd.weight"].data, reader["token_embd.weight"].tensor_type)
    rows = table[tokens].astype(np.float64)
    rows /= np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5)
    wanted = ((rows * reader["blk.0.attn_norm.weight"].data) ** 2).sum(axis=0)
    at, n = found["blk.0.attn_q.weight"]
    sums = np.fromfile(made, np.float32, n, offset=at)
    assert np.linalg.norm(sums - wanted) < 1e-3 * np.linalg.norm(wanted)


def test_small_type_loses_less_with_a_matrix_made_here(smol: str) -> None:
    """Beside the same without, on a text that neither was made with."""
    options = QuantizeOptions(name="plain", score_tokens=300)
    plain = quantize(smol, "Q2_K", options=options)
    weighed = quantize(
        smol, "Q2_K", options=msgspec.structs.replace(options, name="weighed", imatrix="make")
    )
    assert plain.divergence is not None
    assert weighed.divergence is not None
    assert weighed.divergence < 0.9 * plain.divergence


def test_experts_are_weighed_one_by_one(tmp_path: Path) -> None:
    model = make_family(tmp_path / "moe.gguf", "Mixtral (a mixture of experts)")
    text = tmp_path / "text.txt"
    text.write_text(quantizing.calibration_text().read_text()[:600])
    n_tokens = quantizing.make_imatrix(model, text, tmp_path / "imatrix.gguf", Job())
    found = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "imatrix.gguf").tensors}
    n_used = check(model).number("llama.expert_used_count")
    for name in ("ffn_up_exps", "ffn_down_exps"):
        counts = found[f"blk.0.{name}.weight.counts"]
        assert counts.size > 1
        assert counts.sum() == n_tokens * n_used
        assert found[f"blk.0.{name}.weight.in_sum2"].shape[0] == counts.size
    # what goes into an expert's first matrix is what goes into every other's and into the router
    up = found["blk.0.ffn_up_exps.weight.in_sum2"].sum(axis=0)
    router = found["blk.0.ffn_gate_inp.weight.in_sum2"][0]
    assert np.allclose(up, n_used * router, rtol=1e-3)


def test_calibration_text_is_checked(smol: str, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    options = QuantizeOptions(imatrix="make", text=str(short))
    with pytest.raises(QuantizeError, match="fewer than 256"):
        quantize(smol, "IQ2_XXS", options=options)
    with pytest.raises(UsageError, match="no text"):
        quantize(smol, "IQ2_XXS", options=msgspec.structs.replace(options, text=str(short) + "x"))
