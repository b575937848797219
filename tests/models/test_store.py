"""The store of pulled models: local files, references, settings, removal."""

import re
from pathlib import Path

import msgspec
import pytest
from made_gguf import gguf_bytes, split_keys

from edgeinfer.cli.main import main
from edgeinfer.errors import (
    CatalogError,
    ChecksumError,
    InvalidGgufError,
    ModelBusyError,
    ModelNotPulledError,
    SourceNotFoundError,
    UnknownModelError,
    UsageError,
)
from edgeinfer.host import EngineHost
from edgeinfer.models import names, store
from edgeinfer.models.names import parse_reference
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import resolve
from edgeinfer.models.removal import remove_models
from edgeinfer.models.store import model_lock
from edgeinfer.platform import paths

from .conftest import write_models_toml


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "My Model v2.gguf"
    path.write_bytes(gguf_bytes())
    return path


def test_local_file_is_copied(local: Path) -> None:
    record = pull(str(local))
    assert record.name == "my-model-v2"
    assert record.paths[0].parent == paths.models_dir() / "my-model-v2"
    assert record.paths[0].read_bytes() == local.read_bytes()
    local.unlink()
    assert resolve("my-model-v2").files().paths == (str(record.paths[0]),)


def test_local_file_in_place_is_not_copied_but_compared(local: Path) -> None:
    options = PullOptions(name="mine", in_place=True)
    assert pull(f"file:{local}", options=options).in_place
    assert resolve("mine").files().paths == (str(local),)
    assert not list(paths.models_dir().rglob("*.gguf"))
    assert remove_models(["mine"])[0].left_in_place == (str(local),)
    pull(str(local), options=options)
    local.write_bytes(gguf_bytes(seed=3) + b"\0")
    with pytest.raises(InvalidGgufError, match="was changed"):
        resolve("mine").files()
    local.unlink()
    with pytest.raises(ModelNotPulledError, match="cannot be found"):
        resolve("mine").files()


def test_name_under_which_another_file_is_stored_is_refused(local: Path, tmp_path: Path) -> None:
    other = tmp_path / "b" / local.name
    other.parent.mkdir()
    other.write_bytes(gguf_bytes(seed=2))
    record = pull(str(local))
    for path, name, in_place, difference in (
        (other, None, False, f"from file:{local}; file:{other} has another file"),
        (other, record.name, True, f"from file:{local}; file:{other} has another file"),
        (local, record.name, True, "as a copy"),
    ):
        options = PullOptions(name=name, in_place=in_place)
        with pytest.raises(UsageError, match=f"is here already, {re.escape(difference)}"):
            pull(str(path), options=options)
        assert pull(str(local)) == record
    assert pull(str(other), options=PullOptions(in_place=True, again=True)).paths == (other,)


def test_same_file_of_another_place_is_here_already(local: Path, tmp_path: Path, as_json) -> None:
    copy = tmp_path / "b" / local.name
    copy.parent.mkdir()
    copy.write_bytes(local.read_bytes())
    record = pull(str(local))
    assert pull(str(copy)).more_sources == (f"file:{copy}",)
    assert pull(str(copy)) == resolve(f"file:{copy}").pulled == store.list_pulled()[0]
    assert store.list_pulled()[0].files == record.files
    assert as_json("show", record.name)["sources"] == [f"file:{copy}"]
    with pytest.raises(UsageError, match="as a copy"):
        pull(str(copy), options=PullOptions(in_place=True))


def test_file_in_place_follows_to_another_place_and_can_be_copied(local: Path, tmp_path: Path) -> None:
    moved, options = tmp_path / "moved.gguf", PullOptions(name="mine", in_place=True)
    pull(str(local), options=options)
    moved.write_bytes(local.read_bytes())
    assert pull(str(moved), options=options).paths == (moved,)
    assert pull(f"file:{moved}", options=options).paths == (moved,)
    copied = pull(str(moved), options=PullOptions(name="mine"))
    assert (copied.in_place, copied.paths[0].read_bytes()) == (False, moved.read_bytes())


def test_pulled_name_repeats_its_pull(local: Path) -> None:
    record = pull(str(local), options=PullOptions(name="mine", in_place=True))
    local.touch()
    with pytest.raises(InvalidGgufError, match="was changed") as caught:
        resolve("mine").files()
    assert caught.value.hint == "verify it again: `edgeinfer pull mine`"
    assert pull("mine").source == record.source
    assert resolve("mine").files().paths == (str(local),)
    local.write_bytes(gguf_bytes(seed=3))
    assert pull("MINE:f32").sha256 != record.sha256
    assert store.list_pulled()[0].in_place


def test_model_that_was_quantized_here_names_the_command_that_repeats_it(local: Path) -> None:
    record = msgspec.structs.replace(
        pull(str(local), options=PullOptions(name="mine")), source=f"{store.QUANTIZED_FROM}base"
    )
    store.write_record(record)
    with pytest.raises(UsageError, match="was not pulled, but quantized from base") as caught:
        pull("mine")
    assert caught.value.hint == "quantize it again: `edgeinfer quantize base F32 --name mine`"


def test_import_refuses_bad_files(tmp_path: Path, local: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not one")
    (tmp_path / "qwen3-4b.gguf").write_bytes(local.read_bytes())
    for name, error, said in (
        ("none.gguf", SourceNotFoundError, "there is no file"),
        ("bad.gguf", InvalidGgufError, "begins with"),
        ("qwen3-4b.gguf", UsageError, "the catalogue has a model called"),
    ):
        with pytest.raises(error, match=said):
            pull(str(tmp_path / name))
    assert (tmp_path / "bad.gguf").exists()
    with pytest.raises(UsageError, match="in place"):
        pull("https://example.invalid/x.gguf", options=PullOptions(in_place=True))
    assert store.list_pulled() == []


def test_size_that_is_not_the_catalogues(local: Path) -> None:
    write_models_toml("mine", f"file:{local}", size_bytes=5)
    with pytest.raises(ChecksumError, match="not 5"):
        pull("mine")
    assert store.list_pulled() == []


def test_folder_that_cannot_be_written(local: Path) -> None:
    paths.data_dir().parent.mkdir(parents=True, exist_ok=True)
    paths.data_dir().write_text("a file where the folder should be")
    with pytest.raises(CatalogError, match=r"cannot be stored: .*(File exists|Not a dir)") as caught:
        pull(str(local))
    assert "`export EDGEINFER_HOME=FOLDER`" in (caught.value.hint or "")


def test_split_local_files_and_a_part_under_another_parts_name(tmp_path: Path) -> None:
    parts = [gguf_bytes(split_keys(i, 2), seed=i) for i in (0, 1)]
    for i in (0, 1):
        (tmp_path / f"x-0000{i + 1}-of-00002.gguf").write_bytes(parts[i])
    record = pull(str(tmp_path / "x-00002-of-00002.gguf"))
    assert record.name == "x"
    assert [path.name for path in record.paths] == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
    (tmp_path / "x-00002-of-00002.gguf").write_bytes(parts[0])
    with pytest.raises(InvalidGgufError, match="part 1 of 2 in its header, 2 of 2 in its name"):
        pull(str(tmp_path / "x-00001-of-00002.gguf"), options=PullOptions(again=True))
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(parts[0])
    with pytest.raises(InvalidGgufError, match="1 of 1 in its name"):
        pull(str(alone))


@pytest.mark.parametrize(
    "name",
    [*(f"x-{numbers}.gguf" for numbers in ("00001-of-00000", "00004-of-00003", "1-of-3")), "x.gguf"],
)
def test_names_that_are_no_parts(name: str) -> None:
    assert names.split_names(name) == []


def test_path_is_checked_and_needs_no_store(local: Path, tmp_path: Path) -> None:
    files = resolve(str(local)).files()
    assert files.paths == (str(local),)
    assert files.sha256 == ""
    with pytest.raises(InvalidGgufError):
        resolve(str(tmp_path / "none.gguf")).files()


def test_pulled_models_are_offered_in_place_of_one_that_is_not_pulled(local: Path) -> None:
    name = pull(str(local)).name
    with pytest.raises(ModelNotPulledError) as caught:
        resolve("qwen3-4b").files()
    assert caught.value.hint == (
        f"pull it first: `edgeinfer pull qwen3-4b`, or use one that is here: `edgeinfer chat {name}`"
    )


def test_unknown_references_are_no_model() -> None:
    for name in ("qwen3-4b", "qwen3-4b:Q8_0"):
        with pytest.raises(ModelNotPulledError) as caught:
            resolve(name).files()
        assert caught.value.hint == f"pull it first: `edgeinfer pull {name}`"
    with pytest.raises(UnknownModelError) as unknown:
        resolve("qwen3-4bb").files()
    assert "qwen3-4b" in (unknown.value.hint or "")
    for bad in ("../../etc/passwd:Q8_0", "..", "a b", ""):
        with pytest.raises((UsageError, ModelNotPulledError, InvalidGgufError)):
            resolve(bad).files()


def test_catalogue_says_how_to_talk_to_it(local: Path) -> None:
    sampling = {"temperature": 0.1, "top-k": 3}
    prompts = {"chat_template": "{{ x }}", "system_prompt": "Be brief."}
    write_models_toml("mine", f"file:{local}", stop=["END"], sampling=sampling, **prompts)
    pull("mine")
    files = resolve("mine").files()
    assert (files.chat_template, files.stop, files.system_prompt) == ("{{ x }}", ("END",), "Be brief.")
    assert (files.sampling.temperature, files.sampling.top_k, files.sampling.top_p) == (0.1, 3, 0.95)


def test_name_with_the_quantization_it_has_means_the_same(local: Path) -> None:
    write_models_toml("mine", f"file:{local}")
    pull("mine")
    assert resolve("mine:f32").files().name == "mine"
    with pytest.raises(ModelNotPulledError):
        resolve("mine:Q8_0").files()
    assert remove_models(["mine:F32"])[0].name == "mine"


def test_record_that_cannot_be_read(local: Path) -> None:
    record = pull(str(local), options=PullOptions(name="mine"))
    (record.folder / "model.json").write_text('{"name": 5}')
    assert store.list_pulled() == []
    with pytest.raises(CatalogError, match="cannot be read"):
        resolve("mine").files()
    remove_models(["mine"])
    assert not record.folder.exists()


def test_remove_needs_the_lock(local: Path) -> None:
    pull(str(local), options=PullOptions(name="mine"))
    with model_lock(parse_reference("mine")), pytest.raises(ModelBusyError):
        remove_models(["mine"])
    assert resolve("mine").files().name == "mine"


def test_nothing_is_removed_if_one_of_the_models_is_busy(local: Path, capsys) -> None:
    for name in ("first", "second"):
        pull(str(local), options=PullOptions(name=name))
    with model_lock(parse_reference("second")):
        assert main(["rm", "first", "second", "--yes"], EngineHost()) != 0
    assert "second is being changed by process" in capsys.readouterr().err
    assert resolve("first").files().name == "first"


def test_old_file_under_the_name_goes_with_a_new_pull(tmp_path: Path) -> None:
    for i, name in enumerate(("a.gguf", "b.gguf")):
        (tmp_path / name).write_bytes(gguf_bytes(seed=i))
        record = pull(str(tmp_path / name), options=PullOptions(name="mine", again=True))
    assert sorted(path.name for path in record.folder.iterdir()) == ["b.gguf", "model.json"]
