"""`edgeinfer update` with small shipped files: a shell script where the bootloader is."""

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import msgspec
import pytest
from fake_hub import Fault, sha
from made_shipped import BLOCKS, variant
from msgspec.structs import replace
from other_processes import limited_files, wait_until

sys.path.insert(0, str(Path(__file__).parents[2] / "build"))

import publish

from edgeinfer.config import config_file
from edgeinfer.errors import EdgeInferError
from edgeinfer.models.progress import Job, RetryPolicy
from edgeinfer.platform import disk
from edgeinfer.platform.ed25519 import is_signed_by, new_key_text, parse_key
from edgeinfer.shipping import payload, unpack, update
from edgeinfer.shipping.update import Channel, Release, ReleasedFile, parse_release

from . import test_payload
from .conftest import MODEL, ROOT
from .test_bare_machine import ASK
from .test_first_start import wait_for_port

KEY, OTHER_KEY = (parse_key(new_key_text()) for _ in range(2))
NOW = int(time.time())
RETRIES = RetryPolicy(attempts=3, pause_s=0.001)


def ship(folder, version, behaviour="exit 0"):
    """Write a shipped file of `version` that starts with `behaviour`; return it."""
    tree = folder / f"tree-{version}"
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "note").write_text(version)
    boot = f"#!/bin/sh\n{behaviour}\nexit\n".encode()
    return test_payload.ship(tree, folder, version=version, boot=boot, name=f"shipped-{version}")


class Updates:
    """An installed 1.0.0, and a server that publishes others."""

    def __init__(self, folder, publisher):
        self.folder, self.server = folder, publisher
        self.program = folder / "bin/edgeinfer"
        self.program.parent.mkdir()
        ship(folder, "1.0.0").rename(self.program)
        self.program.chmod(0o750)
        self.before = self.program.read_bytes()
        self.app = unpack.ensure_unpacked(self.program)
        self.channel = Channel(url=publisher.url, keys=(OTHER_KEY.public.hex(), KEY.public.hex()))

    def publish(self, version="1.1.0", *, key=KEY, issued_s=NOW, expires_s=NOW + 86400, **options):
        body = ship(self.folder, version, options.get("behaviour", "exit 0")).read_bytes()
        file = ReleasedFile(name="edgeinfer-here", size_bytes=len(body), sha256=sha(body))
        files = {options.get("machine", platform.machine()): file}
        says = options.get("says", version)
        release = Release(version=says, issued_s=issued_s, expires_s=expires_s, files=files)
        raw = msgspec.json.encode(release)
        self.server.files |= {
            "/release.json": raw, "/release.json.sig": key.sign(raw), "/edgeinfer-here": body,
        }  # fmt: skip
        return body

    def update(self):
        with update.locked() as folder:
            release = update.newest(self.channel, folder)
            job = Job(retry_policy=RETRIES)
            update.install(self.program, release, self.server.url, folder, job)

    def back(self):
        with update.locked() as folder:
            return update.back(self.program, folder)

    def refusal(self):
        """Return the code of an update's error, after which nothing is changed or left over."""
        with pytest.raises(EdgeInferError) as caught:
            self.update()
        assert self.program.read_bytes() == self.before
        assert [p.name for p in self.program.parent.iterdir()] == ["edgeinfer"]
        assert payload.open_shipped(self.program).app == self.app.name
        return caught.value.code


@pytest.fixture
def updates(tmp_path, server):
    return Updates(tmp_path, server)


def test_update_and_back_keep_both_applications(updates):
    """A snapshot belongs to the files of its application: they stay, and so does the snapshot."""
    newer = updates.publish()
    inode = (updates.app / "note").stat().st_ino
    updates.update()
    assert updates.program.read_bytes() == newer
    assert updates.program.stat().st_mode & 0o777 == 0o750
    newer_app = unpack.ensure_unpacked(updates.program)
    for version, program in (("1.0.0", updates.before), ("1.1.0", newer), ("1.0.0", updates.before)):
        with unpack.locked():
            assert unpack.remove_unused() == []
        assert updates.back() == version
        assert updates.program.read_bytes() == program
    assert (updates.app / "note").stat().st_ino == inode
    assert unpack.versions() == [updates.app, newer_app]
    assert [p.name for p in updates.program.parent.iterdir()] == ["edgeinfer"]


def test_third_version_lets_the_first_go(updates):
    for version in ("1.1.0", "1.2.0"):
        updates.publish(version)
        updates.update()
        unpack.ensure_unpacked(updates.program)
    assert [app.name.partition("-")[0] for app in unpack.versions()] == ["1.1.0", "1.2.0"]
    assert updates.back() == "1.1.0"


@pytest.mark.parametrize("verb", ["update", "back"])
def test_crash_after_the_rename_keeps_both_applications(updates, verb):
    updates.publish()
    if verb == "back":
        updates.update()
        unpack.ensure_unpacked(updates.program)
    before, is_renaming = unpack.versions(), False

    def crash(event, details):
        nonlocal is_renaming
        if is_renaming:
            os._exit(9)
        is_renaming = event == "os.rename" and details[1] == str(updates.program)

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            sys.addaudithook(crash)
            getattr(updates, verb)()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert payload.open_shipped(updates.program).app != before[-1].name
    with unpack.locked():
        unpack.remove_unused(keep=unpack.app_root() / payload.open_shipped(updates.program).app)
    assert unpack.versions() == before


def test_file_replaced_since_or_of_another_user_is_refused(updates):
    update.refuse_unless_ours(updates.program, updates.app.name)
    with pytest.raises(EdgeInferError, match="was replaced"):
        update.refuse_unless_ours(updates.program, "0.9.0-0")
    with pytest.raises(EdgeInferError, match="belongs to user"):
        update.refuse_unless_ours(program_of_another(updates), updates.app.name)


def program_of_another(updates):
    if os.geteuid():
        return Path("/usr/bin/env")
    os.chown(updates.program, 65534, 65534)
    return updates.program


@pytest.mark.parametrize(
    ("published", "code"),
    [
        ({"key": parse_key(new_key_text())}, "release-untrusted"),
        ({"expires_s": NOW - 1}, "release-untrusted"),
        ({"says": "1.2.0"}, "release-untrusted"),  # an older file under a newer number
        ({"says": "1.2"}, "shipping"),
        ({"machine": "vax"}, "shipping"),
        ({"behaviour": "echo no llama.cpp >&2; exit 1"}, "shipping"),
        ({"behaviour": "kill -9 $$"}, "shipping"),
    ],
)
def test_release_that_is_refused(updates, published, code):
    updates.publish(**published)
    assert updates.refusal() == code


@pytest.mark.parametrize("path", ["/release.json", "/release.json.sig", "/edgeinfer-here"])
@pytest.mark.parametrize("change", ["bit", "short", "empty", "long", "gone"])
def test_tampered_file(updates, path, change):
    updates.publish()
    raw = updates.server.files.pop(path)
    middle = len(raw) // 2
    changed = {
        "bit": raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :],
        "short": raw[:-1], "empty": b"", "long": raw + bytes(1 << 17),
    }  # fmt: skip
    if change in changed:
        updates.server.files[path] = changed[change]
    code = {"/edgeinfer-here": "checksum"}.get(path, "release-untrusted")
    assert updates.refusal() == ("source-not-found" if change == "gone" else code)
    updates.publish()
    updates.update()  # nothing of it stands in the way of the true one


def test_older_manifest_than_one_seen_is_refused(updates):
    updates.publish("1.0.0", issued_s=NOW)
    with update.locked() as folder:
        update.newest(updates.channel, folder)
    updates.publish("1.1.0", issued_s=NOW - 1)
    assert updates.refusal() == "release-untrusted"
    updates.publish("1.1.0", issued_s=NOW)
    updates.update()


def test_manifest_of_the_future_is_refused_and_locks_nothing_out(updates):
    updates.publish("1.1.0", issued_s=NOW + 90_000, expires_s=NOW + 900_000)
    assert updates.refusal() == "release-untrusted"
    updates.publish("1.1.0", issued_s=NOW + 600)  # a clock that is a little behind
    updates.update()


def test_damaged_note_of_the_newest_manifest_names_the_way_out(updates):
    updates.publish()
    with update.locked() as folder:
        (folder / update.SEEN).write_bytes(b"\xff")
    assert updates.refusal() == "shipping"
    (folder / update.SEEN).unlink()
    updates.update()


def test_trial_leaves_no_trace(updates):
    """With the user's configuration otherwise, and nothing that it started goes on."""
    config_file.save(("serve", "keep-alive-s"), 3.0)
    used, lock = (updates.folder / name for name in ("used", "lock"))
    lingering = f"exec 9>{lock}; flock 9; sleep 600 2>&- &"
    updates.publish(behaviour=f"cat $EDGEINFER_CONFIG >{used}; {lingering}")
    updates.update()
    config = config_file.load_config(used)
    assert config.serve.keep_alive_s == 3.0
    switches = (config.snapshots.auto_warm, config.blocks.enabled, config.drift.record)
    assert switches == (False, False, False)
    wait_until(lambda: not disk.is_locked(lock), "the end of what the trial started")


def test_file_without_a_length_is_read_no_further_than_signed(updates):
    updates.publish()
    updates.server.files["/edgeinfer-here"] += bytes(1 << 24)
    updates.server.faults.extend([None, None, Fault(no_length=True)])
    with pytest.raises(EdgeInferError, match="more than the expected"):
        updates.update()
    with update.locked() as folder:
        assert not list(folder.glob("*.part"))


def test_half_a_download_goes_on(updates):
    newer = updates.publish()
    half = len(newer) // 2
    cut = [Fault(cut_after=half), *[Fault(status=503)] * RETRIES.attempts]
    updates.server.faults.extend([None, None, *cut])  # the manifest and its signature come first
    assert updates.refusal() == "download"
    updates.update()
    assert updates.program.read_bytes() == newer
    assert updates.server.gets("/edgeinfer-here")[-1].headers["range"] == f"bytes={half}-"


def test_full_disk_keeps_what_was_fetched(updates):
    newer = updates.publish()
    with limited_files(len(newer) // 2):
        assert updates.refusal() == "disk-full"
    updates.update()
    assert updates.server.gets("/edgeinfer-here")[-1].headers["range"] == f"bytes={len(newer) // 2}-"


def test_one_update_at_a_time(updates):
    updates.publish()
    with update.locked():
        assert updates.refusal() == "shipping"


def test_back_without_a_version_before(updates):
    with pytest.raises(EdgeInferError, match="no previous version"):
        updates.back()


def test_build_without_a_key_refuses(updates):
    updates.publish()
    updates.channel = Channel(url=updates.server.url)
    assert updates.refusal() == "shipping"
    assert updates.server.seen == []


def test_python_package_names_its_own_way(as_json):
    assert "pipx upgrade" in as_json("update", code=1)["hint"]


def test_true_files_with_an_endpoint_running(machine, binary, smollm2, server, tmp_path):
    channel = f'url = "{server.url}"\nkeys = ["{KEY.public.hex()}"]\n'
    changes = {"_internal/edgeinfer/data/release.toml": channel}
    blocks = tmp_path / "blocks"  # what is compressed here is of no use to a later run
    shutil.copytree(BLOCKS, blocks, copy_function=os.symlink)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, old_app = variant(binary, tmp_path / "old", changes, cache=blocks)
    new, new_app = variant(binary, tmp_path / "new", changes, "999.0.0", cache=blocks)
    machine.install(old)
    machine.own(machine.root / "usr/local/bin")
    machine.own(machine.root / "usr/local/bin/edgeinfer")
    shutil.copy(smollm2, machine.root / "tmp/small.gguf")
    (machine.root / "tmp/small.gguf").chmod(0o644)
    machine.run("pull", "/tmp/small.gguf", "--name", MODEL)
    machine.run("warm", MODEL)
    answer = machine.run(*ASK, "--resume", "always").stdout

    body = new.read_bytes()
    file = ReleasedFile(name="edgeinfer-here", size_bytes=len(body), sha256=sha(body))
    raw = msgspec.json.encode(
        Release(version="999.0.0", issued_s=NOW, expires_s=NOW + 3600, files={platform.machine(): file})
    )
    server.files |= {"/release.json": raw, "/edgeinfer-here": body}
    server.files["/release.json.sig"] = OTHER_KEY.sign(raw)
    refused = machine.run("update", check=False)
    assert refused.returncode == 5
    assert "not signed by a key of this program" in refused.stderr
    server.files["/release.json.sig"] = KEY.sign(raw)

    serving = machine.start("serve", MODEL, "--port", "0", "--resume", "always")
    try:
        base = f"http://127.0.0.1:{wait_for_port(serving)}"
        assert machine.json("update", "--check")["version"] == "999.0.0"
        assert machine.json("update")["changed"]
        messages = [{"role": "user", "content": "Say hi."}]
        question = {"model": MODEL, "messages": messages, "max_tokens": 4}
        reply = httpx2.post(f"{base}/v1/chat/completions", json=question, timeout=60).json()
        assert reply["usage"]["completion_tokens"] == 4
    finally:
        serving.terminate()
        serving.communicate(timeout=60)
    assert machine.run(*ASK).stdout == answer
    assert machine.apps == sorted([old_app, new_app])
    assert machine.json("update", "--back")["changed"]
    assert machine.run(*ASK, "--resume", "always").stdout == answer


def test_publisher_takes_no_file_of_another_version(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "DIST", tmp_path)
    ship(tmp_path, "0.0.1").rename(tmp_path / "edgeinfer-aarch64")
    with pytest.raises(SystemExit, match="has version"):
        publish.find_programs()


def test_renewal_changes_the_time_alone(tmp_path):
    file = ReleasedFile(name="edgeinfer-here", size_bytes=1, sha256="0" * 64)
    before = Release(version="1.1.0", issued_s=1, expires_s=2, files={"x86_64": file})
    raw = msgspec.json.encode(before)
    (tmp_path / "release.json").write_bytes(raw)
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{file.sha256}  edgeinfer-here\n{sha(raw)}  release.json\n")
    publish.renew(tmp_path, days=3)
    raw = (tmp_path / "release.json").read_bytes()
    renewed = msgspec.json.decode(raw, type=Release)
    assert renewed.expires_s - renewed.issued_s == 3 * 86400
    assert replace(renewed, issued_s=1, expires_s=2) == before
    assert sums.read_text().endswith(f"{file.sha256}  edgeinfer-here\n{sha(raw)}  release.json\n")
    sums.write_text("")
    with pytest.raises(SystemExit, match="does not list"):
        publish.renew(tmp_path, days=3)


@pytest.mark.parametrize("is_known", [True, False])
def test_workflow_signs_by_openssl_alone_and_for_known_keys(tmp_path, is_known):
    for name in ("scripts/sign.sh", "scripts/debian.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "edgeinfer/data").mkdir(parents=True)
    text = new_key_text()
    public = parse_key(text if is_known else new_key_text()).public.hex()
    (tmp_path / "edgeinfer/data/release.toml").write_text(f'keys = ["{public}"]')
    (tmp_path / "release.json").write_bytes(b"{}")
    (tmp_path / "SHA256SUMS").write_text(f"{sha(b'{}')}  release.json\n")
    command = [tmp_path / "scripts/sign.sh", "."]
    done = subprocess.run(command, env=os.environ | {"RELEASE_KEY": text}, check=False)
    assert (done.returncode == 0) is is_known
    for name in ("release.json", "SHA256SUMS") if is_known else ():
        signature = (tmp_path / f"{name}.sig").read_bytes()
        assert is_signed_by(bytes.fromhex(public), signature, (tmp_path / name).read_bytes())
    assert is_known or not list(tmp_path.glob("*.sig"))


def test_publisher_writes_what_update_reads_and_signs_for_known_keys_alone(tmp_path):
    program = ship(tmp_path, "1.1.0")
    written = publish.manifest({"x86_64": program}, days=3)
    raw = msgspec.json.encode(written)
    assert parse_release(raw, KEY.sign(raw), (KEY.public.hex(),)) == written
    assert written.files["x86_64"].sha256 == sha(program.read_bytes())
    assert written.expires_s - written.issued_s == 3 * 86400
    (tmp_path / "key.pem").write_text(new_key_text())
    (tmp_path / "release.json").write_bytes(raw)
    public = parse_key((tmp_path / "key.pem").read_text()).public.hex()
    with pytest.raises(SystemExit, match=public):
        publish.sign(tmp_path / "key.pem", tmp_path / "release.json")
    assert not (tmp_path / "release.json.sig").exists()
