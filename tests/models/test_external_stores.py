"""Models of Ollama, Hugging Face's cache and LM Studio are listed, checked and used, never changed.

Each store is made here in its program's layout, and damaged in the ways that occur.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from found_stores import STORES, AnyStore, HubCache, OllamaStore, StudioFolder, picture, sha
from made_gguf import gguf_bytes, split_keys
from made_models import make_llama
from made_projectors import make_projector

from edgeinfer.cli import endpoint_setup
from edgeinfer.cli.main import main
from edgeinfer.errors import CatalogError, ChecksumError, ModelNotPulledError
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.external_stores import reader, stores
from edgeinfer.models.gguf import read_header
from edgeinfer.models.listing import every_model
from edgeinfer.models.reference import find, resolve
from edgeinfer.platform import disk
from edgeinfer.snapshot_format.storage import model_prefix, safe_name

TINY = gguf_bytes()


@pytest.fixture(autouse=True)
def _no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)


@pytest.fixture(params=STORES, ids=lambda kind: kind.__name__)
def kind(request) -> type[AnyStore]:
    return request.param


@pytest.fixture
def external(kind) -> AnyStore:
    """A store of each program with one model."""
    return kind(TINY)


@pytest.fixture
def list_models(as_json) -> Callable[[], dict]:
    return lambda: as_json("list", "--pulled")


def test_model_of_another_program_is_listed_shown_and_used_in_place(
    external, capsys, list_models, as_json
) -> None:
    before = picture(external.root)
    (row,) = list_models()["models"]
    assert (row["name"], row["store"], row["quantization"]) == (external.name, external.program, "F32")
    assert row["size_bytes"] == len(TINY)
    assert main(["list", "--pulled"]) == 0
    assert f"from {external.program}" in capsys.readouterr().out
    shown = as_json("show", external.name)
    assert shown["files"][0]["path"] == str(external.file)
    assert f"from {external.program}" in shown["notes"][0]
    files = resolve(external.name).files()
    assert (files.name, files.paths) == (external.name, (str(external.file),))
    assert files.sha256 in ("", external.file.name.removeprefix("sha256-"))
    assert find(external.name) is not None
    assert [model.name for model in endpoint_setup.pulled_models()()] == [external.name]
    assert main(["pull", external.name]) == 0
    assert "was already here" in capsys.readouterr().out
    assert main(["rm", external.name, "--yes"]) != 0
    assert f"belongs to {external.program}" in capsys.readouterr().err
    assert resolve(external.name.upper().replace("HF:", "hf:")).files().name == external.name
    assert picture(external.root) == before


def test_digest_is_checked_once_and_again_when_the_file_changed(monkeypatch) -> None:
    external = OllamaStore(TINY)
    read = []

    def count(path: Path, progress: Callable[[int], None]) -> str:
        read.append(path)
        return disk.sha256_of(path, progress)

    monkeypatch.setattr(reader, "sha256_of", count)
    heard = []
    resolve(external.name).files(progress=lambda stage, fraction: heard.append((stage, fraction)))
    resolve(external.name).files()
    assert len(read) == 1
    assert heard[-1][1] == 1.0
    assert "Ollama" in heard[-1][0]
    external.file.write_bytes(gguf_bytes(seed=5))
    with pytest.raises(ChecksumError, match="but its name says"):
        resolve(external.name).files()


# --- broken


def the_file_is_gone(external: AnyStore) -> None:
    if isinstance(external, StudioFolder):  # LM Studio has no digest: nothing else would notice it
        external.file.rename(external.repo / "tiny-F32-00001-of-00002.gguf")
    else:
        external.file.unlink()


def a_truncated_file_under_its_own_digest(external: AnyStore) -> None:
    external.replace(TINY[: len(TINY) - 40])


def the_file_is_empty(external: AnyStore) -> None:
    external.file.write_bytes(b"")


def a_hostile_header(external: AnyStore) -> None:
    external.replace(gguf_bytes({"llama.block_count": 1 << 30}))


def a_pipe_in_its_place(external: AnyStore) -> None:
    external.file.unlink()
    os.mkfifo(external.file)


def a_link_out_of_the_store(external: AnyStore) -> None:
    elsewhere = external.root.parent.parent / "elsewhere.gguf"
    shutil.move(external.file, elsewhere)
    external.file.symlink_to(elsewhere)


def a_link_to_itself(external: AnyStore) -> None:
    external.file.unlink()
    external.file.symlink_to(external.file)


def a_part_of_a_split_model_alone(external: AnyStore) -> None:
    content = gguf_bytes(split_keys(1, 3))
    if isinstance(external, OllamaStore):
        external.replace(content)
        return
    external.link.unlink()
    name = "tiny-F32-00002-of-00003.gguf"
    if isinstance(external, HubCache):
        external.add(name, content)
    else:
        (external.repo / name).write_bytes(content)


BREAKS = {
    the_file_is_gone: "does not exist|is missing",
    a_truncated_file_under_its_own_digest: "cut off|needs .* bytes, but",
    the_file_is_empty: "is empty|bytes; the manifest says",
    a_hostile_header: "claims .* layers|tensors|metadata",
    a_pipe_in_its_place: "a device or socket",
    a_link_out_of_the_store: "outside",
    a_link_to_itself: "can't be read",
    a_part_of_a_split_model_alone: "split|part|alone",
}


@pytest.mark.parametrize(
    ("break_it", "said"), BREAKS.items(), ids=[function.__name__ for function in BREAKS]
)
def test_broken_model_is_listed_with_what_to_do_and_never_written_to(
    external, break_it, said, capsys, list_models
) -> None:
    break_it(external)
    before = picture(external.root)
    (row,) = list_models()["unusable"]
    assert (row["name"], row["store"]) == (external.name, external.program)
    assert row["fix"]
    assert main(["list"]) == 0
    assert f"{external.name} can't be used: {row['problem']}" in capsys.readouterr().out
    with pytest.raises(CatalogError, match=said):
        resolve(external.name).files()
    assert main(["run", external.name, "Hello"]) != 0
    err = capsys.readouterr().err
    assert "error:" in err
    assert "Traceback" not in err
    assert picture(external.root) == before


def test_unreadable_folder_is_reported(external, list_models) -> None:
    folder = external.root / "manifests" if isinstance(external, OllamaStore) else external.root
    folder.chmod(0)
    try:
        listing = list_models()
        if os.geteuid():
            (row,) = listing["unusable"]
            assert row["name"].endswith("*")
            assert "cannot be listed" in row["problem"]
            with pytest.raises(ModelNotPulledError):
                resolve(external.name).files()
        else:
            assert listing["models"]
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("}{ garbage", "is invalid"),
        ('{"layers": 7}', "is invalid"),
        ("[" * 100_000, "is invalid"),
        ('{"layers": []}', "0 GGUF files"),
        (" " * (2 << 20) + "{}", "bytes; at most"),
    ],
    ids=["garbage", "other-types", "deep", "no-model", "huge"],
)
def test_malformed_manifest_is_reported(content: str, said: str, list_models) -> None:
    external = OllamaStore(TINY)
    external.manifest.write_text(content)
    before = picture(external.root)
    assert said in list_models()["unusable"][0]["problem"]
    with pytest.raises(ModelNotPulledError, match=said):
        resolve(external.name).files()
    assert picture(external.root) == before


@pytest.mark.parametrize(
    "digest",
    ["sha256:../../../../etc/passwd", "sha256:" + "A" * 64, "md5:00", "", "sha256:" + "0" * 63],
)
def test_digest_that_is_a_path_is_no_digest(digest: str) -> None:
    external = OllamaStore(TINY)
    external.write_manifest(digest=digest)
    with pytest.raises(ModelNotPulledError, match="not a SHA-256"):
        resolve(external.name).files()


def test_external_file_of_another_digest_is_refused() -> None:
    for external in (OllamaStore(TINY), HubCache(TINY)):
        external.file.write_bytes(gguf_bytes(seed=9))
        before = picture(external.root)
        with pytest.raises(ChecksumError, match="but its name says"):
            resolve(external.name).files()
        assert picture(external.root) == before


def test_absent_stores_are_empty(tmp_path: Path, monkeypatch, list_models) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "nowhere"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    listing = list_models()
    assert (listing["models"], listing["unusable"]) == ([], [])
    with pytest.raises(ModelNotPulledError, match=r"Ollama has no llama3:8b in .*nowhere"):
        resolve("ollama/llama3:8b").files()


# --- names and layouts


def test_ollamas_names_are_as_they_are_typed_there() -> None:
    external = OllamaStore(TINY)
    for path in (
        "registry.ollama.ai/library/big/latest",
        "registry.ollama.ai/someone/tiny/q8_0",
        "hf.co/someone/Tiny-GGUF/Q4_K_M",
    ):
        external.write_manifest(external.root / "manifests" / path)
    names = {model.name for model in stores.search("ollama/")}
    foreign = {"ollama/big", "ollama/someone/tiny:q8_0", "ollama/hf.co/someone/Tiny-GGUF:Q4_K_M"}
    assert names == {"ollama/tiny:1b", *foreign}
    assert resolve("ollama/big:latest").files().name == "ollama/big"
    assert len({safe_name(name) for name in names}) == 4
    assert model_prefix("Ollama/Big:latest") == model_prefix("ollama/big")


def test_stores_are_searched_again_once_the_list_is_stale(external, monkeypatch) -> None:
    searches: list[str] = []
    plain = stores.search

    def count(prefix=""):
        searches.append(prefix)
        return plain(prefix)

    monkeypatch.setattr(stores, "search", count)
    monkeypatch.setattr(endpoint_setup, "FRESH_S", 1e9)
    list_models = endpoint_setup.pulled_models()
    assert [[model.name for model in list_models()] for _ in range(3)] == [[external.name]] * 3
    assert len(searches) == 1
    monkeypatch.setattr(endpoint_setup, "FRESH_S", 1e-9)
    external.file.unlink()
    assert list_models() == []


def test_bare_ollama_name_is_its_model_but_pulls_the_catalogues(as_json, monkeypatch) -> None:
    external = OllamaStore(TINY)
    assert as_json("pull", "tiny:1b")["name"] == "ollama/tiny:1b"
    external.write_manifest(external.root / "manifests/registry.ollama.ai/library/phi-4/latest")
    assert resolve("phi-4").name == "ollama/phi-4"
    monkeypatch.setenv("EDGEINFER_OFFLINE", "1")
    assert as_json("pull", "phi-4", code=4)["code"] == "offline"


def test_ollama_settings_are_used_or_reported(capsys) -> None:
    params = {"stop": ["<|end|>"], "temperature": 0.5, "num_ctx": 4096, "top_k": -3, "seed": 1}
    template = "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>{{ end }}"
    layers = {"system": "Be brief.", "license": "MIT", "messages": "Hi"}
    OllamaStore(TINY, template=template, params=params, **layers)
    files = resolve("ollama/tiny:1b").files()
    assert files.system_prompt == "Be brief."
    assert files.stop == ("<|end|>",)
    assert files.sampling.temperature == 0.5
    assert main(["show", "ollama/tiny:1b"]) == 0
    out = capsys.readouterr().out
    assert "not used: template: Go templates are not supported" in out
    assert "not used: num_ctx 4096" in out
    assert "not used: top_k -3" in out
    assert "not used: messages" in out


def test_ggufs_own_template_is_used_before_ollamas() -> None:
    content = gguf_bytes({"tokenizer.chat_template": "{{ messages[0].content }}"})
    OllamaStore(content, template="[INST] {{ .Prompt }} [/INST]")
    assert resolve("ollama/tiny:1b").files().chat_template is None


def test_adapter_of_ollamas_is_named_with_the_way_to_use_it() -> None:
    OllamaStore(TINY, adapter="lora")
    with pytest.raises(ModelNotPulledError) as caught:
        resolve("ollama/tiny:1b").files()
    assert "--lora" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"]
)
def test_hubs_cache_is_where_its_variables_say(tmp_path: Path, variable: str, monkeypatch) -> None:
    external = HubCache(TINY)
    below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}.get(variable, "")
    (tmp_path / "moved" / below).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(external.root, tmp_path / "moved" / below)
    assert stores.search() == []
    monkeypatch.setenv(variable, str(tmp_path / "moved"))
    assert [model.name for model in stores.usable()] == [external.name]


def test_files_of_one_quantization_and_other_revisions_have_names_of_their_own() -> None:
    external = HubCache(TINY)
    external.add("Q8/tiny-Q8_0.gguf", gguf_bytes(seed=1))
    external.add("other-Q8_0.gguf", gguf_bytes(seed=2))
    external.add("mmproj-tiny-F16.gguf", gguf_bytes(seed=3))
    external.add("tiny-F32.gguf", gguf_bytes(seed=4), revision="b" * 40)
    external.add("same-F16.gguf", TINY, revision="b" * 40)
    assert {model.name for model in stores.search("hf:")} == {
        external.name,
        "hf:someone/Tiny-GGUF/Q8/tiny-Q8_0.gguf",
        "hf:someone/Tiny-GGUF/other-Q8_0.gguf",
        f"hf:someone/Tiny-GGUF@{'b' * 40}:F32",
    }
    assert resolve("someone/Tiny-GGUF:F32").files().name == external.name


def test_a_stores_projector_is_found_and_verified(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model.gguf")
    width = read_header(model).n_embd
    projector = make_projector(tmp_path / "mmproj-tiny-F16.gguf", "gemma3", width).read_bytes()
    other = make_projector(tmp_path / "mmproj-other.gguf", "gemma3", width + 8).read_bytes()
    hub, studio = HubCache(model.read_bytes()), StudioFolder(model.read_bytes())
    link = hub.add("mmproj-tiny-F16.gguf", projector)
    hub.add("mmproj-other.gguf", other)
    (studio.repo / "mmproj-tiny-F16.gguf").write_bytes(projector)
    assert resolve(hub.name).files().projector == str(link.resolve())
    assert resolve(studio.name).files().projector == str(studio.repo / "mmproj-tiny-F16.gguf")
    with open(link.resolve(), "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(ChecksumError):
        resolve(hub.name).files()


def test_ollamas_projector_is_found(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model.gguf")
    projector = make_projector(tmp_path / "mmproj.gguf", "gemma3", read_header(model).n_embd)
    external = OllamaStore(model.read_bytes())
    external.layers.append(("projector", projector.read_bytes()))
    blob = external.blob(projector.read_bytes())
    external.write_manifest()
    assert resolve(external.name).files().projector == str(blob)
    listed = {model.name: model for model, _ in every_model(load_catalog())}
    assert listed[external.name].can_see


@pytest.mark.parametrize("kind", [HubCache, StudioFolder])
def test_split_model_is_one_model(kind) -> None:
    external = kind(*(gguf_bytes(split_keys(n, 2)) for n in (0, 1)))
    assert len(resolve(external.name).files().paths) == 2
    external.link.unlink()
    with pytest.raises(ModelNotPulledError, match=r"the part .* is missing"):
        resolve(external.name).files()


def test_lm_studio_says_where_its_models_are(tmp_path: Path) -> None:
    external = StudioFolder(TINY)
    shutil.move(external.root, tmp_path / "models")
    assert stores.search() == []
    settings = Path.home() / ".lmstudio/settings.json"
    settings.write_text(json.dumps({"downloadsFolder": str(tmp_path / "models")}))
    assert resolve(external.name).files().paths[0].startswith(str(tmp_path))
    for wrong in ("[]", "{", *(json.dumps({"downloadsFolder": folder}) for folder in ("/\0", 3))):
        settings.write_text(wrong)
        assert stores.search() == []


def test_control_characters_are_not_printed(capsys) -> None:
    external = StudioFolder(TINY)
    external.file.rename(external.repo / "tiny\x1b[2J.gguf")
    assert main(["list", "--pulled"]) == 0
    assert "\x1b[2J" not in capsys.readouterr().out


def test_ollama_model_is_pulled_under_a_name(capsys) -> None:
    external = OllamaStore(TINY)
    before = picture(external.root)
    assert main(["pull", external.name, "--name", "mine"]) == 0
    assert picture(external.root) == before
    copy = Path(resolve("mine").files().paths[0])
    assert copy.read_bytes() == TINY
    shutil.rmtree(external.root)
    assert resolve("mine").files().sha256 == sha(TINY)


# --- the first launch


def test_external_models_are_offered_if_none_is_pulled(external, capsys) -> None:
    assert main(["run", "Hello"]) != 0
    assert f"from {external.program}: `edgeinfer chat {external.name}`" in capsys.readouterr().err


def test_every_cell_layout_generates(kind, smollm2: Path, as_json) -> None:
    external = kind(smollm2.read_bytes())
    before = picture(external.root)
    name = next(iter(stores.usable())).name
    assert as_json("run", name, "Hello", "--max-tokens", "4")["usage"]["completion_tokens"] > 0
    assert picture(external.root) == before
