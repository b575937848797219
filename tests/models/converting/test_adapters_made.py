"""PEFT adapters are converted to GGUF; applied, they change the model as PEFT would."""

import os

import numpy as np
import pytest
from made_checkpoints import golden, make_checkpoint, safetensors, token_ids, weights
from made_peft import ALPHA, RANK, make_peft, pairs
from raw_logits import read

from edgeinfer.cli.parser import build_parser
from edgeinfer.cli.verbs import pull as pull_verb
from edgeinfer.config.load_options import LORA, adapters_of
from edgeinfer.errors import CatalogError, ConfigError, ConversionError, UsageError
from edgeinfer.models import adapters
from edgeinfer.models.adapters import pull_adapter
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import resolve
from edgeinfer.models.removal import remove_models
from edgeinfer.platform import paths
from edgeinfer.runtime.options import Adapter, LoadOptions

from ..conftest import HASTY, write_models_toml

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BASES = {"llama3": (*ATTENTION, "gate_proj", "up_proj", "down_proj"), "qwen3": ATTENTION}


def pulled_base(name, tmp_path) -> None:
    checkpoint = make_checkpoint(name, tmp_path / "base")
    pull(str(checkpoint), options=PullOptions(name="base", quantize="F32"))


def with_adapter_added(name, folder, factor):
    """Save a checkpoint whose weights have factor * B @ A added."""
    make_checkpoint(name, folder)
    shapes = golden(name)["tensors"]
    tensors = {tensor: weights(tensor, tuple(shape)) for tensor, shape in shapes.items()}
    for module, (a, b) in pairs(name, BASES[name]).items():
        added = factor * (b.astype(np.float64) @ a.astype(np.float64))
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"] + added).astype(np.float32)
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def gap(converted, reference) -> float:
    return float(np.linalg.norm(converted - reference) / np.linalg.norm(reference))


@pytest.mark.parametrize("name", BASES)
def test_applied_adapter_equals_changed_weights(name, tmp_path) -> None:
    pulled_base(name, tmp_path)
    pull_adapter(str(make_peft(tmp_path / "red", name, BASES[name])), "base")
    checkpoint = with_adapter_added(name, tmp_path / "added", 0.5 * ALPHA / RANK)
    added = pull(str(checkpoint), options=PullOptions(quantize="F32"))
    base = resolve("base").pulled.paths[0]
    applied = read(base, token_ids(), adapters={adapters.adapter_path("red"): 0.5})
    changed = read(added.paths[0], token_ids())
    assert gap(applied, changed) < 1e-5
    assert gap(read(base, token_ids()), changed) > 0.01


def test_pulled_adapter_is_listed_named_and_removed(tmp_path) -> None:
    pulled_base("qwen3", tmp_path)
    pull_adapter(str(make_peft(tmp_path / "Red-1.0", "qwen3", ATTENTION)), "base")
    (adapter,) = adapters.list_adapters()
    assert (adapter.name, adapter.base, adapter.n_tensors) == ("red-1.0", "base", 8)
    path = LORA.parse("red-1.0:0.5").removesuffix(":0.5")
    assert path == adapter.path
    assert adapters_of(f"{path}:0.5") == {"red-1.0": (path, 0.5)}
    remove_models(["red-1.0"])
    assert adapters.list_adapters() == []


def test_another_adapter_is_replaced_only_if_it_is_pulled_again(tmp_path) -> None:
    pulled_base("qwen3", tmp_path)
    folder = str(make_peft(tmp_path / "red", "qwen3", ATTENTION))
    first = pull_adapter(folder, "base")
    assert pull_adapter(folder, "base") == first  # the same adapter
    make_peft(tmp_path / "red", "qwen3", ATTENTION[:1])
    with pytest.raises(UsageError, match="called red is here already"):
        pull_adapter(folder, "base")
    assert adapters.list_adapters() == [first]
    assert not list((paths.models_dir() / ".partial").iterdir())
    assert pull_adapter(folder, "base", options=PullOptions(again=True)).n_tensors == 2


@pytest.mark.parametrize("more", [{}, {"config.json": b"{}", "tokenizer.json": b"{}"}])
def test_repository_with_an_adapter_is_pulled(more, server, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    pulled_base("qwen3", tmp_path)
    folder = make_peft(tmp_path / "red", "qwen3", ATTENTION)
    server.repos["someone/Red"] = {path.name: path.read_bytes() for path in folder.iterdir()} | more
    options = PullOptions(retry_policy=HASTY)
    with pytest.raises(UsageError, match="holds a LoRA adapter"):
        pull("someone/Red", options=options)
    assert pull_adapter("someone/Red", "base", options=options).name == "someone.red"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "is a DoRA"),
        ({"peft_type": "IA3"}, "adapter type IA3"),
        ({"bias": "all"}, "trains biases"),
        ({"modules_to_save": ["lm_head"]}, r"replaces whole modules \(lm_head\)"),
        ({"r": 0}, "of rank 0"),
        ({"lora_alpha": 1e308}, "an alpha of 1e"),
        ({"lora_alpha": 3e30}, r"an alpha of 3e\+30"),
        ({"alpha_pattern": {"q_proj": 1e9}}, "an alpha of 1e"),
        ({"lora_alpha": "much"}, "cannot be converted: .*: ValueError"),
    ],
)
def test_unsupported_adapter_is_refused_by_name(config, message, tmp_path) -> None:
    pulled_base("qwen3", tmp_path)
    folder = make_peft(tmp_path / "red", "qwen3", ATTENTION, **config)
    with pytest.raises(ConversionError, match=message) as refused:
        pull_adapter(str(folder), "base")
    assert refused.value.hint or "ValueError" in message, "the class's hint is about models"
    assert adapters.list_adapters() == []


def test_sha256_of_an_adapter_is_refused_because_it_has_several_files(tmp_path) -> None:
    pulled_base("qwen3", tmp_path)
    folder = make_peft(tmp_path / "red", "qwen3", ATTENTION)
    typed = ["pull", str(folder), "--base", "base", "--sha256", "0" * 64]
    with pytest.raises(UsageError, match="--sha256 is for one file"):
        pull_verb.run(build_parser("pull").parse_args(typed), None)
    assert adapters.list_adapters() == []


def test_a_damaged_adapter_is_left_out_of_the_list(tmp_path, caplog) -> None:
    pulled_base("qwen3", tmp_path)
    pull_adapter(str(make_peft(tmp_path / "red", "qwen3", ATTENTION)), "base")
    whole = adapters.adapter_path("red").read_bytes()
    adapters.adapter_path("cut").write_bytes(whole[:100])
    adapters.adapter_path("empty").write_bytes(b"")
    assert [adapter.name for adapter in adapters.list_adapters()] == ["red"]
    assert "skipped the adapter cut" in caplog.text
    assert "skipped the adapter empty" in caplog.text


def test_folder_of_adapters_that_cannot_be_made_is_an_error_with_a_way_out(tmp_path) -> None:
    pulled_base("qwen3", tmp_path)
    paths.adapters_dir().write_text("a file where the folder should be")
    with pytest.raises(CatalogError, match="File exists") as caught:
        pull_adapter(str(make_peft(tmp_path / "red", "qwen3", ATTENTION)), "base")
    assert "`export EDGEINFER_HOME=FOLDER`" in (caught.value.hint or "")


def test_adapter_of_another_model_says_where_it_does_not_fit(tmp_path) -> None:
    pulled_base("qwen3", tmp_path)
    with pytest.raises(ConversionError, match="attn_q") as refused:
        pull_adapter(str(make_peft(tmp_path / "red", "llama3", ("q_proj",))), "base")
    assert "--base MODEL" in (refused.value.hint or "")


def test_adapters_of_models_toml_can_be_left_out(tmp_path) -> None:
    pulled_base("qwen3", tmp_path)
    lora = [{"name": "red", "scale": 0.5}, {"path": "~/blue.gguf"}]
    write_models_toml("base", "file:/x.gguf", lora=lora)
    files = resolve("base").files()
    blue = os.path.expanduser("~/blue.gguf")
    red = Adapter("red", str(adapters.adapter_path("red")), 0.5)
    assert LoadOptions().adapters(files) == (red, Adapter("blue", blue))
    assert LoadOptions(lora="none").adapters(files) == ()
    assert [adapter.name for adapter in LoadOptions(lora="/a/green.gguf").adapters(files)] == ["green"]


def test_adapter_in_models_toml_has_one_place() -> None:
    write_models_toml("x", "a/b", lora=[{"scale": 2.0}])
    with pytest.raises(ConfigError, match="a path or a name"):
        load_catalog()
