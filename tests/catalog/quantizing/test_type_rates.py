"""What this CPU is fast at is measured once, and types are chosen by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_checkpoints import make_checkpoint
from made_gguf import gguf_bytes, model_entries
from made_models import make_llama

from edgeinfer.catalog import gguf
from edgeinfer.catalog.ggml_types import file_type
from edgeinfer.catalog.progress.job import Job
from edgeinfer.catalog.quantizing.quantizer import QuantizeOptions, run_quantizer
from edgeinfer.catalog.rates import measured, probe
from edgeinfer.catalog.rates.fits import active_parameters, parameters
from edgeinfer.catalog.rates.probe import Rates
from edgeinfer.catalog.rates.speed import CHOICES, advice, choose
from edgeinfer.cli import main

GIB = 1 << 30
#: Weights a second, as a CPU has them that has a kernel for Q4_0 and none for Q4_1.
PREFILL = {
    "Q4_0": 120e9,
    "Q4_1": 30e9,
    "Q4_K": 90e9,
    "Q6_K": 60e9,
    "Q8_0": 60e9,
    "BF16": 40e9,
    "F16": 40e9,
}
DECODE = {
    "Q4_0": 40e9,
    "Q4_1": 30e9,
    "Q4_K": 35e9,
    "Q6_K": 25e9,
    "Q8_0": 20e9,
    "BF16": 10e9,
    "F16": 10e9,
}


@pytest.fixture
def rates() -> Rates:
    """Rates of a made-up CPU, kept as this one's."""
    found = Rates(machine=probe._machine(), prefill=PREFILL, decode=DECODE)
    probe._KEPT.write(found)
    return found


def result(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["result"]


def test_types_are_measured_and_kept(monkeypatch) -> None:
    monkeypatch.setattr(probe, "PROBED", {"Q4_0": "Q4_0", "F16": "F16"})
    monkeypatch.setattr(probe, "_COPIES_BYTES", 1 << 20)
    assert probe.kept() is None
    found = probe.kept_or_measured(Job())
    assert set(found.prefill) == set(found.decode) == {"Q4_0", "F16"}
    assert all(rate > 0 for rate in (*found.prefill.values(), *found.decode.values()))
    assert probe.kept() == found
    monkeypatch.setattr(probe, "_machine", lambda: "another")
    assert probe.kept() is None


@pytest.mark.parametrize(
    ("purpose", "room", "wanted"),
    [
        ("prefill", 64, "Q4_0"),
        ("decode", 64, "Q4_K_M"),  # within the margin of Q4_0, and better
        ("auto", 64, "Q4_0"),
        ("quality", 64, "BF16"),
        ("quality", 13, "Q8_0"),
        ("size", 64, "Q4_0"),
        ("quality", 1, "Q4_0"),
    ],
)
def test_a_type_for_a_purpose(rates, purpose, room, wanted) -> None:
    chosen = choose(purpose, [*CHOICES], rates, 8e9, room * GIB)
    assert chosen.type == wanted
    assert chosen.reason


def test_a_file_that_is_slower_to_read_than_it_need_be(rates, smollm2: Path, capsys) -> None:
    header = gguf.check(smollm2)
    assert "4.0 times slower" in advice("small", [header], rates)
    assert any("quantize" in note for note in result(capsys, "show", str(smollm2))["notes"])


def test_auto_chooses_and_says_what_it_costs(rates, tmp_path, capsys) -> None:
    made = make_llama(tmp_path / "made.gguf")
    own = tmp_path / "own.txt"
    own.write_text("Somebody's own words, again and again. " * 20)
    assert main(["pull", str(made), "--name", "made", "--quiet"]) == 0
    capsys.readouterr()
    found = result(capsys, "quantize", "made", "auto", "--for", "size", "--text", str(own), "--quiet")
    assert found["type"] == "Q4_0"
    assert "smallest" in found["reason"]
    assert found["divergence"] > 0
    assert 0 <= found["same_top"] <= 1
    assert found["perplexity"] > 1
    assert found["source_perplexity"] > 1


def test_doctor_tells_the_rates(rates, capsys) -> None:
    main(["doctor", "--json"])
    checks = json.loads(capsys.readouterr().out)["result"]["checks"]
    (found,) = (check["found"] for check in checks if check["name"] == "types")
    assert "Q4_0 120/40.0, " in found


def test_models_are_ranked_by_what_this_machine_can_hold(rates, capsys) -> None:
    measured.remember("qwen3-4b", 7.5, 100)
    measured.remember("qwen3-8b", 3.5, 2)
    models = result(capsys, "list", "--fits", "qwen3")["models"]
    by_name = {model["name"]: model["fit"] for model in models}
    assert by_name["qwen3-4b"]["decode"] == 7.5
    assert by_name["qwen3-4b"]["basis"] == "measured"
    assert by_name["qwen3-8b"]["basis"] == "expected"
    fitting = [model["fit"]["fits"] for model in models]
    assert fitting == sorted(fitting, reverse=True)
    assert parameters("1.7B") == 1.7e9
    assert active_parameters("qwen3-30b-a3b", 30e9) == 3e9


def test_of_what_is_published_the_type_for_a_purpose(rates, server, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    body = gguf_bytes(model_entries())
    server.repos["some/Tiny-1B-GGUF"] = {
        f"tiny-{kind}.gguf": body for kind in ("Q4_0", "Q4_K_M", "Q8_0")
    }
    pulled = result(
        capsys, "pull", "some/Tiny-1B-GGUF", "--for", "quality", "--name", "tiny", "--quiet"
    )
    assert pulled["source"] == "hf:some/Tiny-1B-GGUF:Q8_0"


def test_what_comes_in_full_precision_is_stored_in_the_type_for_a_purpose(
    rates, server, tmp_path, capsys
) -> None:
    """From a web server, and as a checkpoint; what is quantized already stays as it is."""
    kind = file_type("F16")
    assert kind is not None
    run_quantizer(
        make_llama(tmp_path / "made.gguf"), tmp_path / "f16.gguf", kind, Job(), QuantizeOptions()
    )
    server.files["/tiny.gguf"] = (tmp_path / "f16.gguf").read_bytes()
    pulled = result(
        capsys, "pull", f"{server.url}/tiny.gguf", "--for", "size", "--name", "tiny", "--quiet"
    )
    assert pulled["quantization"] == "Q4_0"
    folder = make_checkpoint("llama3", tmp_path / "checkpoint")
    made = result(capsys, "pull", str(folder), "--for", "size", "--name", "made", "--quiet")
    assert made["quantization"] == "Q4_0"
    again = result(capsys, "pull", made["files"][0], "--for", "quality", "--name", "kept", "--quiet")
    assert again["quantization"] == "Q4_0"
