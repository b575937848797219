"""Snapshots that travel: to another home and another place of the program, and what is refused."""

import base64
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from stores_here import docker_registry, registry_program

from edgeinfer.errors import EdgeInferError, SnapshotCorruptError, SnapshotUntrustedError, UsageError
from edgeinfer.host import Host
from edgeinfer.platform import paths
from edgeinfer.platform.ed25519 import SigningKey, fingerprint, is_signed_by
from edgeinfer.snapshots.transfer import description, importing, signing
from edgeinfer.snapshots.transfer.oci import Layout

from ...conftest import BUILD_CACHE

MODEL = "small"


@pytest.fixture(scope="module")
def exported(warm) -> Path:
    """The small model's snapshot, exported to a folder."""
    folder = warm.home / "exported"
    warm.run("snapshots", "export", MODEL, str(folder), "--quiet").check()
    return folder


@pytest.fixture(scope="module")
def signer(warm, exported) -> str:
    return warm.run("snapshots", "trust", "--json").result["own"]


@pytest.mark.criu
def test_imported_snapshot_computes_the_same_in_another_home(warm, exported, signer, abroad):
    refused = abroad.run("snapshots", "import", str(exported), "--json")
    assert refused.error["code"] == "snapshot-untrusted"
    assert signer in refused.error["message"]

    abroad.run("snapshots", "trust", signer).check()
    abroad.run("snapshots", "import", str(exported), "--quiet").check()
    here, there = abroad.ask(), warm.ask()
    assert here.start["how"] == "resumed"
    assert here.result["text"] == there.result["text"]


@pytest.mark.criu
@pytest.mark.needs("registry")
def test_registry_receives_a_model_once(warm, signer, abroad, tmp_path):
    program = registry_program(BUILD_CACHE)
    if program is None:
        pytest.skip("docker-registry is missing: scripts/setup.sh test-all")
    with docker_registry(program, tmp_path) as address:
        name = f"oci://{address}/people/small"
        first, second = (
            warm.run("snapshots", "export", MODEL, f"{name}:{tag}", "--json").result for tag in "ab"
        )
        assert first["written_bytes"] == first["layers_bytes"] == warm.model.stat().st_size
        assert second["written_bytes"] == 0
        abroad.run("pull", f"{name}:a", "--name", "pulled", "--quiet").check()  # the model alone
        (pulled,) = (abroad.home / "ei/data/models/pulled").glob("*.gguf")
        assert pulled.read_bytes() == warm.model.read_bytes()
        missing = abroad.run("snapshots", "import", f"{name}:c", "--json").error
        assert missing["code"] == "snapshot-missing"
        abroad.run("pull", str(abroad.model), "--name", MODEL, "--in-place", "--quiet").check()
        for blob in (tmp_path / "blobs").rglob("data"):
            if blob.stat().st_size == abroad.model.stat().st_size:
                blob.unlink()  # who has the model does not ask for it
        abroad.run("snapshots", "trust", signer).check()
        abroad.run("snapshots", "import", f"{name}:b", "--quiet").check()
    assert abroad.ask().start["how"] == "resumed"


# --- what was altered on the way


def resigned(
    exported: Path,
    folder: Path,
    key: SigningKey,
    change: Callable[[description.SnapshotDescription], description.SnapshotDescription],
) -> None:
    """A copy of an export whose description is changed and signed by `key`."""
    changed = description.config_bytes(change(description_of(exported)))
    shutil.copytree(exported, folder, copy_function=os.link)
    (folder / "index.json").unlink()
    layout = Layout(folder)
    layout.put(description.sha256(changed), len(changed), iter([changed]))
    annotations = {
        description.SIGNER: base64.b64encode(key.public).decode(),
        description.SIGNATURE: base64.b64encode(key.sign(changed)).decode(),
    }
    layout.put_manifest("small", description.manifest_bytes(changed, [], annotations))


def copied(exported: Path, folder: Path) -> description.ImageManifest:
    shutil.copytree(exported, folder, copy_function=os.link)
    return description.read_manifest(Layout(folder).manifest())


def rewritten(folder: Path, manifest: description.ImageManifest) -> None:
    """Another manifest in a copy of an export, with its own digest right."""
    (folder / "index.json").unlink()
    content = Layout(folder).read(manifest.config.digest, manifest.config.size)
    changed = description.manifest_bytes(content, [], manifest.annotations)
    Layout(folder).put_manifest("small", changed)


def replaced(folder: Path, digest: str, change: Callable[[bytes], bytes]) -> None:
    """Other bytes under a blob's name."""
    path = Layout(folder).blob(digest)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(change(content))


def description_of(folder: Path) -> description.SnapshotDescription:
    manifest = description.read_manifest(Layout(folder).manifest())
    return description.read_config(Layout(folder).read(manifest.config.digest, manifest.config.size))


def last_file(folder: Path) -> description.Descriptor:
    """An adapter's layer, or the only one: that of the model."""
    return description.layers(description_of(folder))[-1]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def flip_file(exported, folder, _key):
    copied(exported, folder)
    replaced(folder, last_file(folder).digest, flipped)


def flip_config(exported, folder, _key):
    replaced(folder, copied(exported, folder).config.digest, flipped)


def change_config(exported, folder, _key):
    manifest = copied(exported, folder)
    content = Layout(folder).read(manifest.config.digest, manifest.config.size)
    content = content.replace(b'"model":"small"', b'"model":"smart"')
    manifest.config = description.Descriptor("", description.sha256(content), len(content))
    Layout(folder).put(manifest.config.digest, manifest.config.size, iter([content]))
    rewritten(folder, manifest)


def drop(exported, folder, _key):
    copied(exported, folder)
    Layout(folder).blob(last_file(folder).digest).unlink()


def cut(exported, folder, _key):
    copied(exported, folder)
    replaced(folder, last_file(folder).digest, lambda content: content[:-4096])


def link(exported, folder, _key):
    copied(exported, folder)
    path = Layout(folder).blob(last_file(folder).digest)
    path.rename(folder / "aside")
    path.symlink_to(folder / "aside")


def unsign(exported, folder, _key):
    manifest = copied(exported, folder)
    manifest.annotations = {}
    rewritten(folder, manifest)


def other_signer(exported, folder, _key):
    resigned(exported, folder, SigningKey(os.urandom(32)), lambda d: d)


TAMPERINGS = {
    "a bit of the model": (flip_file, "snapshot-corrupt", "holds other bytes than its name says"),
    "a bit of the config": (flip_config, "snapshot-corrupt", "holds other bytes than its name says"),
    "another config": (change_config, "snapshot-untrusted", "altered after it was signed"),
    "a layer left out": (drop, "snapshot-corrupt", "has no sha256:"),
    "a layer cut short": (cut, "snapshot-corrupt", "has fewer bytes"),
    "a symlink for a layer": (link, "snapshot-corrupt", "has no sha256:"),
    "no signature": (unsign, "snapshot-untrusted", "is not signed"),
    "another signer": (other_signer, "snapshot-untrusted", "whom you have not trusted"),
}  # fmt: skip


def refused(folder: Path) -> EdgeInferError:
    """Return the error of importing a folder; assert that nothing is published."""
    source = Layout(folder)
    with pytest.raises(EdgeInferError) as error:
        importing.import_snapshot(
            source, importing.offered(source), Host(), lambda _stage, _fraction: None
        )
    assert not list(paths.snapshots_dir().glob("*@*"))
    return error.value


def all_refused(tamperings: dict, exported: Path, signer: str) -> None:
    """Import what each of `tamperings` makes of an export; `signer` and a key of the test are trusted."""
    key = SigningKey(os.urandom(32))
    signing.trust(signer)
    signing.trust(key.fingerprint)
    for number, (what, (tamper, code, words)) in enumerate(tamperings.items()):
        folder = exported.with_name(f"{exported.name}-{number}")
        tamper(exported, folder, key)
        error = refused(folder)
        assert (error.code, words in error.message) == (code, True), (what, error)
        shutil.rmtree(folder)


@pytest.mark.criu
def test_altered_image_is_refused_by_name_and_nothing_is_published(exported, signer):
    all_refused(TAMPERINGS, exported, signer)


# --- parts


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_regular_files_of_an_image_folder_are_read(tmp_path, make):
    make(tmp_path / "index.json")
    with pytest.raises(SnapshotCorruptError, match="cannot be understood"):
        Layout(tmp_path).manifest()
    digest = "sha256:" + "0" * 64
    (tmp_path / "blobs/sha256").mkdir(parents=True)
    make(Layout(tmp_path).blob(digest))
    with pytest.raises(SnapshotCorruptError, match="has no sha256:"):
        Layout(tmp_path).read(digest, 5)


def test_huge_index_of_an_image_folder_is_refused(tmp_path):
    with (tmp_path / "index.json").open("wb") as file:
        file.truncate(1 << 34)  # a hole
    with pytest.raises(SnapshotCorruptError, match="has more than"):
        Layout(tmp_path).manifest()


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
    with pytest.raises(EdgeInferError, match="yours alone"):
        signing.own_key(make=False)
    path.write_text("nothing")
    path.chmod(0o600)
    with pytest.raises(SnapshotUntrustedError, match="no Ed25519 key"):
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
    assert list(signing.trusted()) == [who]
    signing.distrust(who)
    assert signing.trusted() == {}
    for wrong in ("", "SHA256:short", f"{who}\n{who}"):
        with pytest.raises(UsageError):
            signing.trust(wrong)
