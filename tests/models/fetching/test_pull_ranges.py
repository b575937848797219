"""One file over several connections, from a server that misbehaves: the promises of a pull hold."""

from __future__ import annotations

import json
import random
import threading

import msgspec
import pytest
from fake_hub import Fault
from made_gguf import gguf_bytes

from edgeinfer.errors import AuthenticationError, DownloadError, InterruptedByUser
from edgeinfer.models.fetching import download
from edgeinfer.models.progress import PullProgress
from edgeinfer.models.pull import PullOptions, pull
from edgeinfer.models.reference import resolve

from ..conftest import HASTY, part

SIZE = 8 << 20


@pytest.fixture
def body() -> bytes:
    return gguf_bytes(tensors=[("token_embd.weight", SIZE // 4)])


@pytest.fixture
def options() -> PullOptions:
    return PullOptions(name="tiny", retry_policy=msgspec.structs.replace(HASTY, parallel_bytes=1 << 20))


def is_right(body: bytes) -> bool:
    record = resolve("tiny").pulled
    return record is not None and record.paths[0].read_bytes() == body and not part().parent.exists()


def starts(server) -> list[int]:
    """The first byte of every request."""
    wanted = [one.headers.get("range", "bytes=0-") for one in server.gets("/tiny.gguf")]
    return [int(text.removeprefix("bytes=").partition("-")[0]) for text in wanted]


def test_connections_fetch_segments(server, url, body, options) -> None:
    server.always = Fault(pace=1 << 14)
    seen: list[PullProgress] = []
    pull(url, seen.append, options=options)
    assert is_right(body)
    assert len(set(starts(server))) >= 8
    assert server.served < len(body) + (4 << 20), "nothing is fetched twice but what was on its way"
    done = [now.done_bytes for now in seen if now.stage == "downloading"]
    assert done == sorted(done)


def test_slow_connection_loses_its_rest_to_others(server, url, body, options) -> None:
    server.faults.append(Fault(pace=1024))  # the first connection alone: minutes for the whole file
    pull(url, options=options)
    assert is_right(body)


def test_silent_connections_lose_their_segments(server, url, body, options) -> None:
    server.faults.append(None)
    server.faults.extend(Fault(cut_after=0, silent=True) for _ in range(7))
    retry_policy = msgspec.structs.replace(options.retry_policy, silence_s=200.0)
    pull(url, options=msgspec.structs.replace(options, retry_policy=retry_policy))
    assert is_right(body)


def test_connections_recover_from_cuts_and_errors(server, url, body, options) -> None:
    rng = random.Random(15)
    server.faults.extend(Fault(cut_after=rng.randrange(300_000)) for _ in range(12))
    server.faults.extend([Fault(status=503), Fault(wrong_start=3), Fault(status=429)])
    pull(url, options=options)
    assert is_right(body)


@pytest.mark.parametrize("status", [403, 429, 503])
def test_refused_connections_leave_one(server, url, body, options, status) -> None:
    server.faults.append(Fault(pace=1 << 14))
    server.faults.extend(Fault(status=status) for _ in range(7))
    notes: set[str] = set()
    pull(url, lambda now: notes.add(now.note), options=options)
    assert is_right(body)
    assert any("one connection less" in note for note in notes)


def test_refused_download_keeps_its_bytes(server, url, body, options) -> None:
    server.faults.extend(Fault(cut_after=200_000) for _ in range(8))
    server.always = Fault(status=403)
    with pytest.raises(AuthenticationError):
        pull(url, options=options)
    kept = download.fetched_bytes(part())
    assert 8 * 200_000 >= kept > 200_000
    for start, end in download._read_spans(part()):
        assert part().read_bytes()[start:end] == body[start:end]
    server.always = Fault()
    server.served = 0
    pull(url, options=options)
    assert is_right(body)


def test_endless_drops_end_in_an_error(server, url, options) -> None:
    server.faults.extend(Fault(cut_after=100_000) for _ in range(8))
    server.always = Fault(cut_after=0)
    with pytest.raises(DownloadError, match="gave up"):
        pull(url, options=options)
    assert download.fetched_bytes(part()) > 100_000


def test_promised_ranges_may_be_absent(server, url, body, options) -> None:
    server.always = Fault(ignore_range=True, pace=1 << 14)
    pull(url, options=options)
    assert is_right(body)


def test_ranges_may_stop(server, url, body, options) -> None:
    server.faults.extend(Fault(cut_after=100_000) for _ in range(8))
    server.always = Fault(ignore_range=True)
    pull(url, options=options)
    assert is_right(body)


@pytest.mark.parametrize("what", ["etag", "length"])
def test_changed_file_is_fetched_anew(server, url, body, options, what) -> None:
    size = SIZE // 4 + 8 * (what == "length")
    if what == "length":
        server.etags["/tiny.gguf"] = '"the same"'
    other = gguf_bytes(tensors=[("token_embd.weight", size)], seed=1)
    server.always = Fault(pace=1 << 12)
    changing = threading.Event()

    def change(now: PullProgress) -> None:
        if now.stage == "downloading" and now.done_bytes > 1 << 20 and not changing.is_set():
            changing.set()
            server.files["/tiny.gguf"] = other
            server.always = Fault()
            server.drop_all()

    pull(url, change, options=options)
    assert changing.is_set()
    assert is_right(other)


def test_cancelled_pull_keeps_every_segment(server, url, body, options) -> None:
    server.always = Fault(pace=1 << 12)
    cancel = threading.Event()

    def stop(now: PullProgress) -> None:
        if now.stage == "downloading" and now.done_bytes > 1 << 20:
            cancel.set()

    with pytest.raises(InterruptedByUser):
        pull(url, stop, cancel, options)
    kept = download.fetched_bytes(part())
    assert kept > 1 << 20
    server.always = Fault()
    server.served = 0
    pull(url, options=options)
    assert is_right(body)


@pytest.mark.parametrize("n", [1, 8])
def test_cancelled_pull_does_not_wait_for_silent_connections(server, url, options, n) -> None:
    server.always = Fault(cut_after=50_000, silent=True)
    cancel = threading.Event()
    retry_policy = msgspec.structs.replace(options.retry_policy, silence_s=200.0, connections=n)

    def stop() -> None:
        server.wait_served(n * 50_000)
        cancel.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(InterruptedByUser):
        pull(url, None, cancel, PullOptions(name="tiny", retry_policy=retry_policy))
    stopping.join()


def test_spans_of_another_boot_are_dropped_without_a_digest(server, url, body, options) -> None:
    server.faults.extend(Fault(cut_after=200_000) for _ in range(8))
    server.always = Fault(status=403)
    with pytest.raises(AuthenticationError):
        pull(url, options=options)
    state = part().with_name(part().name + ".json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"boot_id": "another"}))
    server.always = Fault()
    server.served = 0
    pull(url, options=options)
    assert is_right(body)
    assert server.served >= len(body)


def test_killed_pull_loses_no_written_bytes(server, start_cli) -> None:
    body = gguf_bytes(tensors=[("token_embd.weight", 6 << 20)])
    server.files["/tiny.gguf"] = body
    url = f"{server.url}/tiny.gguf"
    rng = random.Random(9)
    server.always = Fault(pace=1 << 14)
    before = 0
    for _ in range(3):
        process = start_cli("pull", url, "--name", "tiny")
        server.wait_served(server.served + rng.randrange(1 << 20, 4 << 20))
        process.kill()
        process.wait()
        now = download.fetched_bytes(part())
        assert now >= before
        before = now
    content = part().read_bytes()
    assert before > 0
    for start, end in download._read_spans(part()):
        assert content[start:end] == body[start:end]
    server.always = Fault()
    process = start_cli("pull", url, "--name", "tiny", "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out)["result"]["size_bytes"] == len(body)
    assert is_right(body)
