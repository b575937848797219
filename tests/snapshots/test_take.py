"""`snapshots take` of a running endpoint with real streams, as an ordinary user and root."""

import contextlib
import itertools
import json
import os
import threading

import httpx2
import pytest
from made_models import make_adapter
from other_processes import descendants, has_ended, wait_until

from edgeinfer.platform import process_metadata
from edgeinfer.snapshots.inputs import ProcessDescription

from ..conftest import without_other_tests
from .conftest import MODEL, NO_AUTO_WARM, Endpoint, Person, small_disk
from .test_faults import folders
from .test_resume import SECRET

pytestmark = pytest.mark.criu

STREAMS = 8
#: Streams may differ only where two tokens are this close (nats): batching changes few bits with such a
#: cache and one thread (decision 022).
TIE = 0.5
EXACT = ("--kv-type", "q8_0", "--threads", "1")


@pytest.fixture(scope="module")
def somebody(anybody) -> Person:
    """The user of `anybody` with another home, in which nothing is built in the background."""
    home = anybody.place.folder / f"take-{anybody.uid}"
    person = Person(anybody.place, anybody.uid, anybody.gid, home, anybody.model)
    person.settings(NO_AUTO_WARM)
    return person


@pytest.fixture(autouse=True)
def _processors_for_the_build():
    """Keep other tests away: a running endpoint is taken at the lowest CPU priority."""
    with without_other_tests():
        yield


def take(person, *arguments: str):
    """Run `take`, which can take minutes at idle priority next to other programs."""
    return person.run("snapshots", "take", *arguments, "--quiet", "--json", timeout=280)


class Stream(threading.Thread):
    """A greedy stream in a thread, until it has `n_tokens` or `hang_up` is set."""

    def __init__(self, endpoint: Endpoint, number: int, n_tokens: int) -> None:
        super().__init__()
        self.text, self.n_tokens = "", 0
        self.began, self.hang_up = threading.Event(), threading.Event()
        self._client = endpoint.client
        self.prompt = f"{SECRET}: {_counting(10 * number)}"
        self._body = {
            "model": MODEL, "prompt": self.prompt, "max_tokens": n_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": False,
        }  # fmt: skip
        self.start()

    def run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
            for line in answer.iter_lines():
                choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
                for choice in choices:
                    self.text += choice["text"]
                    self.n_tokens += 1
                    self.began.set()
                if self.hang_up.is_set():
                    return


def _counting(start: int) -> str:
    """Return a prompt with one likely continuation, so that rounding does not change it."""
    return "".join(f"{n}, " for n in range(start, start + 20)).rstrip()


def assert_same(endpoint: Endpoint, stream: Stream, undisturbed: Stream) -> None:
    """Assert that `stream` is a prefix of `undisturbed`, or differs where two tokens are as likely."""
    pairs = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(stream.text, undisturbed.text, strict=False)
    )
    common = "".join(character for character, _ in pairs)
    if common == stream.text:
        return
    body = {"model": MODEL, "prompt": stream.prompt + common, "max_tokens": 1, "logprobs": 2}
    answer = endpoint.post({**body, "temperature": 0})
    (candidate,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    likeliest = [stream.text[len(common) :], undisturbed.text[len(common) :]]
    both = (candidate, likeliest)
    assert all(any(text.startswith(token) for text in likeliest) for token in candidate), both
    assert abs(max(candidate.values()) - min(candidate.values())) < TIE


def streams(endpoint: Endpoint, n_tokens: int) -> list[Stream]:
    return [Stream(endpoint, number, n_tokens) for number in range(STREAMS)]


def test_take_disturbs_no_stream_and_holds_no_prompt(somebody):
    with Endpoint(somebody, MODEL, *EXACT) as endpoint:
        running = streams(endpoint, 120)
        for stream in running:
            assert stream.began.wait(60)
        try:
            snapshot = take(somebody, "--name", "live")
        finally:
            for stream in running:
                stream.hang_up.set()
                stream.join(60)
        assert snapshot.result["was_built"]
        assert snapshot.result["pid"] == endpoint.process.pid
        (app,) = endpoint.apps()
        record = (process_metadata.DESCRIPTION, ProcessDescription)
        description = process_metadata.read_process_record(app, *record)
        assert SECRET not in repr(description)
        for path in somebody.snapshot(f"{MODEL},live").rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            for encoding in ("utf-8", "utf-16-le", "utf-32-le"):
                assert SECRET.encode(encoding) not in content, path
        assert not take(somebody, str(endpoint.process.pid), "--name", "live").result["was_built"]
    copy = somebody.ask("--snapshot", "live")
    assert copy.start["snapshot"] == f"{MODEL},live"
    assert copy.result["text"] == somebody.ask("--resume=never", *EXACT).result["text"] != ""
    with Endpoint(somebody, MODEL, "--snapshot", "live", "--threads", "1") as endpoint:
        undisturbed = streams(endpoint, 120)
        for stream, same in zip(running, undisturbed, strict=True):
            same.join(120)
            assert stream.n_tokens > 1
            assert_same(endpoint, stream, same)
        rows = somebody.run("ps", "--json").result["running"]
        (row,) = [row for row in rows if row["pid"] == endpoint.process.pid]
        assert row["snapshots"] == [f"{MODEL},live"]
        assert not take(somebody).result["was_built"]  # the same name and inputs as the running process
    somebody.run("snapshots", "rm", f"{MODEL},live").check()


def test_take_over_http_builds_once_and_a_killed_endpoint_leaves_none(somebody):
    route = f"/v1/models/{MODEL}/snapshot"
    with Endpoint(somebody, MODEL) as endpoint:
        endpoint.ask()
        states = [endpoint.client.post(route, json={}).json()["state"] for _ in range(2)]
        assert states == ["taken", "unchanged"]
        assert endpoint.ask()["usage"]["completion_tokens"] == 3
    assert somebody.ask("--resume=always").start["snapshot"] == MODEL
    somebody.run("snapshots", "rm", MODEL).check()
    with Endpoint(somebody, MODEL) as endpoint:
        endpoint.ask()
        asked = threading.Thread(target=_ask_in_vain, args=(endpoint, route))
        asked.start()
        wait_until(
            lambda: any(name.startswith(f"{MODEL}@") for name in folders(somebody)), "it has begun"
        )
        all_of_it = descendants(endpoint.process.pid)
        endpoint.process.kill()
        endpoint.process.wait(60)
    asked.join(60)
    wait_until(lambda: all(map(has_ended, all_of_it)), "everything has ended")
    assert MODEL not in names(somebody)
    somebody.run("warm", MODEL, "--ctx", "512", "--quiet").check()  # removes what the killed build left
    assert {name.partition("@")[0] for name in folders(somebody)} == names(somebody)
    somebody.run("snapshots", "rm", f"{MODEL},ctx=512").check()


def _ask_in_vain(endpoint: Endpoint, route: str) -> None:
    with contextlib.suppress(httpx2.TransportError):  # the endpoint is killed
        endpoint.client.post(route, json={})


@pytest.mark.needs("time")
def test_take_includes_adapters_loaded_while_the_endpoint_ran(somebody):
    adapter = somebody.data / "data/adapters/red.gguf"
    adapter.parent.mkdir(parents=True, exist_ok=True)
    make_adapter(adapter, 1, strength=0.5)
    os.chown(adapter, somebody.uid, somebody.gid)
    with Endpoint(somebody, MODEL) as endpoint:
        endpoint.ask()
        assert take(somebody).result["snapshot"]["name"] == MODEL
        load = {"lora_name": "tone", "lora_path": "red", "scale": 1.0}
        assert endpoint.client.post("/v1/load_lora_adapter", json=load).is_success
        toned = endpoint.ask()["choices"][0]["text"]
        assert take(somebody).result["was_built"]
        assert names(somebody) - {MODEL}
        make_adapter(adapter, 2, strength=0.5)
        changed = take(somebody, "--name", "other")
        assert changed.code == 7
        assert "red.gguf was changed since it was loaded" in changed.error["message"]
        assert endpoint.ask()["choices"][0]["text"] == toned
    somebody.run("snapshots", "prune", "--all").check()
    with Endpoint(somebody, MODEL) as endpoint:
        endpoint.ask()
        assert endpoint.client.post("/v1/load_lora_adapter", json=load).is_success
        take(somebody, str(endpoint.process.pid)).check()
    copy = somebody.ask("--lora", "red", "--resume=always")
    assert copy.result["text"] == somebody.ask("--lora", "red", "--resume=never").result["text"]
    assert somebody.ask().start["how"] == "cold"
    with Endpoint(somebody, MODEL, "--lora", "red", "--resume=always") as endpoint:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 3, "lora": [{"name": "tone"}]}
        endpoint.post(body)  # the snapshot knows the adapter by the name it was loaded with
    somebody.run("snapshots", "prune", "--all").check()


def names(person) -> set[str]:
    listed = person.run("snapshots", "--json").result["snapshots"]
    return {row["details"]["name"] for row in listed}


def test_impossible_take_reports_a_next_step(somebody):
    assert "no endpoint is running" in take(somebody).error["message"]
    assert "there is no process" in take(somebody, str(1 << 22)).error["message"]
    assert "no running process has loaded unheard" in take(somebody, "unheard").error["message"]
    if somebody.uid != os.stat("/proc/1").st_uid:
        outcome = take(somebody, "1")
        assert (outcome.code, "belongs to another user" in outcome.error["message"]) == (2, True)
    program = somebody.popen(program="import time; time.sleep(60)")
    stranger = take(somebody, str(program.pid))
    program.kill()
    assert (stranger.code, "has loaded no model" in stranger.error["message"]) == (2, True)
    with Endpoint(somebody, MODEL) as endpoint:
        endpoint.ask()
        elsewhere = {"EDGEINFER_HOME": str(somebody.home / "elsewhere")}
        other = somebody.run("snapshots", "take", str(endpoint.process.pid), env=elsewhere)
        assert "uses another data folder" in other.err
        without = somebody.run("snapshots", "take", env={"EDGEINFER_CRIU": "/nowhere/criu", "PATH": ""})
        assert (without.code, "snapshots do not work here" in without.err) == (7, True)
        assert "hint:" in without.err
        assert MODEL not in names(somebody)
        assert endpoint.ask()["usage"]["completion_tokens"] == 3


def test_take_is_refused_where_little_of_the_disk_would_stay_free(somebody):
    with small_disk(somebody, "120m"), Endpoint(somebody, MODEL) as endpoint:
        endpoint.ask()
        refused = take(somebody)
        assert (refused.code, refused.error["code"]) == (6, "disk-full")
        assert endpoint.ask()["usage"]["completion_tokens"] == 3


OTHER_CHOICES = """
import json, msgspec
from edgeinfer.config.config_file import SnapshotsConfig
from edgeinfer.host import EngineHost
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.snapshots.builder import jobs
from edgeinfer.snapshots.inputs import SnapshotInputs
actual = LoadOptions(n_ctx=768, n_parallel=3, kv_type="q8_0", flash_attention="on")
inputs = SnapshotInputs(
    model="small", files=EngineHost().files("small"), options=LoadOptions(), actual=actual, given_name="less"
)
details = jobs.build(inputs, SnapshotsConfig(), lambda stage, fraction: None)
print(json.dumps([details.requested, details.actual]))
"""


def test_load_choices_are_reproduced_with_other_free_memory(user):
    user.settings(NO_AUTO_WARM)
    requested, actual = json.loads(user.run(program=OTHER_CHOICES).check().out)
    assert requested == {}
    chosen = {"n_ctx": "768", "n_parallel": "3", "kv_type": "q8_0"}
    assert actual | chosen == actual
    assert user.ask("--snapshot", "less").start["snapshot"] == f"{MODEL},less"
