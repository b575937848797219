"""The official `ollama` package against the real small model."""

import json

import ollama
import pytest
from fake_engine import FakeEngine
from least_requests import HI, PLACE

pytestmark = pytest.mark.model
MODEL = "smollm2"
SHORT = {"num_predict": 20, "temperature": 0}


@pytest.fixture(scope="module")
def client(real):
    with ollama.Client(real.url) as client:
        yield client


def get_weather(city: str) -> str:
    """Say how the weather is.

    Args:
      city: The city's name
    """
    return f"sunny in {city}"


def test_models_are_listed_shown_and_running(client):
    (listed,) = client.list().models
    assert listed.model == "smollm2:latest"
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 4096
    assert [model.model for model in client.ps().models] == ["smollm2:latest"]
    assert client.ps().models[0].expires_at.year > 2025


def test_stream_has_the_text_of_the_whole_answer(client):
    whole = client.chat(MODEL, HI, options=SHORT)
    parts = list(client.chat(MODEL, HI, options=SHORT, stream=True))
    assert "".join(piece.message.content for piece in parts) == whole.message.content
    last = parts[-1]
    assert (last.done, last.eval_count, last.done_reason) == (True, whole.eval_count, whole.done_reason)
    assert last.total_duration >= last.eval_duration > 0
    assert last.prompt_eval_count == whole.prompt_eval_count


def test_a_second_turn_with_a_tools_answer(client):
    turns = [{"role": "user", "content": "What is the weather in Paris?"}]
    call = ollama.Message.ToolCall
    called = call(function=call.Function(name="get_weather", arguments={"city": "Paris"}))
    turns.append(ollama.Message(role="assistant", tool_calls=[called]))
    turns.append({"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")})
    said = client.chat(MODEL, turns, tools=[get_weather], options=SHORT)
    assert said.message.content or said.message.tool_calls
    assert said.prompt_eval_count > 50


def test_format_is_followed(client):
    said = client.chat(MODEL, HI, format=PLACE, options=SHORT | {"num_predict": 60})
    assert list(json.loads(said.message.content)) == ["city"]


def test_a_key_is_sent_as_a_bearer(serve, monkeypatch):
    live_server = serve(FakeEngine(), keys=["test-key-0123456789abcdef"])
    with ollama.Client(live_server.url) as client, pytest.raises(ollama.ResponseError) as refused:
        client.list()
    assert refused.value.status_code == 401
    monkeypatch.setenv("OLLAMA_API_KEY", "test-key-0123456789abcdef")
    with ollama.Client(live_server.url) as client:
        assert client.list().models


def test_copilot_finds_its_models_and_asks_them_by_openais_route(real):
    """Send what Copilot's provider sends: version, list, show, chat."""
    version = [int(piece) for piece in real.get("/api/version").json()["version"].split(".")]
    assert version >= [0, 6, 4]
    for model in real.get("/api/tags").json()["models"]:
        shown = real.post("/api/show", {"model": model["model"]}).json()
        info = shown["model_info"]
        assert info["general.basename"]
        assert info[f"{info['general.architecture']}.context_length"] == 4096
        assert "tools" in shown["capabilities"]
        assert real.chat(model=model["model"], max_tokens=2).status_code == 200
