"""OpenAI's package: chat, streams, structured answers and Responses, then two turns with a tool call."""

import sys

import openai
from openai import OpenAI

url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": PLACE}
hi = [{"role": "user", "content": "hi"}]

assert client.models.list().data
stream = client.chat.completions.create(
    model=model, messages=hi, max_tokens=8, stream=True, stream_options={"include_usage": True}
)
assert list(stream)[-1].usage.completion_tokens
form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
client.chat.completions.create(model=model, messages=hi, max_tokens=40, response_format=form)
answer = client.responses.create(
    model=model, input="hi", max_output_tokens=8, metadata={"a": "b"}, store=False
)
with client.responses.stream(model=model, input="hi", max_output_tokens=8) as events:
    assert [event.type for event in events][-1] in ("response.completed", "response.incomplete")
assert len(client.embeddings.create(model=model, input=["a"] * 3).data) == 3

talk = [{"role": "user", "content": "What is the weather in Paris?"}]
tools = [{"type": "function", "function": FUNCTION}]
asked = {"model": model, "messages": talk, "tools": tools, "temperature": 0}
hints = {"user": "somebody", "prompt_cache_key": "talk", "parallel_tool_calls": False}
first = client.chat.completions.create(**asked, **hints, tool_choice="required", max_tokens=60)
said = first.choices[0].message
(call,) = said.tool_calls
talk += [said, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
assert client.chat.completions.create(**asked, max_tokens=20).choices[0].finish_reason
print(openai.__version__)
