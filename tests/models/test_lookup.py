"""One rule for names of models on the command line and in every API; suggestions for misspelt ones."""

import os
import random
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from found_stores import HubCache, OllamaStore
from made_gguf import gguf_bytes

from edgeinfer.cli.endpoint_setup import pulled_models
from edgeinfer.cli.main import main
from edgeinfer.errors import CatalogError, EdgeInferError, UnknownModelError, UsageError
from edgeinfer.models import reference
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.lookup import did_you_mean, find, similar_names
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import find_unless_misspelt, resolve
from edgeinfer.models.store import list_pulled
from edgeinfer.server.model_pool import ModelPool

CATALOG = tuple(load_catalog())
#: Words with which a prompt of one word may begin, of each shape that a name may have.
PROMPTS = (
    "hi code Hello tiny Привет 你好 12:30 yes: ... -5 covid-19 2024-11-29 3.14 192.168.0.1 H2O C3PO "
    "mp3 B2B k8s utf-8 sha-256 room-101 catch-22 7-zip R2-D2 e-mail x-ray self-made well-known Hallo."
).split()


@dataclass
class Named:
    name: str
    other_names: tuple[str, ...]


@pytest.fixture
def pool(tmp_path: Path) -> ModelPool:
    """An endpoint's models: `main`, a pulled one of each kind, Ollama's and Hugging Face's."""
    for index, name in enumerate(("mine", "mine:Q8_0", "phi-4")):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(gguf_bytes(seed=index))
        pull(str(path), options=PullOptions(name=name, in_place=True))
    OllamaStore(gguf_bytes(seed=7))
    HubCache(gguf_bytes(seed=8))
    loads = {"load": lambda *_: pytest.fail("loaded"), "list_pulled": pulled_models()}
    return ModelPool(**loads, default="main", keep_alive_s=0)


def _spellings(name: str) -> set[str]:
    tagged = {name, f"{name}:latest"} if ":" not in name.removeprefix("hf:") else {name}
    bare = {re.sub("^(ollama/|hf:)", prefix, each) for each in tagged for prefix in ("", r"\1")}
    hub = {each.replace("hf:", "hf.co/") for each in bare}
    return {text for each in bare | hub for text in (each, each.upper(), each.lower(), each.title())}


def test_a_name_means_the_same_on_the_command_line_and_in_every_api(pool: ModelPool) -> None:
    names = ["mine", "mine:Q8_0", "phi-4", OllamaStore.name, HubCache.name]
    expected = {spelled: name for name in names for spelled in _spellings(name)}
    expected |= {"mine:F32": "mine", "MINE:f32": "mine", "someone/tiny-gguf:f32": HubCache.name}
    expected |= {str(model.source): model.name for model in list_pulled()}
    for text, name in expected.items():
        assert (resolve(text).name, pool.resolve(text)) == (name, name), text


@pytest.mark.parametrize(
    "text", ["mine:Q4_0", "min", "qwen3-4b", "qwen3:4b", "tiny", "lmstudio/x", "a/b:Q8_0"]
)
def test_a_name_that_means_nothing_means_it_everywhere(pool: ModelPool, text: str) -> None:
    with pytest.raises(CatalogError):
        resolve(text).files()
    with pytest.raises(UnknownModelError):
        pool.resolve(text)


def _misspellings(name: str) -> set[str]:
    """Return `name` as users of Ollama and others write it; all have its letters and digits."""
    head, _, size = name.rpartition("-")
    tagged = {name.replace("-", ":", count) for count in range(1, 3)} | {f"{head}:{size}"}
    plain = tagged | {name.replace("-", ""), name.replace("-", "_"), name.replace(".", "-")}
    return plain | {text.upper() for text in plain}


@pytest.mark.parametrize("name", CATALOG)
def test_other_spellings_of_a_name_are_suggested_first(name: str) -> None:
    for text in _misspellings(name):
        assert similar_names(text, CATALOG)[:1] == [name], text
        for typed, quant in ((":q8_0", "Q8_0"), ("-Q4KM", "Q4_K_M"), ("-q4-k-m", "Q4_K_M")):
            assert similar_names(text + typed, CATALOG)[:1] == [f"{name}:{quant}"], text + typed


@pytest.mark.parametrize("name", CATALOG)
def test_a_name_with_one_mistake_is_suggested(name: str) -> None:
    draw = random.Random(name)
    for _ in range(20):
        index = draw.randrange(len(name))
        wrong = draw.choice(["", "x", name[index] * 2])
        text = name[:index] + wrong + name[index + 1 :]
        near = similar_names(text, CATALOG)
        assert name in near or similar_names(near[0], CATALOG) == near, text  # or it is another name


def test_models_of_this_machine_are_suggested_with_their_store(pool: ModelPool) -> None:
    tiny = OllamaStore.name
    for text, near in (("tiny-1b", tiny), ("minee", "mine"), ("tiny1b:q8_0", tiny)):
        with pytest.raises(EdgeInferError) as caught:
            resolve(text).files()
        assert near in (caught.value.hint or "")
        with pytest.raises(UnknownModelError) as refused:
            pool.resolve(text)
        assert near in (refused.value.hint or "")


@pytest.mark.parametrize("verb", ["pull", "show", "rm --yes", "chat", "warm", "serve --port 0"])
def test_ollamas_way_of_writing_a_size_is_corrected_by_every_verb(capsys, verb: str) -> None:
    name, *options = verb.split()
    assert main([name, "qwen3:4b", *options]) == 3
    near = "qwen3-4b" if name == "pull" else "qwen3-4b (not pulled)"
    error = f"error: no model is called 'qwen3:4b'\n\nhint: did you mean {near}? `edgeinfer list`"
    assert capsys.readouterr().err.startswith(error)


@pytest.mark.parametrize("word", PROMPTS)
def test_a_prompt_of_one_word_is_not_taken_for_a_misspelt_name(word: str) -> None:
    assert find_unless_misspelt(word, "main") is None


def test_names_that_begin_as_typed_come_first_and_a_letter_is_near_none() -> None:
    first, *others = similar_names("smollm2", CATALOG)
    assert (first, first in others) == ("smollm2-135m-instruct", False)
    assert similar_names("x", CATALOG) == []


def test_pulled_models_are_suggested_before_others(pool: ModelPool, tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(gguf_bytes(seed=9))
    pull(str(tmp_path / "small.gguf"), options=PullOptions(name="smollm2-1.7b-instruct", in_place=True))
    question = "did you mean smollm2-1.7b-instruct or smollm2-135m-instruct (not pulled)"
    as_prompt = partial(find_unless_misspelt, default_model="main")
    for refuse in (lambda name: resolve(name).files(), pool.resolve, as_prompt):
        with pytest.raises(UnknownModelError) as caught:
            refuse("smollm2")
        assert (caught.value.hint or "").startswith(question)
    of_types = did_you_mean(["mine:F32", "mine:Q4_0"], list_pulled())
    assert of_types == "did you mean mine:F32 or mine:Q4_0 (not pulled)? "


def test_what_cannot_be_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="not a model name"):
        resolve("a b")


def test_letter_case_matters_in_addresses_of_files():
    roots = ("https://h/", "http://h/", "file:/", "s3://b/", "gs://b/", "oci://h/n:", "wheel:h==1/")
    for root in roots:
        models = [Named("a1", (f"{root}A.gguf",)), Named("a2", (f"{root}a.gguf",))]
        for model in models:
            assert find(model.other_names[0], models) is model
            assert find(model.other_names[0].swapcase(), [model]) is None
        assert find(f"{root}a.gguf", models[:1]) is None
        assert find(f"{root}A.gguf", models[1:]) is None


def test_catalogues_name_is_no_model_of_another_user(monkeypatch):
    external = OllamaStore(gguf_bytes(seed=7))
    external.write_manifest(external.root / "manifests/registry.ollama.ai/library/phi-4/latest")
    assert resolve("phi-4").kind == "external"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(reference, "_ROOT", 54321)
    assert resolve("phi-4").kind == "absent"
    assert resolve("ollama/phi-4").kind == "external"
