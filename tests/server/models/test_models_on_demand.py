"""Loading and unloading of models: waiting, keep-alive, memory, dead engines."""

import threading

import pytest
import raw_http
from fake_engine import DEFAULT_INFO, FakeEngine, StepGate
from least_requests import READING
from msgspec.structs import replace

from edgeinfer.errors import EngineClosedError, ModelLoadError
from edgeinfer.server.lifecycle import RunOptions
from edgeinfer.server.limits import Limits
from edgeinfer.server.model_entry import LoadedEngine

GIB = 1 << 30
IMPATIENT = Limits(patience_s=0.02, comment_s=0.02)


class ScriptedLoader:
    """Loads scripted engines by name and counts them. A load can be held or refused."""

    def __init__(self, total_bytes: int = 1 << 60, size_bytes: int = GIB) -> None:
        self.total = total_bytes
        self.size = size_bytes
        self.loads: list[str] = []
        self.live: dict[str, FakeEngine] = {}
        self.closed: list[str] = []
        self.holds: dict[str, threading.Event] = {}
        self.refusals: dict[str, Exception] = {}
        self.scripts: dict[str, list] = {}
        self.writing: dict[str, threading.Event] = {}
        self.dead: set[str] = set()

    def load(self, name, progress):
        self.loads.append(name)
        progress("reading weights", 0.5)
        if name in self.holds:
            assert self.holds[name].wait(60)
        if name in self.refusals:
            raise self.refusals[name]
        loader = self

        class Engine(FakeEngine):
            @property
            def is_open(self):
                return super().is_open and name not in loader.dead

            def close(self):
                super().close()
                if name in loader.writing:
                    assert loader.writing[name].wait(60)
                if loader.live.pop(name, None):
                    loader.closed.append(name)

        info = replace(DEFAULT_INFO, model=name, weights_bytes=self.size, sha256=name * 16)
        self.live[name] = Engine(self.scripts.get(name, [[f"I am {name}"]]), info=info)
        start = {"where": "worker", "how": "resumed", "stages_ms": {"restore": 80.0}}
        return LoadedEngine(engine=self.live[name], **start)

    def available(self):
        return self.total - self.size * len(self.live)


@pytest.fixture
def loader():
    return ScriptedLoader()


def _ask(live_server, model, **body):
    return live_server.chat(model=model, **body).json()["choices"][0]["message"]["content"]


def _report(live_server, model):
    return next(m for m in live_server.get("/props").json()["models"] if m["id"] == model)


def test_any_pulled_model_can_be_named(serve, loader):
    live_server = serve(load=loader.load, names=("a", "b", "c"))
    for model in "abba":
        assert _ask(live_server, model) == f"I am {model}"
    assert loader.loads == ["a", "b"]
    states = {m["id"]: m["state"] for m in live_server.get("/v1/models").json()["data"]}
    assert states == {"a": "loaded", "b": "loaded", "c": "cold"}
    assert live_server.chat(model="d").status_code == 404
    for path in ("/etc/passwd", "../a", "a/../b", "./a.gguf"):
        assert live_server.chat(model=path).status_code == 404


def test_many_requests_load_a_model_once(serve, loader, until):
    loader.holds["b"] = threading.Event()
    live_server = serve(load=loader.load, names=("a", "b"))
    asking = [live_server.pool.submit(_ask, live_server, "b") for _ in range(8)]
    until(lambda: live_server.endpoint.in_flight == 8, "all to wait")
    loader.holds["b"].set()
    assert [future.result() for future in asking] == ["I am b"] * 8
    assert loader.loads == ["a", "b"]


def test_a_request_does_not_wait_for_another_models_load(serve, loader, until):
    loader.holds["b"] = threading.Event()
    live_server = serve(load=loader.load, names=("a", "b", "c"))
    waiting = live_server.pool.submit(_ask, live_server, "b")
    until(lambda: "b" in loader.loads, "b to be loading")
    assert _ask(live_server, "a") == "I am a"
    assert _ask(live_server, "c") == "I am c"
    loader.holds["b"].set()
    assert waiting.result() == "I am b"


def test_a_streaming_client_gets_comments_while_its_model_loads(serve, loader):
    loader.holds["b"] = threading.Event()
    live_server = serve(load=loader.load, names=("a", "b"), limits=IMPATIENT)
    with live_server.stream(model="b") as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert ": reading weights 50%" in (next(lines), next(lines), next(lines))
        loader.holds["b"].set()
        said = [line for line in lines if line.startswith("data: {")]
    assert '"I am b"' in "".join(said)


def test_a_field_refused_after_the_load_is_an_error_event(serve, loader):
    loader.holds["b"] = threading.Event()
    live_server = serve(load=loader.load, names=("a", "b"), limits=IMPATIENT)
    body = {"model": "b", "prompt": "p", "logit_bias": [[5, True]], "stream": True}
    with live_server.client.stream("POST", "/completion", json=body) as answer:
        loader.holds["b"].set()
        assert any('"param":"logit_bias"' in line for line in answer.iter_lines())


def test_failed_load_is_a_status_or_stream_error_and_is_retried(serve, loader):
    loader.refusals["b"] = ModelLoadError("the file is damaged")
    live_server = serve(load=loader.load, names=("a", "b"), limits=IMPATIENT)
    assert live_server.chat(model="b").status_code == 422
    assert "damaged" in live_server.chat(model="b").json()["error"]["message"]
    loader.holds["b"] = threading.Event()
    with live_server.stream(model="b") as answer:
        lines = answer.iter_lines()
        next(lines)
        loader.holds["b"].set()
        assert any("damaged" in line for line in lines)
    loader.refusals.clear()
    assert _ask(live_server, "b") == "I am b"


def test_model_is_reloaded_after_its_engine_has_stored_prefixes(serve, loader, until):
    loader.writing["b"] = threading.Event()
    live_server = serve(load=loader.load, names=("a", "b"))
    _ask(live_server, "b", keep_alive=0)
    asking = live_server.pool.submit(_ask, live_server, "b")
    loading = live_server.endpoint.models.loading
    until(lambda: [m.stage for m in loading()] == ["writing cached prefixes"], "b to be waited for")
    assert loader.loads == ["a", "b"]
    loader.writing["b"].set()
    asking.result(60)
    assert loader.loads == ["a", "b", "b"]


def test_keep_alive_zero_unloads_after_the_request_and_minus_one_keeps(serve, loader, until):
    live_server = serve(load=loader.load, names=("a", "b"), keep_alive_s=300)
    _ask(live_server, "b", keep_alive=0)
    until(lambda: loader.closed == ["b"], "b to be unloaded")
    _ask(live_server, "b", keep_alive=-1)
    assert _report(live_server, "b")["expires_in_s"] is None
    _ask(live_server, "b", keep_alive=50)
    assert 0 < _report(live_server, "b")["expires_in_s"] <= 50


@pytest.mark.parametrize("path", READING)
def test_keep_alive_is_honoured_on_every_route(serve, loader, until, path):
    live_server = serve(load=loader.load, names=("a", "b"))
    body = READING[path] | {"model": "b", "keep_alive": 0}
    assert live_server.post(path, body).status_code == 200
    until(lambda: loader.closed == ["b"], "b to be unloaded")


def test_an_idle_model_expires(serve, loader, until):
    live_server = serve(load=loader.load, names=("a",), keep_alive_s=0.05)
    until(lambda: loader.closed == ["a"], "a to expire")
    assert _ask(live_server, "a") == "I am a"
    assert live_server.get("/health").status_code == 200


def test_least_recently_used_model_is_unloaded_for_memory(serve):
    loader = ScriptedLoader(total_bytes=3 * GIB + GIB // 2 + (1 << 29))
    live_server = serve(load=loader.load, names=("a", "b", "c", "d"), available_bytes=loader.available)
    for model in ("a", "b", "c", "a"):
        _ask(live_server, model)
    assert loader.closed == []
    live_server.endpoint.models._sizes["d"] = GIB
    _ask(live_server, "d")
    assert loader.closed == ["b"]


def test_model_in_use_is_not_unloaded_for_another(serve, until):
    loader = ScriptedLoader(total_bytes=GIB + (1 << 29))
    gate = StepGate()
    loader.scripts["a"] = [[gate, "held"]]
    memory = {"available_bytes": loader.available, "memory_wait_s": 0.2}
    live_server = serve(load=loader.load, names=("a", "b"), **memory)
    live_server.endpoint.models._sizes["b"] = GIB
    holding = live_server.begin(gate, model="a")
    refused = live_server.chat(model="b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "out_of_memory")
    assert "retry-after" in refused.headers
    live_server.endpoint.models._memory_wait_s = 60
    waiting = live_server.pool.submit(_ask, live_server, "b")
    until(lambda: live_server.get("/health").json()["loading"] != [], "b to wait for room")
    assert live_server.get("/health").json()["loading"][0]["stage"] == "waiting for memory"
    gate.opened.set()
    assert waiting.result() == "I am b"
    holding.result()
    assert loader.closed == ["a"]


def test_dead_engine_is_replaced_before_the_next_answer(serve, loader):
    live_server = serve(load=loader.load, names=("a",))
    _ask(live_server, "a")
    FakeEngine.close(loader.live["a"])
    assert _ask(live_server, "a") == "I am a"
    assert loader.loads == ["a", "a"]


def test_engine_that_dies_during_an_answer_is_replaced(serve, loader):
    dies = ["part", EngineClosedError("the worker died")]
    loader.scripts["a"] = [dies, ["others go on"], dies]
    live_server = serve(load=loader.load, names=("a",))
    text = live_server.chat(stream=True).text
    assert "part" in text
    assert "the worker died" in text
    assert _ask(live_server, "a") == "others go on"
    loader.dead.add("a")
    assert "the worker died" in live_server.chat(stream=True).text
    loader.dead.clear()
    loader.scripts["a"] = [["back"]]
    assert _ask(live_server, "a") == "back"
    assert live_server.chat(model="a").status_code == 200


def test_a_model_is_unloaded_on_request(serve, loader, until):
    gate = StepGate()
    loader.scripts["b"] = [[gate, "done"], ["again"]]
    live_server = serve(load=loader.load, names=("a", "b"))
    unload = "/v1/models/b/unload"
    assert live_server.post(unload).json() == {"id": "b", "state": "not loaded"}
    assert live_server.post("/v1/models/zz/unload").status_code == 404
    running = live_server.begin(gate, model="b")
    assert live_server.post(unload).json()["state"] == "unloading"
    gate.opened.set()
    assert "done" in running.result().text
    until(lambda: loader.closed == ["b"], "b to be unloaded")
    _ask(live_server, "b")
    assert live_server.post(unload).json()["state"] == "unloaded"
    assert loader.closed == ["b", "b"]


def test_client_that_disconnects_during_a_load_releases_the_model(serve, loader, until):
    loader.holds["b"] = threading.Event()
    live_server = serve(load=loader.load, names=("a", "b"), limits=IMPATIENT)
    for stream in (True, False):
        with raw_http.connect(live_server.port) as client:
            client.sendall(raw_http.post(raw_http.HI_BODY | {"model": "b", "stream": stream}))
            until(lambda: live_server.endpoint.in_flight == 1, "the request to wait")
        until(lambda: live_server.endpoint.in_flight == 0, "the request to be forgotten")
    loader.holds["b"].set()
    until(lambda: live_server.endpoint.models.is_loaded("b"), "b to be loaded all the same")
    assert loader.live["b"].requests == []
    assert _report(live_server, "b")["in_use"] == 0
    assert _report(live_server, "b")["expires_in_s"] > 0


def test_health_reports_the_stage_of_a_load(serve, loader, until):
    loader.holds["a"] = threading.Event()
    live_server = serve(load=loader.load, names=("a",), wait_ready=False)
    until(lambda: "a" in loader.loads, "a to be loading")
    answer = live_server.get("/health", status=503)
    loading = [{"model": "a", "stage": "reading weights", "progress": 0.5}]
    assert answer.json() == {"status": "loading", "model": "a", "loading": loading}
    loader.holds["a"].set()
    until(lambda: live_server.get("/health").status_code == 200, "the endpoint to be healthy")


def test_a_default_model_that_does_not_load_leaves_the_endpoint_up(serve, loader, until):
    loader.refusals["a"] = ModelLoadError("damaged")
    live_server = serve(load=loader.load, names=("a", "b"), wait_ready=False)
    until(lambda: "a" in loader.loads, "a to be loading")
    assert _ask(live_server, "b") == "I am b"
    health = live_server.get("/health", status=503)
    assert (health.json()["status"], health.json()["error"]) == ("error", "damaged")
    until(lambda: "model-failed" in live_server.log.getvalue(), "the log to tell of it")
    assert "Traceback" not in live_server.log.getvalue()


def test_without_preload_the_first_request_loads(serve, loader):
    live_server = serve(load=loader.load, names=("a",), options=RunOptions(preload=False))
    assert loader.loads == []
    assert _ask(live_server, "a") == "I am a"


def test_a_dead_worker_does_not_break_a_scrape(serve, loader):
    live_server = serve(load=loader.load, names=("a", "b"))
    _ask(live_server, "b")

    def dead():
        raise EngineClosedError("the worker died")

    loader.live["b"].metrics = dead
    text = live_server.get("/metrics").text
    assert 'edgeinfer_num_requests_running{model_name="a"' in text
    assert 'edgeinfer_num_requests_running{model_name="b"' not in text


def test_a_model_given_back_while_the_endpoint_ends_is_closed(serve, loader, until):
    gate = StepGate()
    loader.scripts["b"] = [[gate, "done"]]
    live_server = serve(load=loader.load, names=("a", "b"))
    running = live_server.begin(gate, model="b")
    assert live_server.post("/v1/models/b/unload").json()["state"] == "unloading"
    live_server.drain()
    until(lambda: live_server.endpoint.draining, "the drain to begin")
    gate.opened.set()
    running.result()
    live_server.wait_ended()
    assert sorted(loader.closed) == ["a", "b"]
