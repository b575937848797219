"""LoRA adapters are loaded and unloaded by vLLM's routes, on the real engine."""

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine
from least_requests import EVERY
from made_models import make_adapter, make_llama
from msgspec.structs import replace

from edgeinfer.platform import paths
from edgeinfer.runtime.options import Adapter
from edgeinfer.server.model_entry import LoadedEngine

ASK = {"prompt": "A short note about rivers:", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def live_server(serve, load_model, smollm2):
    """Serve the real small model, which can be loaded again, and a pulled adapter."""
    paths.adapters_dir().mkdir(parents=True)
    make_adapter(paths.adapters_dir() / "red.gguf", 1, strength=0.5)

    def load(name, progress):
        return LoadedEngine(engine=load_model(smollm2, name, n_ctx=512))

    return serve(load=load, names=("smol",), aliases={"*": ""})


def said(live_server, **fields) -> str:
    return live_server.post("/v1/completions", ASK | fields, status=200).json()["choices"][0]["text"]


def change(live_server, verb: str, **fields):
    return live_server.post(f"/v1/{verb}_lora_adapter", {"lora_name": "red"} | fields)


@pytest.mark.model
def test_an_adapter_comes_and_goes(live_server):
    plain = said(live_server)
    assert change(live_server, "load").text == "Success: LoRA adapter 'red' added successfully."
    assert said(live_server) == plain  # requests that do not name the adapter do not use it
    red = said(live_server, lora=[{"name": "red"}])
    assert red != plain
    assert said(live_server, model="red") == red  # vLLM's clients send the adapter's name as the model
    assert "red" in [model["id"] for model in live_server.get("/v1/models").json()["data"]]

    assert change(live_server, "load", scale=1.0).status_code == 200
    assert said(live_server) == red
    assert live_server.post("/v1/models/smol/unload").json()["state"] == "unloaded"
    assert said(live_server) == red  # the model was loaded again with the same adapters

    assert change(live_server, "unload").status_code == 200
    assert said(live_server) == plain
    assert live_server.post("/v1/completions", ASK | {"model": "red"}).status_code == 404
    gone = change(live_server, "unload")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "adapter_not_found")


@pytest.fixture
def fake(serve):
    return serve(FakeEngine())


@pytest.mark.parametrize("path", EVERY)
def test_every_dialect_chooses_adapters(serve, path):
    engine = FakeEngine(info=replace(DEFAULT_INFO, lora=(Adapter("red", ""),)))
    lora = [{"id": 0, "scale": 0.5}] if path == "/completion" else [{"name": "red", "scale": 0.5}]
    serve(engine).post(path, EVERY[path] | {"model": "fake", "lora": lora}, status=200)
    assert engine.requests[0].lora == (("red", 0.5),)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x.gguf", "~/red.gguf", "red:0.5", "a,b"])
def test_clients_name_adapters_and_no_files(fake, path):
    refused = change(fake, "load", lora_path=path)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")


def test_a_file_where_clients_may_name_files(serve, tmp_path):
    engine = FakeEngine()
    live_server = serve(engine, model_admin=object())
    path = make_llama(tmp_path / "any.gguf")
    assert change(live_server, "load", lora_path=str(path), scale=0.5).status_code == 200
    assert [(a.name, a.scale) for a in engine.info.lora] == [("red", 0.5)]
    missing = change(live_server, "load", lora_path=str(tmp_path / "none.gguf"))
    assert (missing.status_code, "is not pulled" in missing.json()["error"]["message"]) == (400, True)
