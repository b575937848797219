"""Exported snapshots are imported with another home and program path, or refused."""

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from stores_here import docker_registry

from edgeinfer.errors import EdgeInferError, SnapshotCorruptError, SnapshotUntrustedError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.platform import paths
from edgeinfer.platform.ed25519 import SigningKey, fingerprint, is_signed_by
from edgeinfer.snapshots.transfer import image, importing, signing
from edgeinfer.snapshots.transfer.layout import Layout

from ...conftest import BUILD_CACHE
from ..conftest import MODEL


@pytest.fixture(scope="module")
def export_folder(warm) -> Path:
    """Export the small model's snapshot to a folder."""
    folder = warm.home / "exported"
    warm.run("snapshots", "export", MODEL, str(folder), "--quiet").check()
    return folder


@pytest.fixture(scope="module")
def signer(warm, export_folder) -> str:
    return warm.run("snapshots", "trust", "--json").result["own"]


@pytest.mark.criu
def test_imported_snapshot_computes_the_same_in_another_home(warm, export_folder, signer, abroad):
    refused = abroad.run("snapshots", "import", str(export_folder), "--json")
    assert refused.error["code"] == "snapshot-untrusted"
    assert signer in refused.error["message"]

    abroad.run("snapshots", "trust", signer).check()
    abroad.run("snapshots", "import", str(export_folder), "--quiet").check()
    imported, original = abroad.ask(), warm.ask()
    assert imported.start["how"] == "resumed"
    assert imported.result["text"] == original.result["text"]


@pytest.mark.criu
def test_an_export_that_was_stopped_is_repeated(warm, export_folder):
    folder = warm.home / "stopped"
    shutil.copytree(export_folder, folder)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, warm.uid, warm.gid)
    (folder / "index.json").unlink()
    next((folder / "blobs/sha256").iterdir()).unlink()
    warm.run("snapshots", "export", MODEL, str(folder), "--quiet").check()
    refused = warm.run("snapshots", "export", MODEL, str(folder), "--json")
    assert "is not empty" in refused.error["message"]


@pytest.mark.criu
@pytest.mark.needs("registry")
def test_registry_receives_a_model_once(warm, signer, abroad, tmp_path):
    with docker_registry(BUILD_CACHE / "docker-registry", tmp_path) as address:
        name = f"oci://{address}/people/small"
        first, second = (
            warm.run("snapshots", "export", MODEL, f"{name}:{tag}", "--json").result for tag in "ab"
        )
        assert first["written_bytes"] == first["layers_bytes"] == warm.model.stat().st_size
        assert second["written_bytes"] == 0
        # the model without the snapshot
        abroad.run("pull", f"{name}:a", "--name", "pulled", "--quiet").check()
        (pulled,) = (abroad.home / "ei/data/models/pulled").glob("*.gguf")
        assert pulled.read_bytes() == warm.model.read_bytes()
        missing = abroad.run("snapshots", "import", f"{name}:c", "--json").error
        assert missing["code"] == "source-not-found"
        abroad.run("pull", str(abroad.model), "--name", MODEL, "--in-place", "--quiet").check()
        for blob in (tmp_path / "blobs").rglob("data"):
            if blob.stat().st_size == abroad.model.stat().st_size:
                blob.unlink()  # a machine that has the model does not need the blob
        abroad.run("snapshots", "trust", signer).check()
        abroad.run("snapshots", "import", f"{name}:b", "--quiet").check()
    assert abroad.ask().start["how"] == "resumed"


# --- images that were altered


def sign_again(
    folder: Path,
    key: SigningKey,
    change: Callable[[image.SnapshotDescription], image.SnapshotDescription] = lambda described: (
        described
    ),
) -> None:
    """Change the description in a copy of an export, and sign it with `key`."""
    config, manifest = image.sign(change(description_of(folder)), key)
    Layout(folder).put_blob(image.sha256(config), len(config), iter([config]))
    Layout(folder).put_manifest(manifest)


def manifest_of(folder: Path) -> image.ImageManifest:
    return msgspec.json.decode(Layout(folder).manifest_content(), type=image.ImageManifest)


def description_of(folder: Path) -> image.SnapshotDescription:
    return image.read_signed(Layout(folder))[0]


def last_blob(folder: Path) -> Path:
    """Return the path of the last layer: an adapter, or the model."""
    return Layout(folder).blob(image.layers(description_of(folder))[-1].digest)


def change_content(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace a file, which has a second link in the export."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(change(content))


def flip_byte(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def flip_file(folder, _key):
    change_content(last_blob(folder), flip_byte)


def flip_config(folder, _key):
    change_content(Layout(folder).blob(manifest_of(folder).config.digest), flip_byte)


def change_config(folder, _key):
    manifest = manifest_of(folder)
    content = Layout(folder).blob(manifest.config.digest).read_bytes()
    content = content.replace(b'"model":"small"', b'"model":"smart"')
    manifest.config = image.Descriptor("", image.sha256(content), len(content))
    Layout(folder).put_blob(manifest.config.digest, len(content), iter([content]))
    Layout(folder).put_manifest(msgspec.json.encode(manifest))


def drop(folder, _key):
    last_blob(folder).unlink()


def cut(folder, _key):
    change_content(last_blob(folder), lambda content: content[:-4096])


def link(folder, _key):
    path = last_blob(folder).rename(folder / "aside")
    last_blob(folder).symlink_to(path)


def unsign(folder, _key):
    manifest = manifest_of(folder)
    manifest.annotations = {}
    Layout(folder).put_manifest(msgspec.json.encode(manifest))


def garble_signature(folder, _key):
    manifest = manifest_of(folder)
    manifest.annotations[image.SIGNATURE] = "?"
    Layout(folder).put_manifest(msgspec.json.encode(manifest))


def other_signer(folder, _key):
    sign_again(folder, SigningKey(os.urandom(32)))


TAMPERINGS = {
    "a bit of the model": (flip_file, "snapshot-corrupt", "has another digest"),
    "a bit of the config": (flip_config, "snapshot-corrupt", "has another digest"),
    "another config": (change_config, "snapshot-untrusted", "changed after it was signed"),
    "a layer left out": (drop, "snapshot-corrupt", "has no blob sha256:"),
    "a layer cut short": (cut, "snapshot-corrupt", " bytes, not "),
    "a symlink for a layer": (link, "snapshot-corrupt", "has no blob sha256:"),
    "no signature": (unsign, "snapshot-untrusted", "is not signed"),
    "a garbled signature": (garble_signature, "snapshot-untrusted", "is not Base64"),
    "another signer": (other_signer, "snapshot-untrusted", "a key that you do not trust"),
}  # fmt: skip


def import_refusal(folder: Path) -> EdgeInferError:
    """Return the error of importing a folder; assert that nothing is published."""
    with pytest.raises(EdgeInferError) as error:
        importing.import_snapshot(Layout(folder), EngineHost(), lambda _stage, _fraction: None)
    assert not list(paths.snapshots_dir().glob("*@*"))
    return error.value


def all_refused(tamperings: dict, export_folder: Path, signer: str) -> None:
    """Assert that an import refuses each of `tamperings`; `signer` and the test's key are trusted."""
    key = SigningKey(os.urandom(32))
    signing.trust(signer)
    signing.trust(key.fingerprint)
    for number, (name, (tamper, code, message)) in enumerate(tamperings.items()):
        folder = export_folder.with_name(f"{export_folder.name}-{number}")
        shutil.copytree(export_folder, folder, copy_function=os.link)
        tamper(folder, key)
        error = import_refusal(folder)
        assert (error.code, message in error.message) == (code, True), (name, error)
        shutil.rmtree(folder)


@pytest.mark.criu
def test_altered_image_is_refused_by_name_and_nothing_is_published(export_folder, signer):
    all_refused(TAMPERINGS, export_folder, signer)


# --- parts


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_of_an_image_folder_are_read(tmp_path, make):
    make(tmp_path / "index.json")
    with pytest.raises(SnapshotCorruptError, match="is invalid"):
        Layout(tmp_path).manifest_content()
    digest = "sha256:" + "0" * 64
    (tmp_path / "blobs/sha256").mkdir(parents=True)
    make(Layout(tmp_path).blob(digest))
    with pytest.raises(SnapshotCorruptError, match="has no blob sha256:"):
        Layout(tmp_path).read_blob(digest, 5)


def test_huge_index_of_an_image_folder_is_refused(tmp_path):
    with (tmp_path / "index.json").open("wb") as file:
        file.truncate(1 << 34)  # a hole
    with pytest.raises(SnapshotCorruptError, match="has more than"):
        Layout(tmp_path).manifest_content()


def test_a_key_is_made_once_and_for_its_user_alone(monkeypatch, tmp_path):
    assert signing.own_key(make=False) is None
    key = signing.own_key(make=True)
    path = paths.data_dir() / signing.PRIVATE_KEY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert signing.own_key(make=False).fingerprint == key.fingerprint
    signature = key.sign(b"message")
    assert is_signed_by(key.public, signature, b"message")
    assert not is_signed_by(key.public, signature, b"massage")
    path.chmod(0o644)
    with pytest.raises(EdgeInferError, match="other users may access"):
        signing.own_key(make=False)
    path.write_text("nothing")
    path.chmod(0o600)
    with pytest.raises(SnapshotUntrustedError, match="not an Ed25519 key"):
        signing.own_key(make=False)


def test_openssl_reads_the_key_and_checks_the_signature(tmp_path):
    key = signing.own_key(make=True)
    (tmp_path / "message").write_bytes(b"message")
    (tmp_path / "signature").write_bytes(key.sign(b"message"))
    pem = paths.data_dir() / signing.PRIVATE_KEY
    command = ["openssl", "pkeyutl", "-verify", "-inkey", pem, "-rawin"]
    files = ["-in", tmp_path / "message", "-sigfile", tmp_path / "signature"]
    subprocess.run([*command, *files], check=True, capture_output=True)


def test_trust_is_given_and_taken():
    who = fingerprint(bytes(32))
    signing.trust(who)
    assert list(signing.trusted_keys()) == [who]
    signing.distrust(who)
    assert signing.trusted_keys() == {}
    for wrong in ("", "SHA256:short", f"{who}\n{who}"):
        with pytest.raises(UsageError):
            signing.trust(wrong)
