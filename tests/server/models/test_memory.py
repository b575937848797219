"""What requests share of the prefix cache: prefill-only requests, salts, keys, usage, metrics."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from fake_engine import FakeEngine
from least_requests import EVERY, GENERATING
from made_decoders import make_reader
from made_models import make_llama
from other_processes import LAUNCHER, engines_below, free_port

from edgeinfer.models import pull
from edgeinfer.platform.paths import config_dir
from edgeinfer.runtime.events import Finished, Timings, Usage
from edgeinfer.runtime.prefix_cache import block_saver, cache
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.retention import CacheLimits, list_blocks

#: Tokens per KV block. A last, partial block may be prefilled again.
BLOCK = 256
KEYS = ["test-key-0123456789abcdef", "another-key-0123456789"]
WORDS = ("river", "bread", "moon", "clock", "whale", "ink", "bridge", "tea", "salt", "wool", "map")
#: A text of several hundred tokens, so that whole blocks are cached.
STORY = " ".join(f"{WORDS[i * i % 11]}{i * 7 % 13}" for i in range(180))


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Load cached blocks and store new ones, however slow or fast this machine is."""
    monkeypatch.setattr(cache, "_MIN_WAIT_S", 600.0)
    monkeypatch.setattr(block_saver, "_MIN_PREFILL_S", 0.0)


@pytest.fixture(scope="module")
def reader(smollm2, tmp_path_factory) -> Path:
    """A model that prefills thousands of tokens a second. Its cache works as any other's."""
    return make_reader(tmp_path_factory.mktemp("reader") / "reader.gguf", smollm2, 2048)


@pytest.fixture
def serve_reader(serve, load_model, reader, tmp_path):
    """Return a function that serves the reader with this test's on-disk prefix cache."""

    def start(**setup):
        engine = load_model(reader, "reader", n_ctx=2048, n_parallel=4)
        limits = CacheLimits(max_bytes=1 << 30, margin_bytes=0)
        engine.open_prefix_cache(BlockStore(tmp_path / "blocks", limits))
        return serve(engine, **setup)

    return start


def _complete(live_server, prompt=STORY, key="", **fields) -> dict:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "ignore_eos": True} | fields
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return live_server.post("/v1/completions", body, headers=headers, status=200).json()


def _cached_tokens(reply: dict) -> tuple[int, int]:
    details = reply["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], details["cached_disk_tokens"]


@pytest.mark.parametrize("path", EVERY)
def test_every_route_accepts_the_prefix_cache_fields(serve, path):
    engine = FakeEngine()
    fields = {"cache_prompt": False, "cache_salt": "mine", "prompt_cache_key": "talk"}
    serve(engine).post(path, EVERY[path] | fields, status=200)
    (request,) = engine.requests
    assert (request.cache_prompt, request.cache_salt, request.conversation) == (False, "mine", "talk")


@pytest.mark.parametrize("path", GENERATING)
def test_zero_tokens_only_prefill(serve, path):
    engine = FakeEngine()
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert serve(engine).client.post(path, json=GENERATING[path] | {limit: 0}).status_code == 200
    (read,) = engine.read
    assert (read.max_tokens, read.cache_prompt, read.cache_salt, read.conversation) == (0, True, "", "")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_store_none_stores_no_prefix_and_store_false_does(serve, path):
    engine = FakeEngine()
    live_server = serve(engine)
    for store in ("none", False):
        assert live_server.post(path, GENERATING[path] | {"store": store}).status_code == 200
    assert [request.cache_prompt for request in engine.requests] == [False, True]


@pytest.mark.parametrize("path", GENERATING)
def test_usage_and_timings_tell_memory_from_disk(serve, path):
    usage = Usage(prompt_tokens=9, cached_tokens=6, cached_disk_tokens=4, completion_tokens=1)
    finished = Finished(reason="stop", usage=usage, timings=Timings())
    reply = serve(FakeEngine([["a", finished]])).client.post(path, json=GENERATING[path]).json()
    assert (reply["timings"]["cache_n"], reply["timings"]["cache_disk_n"]) == (6, 4)
    told = reply.get("usage", {})
    details = told.get("prompt_tokens_details") or told.get("input_tokens_details") or told
    if path == "/v1/messages":
        assert (details["cache_read_input_tokens"], details["cache_read_disk_input_tokens"]) == (6, 4)
    elif path != "/infer":
        assert (details["cached_tokens"], details["cached_disk_tokens"]) == (6, 4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_was_only_read_is_there_for_the_next(serve_reader, stream):
    live_server = serve_reader()
    if stream:
        body = {"prompt": STORY, "max_tokens": 0, "stream": True}
        text = live_server.post("/v1/completions", body).text
        assert '"finish_reason":"length"' in text
        assert '"predicted_n":0' in text
    else:
        read = _complete(live_server, max_tokens=0)
        empty = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        assert read["choices"][0] | {"logprobs": None} == empty
        assert read["usage"]["completion_tokens"] == 0
        assert read["timings"]["prompt_ms"] > 0
    asked = _complete(live_server, STORY + " and then")
    n = asked["usage"]["prompt_tokens"]
    assert _cached_tokens(asked)[0] >= n - 8
    assert asked["timings"]["prompt_n"] <= 8


def test_one_keys_blocks_are_not_found_by_another(serve_reader):
    """Blocks of a key are not shared in memory, nor on the disk after a restart."""
    live_server = serve_reader(keys=KEYS)
    first = _complete(live_server, key=KEYS[0])
    n = first["usage"]["prompt_tokens"]
    assert _cached_tokens(first) == (0, 0)
    assert _cached_tokens(_complete(live_server, key=KEYS[1], max_tokens=0)) == (0, 0)
    salted = _complete(live_server, key=KEYS[0], cache_salt="mine", max_tokens=0)
    assert _cached_tokens(salted) == (0, 0)
    assert _cached_tokens(_complete(live_server, key=KEYS[0])) == (n - 1, 0)
    live_server.drain()
    live_server.wait_ended()
    again = serve_reader(keys=[*KEYS, "k" * 20])
    assert _cached_tokens(_complete(again, key="k" * 20, cache_prompt=False)) == (0, 0)
    assert _cached_tokens(_complete(again, key="k" * 20)) == (0, 0)
    assert _cached_tokens(_complete(again, key=KEYS[0])) == (n - 1, n - 1)


def test_one_key_shares_with_every_client_of_this_user(serve):
    engine = FakeEngine()
    for keys, is_shared in ((KEYS[:1], True), (KEYS[:1] * 2, True), (KEYS, False)):
        live_server = serve(engine, keys=keys)
        _complete(live_server, "hi", key=keys[0])
        assert (engine.requests[-1].cache_salt == "") is is_shared


def test_damaged_blocks_are_computed_again_and_metrics_tell_sources(serve_reader, tmp_path):
    live_server = serve_reader()
    first = _complete(live_server)
    n = first["usage"]["prompt_tokens"]
    _complete(live_server)
    live_server.drain()
    live_server.wait_ended()
    for block in list_blocks(tmp_path / "blocks")[:-1]:  # all but the first, which was used last
        whole = block.path.read_bytes()
        block.path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = serve_reader()
    restored = _complete(again)
    assert restored["choices"] == first["choices"]
    from_disk = _cached_tokens(restored)[1]
    assert BLOCK <= from_disk < n - 1
    scrape = again.client.get("/metrics").text
    for name in ("prompt_tokens_cached", "prompt_tokens_cached_disk"):
        labels = 'model_name="reader",model_version="abababababab"'
        assert f"edgeinfer_{name}_total{{{labels}}} {from_disk}.0" in scrape
    blocks = dict(again.endpoint.models.engines())["reader"].metrics()
    assert blocks.block_bytes_read_total > 0
    assert (blocks.blocks_pruned_total, blocks.blocks_damaged_total) == (0, 1)


def test_slots_report_where_a_prompt_diverged(serve_reader):
    live_server = serve_reader(keys=KEYS)
    middle = STORY.index(" ", len(STORY) // 2)
    edited = STORY[:middle] + " Suddenly" + STORY[middle:]
    texts = (STORY, edited, STORY)
    replies = [_complete(live_server, text, key=KEYS[0], max_tokens=1) for text in texts]
    _complete(live_server, key=KEYS[1], max_tokens=1)

    def slots(key: str) -> list[dict]:
        headers = {"authorization": f"Bearer {key}"}
        return live_server.get("/slots", headers=headers).json()["slots"]

    again, edit, first = slots(KEYS[0])
    assert [slot["cause"] for slot in (first, edit, again)] == ["nothing", "text", "none"]
    assert edit["n_diverged"] == edit["cache_n"] == _cached_tokens(replies[1])[0]
    assert edit["prompt_n"] == edit["n_prompt_tokens"] - edit["cache_n"]
    (other,) = slots(KEYS[1])
    assert other["cause"] == "nothing"
    assert live_server.get("/slots").status_code == 401
    assert "Sudden" not in json.dumps(slots(KEYS[0]))
    assert "Suddenly" not in live_server.log.getvalue()
    _complete(live_server, "A secret.", key=KEYS[1], max_tokens=1, cache_prompt=False)
    assert len(slots(KEYS[1])) == 1  # a request with `cache_prompt: false` is not listed


@pytest.mark.needs("time")
@pytest.mark.model
def test_a_model_that_leaves_memory_keeps_its_conversations(smollm2, tmp_path, until):
    """Unload the model in three ways and kill its process: its prefixes stay cached."""
    for name, path in (("small", smollm2), ("other", make_llama(tmp_path / "other.gguf"))):
        pull.pull(str(path), options=pull.PullOptions(name=name, in_place=True))
    settings = config_dir() / "config.toml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("[snapshots]\nauto-warm = false\n")  # no background process takes snapshots
    port = free_port()
    command = f"serve small --port {port} --threads 1 --ctx 2048 --log off".split()
    program = subprocess.Popen([sys.executable, "-c", LAUNCHER, *command])
    headers = {"connection": "close"}  # an open connection would end with the process that is killed
    client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, headers=headers)
    turns = [{"role": "user", "content": STORY}]
    n_known = 0

    def post(path: str, **body: object) -> dict:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ready() -> bool:
        assert program.poll() is None
        with contextlib.suppress(httpx2.TransportError):
            return client.get("/health").status_code == 200
        return False

    def unload() -> None:
        assert post("/v1/models/small/unload")["state"] == "unloaded"

    def go_on(where: str, most: int) -> None:
        """Ask once more: at most `most` known tokens are prefilled again, by a model loaded at `where`."""
        nonlocal n_known
        asked = {"messages": turns, "max_tokens": 16, "temperature": 0}
        reply = post("/v1/chat/completions", model="small", **asked)
        assert n_known - _cached_tokens(reply)[0] <= most
        n_known = reply["usage"]["prompt_tokens"]
        answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
        turns.extend((answer, {"role": "user", "content": "Go on, please."}))
        report = client.get("/props").json()["models"]
        assert ("small", where) in [(model["id"], model["where"]) for model in report]

    with program, client:
        try:
            until(ready, "it to be ready")
            go_on("process", 0)
            go_on("process", 1)
            for _ in range(2):
                unload()
                go_on("worker", BLOCK)
            post("/v1/completions", model="other", prompt="hi", max_tokens=2, keep_alive=0)
            unload()
            post("/v1/completions", model="other", prompt="hi", max_tokens=2)
            go_on("worker", BLOCK)
            os.kill(engines_below(program.pid)[0], signal.SIGKILL)
            go_on("process", BLOCK)
        finally:
            program.terminate()
