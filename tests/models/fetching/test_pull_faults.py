"""Pulls from a server that misbehaves end with the right file or a clear error, and keep fetched data."""

import json
import socket
import subprocess
import threading
from itertools import groupby

import pytest
from fake_hub import Fault, sha
from made_gguf import gguf_bytes
from msgspec.structs import replace

from edgeinfer import error_text
from edgeinfer.errors import (
    AuthenticationError,
    ChecksumError,
    DiskFullError,
    DownloadError,
    InterruptedByUser,
    InvalidGgufError,
    ModelBusyError,
    OfflineError,
    SourceNotFoundError,
)
from edgeinfer.models import store
from edgeinfer.models.names import parse_reference
from edgeinfer.models.progress import PullProgress
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import resolve
from edgeinfer.models.removal import remove_models
from edgeinfer.models.store import model_lock
from edgeinfer.platform import paths

from ...conftest import flip_bit
from ..conftest import part, write_models_toml

SIZE = 300_000


@pytest.fixture
def body() -> bytes:
    return gguf_bytes(tensors=[("token_embd.weight", SIZE // 4)])


def other_body() -> bytes:
    return gguf_bytes(tensors=[("token_embd.weight", SIZE // 4)], seed=1)


def kept_bytes() -> int:
    return part().stat().st_size if part().exists() else 0


def nothing_published() -> bool:
    return resolve("tiny").pulled is None and not list(paths.models_dir().glob("tiny/*.gguf"))


def is_right(body: bytes) -> bool:
    record = resolve("tiny").pulled
    return record is not None and record.paths[0].read_bytes() == body and record.sha256 == sha(body)


def test_good_server(url, body, options) -> None:
    stages: list[PullProgress] = []
    record = pull(url, stages.append, options=options)
    assert is_right(body)
    assert (record.quantization, record.architecture, record.source) == ("F32", "llama", url)
    seen = [stage for stage, _ in groupby(now.stage for now in stages)]
    assert seen == ["resolving", "downloading", "verifying", "done"]
    assert not part().parent.exists()
    assert resolve("tiny").files().sha256 == sha(body)


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(cut_after=200_000), Fault(ignore_range=True)],  # 200 instead of 206
        [Fault(cut_after=100_000), Fault(wrong_start=0)],  # 206 from another place
        [Fault(no_length=True)],
        *([Fault(status=s, headers={"Retry-After": "0"}), Fault(status=s)] for s in (429, 500, 503)),
    ],
)
def test_pull_recovers_from_server_faults(server, url, body, options, faults) -> None:
    server.faults.extend(faults)
    pull(url, options=options)
    assert is_right(body)
    server.seen.clear()
    pull(url, options=options)
    assert server.seen == [], "a model that is here needs no request"


def redirect(location: str) -> Fault:
    return Fault(status=302, headers={"Location": location})


NO_ADDRESSES = "https://[::1/x http://127.0.0.1:port/ http://127.0.0.1:99999999/x".split()
NO_ADDRESSES += ["https://[v1.x]/", f"https://{'a' * 64}.example/", "https://../"]


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault(extra_length=-1000), InvalidGgufError, "ends 1000 bytes past the end"),
        (Fault(no_length=True, cut_after=50_000), InvalidGgufError, "cut off"),
        (Fault(headers={"Content-Encoding": "gzip"}), DownloadError, "encoding"),
        (Fault(extra_length=1 << 60), DiskFullError, "are free"),
        (redirect("file:///etc/hostname"), DownloadError, "a file: addr"),
        (redirect("ftp://127.0.0.1/x"), DownloadError, "an? ftp: addr"),
        (redirect("/tiny.gguf"), DownloadError, "too many redirects"),
        *((redirect(text), DownloadError, "is not an address") for text in NO_ADDRESSES),
    ],
)
def test_pull_publishes_nothing_wrong(server, url, options, fault, error, message) -> None:
    server.always = fault
    with pytest.raises(error, match=message):
        pull(url, options=options)
    assert nothing_published()
    if "addr" in message:
        assert len(server.gets("/tiny.gguf")) == 1, "a redirect to another scheme is not tried again"


@pytest.mark.parametrize("is_damaged", [False, True])
def test_changed_file_is_hashed_and_fetched_if_it_is_damaged(
    server, url, body, options, is_damaged
) -> None:
    path = pull(url, options=options).paths[0]
    flip_bit(path, len(body) - 1) if is_damaged else path.touch()
    with pytest.raises(InvalidGgufError, match="was changed"):
        resolve("tiny").files()
    server.seen.clear()
    pull(url, options=options)
    assert bool(server.seen) == is_damaged
    assert is_right(body)
    assert resolve("tiny").files().sha256 == sha(body)


def test_dropped_download_continues(server, url, body, options) -> None:
    server.faults.extend(Fault(cut_after=n) for n in (100_000, 1, 0, 150_000))
    pull(url, options=options)
    assert is_right(body)
    starts = [seen.headers.get("range", "bytes=0-") for seen in server.gets("/tiny.gguf")]
    assert [int(s[6:-1]) for s in starts] == [0, 100_000, 100_001, 100_001, 250_001]
    assert server.served == len(body)


@pytest.mark.parametrize("drops", [Fault(cut_after=0), Fault(ignore_range=True, cut_after=1000)])
def test_server_that_only_drops_ends_in_an_error_with_the_longest_partial_kept(
    server, url, body, options, drops
) -> None:
    server.faults.append(Fault(cut_after=200_000))
    server.always = drops
    with pytest.raises(DownloadError, match="gave up"):
        pull(url, options=options)
    assert part().read_bytes() == body[:200_000]
    assert nothing_published()
    server.always = Fault()
    pull(url, options=options)
    assert is_right(body)
    assert server.gets("/tiny.gguf")[-1].headers["range"] == "bytes=200000-"


def test_length_beyond_the_body_ends_once_the_server_says_so(server, url, body, options) -> None:
    server.always = Fault(extra_length=10)
    pull(url, options=options)
    assert is_right(body)
    assert server.gets("/tiny.gguf")[-1].headers["range"] == f"bytes={len(body)}-"


def test_pin_refuses_other_bytes(server, url, body, options) -> None:
    pull(url, options=options)
    server.always = Fault(wrong_byte_at=250_000)
    again = PullOptions(name="tiny", again=True, retry_policy=options.retry_policy)
    with pytest.raises(ChecksumError, match="first pull"):
        pull(url, options=again)
    assert is_right(body), "the good one must stay"
    bad = paths.models_dir() / ".partial/tiny/tiny.gguf.bad"
    assert bad.stat().st_size == len(body)
    server.always = Fault()
    pull(url, options=again)
    assert is_right(body)


def test_catalogue_digest_refuses_other_bytes(body, tmp_path) -> None:
    # a file: source, because the catalogue refuses http: and the server has no certificate
    local = tmp_path / "tiny.gguf"
    local.write_bytes(body)
    flip_bit(local, len(body) - 5)
    write_models_toml("tiny", f"file:{local}", sha256=sha(body))
    with pytest.raises(ChecksumError, match="the catalogue"):
        pull("tiny")
    assert nothing_published()
    local.write_bytes(body)
    pull("tiny")
    assert is_right(body)


def test_not_a_gguf(server, options) -> None:
    server.files["/tiny.gguf"] = b"<html>please log in</html>" * 100
    with pytest.raises(InvalidGgufError, match="begins with"):
        pull(f"{server.url}/tiny.gguf", options=options)
    assert nothing_published()


def test_server_that_falls_silent(server, url, body, options) -> None:
    server.faults.append(Fault(cut_after=120_000, silent=True))
    notes: list[str] = []
    policy = replace(options.retry_policy, silence_s=0.5)
    options = replace(options, retry_policy=policy)
    pull(url, lambda now: notes.append(now.note), options=options)
    assert is_right(body)
    assert any("stopped sending" in note for note in notes)


@pytest.mark.parametrize(("status", "error"), [(404, SourceNotFoundError), (403, AuthenticationError)])
def test_refused_request_is_not_repeated(server, url, options, status, error) -> None:
    server.faults.append(Fault(cut_after=5000))
    server.always = Fault(status=status)
    with pytest.raises(error) as caught:
        pull(url, options=options)
    assert "HF_TOKEN" not in error_text.hint(caught.value), "the server is not Hugging Face"
    assert kept_bytes() == 5000
    assert nothing_published()
    assert len(server.gets("/tiny.gguf")) == 2, "a refusal is not asked again"


def fetch_a_part(server, url, options, n_bytes: int = 100_000) -> None:
    """Pull from a server that drops the connection after `n_bytes` and then refuses another."""
    server.faults.append(Fault(cut_after=n_bytes))
    server.always = Fault(status=404)
    with pytest.raises(SourceNotFoundError):
        pull(url, options=options)
    server.always = Fault()


@pytest.mark.parametrize("reason", ["another file", "no validator", "an earlier version", "too long"])
def test_partial_that_cannot_be_trusted_is_dropped(server, url, body, options, reason) -> None:
    """Drop a partial file of another file or version, or one that is longer than the file."""
    if reason == "no validator":
        server.etags["/tiny.gguf"] = ""
    fetch_a_part(server, url, options)
    if reason == "another file":
        body = server.files["/tiny.gguf"] = other_body()
    elif reason == "an earlier version":
        state = part().with_name(part().name + ".json")
        state.write_text(json.dumps(json.loads(state.read_text()) | {"boot_id": "a kernel's"}))
    elif reason == "too long":
        with open(part(), "ab") as file:
            file.write(b"\0" * SIZE)
    pull(url, options=options)
    assert is_right(body)
    if reason in ("no validator", "an earlier version"):
        assert "range" not in server.gets("/tiny.gguf")[-1].headers


def test_changed_file_while_it_is_fetched(server, url, body, options) -> None:
    other = other_body()
    server.always = Fault(pace=1 << 12)
    changed = threading.Event()

    def change(now: PullProgress) -> None:
        if now.stage == "downloading" and now.done_bytes > 50_000 and not changed.is_set():
            changed.set()
            server.files["/tiny.gguf"] = other
            server.always = Fault()
            server.drop_all()

    pull(url, change, options=options)
    assert changed.is_set()
    assert is_right(other)


@pytest.mark.parametrize("says", ["another validator", "no validator", "the same file"])
@pytest.mark.parametrize("cut", [1, 4_096, 100_000, SIZE - 1])
def test_parts_of_two_files_are_never_joined(server, url, body, options, says, cut) -> None:
    """Pull from a server that ignores If-Range and may have replaced the file by one of equal size."""
    fetch_a_part(server, url, options, cut)
    assert kept_bytes() == cut
    if says != "the same file":
        other = other_body()
        assert len(other) == len(body)
        body = server.files["/tiny.gguf"] = other
    server.always = Fault(ignore_if_range=True, partial_without_etag=says == "no validator")
    pull(url, options=options)
    assert is_right(body)
    ranged = ["range" in seen.headers for seen in server.gets("/tiny.gguf")[2:]]
    assert ranged == ([True] if says == "the same file" else [True, False])


def test_cancelled_pull_does_not_wait_for_a_silent_server(server, url, options) -> None:
    server.always = Fault(cut_after=50_000, silent=True)
    cancel = threading.Event()

    def stop() -> None:
        server.wait_served(50_000)
        cancel.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(InterruptedByUser):
        pull(url, None, cancel, options)
    stopping.join()


def test_pull_of_a_locked_model_is_refused(url, options) -> None:
    with model_lock(parse_reference("tiny")), pytest.raises(ModelBusyError, match="process"):
        pull(url, options=options)


@pytest.mark.parametrize("switch", ["EDGEINFER_OFFLINE", "HF_HUB_OFFLINE", "config"])
@pytest.mark.parametrize(
    "source", ["https://example.invalid/x.gguf", "a/b:Q8_0", "smollm2-135m-instruct"]
)
def test_offline_pull_opens_no_connection(monkeypatch, switch, source) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    if switch == "config":
        paths.config_dir().mkdir(parents=True)
        (paths.config_dir() / "config.toml").write_text("offline = true\n")
    else:
        monkeypatch.setenv(switch, "1")
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    with pytest.raises(OfflineError) as caught:
        pull(source)
    step = "remove `offline = true` from config.toml" if switch == "config" else f"unset {switch}"
    assert (caught.value.hint or "").startswith(f"{step}, or import a local file")


def test_split_files_are_fetched_whole(server, options) -> None:
    parts = [gguf_bytes(tensors=[(f"blk.{i}.weight", 20_000)], seed=i) for i in range(3)]
    for i, part_bytes in enumerate(parts):
        server.files[f"/x-0000{i + 1}-of-00003.gguf"] = part_bytes
    server.faults.extend([None, Fault(cut_after=10_000)])
    record = pull(f"{server.url}/x-00002-of-00003.gguf", options=options)
    assert [file.sha256 for file in record.files] == [sha(p) for p in parts]
    assert [path.name for path in record.paths] == [f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert record.sha256 == sha("".join(map(sha, parts)).encode())
    assert record.n_params == 60_000


def test_pins_outlive_rm_unless_forgotten(server, url, body, options) -> None:
    pull(url, options=options)
    assert store.read_pins(parse_reference("tiny")).pins[0].file_name == "tiny.gguf"
    remove_models(["tiny"])
    assert nothing_published()
    server.files["/tiny.gguf"] = other_body()
    with pytest.raises(ChecksumError):
        pull(url, options=options)
    remove_models(["tiny"], forget=True)
    pull(url, options=options)


def test_refused_connection_to_this_machine_is_not_tried_again(options) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(DownloadError, match="the server refuses connections"):
            pull(f"http://127.0.0.1:{port}/x.gguf", options=options)
