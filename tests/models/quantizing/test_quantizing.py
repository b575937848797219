"""Quantizing both real models, and its failures."""

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from made_gguf import gguf_bytes
from made_models import make_llama

from edgeinfer.cli.main import main
from edgeinfer.errors import (
    DiskFullError,
    InterruptedByUser,
    InvalidGgufError,
    QuantizeError,
    UsageError,
)
from edgeinfer.models import quantizing, store
from edgeinfer.models.gguf import FILE_TYPES, read_model_header
from edgeinfer.models.progress import Job, PullProgress
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.quantizing import NEEDS_IMATRIX, QuantizeOptions, quantize, score_model
from edgeinfer.models.reference import resolve
from edgeinfer.platform import paths
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.requests import GenerateRequest, Sampling
from edgeinfer.usage.daily_counts import drift_path

from ..conftest import write_models_toml

pytestmark = pytest.mark.model


def generate(model: str) -> str:
    """Return a few greedy tokens of a stored model."""
    engine = load_engine(resolve(model).files(), LoadOptions(n_ctx=256, n_parallel=1))
    sampling = Sampling(temperature=0)
    request = GenerateRequest(prompt="The capital of France is", max_tokens=8, sampling=sampling)
    with contextlib.closing(engine):
        return "".join(getattr(event, "text", "") for event in engine.submit(request))


def test_smollm2_to_q2_k(smol: str) -> None:
    """Quantize rows of 576 values, no multiple of 256, for which llama.cpp uses another type."""
    seen: list[PullProgress] = []
    done = quantize(smol, "q2_k", seen.append, options=QuantizeOptions(score_tokens=160))
    assert (done.model.name, done.source_type, done.quantized_twice) == ("smol:Q2_K", "Q4_1", True)
    assert done.model.size_bytes < done.source_bytes
    assert 10 < done.source_perplexity < done.perplexity < 10_000
    assert done.n_scored_tokens == 160 - 1 - 32
    tensors = [now for now in seen if now.stage == "quantizing" and now.total_bytes]
    n_tensors = len(read_model_header(done.model.paths[0]).tensors)
    assert tensors[-1].done_bytes == tensors[-1].total_bytes == n_tensors
    assert generate("smol:Q2_K")
    assert not list((paths.models_dir() / ".partial").iterdir())


@pytest.mark.needs("time")
def test_gemma_to_a_q8_0_based_type(gemma: str) -> None:
    done = quantize(gemma, "Q8_0", options=QuantizeOptions(perplexity=False))
    assert done.model.quantization == "Q8_0"
    assert done.source_perplexity is None
    both = (done.model.paths[0], resolve(gemma).files().paths[0])
    assert len({read_model_header(path).n_params for path in both}) == 1
    assert "capital" in generate("gemma:Q8_0")


def test_catalogue_model_that_wants_quantizing(smollm2: Path) -> None:
    write_models_toml("small", f"file:{smollm2}", quantize="Q4_0", stop=["END"])
    record = pull("small")
    assert (record.name, record.quantization, record.requantized_from) == ("small", "Q4_0", "Q4_1")
    assert record.paths[0].name == "SmolLM2-135M-Instruct.Q4_1-Q4_0.gguf"
    assert resolve("small").files().stop == ("END",)
    assert not (paths.models_dir() / ".partial/small").exists()


def test_quantize_writes_a_model_and_says_so(smol: str, as_json) -> None:
    body = as_json("quantize", smol, "q4_0", "--name", "small")
    assert (body["name"], body["type"]) == ("small", "Q4_0")
    assert body["perplexity"] > 0
    assert Path(body["path"]).stat().st_size == body["size_bytes"]


@pytest.mark.needs("time")
def test_types_are_compared_by_size_speed_loss_and_score(
    smol: str, as_json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = tmp_path / "eval-basics.jsonl"
    item = {"id": "1", "prompt": "Paris is in", "choices": ["France", "wax"], "answer": 0}
    items.write_text(json.dumps(item))
    shipped_file = paths.shipped_file
    monkeypatch.setattr(
        paths, "shipped_file", lambda name: items if name == items.name else shipped_file(name)
    )
    before = quantize(smol, "q2_k", options=QuantizeOptions(perplexity=False)).model
    body = as_json("quantize", smol, "--compare", "q8_0,q2_k", "--quiet")
    assert resolve(f"{smol}:Q2_K").pulled == before
    assert [model["name"] for model in body["models"]] == [smol, f"{smol}:Q8_0", f"{smol}:Q2_K"]
    source, large, small = body["models"]
    assert large["size_bytes"] > source["size_bytes"] > small["size_bytes"]
    assert source["divergence"] is None
    assert 0 < large["divergence"] < small["divergence"]
    for model in body["models"]:
        assert min(model["prefill_tokens_per_s"], model["decode_tokens_per_s"]) > 0
    assert body["evaluation"]["scores"][0]["value"] == 1
    assert not drift_path().exists(), "its answers are not a person's"
    assert body["evaluation"]["candidates"] == [model["name"] for model in body["models"]]


def test_comparison_of_bad_types_begins_with_an_error(smol: str, as_json) -> None:
    assert "quantization" in as_json("quantize", smol, "--compare", "q8_0,q9", code=2)["message"]
    as_json("quantize", smol, code=2)
    assert [model.name for model in store.list_pulled()] == [smol]


@pytest.mark.parametrize("kind", sorted(NEEDS_IMATRIX))
def test_types_without_importance_matrix_are_refused(gemma: str, kind: str) -> None:
    with pytest.raises(QuantizeError, match="importance matrix"):
        quantize(gemma, kind, options=QuantizeOptions(perplexity=False))
    assert resolve(f"gemma:{kind}").pulled is None


def importance(model: Path, target: Path, *, wrong: bool = False) -> str:
    """Write an importance matrix in which all values are equal."""
    tensors = []
    for t in read_model_header(model).tensors:
        if len(t.shape) == 2 and t.name.startswith("blk."):
            tensors += [(f"{t.name}.in_sum2", t.shape[0]), (f"{t.name}.counts", 24 if wrong else 8)]
    content = bytearray(gguf_bytes(tensors=tensors))
    data = sum(4 * n for _, n in tensors)
    content[-data:] = struct.pack("<f", 1.0) * (data // 4)
    target.write_bytes(content)
    return str(target)


@pytest.mark.needs("time")
def test_importance_matrix_allows_small_types(gemma: str, gemma3: Path, tmp_path: Path) -> None:
    matrix = importance(gemma3, tmp_path / "imatrix.gguf")
    done = quantize(gemma, "Q2_K_S", options=QuantizeOptions(perplexity=False, imatrix=matrix))
    assert "Q2_K" in {tensor.type for tensor in read_model_header(done.model.paths[0]).tensors}


def test_bad_importance_matrix_is_refused(gemma: str, gemma3: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidGgufError, match="not an importance matrix"):
        quantize(gemma, "IQ2_XXS", options=QuantizeOptions(imatrix=str(gemma3)))
    wrong = importance(gemma3, tmp_path / "imatrix.gguf", wrong=True)
    with pytest.raises(InvalidGgufError, match="do not match"):
        quantize(gemma, "IQ2_XXS", options=QuantizeOptions(imatrix=wrong))


def test_every_type_is_offered(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    said = "".join(capsys.readouterr().out.split())
    assert all(name in said for name in FILE_TYPES.values())


def test_quantize_refuses_bad_requests(smol: str, smollm2: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a quantization of"):
        quantize(smol, "Q9")
    with pytest.raises(UsageError, match="would replace smol itself"):
        quantize(smol, "Q4_0", options=QuantizeOptions(name="smol"))
    pull(str(smollm2), options=PullOptions(name="other", in_place=True))
    with pytest.raises(UsageError, match="other is here already, from another source"):
        quantize(smol, "Q4_0", options=QuantizeOptions(name="other"))
    with pytest.raises(UsageError, match="needs a name"):
        quantize(str(smollm2), "Q4_0")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(InvalidGgufError):
        quantize(str(bad), "Q4_0", options=QuantizeOptions(name="x"))


@pytest.mark.parametrize(
    "error", [InterruptedByUser, ZeroDivisionError], ids=["cancelled", "report raises"]
)
def test_quantization_that_is_given_up_leaves_nothing(gemma: str, error) -> None:
    cancel = threading.Event()

    def stop(now: PullProgress) -> None:
        if now.stage == "quantizing" and now.done_bytes:
            assert error is InterruptedByUser or 1 // 0
            cancel.set()

    with pytest.raises(error):
        quantize(gemma, "Q8_0", stop, cancel)
    assert resolve("gemma:Q8_0").pulled is None
    assert not list((paths.models_dir() / ".partial").rglob("*.part"))


def test_full_disk_stops_quantization(smol: str, monkeypatch) -> None:
    monkeypatch.setattr(
        quantizing, "child_command", lambda *arguments: [sys.executable, "-c", _FULL_DISK, *arguments]
    )
    with pytest.raises(DiskFullError, match="is full"):
        quantize(smol, "Q4_0", options=QuantizeOptions(perplexity=False))
    assert resolve("smol:Q4_0").pulled is None


_FULL_DISK = """
import sys, runpy
from edgeinfer.platform import disk
disk.free_bytes = lambda _: 0
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_dead_quantizer_is_an_error(smol: str, monkeypatch) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
    monkeypatch.setattr(quantizing, "child_command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(QuantizeError, match="SIGABRT"):
        quantize(smol, "Q4_0", options=QuantizeOptions(perplexity=False))
    assert resolve("smol:Q4_0").pulled is None


STARTS_A_QUANTIZER = """
import subprocess, sys
command = [sys.executable, "-m", "edgeinfer.runtime.llama.helpers.quantizer", sys.argv[1]]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_quantizer_dies_with_its_parent(gemma3: Path, tmp_path: Path) -> None:
    wish = {"source": str(gemma3), "target": str(tmp_path / "x.gguf"), "ftype": 7}
    command = [sys.executable, "-c", STARTS_A_QUANTIZER, json.dumps(wish)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watched = os.pidfd_open(child)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert select.select([watched], [], [], 60)[0], "the child outlived its parent"
    os.close(watched)


@pytest.mark.parametrize("limit", [0, 60_000])
def test_quantizing_on_a_full_disk_says_so(limit: int, tmp_path: Path, start_cli) -> None:
    """Set a file-size limit, at which our writes and llama.cpp's fail as on a full disk."""
    original = make_llama(tmp_path / "made.gguf")
    before = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    process = start_cli("quantize", str(original), "Q8_0", "--name", "eight", "--json", before=before)
    out, err = process.communicate()
    assert process.returncode == 6, err
    assert json.loads(out)["error"]["code"] == "disk-full"
    assert store.list_pulled() == []


def test_perplexity_is_the_same_twice(smollm2: Path) -> None:
    options = QuantizeOptions(score_tokens=100)
    first, second = (score_model(str(smollm2), Job(), options) for _ in range(2))
    assert first["n_tokens"] == second["n_tokens"]
    assert first["perplexity"] == pytest.approx(second["perplexity"], rel=1e-3)


def test_perplexity_of_a_file_llama_cpp_refuses(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes())
    with pytest.raises(QuantizeError, match="cannot be measured"):
        score_model(str(path), Job(), QuantizeOptions())
