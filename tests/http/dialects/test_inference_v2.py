"""The Open Inference Protocol: health, metadata, inference, and the generate extension."""

from __future__ import annotations

import json

import pytest

from edgeinfer.runtime.fake import FakeEngine
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import Gate

MODEL = "/v2/models/fake"
GENERATE = {"text_input": "Once", "id": "42", "parameters": {"max_tokens": 4, "temperature": 0}}


@pytest.fixture
def here(serve):
    return serve(FakeEngine([["a", " b"]]))


def test_the_server_and_its_model_say_what_they_are(here):
    server = here.client.get("/v2").json()
    assert (server["name"], server["extensions"]) == ("edgeinfer", ["generate"])
    model = here.client.get(MODEL).json()
    assert (model["name"], model["versions"]) == ("fake", ["1"])
    assert model["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}]
    assert model["outputs"][0]["name"] == "text_output"
    assert here.client.get(f"{MODEL}/versions/1").json() == model


def test_probes_need_no_key(serve):
    here = serve(FakeEngine(), gate=Gate(keys=Keys(["k" * 20])))
    assert here.client.get("/v2/health/live").json() == {"live": True}
    assert here.client.get("/v2/health/ready").json() == {"ready": True}
    assert here.client.get(MODEL).status_code == 401


def test_a_model_is_ready_when_it_is_loaded(serve):
    here = serve(load=lambda name, progress: _loaded(), names=("a", "b"))
    here.client.post("/v2/models/b/generate", json={"text_input": "x"}).raise_for_status()
    assert here.client.get("/v2/models/b/ready").json() == {"name": "b", "ready": True}
    here.client.post("/v1/models/b/unload").raise_for_status()
    cold = here.client.get("/v2/models/b/ready")
    assert (cold.status_code, cold.json()) == (400, {"name": "b", "ready": False})


def _loaded():
    from edgeinfer.server.core.models.values import Loaded

    return Loaded(engine=FakeEngine())


def test_a_text_is_gone_on_with(serve):
    engine = FakeEngine([["a", " b"]])
    answer = serve(engine).client.post(f"{MODEL}/versions/1/generate", json=GENERATE).json()
    assert answer == {"model_name": "fake", "text_output": "a b", "model_version": "1", "id": "42"}
    (request,) = engine.requests
    assert (request.prompt, request.max_tokens, request.sampling.temperature) == ("Once", 4, 0)


def test_a_text_is_gone_on_with_in_pieces(here):
    streamed = here.client.post(f"{MODEL}/generate_stream", json=GENERATE)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line]
    assert "".join(event["text_output"] for event in events) == "a b"
    assert events[0]["id"] == "42"


def test_texts_are_a_tensor_of_bytes(serve):
    engine = FakeEngine([["one"], ["two"]])
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["x", "y"]}
    body = {"id": "7", "inputs": [tensor], "outputs": [{"name": "text_output"}]}
    answer = serve(engine).client.post(f"{MODEL}/infer", json=body).json()
    (output,) = answer["outputs"]
    assert (answer["id"], output["shape"], output["datatype"]) == ("7", [2], "BYTES")
    assert sorted(output["data"]) == ["one", "two"]
    assert [request.prompt for request in engine.requests] == ["x", "y"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (f"{MODEL}/generate", {}, 400, "text_input"),
        (f"{MODEL}/infer", {"inputs": []}, 400, "inputs"),
        (f"{MODEL}/versions/2/generate", GENERATE, 404, "version 1"),
        ("/v2/models/other/generate", GENERATE, 404, "other"),
        ("/v2/nothing", {}, 404, "No such route"),
    ],
)
def test_errors_are_in_the_protocols_envelope(here, path, body, status, said):
    answer = here.client.post(path, json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]
