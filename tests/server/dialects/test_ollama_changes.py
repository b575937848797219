"""Pulling and removing models as Ollama's clients do, on real files and a fake hub."""

import json
import threading

import pytest
from fake_engine import FakeEngine
from fake_hub import Fault
from found_stores import OllamaStore
from least_requests import EVERY

from edgeinfer.cli.endpoint_setup import ModelAdmin, pulled_models
from edgeinfer.models import pull, store
from edgeinfer.models.reference import resolve
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.server.model_entry import LoadedEngine
from edgeinfer.server.pulling import source_of

REPO = "someone/Tiny-GGUF"


def _load(name, progress):
    if name == "fake":
        return LoadedEngine(engine=FakeEngine())
    options = LoadOptions(n_ctx=256, n_parallel=1, n_threads=1)
    return LoadedEngine(engine=load_engine(resolve(name).files(), options, None))


@pytest.fixture
def live_server(serve):
    admin = ModelAdmin()
    return serve(load=_load, pulled=pulled_models(), model_admin=admin)


def _names(live_server) -> list[str]:
    return [model["name"] for model in live_server.get("/api/tags").json()["models"]]


def _pull(live_server, model, **body):
    return live_server.post("/api/pull", {"model": model} | body)


def _delete(live_server, **body):
    return live_server.client.request("DELETE", "/api/delete", json=body)


@pytest.fixture
def mine(live_server, gguf):
    pull.pull(str(gguf), options=pull.PullOptions(name="mine", in_place=True))


def test_pulled_model_is_listed_used_and_removed(live_server, gguf, mine):
    assert "mine:latest" in _names(live_server)
    asked = live_server.post("/api/generate", EVERY["/api/generate"] | {"model": "mine", "raw": True})
    assert asked.json()["done"], asked.json()
    removed = _delete(live_server, name="mine:latest")
    assert removed.json() == {"status": "success"}
    assert _names(live_server) == ["fake:latest"]
    assert gguf.exists()


def test_show_of_a_cold_model_reads_its_file(live_server, gguf, mine):
    shown = live_server.post("/api/show", {"model": "mine"}).json()
    assert shown["capabilities"] == ["completion", "tools", "insert"]
    assert shown["model_info"]["llama.context_length"] == 256
    assert shown["model_info"]["tokenizer.ggml.tokens"] is None
    assert "add_generation_prompt" in shown["template"]
    assert shown["details"]["family"] == "llama"


def test_a_pull_says_how_far_it_is(live_server, hub):
    answer = _pull(live_server, f"hf.co/{REPO}:Q8_0")
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1] == {"status": "success"}
    loads = [line for line in lines if "digest" in line]
    assert loads[-1]["completed"] == loads[-1]["total"] > 0
    assert "verifying sha256 digest" in [line["status"] for line in lines]
    assert "someone.tiny-gguf-q8_0:latest" in _names(live_server)
    by_source = live_server.post("/api/show", {"model": f"hf.co/{REPO}:Q8_0"})
    assert by_source.status_code == 200, "clients ask for the name that they pulled"


@pytest.mark.parametrize("hub", ["", "hf:", "hf.co/", "https://huggingface.co/"])
def test_a_file_of_a_repository_is_never_a_path_of_the_server(hub):
    assert source_of(f"{hub}a/b/x.gguf") == "hf:a/b/x.gguf"


def test_a_client_that_leaves_ends_its_pull(live_server, hub, until):
    hub.always = Fault(pace=4096)
    with live_server.client.stream("POST", "/api/pull", json={"model": f"hf.co/{REPO}:Q8_0"}) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        hub.wait_served(1)
    until(lambda: all(thread.name != "models" for thread in threading.enumerate()), "the pull to end")
    assert store.list_pulled() == []


def test_an_unknown_model_is_a_404_before_anything_is_streamed(live_server):
    answer = _pull(live_server, "no-such-model")
    assert answer.status_code == 404
    assert "not found" in answer.json()["error"]
    ollamas = _pull(live_server, "llama3.2:3b")
    assert ollamas.status_code == 404
    assert "did you mean llama-3.2-3b" in ollamas.json()["error"]


def test_a_pull_that_fails_later_says_so_in_its_last_line(live_server, hub, monkeypatch):
    hub.lies["Tiny-Q8_0.gguf"] = "0" * 64
    *_, last = _pull(live_server, f"hf.co/{REPO}:Q8_0").text.splitlines()
    assert "SHA-256" in json.loads(last)["error"]
    whole = _pull(live_server, f"hf.co/{REPO}:Q8_0", stream=False)
    assert whole.status_code >= 400
    assert "SHA-256" in whole.json()["error"]


@pytest.mark.parametrize(
    "name",
    [
        "/etc/hostname",
        "../x.gguf",
        "file:/x.gguf",
        "http://127.0.0.1/x.gguf",
        "wheel:a==1/b",
        "oci://127.0.0.1:9/x/y",
        "s3://bucket/folder/",
        "gs://bucket/key",
        "OCI://127.0.0.1:9/x/y",
        "hf.co/../x",
        "hf:oci://127.0.0.1:9/x",
        "~/x.gguf",
        "x.gguf",
    ],
)
def test_a_pull_reads_no_files_and_asks_no_other_servers(live_server, name):
    answer = _pull(live_server, name)
    assert answer.status_code == 400
    assert "edgeinfer pull" in answer.json()["error"]


def test_a_pull_of_a_local_name_is_repeated_only_from_the_hub(live_server, hub, gguf, mine):
    refused = _pull(live_server, "mine")
    assert refused.status_code == 400
    assert "`edgeinfer pull mine`" in refused.json()["error"]
    assert str(gguf) not in refused.text
    pull.pull(f"hf.co/{REPO}:Q8_0", options=pull.PullOptions(name="tiny"))
    assert json.loads(_pull(live_server, "tiny").text.splitlines()[-1]) == {"status": "success"}


def test_deleting_an_unknown_model_is_a_404(live_server):
    assert _delete(live_server, model="nobody").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/api/pull", {"model": "fake"}), ("DELETE", "/api/delete", {"model": "fake"})],
)
def test_models_change_only_where_the_endpoint_was_started_for_it(serve, method, path, body):
    answer = serve(FakeEngine()).client.request(method, path, json=body)
    assert answer.status_code == 403
    assert "serve --ollama" in answer.json()["error"]


def test_model_of_ollamas_store_is_used_under_ollamas_name(live_server, gguf, until):
    store = OllamaStore(gguf.read_bytes())
    until(lambda: "tiny:1b" in _names(live_server), "the cached list to expire")
    name = {"model": "tiny:1b"}
    assert "insert" in live_server.post("/api/show", name).json()["capabilities"]
    ask = EVERY["/api/generate"] | name | {"raw": True, "options": {"num_predict": 2}}
    said = live_server.post("/api/generate", ask).json()
    assert (said["model"], said["done"]) == ("tiny:1b", True)
    live_server.post("/v1/completions", name | {"prompt": "x", "max_tokens": 1}, status=200)
    assert [model["name"] for model in live_server.get("/api/ps").json()["models"]][-1] == "tiny:1b"
    refused = _delete(live_server, **name)
    assert refused.status_code == 400
    assert "belongs to Ollama" in refused.json()["error"]
    assert store.file.exists()


def test_root_identifies_the_server(live_server, serve):
    assert live_server.get("/").text == "Ollama is running"
    assert live_server.client.head("/").status_code == 200
    assert serve(FakeEngine()).client.get("/").text == "edgeinfer is running"
