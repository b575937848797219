"""The official OpenAI client against the real small model, route by route."""

import json
import re

import jsonschema
import pytest
from least_requests import HI, PLACE

pytestmark = pytest.mark.model

FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": PLACE}
WEATHER = {"type": "function", "function": FUNCTION}
NOTHING = {"type": "object", "properties": {}}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": NOTHING}}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture
def client(real, openai):
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_stream_has_the_text_of_the_whole_answer(client):
    asked = {"model": "smollm2", "messages": HI, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert (choice.message.role, whole.model) == ("assistant", "smollm2")
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage.completion_tokens == whole.timings["predicted_n"] <= 8
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.id.startswith("chatcmpl-")
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert deltas[0].role == "assistant"
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0
    assert {chunk.id for chunk in chunks} == {last.id}


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"response_format": {"type": "json_object", "schema": PLACE}}, r'\{\s*"city"\s*:\s*".*"\s*\}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": PLACE}}},
            r'\{\s*"city"\s*:\s*".*"\s*\}',
        ),
    ],
)
def test_a_constraint_is_followed(client, constraint, pattern):
    answer = client.chat.completions.create(
        model="smollm2", messages=HI, max_tokens=60, temperature=0, extra_body=constraint
    )
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, answer.choices[0].message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called_and_its_answer_is_read(client, stream):
    asked = {"model": "smollm2", "max_tokens": 60, "temperature": 0}
    asked |= {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    called = {"messages": [QUESTION], "tool_choice": choice}
    if stream:
        with client.chat.completions.stream(**asked, **called) as running:
            choice = running.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked, **called).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), PLACE)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 C"}
    turns = [QUESTION, choice.message, result]
    last = client.chat.completions.create(**asked, messages=turns, tool_choice="none")
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls


def test_completions_continue_text_tokens_and_several_prompts(client, real):
    asked = {"model": "smollm2", "max_tokens": 5, "temperature": 0}
    text = client.completions.create(**asked, prompt="Once upon a")
    tokens = real.post("/tokenize", {"content": "Once upon a"}).json()["tokens"]
    assert client.completions.create(**asked, prompt=tokens).choices[0].text == text.choices[0].text
    several = client.completions.create(**asked, prompt=["Once upon a", "The sky is"], echo=True)
    assert several.choices[0].text == "Once upon a" + text.choices[0].text
    assert several.choices[1].text.startswith("The sky is")
    assert several.usage.completion_tokens <= 10


def test_models_are_listed_and_retrieved(client, openai):
    assert [m.id for m in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_responses_whole_and_streamed(client):
    asked = {"model": "smollm2", "input": "hi", "max_output_tokens": 40, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text
    assert whole.status == "completed"
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == whole.output_text == final.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_errors_arrive_as_the_clients_own_exceptions(client, openai):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="smollm2", messages=HI, temperature=99)
    assert wrong.value.param == "temperature"
    turns = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="smollm2", messages=turns)
    assert long.value.code == "context_length_exceeded"
    assert missing.value.request_id
