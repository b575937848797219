"""Choosing a snapshot: launcher and app decide alike, whatever was typed or configured."""

import errno
import json
import os
import random
import select
import shutil
import socket
from collections import Counter
from itertools import chain

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine
from made_gguf import gguf_bytes
from made_models import make_llama
from msgspec.structs import replace

from edgeinfer import typed_options
from edgeinfer.cli import endpoint_setup
from edgeinfer.cli.main import main
from edgeinfer.cli.parser import build_parser
from edgeinfer.config.config_file import Config, load_config
from edgeinfer.config.load_options import LOAD_OPTIONS, snapshot_options
from edgeinfer.errors import (
    RestoreError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMissingError,
    SnapshotStaleError,
)
from edgeinfer.host import EngineHost, ProcessStart
from edgeinfer.launcher import launch, selection, supervise
from edgeinfer.launcher.apps import Apps
from edgeinfer.launcher.argv import CommandLine
from edgeinfer.models import store
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import ModelRef, resolve
from edgeinfer.platform import paths
from edgeinfer.runtime.options import Chosen, LoadOptions, ModelFiles
from edgeinfer.snapshot_format import storage
from edgeinfer.snapshots import registry
from edgeinfer.snapshots.inputs import SnapshotInputs, describe
from edgeinfer.snapshots.restore.app_host import AppHost
from edgeinfer.snapshots.restore.loaded_model import LoadedModel, chosen_values

from .conftest import folder_of, publish

#: Values that a build chooses for options that were left out.
CHOSEN = {"n_ctx": "4096", "n_parallel": "4", "kv_type": "f16", "lora": "none", "draft": "none"}


def launch_choice(argv):
    return selection.launch_choice(CommandLine(argv))


def spellings(folder) -> dict[str, dict[str, list[str]]]:
    """Return option → value ("" if it is left out) → how a user may write that."""
    adapter, alias, draft = (f"{folder}/{name}.gguf" for name in ("red", "alias", "draft"))
    return {
        "n_ctx": {"": ["0"], "512": ["512", "0512"], "4096": ["4096"]},
        "n_parallel": {"": ["0"], "2": ["2"], "4": ["4", "04"]},
        "kv_type": {"": ["auto"], "f16": ["f16"], "q8_0": ["q8_0"]},
        "special_tokens_in_content": {"": ["off"], "on": ["on"]},
        "lora": {
            "": [],
            "none": ["none"],
            adapter: [adapter, "./x/../red.gguf", "red.gguf:1.0", "linked/red.gguf"],
            alias: [alias, "alias.gguf", "linked/alias.gguf"],
        },
        "draft": {
            "": [],
            "none": ["none", "NONE"],
            "small": ["small", "Small"],
            "small:q8_0": ["small:Q8_0", "SMALL:q8_0"],
            "hf:a/tiny:q8_0": ["hf:A/Tiny:Q8_0", "HF:a/tiny:q8_0"],
            draft: [draft, "draft.gguf", "./draft.gguf", "x/../draft.gguf", "link.gguf"],
        },
    }


def write_launch(generator, spelled, values) -> tuple[list[str], str]:
    """Return arguments and a config.toml that ask for these values."""
    arguments, config = [], "[load]\n"
    for option in (option for option in LOAD_OPTIONS if option.field in spelled):
        of_value, value = spelled[option.field], values[option.field]
        text = generator.choice([*of_value[value], *([] if value else [""])])
        is_typed = option.flag and (not option.key or generator.random() < 0.6)
        if is_typed and text:
            arguments += generator.choice([[option.flag, text], [f"{option.flag}={text}"]])
            text = generator.choice(["", *chain(*of_value.values())])  # the typed one overrides it
        if text and option.key:
            number = option.high and text.isdecimal()
            config += f"{option.key} = {int(text) if number else json.dumps(text)}\n"
    return arguments, config


def load(options: LoadOptions, model: str = "m", files: ModelFiles | None = None) -> LoadedModel:
    """Return a loaded model whose build was given these options, and chose `CHOSEN` for the others."""
    files = files or ModelFiles(name=model, paths=())
    values = CHOSEN | snapshot_options(options)
    info = replace(
        DEFAULT_INFO,
        n_ctx=int(values["n_ctx"]),
        n_parallel=int(values["n_parallel"]),
        choices={name: Chosen(values[name], "") for name in ("kv_type", "draft")},
        lora=options.adapters(files),
    )
    engine, inputs = FakeEngine(info=info), SnapshotInputs(model=model, files=files, options=options)
    return LoadedModel(engine, describe(engine, inputs))


def test_a_snapshot_serves_exactly_the_launches_with_its_options(root, tmp_path, monkeypatch, cases):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGEINFER_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "x").mkdir()
    for name in ("red.gguf", "draft.gguf"):
        (tmp_path / name).touch()
    for link, target in (("link.gguf", "draft.gguf"), ("alias.gguf", "red.gguf"), ("linked", ".")):
        (tmp_path / link).symlink_to(target)
    spelled, parser = spellings(tmp_path), build_parser()
    generator, outcomes = random.Random(29), Counter()

    def resolve_options(values) -> tuple[dict[str, str], LoadOptions]:
        """Return the options that the launcher and the app find in a launch."""
        arguments, config = write_launch(generator, spelled, values)
        (tmp_path / "config.toml").write_text(config)
        argv = ["run", "m", "hello", *arguments]
        app_options = typed_options.load_options(parser.parse_args(argv), load_config().load)
        launcher_options = launch_choice(argv).options
        assert launcher_options == snapshot_options(app_options), (argv, config)
        return launcher_options, app_options

    for _ in range(cases(300)):
        built = {field: generator.choice(["", *of_value]) for field, of_value in spelled.items()}
        changed = generator.sample([*spelled], generator.choice([0, 0, 1, 2]))
        launched = built | {field: generator.choice([*spelled[field]]) for field in changed}
        fits = all(
            value == built[field] or (not built[field] and value == CHOSEN.get(field))
            for field, value in launched.items()
        )
        requested, build_options = resolve_options(built)
        loaded = load(build_options)
        name, actual = storage.snapshot_name("m", requested), chosen_values(loaded.engine)
        folder = publish(root, name, requested=requested, actual=actual, size=1)
        options, launch_options = resolve_options(launched)
        try:
            is_resumed = bool(selection.find("m", options))
        except SnapshotMissingError:
            is_resumed = False
        assert is_resumed == loaded.serves("m", launch_options) == fits, (built, launched)
        assert not loaded.serves("other", build_options)
        loaded.engine.close()
        assert not loaded.serves("m", build_options)
        outcomes[fits] += 1
        shutil.rmtree(folder)
    assert min(outcomes[True], outcomes[False]) > 10


def test_the_model_is_the_first_word_that_has_a_snapshot(root):
    publish(root, "m")
    assert launch_choice(["run", "--seed", "4", "m", "hello"]).model == "m"
    assert launch_choice(["run", "hello"]).model == paths.DEFAULT_MODEL
    assert launch_choice(["run", "--lora", "m", "hello"]).model == paths.DEFAULT_MODEL


@pytest.mark.parametrize(
    "typed",
    [
        ["run", "m", "--max-tokens", "4", "hello"],
        ["run", "--system", "other", "m", "hello"],
        ["run", "m", "other"],
        ["chat", "--plain", "m"],
        ["batch", "--model", "m", "other", "out"],
        ["run", "--raw", "--", "m", "--snapshot"],
    ],
)
def test_launcher_and_argparse_agree_on_the_model_wherever_options_stand(root, typed):
    publish(root, "m")
    publish(root, "other")
    parsed = build_parser().parse_args(typed)
    assert launch_choice(typed).model == "m"
    assert getattr(parsed, "model_or_prompt", None) or parsed.model == "m"
    assert launch_choice(typed).snapshot == (parsed.snapshot or "")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("serve other --port 8080", "other"),
        ("chat other", "other"),
        ("run other hello", "other"),
        ("run hello", paths.DEFAULT_MODEL),
        ("run hello --seed 4", paths.DEFAULT_MODEL),
        ("serve --port 8080", paths.DEFAULT_MODEL),
        ("chat", paths.DEFAULT_MODEL),
        ("batch in.jsonl out.jsonl", paths.DEFAULT_MODEL),
    ],
)
def test_a_cold_start_names_the_model_that_was_typed(root, typed, said):
    with pytest.raises(SnapshotMissingError, match=f"^{said} has no snapshot yet"):
        launch_choice(typed.split()).find()


@pytest.mark.parametrize(
    ("made_of", "typed"),
    [
        ("ollama/llama3.2", "Ollama/Llama3.2:latest"),
        ("hf:Someone/Tiny-GGUF:Q8_0", "someone/tiny-gguf:q8_0"),
        ("qwen3-4b:Q8_0", "Qwen3-4B:q8_0"),
        ("ollama/llama3.2", "llama3.2"),
        ("qwen3-4b", "Qwen3-4B:latest"),
        ("hf:Someone/Tiny-GGUF:Q8_0", "hf.co/someone/tiny-gguf:q8_0"),
        ("hf:Someone/Tiny-GGUF:Q4_K_M", "hf.co/someone/tiny-gguf"),
    ],
)
def test_a_model_is_known_however_it_is_spelled(root, made_of, typed):
    publish(root, storage.snapshot_name(made_of, {}), model=made_of)
    assert launch_choice(["run", typed, "hello"]).find()[1].model == made_of


@pytest.mark.parametrize(
    ("source", "typed"),
    [
        ("https://host/Tiny.gguf", "https://host/Tiny.gguf"),
        ("hf:Someone/Tiny-GGUF:Q4_K_M", "Someone/Tiny-GGUF"),
        ("hf:Someone/Tiny-GGUF:Q8_0", "huggingface.co/someone/tiny-gguf:q8_0"),
        ("hf:Someone/Tiny-GGUF@v1/x.gguf", "hf:Someone/Tiny-GGUF@v1/x.gguf"),
        ("s3://bucket/Tiny.gguf", "s3://bucket/Tiny.gguf"),
        ("oci://host:5000/someone/tiny:latest", "oci://host:5000/someone/tiny"),
        ("oci://host/someone/tiny:Tiny.gguf", "oci://host/someone/tiny:Tiny.gguf"),
        ("file:/folder/tiny.gguf", "file:/folder/tiny.gguf"),
    ],
)
@pytest.mark.parametrize("name", ["mine", "mine:Q8_0"])
def test_a_pulled_model_is_resumed_by_its_source(root, tmp_path, name, source, typed):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(gguf_bytes())
    record = pull(str(file), options=PullOptions(name=name))
    store.write_record(replace(record, source=source))
    publish(root, storage.snapshot_name(name, {}), model=name)
    publish(root, "other", model="other")
    choice = launch_choice(["run", typed, "hello"])
    assert resolve(typed).name == choice.find()[1].model == name
    assert choice.model.lower() == name.lower()
    other_case = {typed.replace("iny.gguf", "INY.gguf")} - {typed}
    for text in (f"{typed}x", str(file), f"hello/{typed}", *other_case):
        assert launch_choice(["run", text, "hello"]).model == text


def test_a_given_name_is_enough_everywhere(root):
    folder = publish(root, "m,work", 5, requested={"n_ctx": "512"})
    assert registry.find("work") == folder
    assert launch_choice(["run", "hello", "--snapshot", "work"]).find()[0] == str(folder)
    publish(root, "other,work", model="other")
    with pytest.raises(SnapshotMissingError, match="work is the name of several") as caught:
        registry.find("work")
    assert caught.value.hint == "name one of: m,work, other,work"
    assert selection.find_named("work", "m", {})[1].name == "m,work"
    with pytest.raises(SnapshotMissingError, match="several snapshots are called work") as caught:
        selection.find_named("work", "third", {})
    assert caught.value.hint == "name one of: m,work, other,work"
    with pytest.raises(SnapshotMissingError, match=r"made with --ctx 512, not --ctx 99$") as caught:
        selection.find_named("work", "m", {"n_ctx": "99"})
    command = "edgeinfer warm m --ctx 99 --name NAME"
    assert caught.value.hint == f"leave --ctx out, or build another: `{command}`"


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_hint_for_a_damaged_named_snapshot_builds_it_under_its_name(root, spoil):
    spoil(publish(root, "m,work", requested={"n_ctx": "512"}) / storage.MEMORY)
    with pytest.raises((SnapshotCorruptError, SnapshotMissingError)) as caught:
        selection.find_named("work", "m", {})
    assert caught.value.hint == "build it again: `edgeinfer warm m --ctx 512 --name work`"


def test_hint_for_an_unknown_snapshot_name_lists_the_names_or_builds_one(root):
    with pytest.raises(SnapshotMissingError, match="no snapshot called home") as caught:
        selection.find_named("home", "m", {})
    assert caught.value.hint == "`edgeinfer warm MODEL --name NAME` builds one"
    publish(root, "m,work")
    with pytest.raises(SnapshotMissingError) as caught:
        selection.find_named("home", "m", {})
    assert caught.value.hint == "name one of: m,work"


@pytest.mark.parametrize("requested", [{}, {"n_ctx": "512"}])
def test_resume_always_hints_at_the_command_that_builds_the_missing_snapshot(root, requested):
    publish(root, "m", 1, requested=requested, keys={"edgeinfer": "0.1"})
    line = CommandLine(["run", "m", "hello", "--ctx", "512", "--resume=always"])
    with pytest.raises(SnapshotError) as caught:
        Apps(line, select.poll(), 0, 0).start_verb()
    assert type(caught.value) is (SnapshotStaleError if requested else SnapshotMissingError)
    assert caught.value.hint == "`edgeinfer warm m --ctx 512` builds it now"


def test_resume_always_does_not_start_cold_if_no_process_can_be_started(root, monkeypatch):
    def refuse(*_):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    publish(root, "m")
    monkeypatch.setattr(supervise, "resume", refuse)
    line = CommandLine(["run", "m", "hello", "--resume=always"])
    with pytest.raises(RestoreError, match=r"could not be resumed: .*temporarily unavailable"):
        Apps(line, select.poll(), 0, 0).start_verb()


def test_default_model_is_the_configured_one(root, tmp_path):
    assert Config().default_model == launch_choice(["run", "hi"]).model == paths.DEFAULT_MODEL
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.toml").write_text('default-model = "d"')
    assert launch_choice(["run", "hi"]).model == "d"
    assert launch_choice(["run", "hi", "--resume", "always"]).resume == "always"


def test_an_exact_match_is_preferred_then_the_newest(root):
    publish(root, "m,ctx=512", 1, requested={"n_ctx": "512"})
    for generation in (2, 3):
        publish(root, "m", generation, actual={"n_ctx": "512"})
    assert selection.find("m", {})[0].endswith(folder_of("m", 3))
    assert selection.find("m", {"n_ctx": "512"})[1].name == "m,ctx=512"
    with pytest.raises(SnapshotMissingError, match=r"with --ctx 99$"):
        selection.find("m", {"n_ctx": "99"})


def test_refused_snapshot_is_replaced_by_the_next_that_fits_or_reported(root):
    launched = {"n_ctx": "512"}
    fitting = publish(root, "m", 1, actual=launched)
    spoiled = publish(root, "m,ctx=512", 2, requested=launched)
    (spoiled / storage.MEMORY).write_bytes(b"")
    assert selection.find("m", launched)[1].name == "m"
    (fitting / storage.MEMORY).write_bytes(b"")
    with pytest.raises(SnapshotCorruptError, match=r"memory\.img"):
        selection.find("m", launched)


@pytest.mark.parametrize("typed", ["tiny:F32", "Tiny:f32"])
def test_a_quantization_is_resumed_from_its_own_snapshot_only(root, tmp_path, typed):
    file = make_llama(tmp_path / "x.gguf", 64)
    assert main(["pull", str(file), "--name", "tiny", "--in-place", "--quiet"]) == 0
    keys = {storage.QUANTIZATION: resolve("tiny").files().quantization}
    publish(root, "tiny", model="tiny", keys=keys)
    assert launch_choice(["run", typed, "hello"]).find()[1].model == resolve(typed).name
    with pytest.raises(SnapshotMissingError, match=r"^tiny:Q8_0 has no snapshot yet"):
        launch_choice(["run", "tiny:Q8_0", "hello"]).find()
    # a model that was pulled under the whole name is another one
    record = paths.models_dir() / "tiny/model.json"
    (paths.models_dir() / "tiny+f32").mkdir()
    text = record.read_text().replace('"name": "tiny"', '"name": "tiny:F32"')
    (paths.models_dir() / "tiny+f32/model.json").write_text(text)
    assert resolve(typed).name == "tiny:F32"
    with pytest.raises(SnapshotMissingError, match=f"^{typed} has no snapshot yet"):
        launch_choice(["run", typed, "hello"]).find()


def test_endpoint_verifies_a_file_once_and_names_it_alike_resumed_and_cold(tmp_path, monkeypatch):
    path = str(make_llama(tmp_path / "tiny.gguf", 64))
    options = build_parser().parse_args(["serve", path])
    verify, verified = ModelRef._own_files, []

    def count(ref, progress):
        verified.append(ref.name)
        return verify(ref, progress)

    monkeypatch.setattr(ModelRef, "_own_files", count)
    monkeypatch.setattr(EngineHost, "_load", lambda *_: FakeEngine())
    loader = endpoint_setup._default_loader(options, EngineHost(config=Config()))
    loader(loader.name, lambda *_: None)
    assert verified == [path]
    loaded = load(LoadOptions(), path, resolve(path).files())
    app_end, launcher_end = socket.socketpair()
    with app_end, launcher_end:
        resumed = AppHost(ProcessStart(how="resumed"), app_end, loaded)
        assert endpoint_setup._default_loader(options, resumed).name == loader.name == "tiny"


def test_model_without_a_snapshot_is_not_resumed_from_that_of_the_default_model(root):
    publish(root, paths.DEFAULT_MODEL, model=paths.DEFAULT_MODEL)
    assert launch_choice(["run", "hello"]).find()[1].model == paths.DEFAULT_MODEL
    with pytest.raises(SnapshotMissingError, match=r"^other has no snapshot yet"):
        launch_choice(["serve", "other"]).find()


def test_adapters_of_the_catalogue_are_no_choice_once_they_are_loaded(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"x")
    files = ModelFiles(name="fake", paths=(), lora=str(tmp_path / "a.gguf"))
    inputs = SnapshotInputs(model="fake", files=files, options=LoadOptions())
    (adapter,) = LoadOptions().adapters(files)
    loaded = (replace(adapter, sha256="ab" * 32),)
    running = describe(FakeEngine(), inputs).with_adapters(loaded)
    assert (running.options.lora, running.name) == ("", inputs.name)
    assert running.depends_on == inputs.depends_on


@pytest.mark.parametrize("text", [b"load = 5", b"\xff", b"[" * 3000, b'serve = "x"\n[load]\nctx = 512'])
def test_a_launch_leaves_a_wrong_configuration_to_the_app(tmp_path, monkeypatch, text):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.toml").write_bytes(text)
    assert launch_choice(["run", "hi"]).model
    (listener,) = launch.listen(CommandLine(["serve", "--port", "0"]))
    os.close(listener)


def test_a_path_has_one_name_for_launcher_and_catalogue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/below")
    file = make_llama(tmp_path / "real/x.gguf", 64)
    (tmp_path / "moved.gguf").symlink_to(file)
    for typed in ("real/x.gguf", "./real//x.gguf", "real/below/../x.gguf", "link/../x.gguf", str(file)):
        assert resolve(typed).name == str(file)
        assert storage.safe_name(typed) == storage.safe_name(str(file))
    assert resolve("./moved.gguf").name == str(tmp_path / "moved.gguf")
