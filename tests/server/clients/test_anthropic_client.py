"""The official Anthropic client against the real small model."""

import json

import jsonschema
import pytest
from least_requests import PLACE

pytestmark = pytest.mark.model

WEATHER = {"name": "get_weather", "description": "The weather in a city.", "input_schema": PLACE}
#: The official client has no argument `temperature` any more, but the API has it.
GREEDY = {"temperature": 0}
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def client(real, anthropic):
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_stream_accumulates_to_the_same_message(client):
    asked = {"model": "smollm2", "max_tokens": 8, "messages": HELLO, "extra_body": GREEDY}
    asked |= {"system": "Be brief."}
    whole = client.messages.create(**asked)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert 0 < whole.usage.output_tokens <= 8
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_stop_sequences_and_prefill(client):
    message = client.messages.create(
        model="smollm2",
        max_tokens=30,
        extra_body=GREEDY,
        stop_sequences=["."],
        messages=[
            {"role": "user", "content": "Tell me about Paris."},
            {"role": "assistant", "content": "Paris is the"},
        ],
    )
    assert "." not in message.content[0].text
    if message.stop_reason == "stop_sequence":
        assert message.stop_sequence == "."


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_used_and_their_results_taken(client, stream):
    question = {"role": "user", "content": "What is the weather in Paris?"}
    asked = {"model": "smollm2", "max_tokens": 60, "extra_body": GREEDY, "tools": [WEATHER]}
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    if stream:
        with client.messages.stream(**asked, messages=[question], tool_choice=choice) as running:
            first = running.get_final_message()
    else:
        first = client.messages.create(**asked, messages=[question], tool_choice=choice)
    assert first.stop_reason == "tool_use"
    (use,) = [block for block in first.content if block.type == "tool_use"]
    jsonschema.validate(use.input, PLACE)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [question, {"role": "assistant", "content": first.content}]
    turns.append({"role": "user", "content": [result]})
    last = client.messages.create(**asked, messages=turns, tool_choice={"type": "none"})
    assert last.content[0].type == "text"


def test_structured_output(client):
    message = client.messages.create(
        model="smollm2",
        max_tokens=40,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": "Weather in Paris."}],
        output_config={"format": {"type": "json_schema", "schema": PLACE}},
    )
    jsonschema.validate(json.loads(message.content[0].text), PLACE)


@pytest.mark.parametrize("choice", ["auto", "any", "none", "tool", ""])
@pytest.mark.parametrize("begun", [[], [{"role": "assistant", "content": "It is"}]])
def test_tokens_are_counted_as_they_are_used(client, choice, begun):
    asked = {"model": "smollm2", "messages": [*HELLO, *begun]}
    if choice:
        named = {"name": WEATHER["name"]} if choice == "tool" else {}
        asked |= {"tools": [WEATHER], "tool_choice": {"type": choice, **named}}
    counted = client.messages.count_tokens(**asked)
    used = client.messages.create(max_tokens=1, **asked).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_errors_are_the_clients_own(client, anthropic):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nobody", max_tokens=1, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="smollm2", max_tokens=-1, messages=HELLO)
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    turns = [{"role": "user", "content": [image]}]
    with pytest.raises(anthropic.BadRequestError, match="fetches nothing"):
        client.messages.create(model="smollm2", max_tokens=1, messages=turns)
