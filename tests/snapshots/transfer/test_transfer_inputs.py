"""Exports contain adapters; inputs that another machine could not have are refused."""

import os
from pathlib import Path

import pytest
from made_models import make_adapter
from msgspec.structs import replace

from edgeinfer.config.load_options import LORA
from edgeinfer.errors import SnapshotError
from edgeinfer.models import adapters, pull
from edgeinfer.models.catalog import user_path
from edgeinfer.platform import paths
from edgeinfer.snapshots.transfer import exporting, image

from ..conftest import MODEL, Endpoint, manifest
from .test_transfer import all_refused, description_of, flip_file, sign_again

#: Options with which the exported snapshot was built.
OPTIONS = ("--lora", "red:0.5", "--lora", "blue")


@pytest.fixture(scope="module")
def exporter(warm):
    """A user with two adapters of the small model."""
    folder = warm.data / "data/adapters"
    folder.mkdir(mode=0o700, exist_ok=True)
    for seed, path in enumerate((folder / "red.gguf", warm.home / "blue.gguf")):
        make_adapter(path, seed, strength=0.5)
        os.chown(path, warm.uid, warm.gid)
    os.chown(folder, warm.uid, warm.gid)
    return warm


@pytest.fixture(scope="module")
def export_folder(exporter) -> Path:
    """Export that user's snapshot to a folder."""
    folder = exporter.home / "with adapters"
    options = ("--lora", "red:0.5", "--lora", str(exporter.home / "blue.gguf"))
    name = exporter.run("warm", MODEL, *options, "--json").result["snapshot"]["name"]
    exporter.run("snapshots", "export", name, str(folder), "--quiet").check()
    return folder


@pytest.fixture(scope="module")
def signer(exporter, export_folder) -> str:
    return exporter.run("snapshots", "trust", "--json").result["own"]


def place_of(person, name: str) -> Path:
    return person.data / f"data/adapters/{name}.gguf"


@pytest.mark.needs("time")
@pytest.mark.criu
def test_adapters_are_exported_with_the_model(exporter, export_folder, signer, abroad):
    kinds = [layer.media_type for layer in image.layers(description_of(export_folder))]
    assert kinds == [image.MEDIA_TYPES[kind] for kind in ("model", "adapter", "adapter")]

    abroad.run("snapshots", "trust", signer).check()
    abroad.run("snapshots", "import", str(export_folder), "--quiet").check()
    assert place_of(abroad, "red").read_bytes() == place_of(exporter, "red").read_bytes()

    blue = str(exporter.home / "blue.gguf")
    original = exporter.ask(*(blue if word == "blue" else word for word in OPTIONS))
    imported = abroad.ask(*OPTIONS)
    assert (imported.start["how"], original.start["how"]) == ("resumed", "resumed")
    assert imported.result["text"] == original.result["text"] != exporter.ask().result["text"]
    with Endpoint(abroad, MODEL, *OPTIONS, "--resume=always") as endpoint:
        usual = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
        asked = [usual | {"lora": lora} for lora in ([], None)]
        plain, tuned = (endpoint.post(body)["choices"][0]["text"] for body in asked)
        # adapters are applied per request: the process has opened this machine's files
        assert plain != tuned
    assert abroad.ask().start["how"] == "cold"  # a launch without --lora gets no adapter

    make_adapter(place_of(abroad, "red"), 7)
    assert "red.gguf was changed" in abroad.ask(*OPTIONS).err
    again = abroad.run("snapshots", "import", str(export_folder), "--json").error
    assert again["code"] == "snapshot-stale"
    assert "the exported adapter red has SHA-256" in again["message"]


# --- what was altered on the way


def last_adapter(**changes):
    """Return a tampering that signs a description with a changed last adapter."""

    def change(d):
        *files, last = d.files
        return replace(d, files=(*files, replace(last, **changes)))

    return lambda folder, key: sign_again(folder, key, change)


def other_adapter_here(folder, key):
    sign_again(folder, key)
    make_adapter(adapters.adapter_path("red"), 5, strength=0.5)


def wished_otherwise(folder, key):
    """Give the model adapters in the local models.toml; the snapshot has none."""
    lora = 'lora = [{ name = "red" }]'
    user_path().parent.mkdir(parents=True, exist_ok=True)
    user_path().write_text(f'[models.{MODEL}]\ntitle = "S"\nsources = ["file:/x.gguf"]\n{lora}\n')

    def without_adapters(d):
        return replace(d, requested={}, files=tuple(d.model_files))

    sign_again(folder, key, without_adapters)


TAMPERINGS = {
    "a bit of an adapter": (flip_file, "snapshot-corrupt", "has another digest"),
    "another adapter here": (other_adapter_here, "snapshot-stale", "the exported adapter red has SHA-256"),
    "a digest that leads out": (
        last_adapter(sha256="../" * 5 + "etc/hosts"), "snapshot-corrupt", "not a snapshot of edgeinfer"
    ),
    "a name that leads out": (
        last_adapter(name="../x"), "snapshot-corrupt", "this image is not a snapshot of edgeinfer"
    ),
    "other wishes here": (wished_otherwise, "snapshot-stale", "sets `lora` for small"),
}  # fmt: skip


@pytest.mark.criu
def test_altered_adapters_are_refused_by_name_and_nothing_is_published(export_folder, signer):
    paths.private_dir(paths.adapters_dir())
    for name, tampering in TAMPERINGS.items():
        all_refused({name: tampering}, export_folder, signer)
        adapters.adapter_path("red").unlink(missing_ok=True)
        assert not list(paths.adapters_dir().iterdir()), name


# --- what does not travel


def test_unnamed_inputs_are_not_exported(smollm2, tmp_path):
    pull.pull(str(smollm2), options=pull.PullOptions(name=MODEL, in_place=True))
    shouting = make_adapter(tmp_path / "RED.gguf", 1)
    for fields, message in (
        (
            {"requested": {"lora": shouting}},
            "the file name of the adapter RED.gguf is not a valid name",
        ),
        ({"files": {shouting: ""}}, "RED.gguf, which only this machine's models.toml names"),
    ):
        with pytest.raises(SnapshotError, match=message):
            exporting.describe(manifest(model=MODEL, **fields), "")
    (tmp_path / "RED.gguf").rename(tmp_path / "red.gguf")
    lora = str(LORA.parse(f"{tmp_path}/red.gguf:0.5"))
    with_adapter = manifest(model=MODEL, requested={"lora": lora})
    described, paths_by_digest = exporting.describe(with_adapter, "")
    assert [(adapter.name, adapter.scale) for adapter in described.adapters] == [("red", 0.5)]
    assert len(paths_by_digest) == 2
