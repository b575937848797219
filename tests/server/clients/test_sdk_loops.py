"""Loops of the official clients: they send parsed messages back to the endpoint."""

import pytest
from fake_engine import FakeEngine

from edgeinfer.runtime.events import Finished, ReasoningDelta, Timings, ToolCallDelta, Usage

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def place_type(openai):
    """A type of arguments, made with a package that only clients need."""
    import pydantic

    return pydantic.create_model("Place", city=(str, ...), __doc__="A place.")


@pytest.fixture
def loop(serve):
    """An endpoint whose model calls `Place` once, and then answers."""

    def script(request):
        if any(turn.role == "tool" for turn in request.messages):
            return ['{"city": "Rome"}']
        return [
            ReasoningDelta("hm"),
            ToolCallDelta(index=0, id="c1", name="Place", arguments='{"city": '),
            ToolCallDelta(index=0, id="", name="", arguments='"Rome"}'),
            Finished(reason="tool_calls", usage=Usage(), timings=Timings()),
        ]

    return serve(FakeEngine(script))


@pytest.fixture
def client(loop, openai):
    with openai.OpenAI(base_url=f"{loop.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # the official client warns about itself
@pytest.mark.parametrize("streamed", [False, True])
def test_openais_parsed_message_is_sent_back(client, openai, streamed, place_type):
    tools = [openai.pydantic_function_tool(place_type)]
    asked = {"model": "fake", "tools": tools, "response_format": place_type}
    if streamed:
        with client.chat.completions.stream(messages=HI, **asked) as stream:
            first = stream.get_final_completion().choices[0].message
    else:
        first = client.chat.completions.parse(messages=HI, **asked).choices[0].message
    (call,) = first.tool_calls
    assert call.function.parsed_arguments == place_type(city="Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    second = client.chat.completions.parse(messages=[*HI, first, result], **asked).choices[0].message
    assert second.parsed == place_type(city="Rome")
    third = client.chat.completions.create(model="fake", messages=[*HI, first, result, second, *HI])
    assert third.choices[0].message.content


def test_openais_parsed_response_is_sent_back(client, openai, place_type):
    tools = [openai.pydantic_function_tool(place_type)["function"] | {"type": "function"}]
    asked = {"model": "fake", "tools": tools, "text_format": place_type}
    first = client.responses.parse(input=HI, **asked)
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.parse(input=[*HI, *first.output, result], **asked)
    assert second.output_parsed == place_type(city="Rome")
    items = [*HI, *first.output, result, *second.output, *HI]
    assert client.responses.create(model="fake", input=items).output


def test_anthropics_tool_runner_works_without_threads(loop, anthropic):
    @anthropic.beta_tool
    def Place(city: str) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        return f"sunny in {city}"

    with anthropic.Anthropic(base_url=loop.url, api_key="none", max_retries=0) as opened:
        run = opened.beta.messages.tool_runner
        last = run(model="fake", max_tokens=99, tools=[Place], messages=HI).until_done()
    assert last.content[-1].text == '{"city": "Rome"}'
