"""Ollama's package: what is here, a stream, then two turns with a tool call."""

import sys
from importlib.metadata import version

import ollama

url, model = sys.argv[1:]
client = ollama.Client(host=url, timeout=300)
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": PLACE}
tools = [{"type": "function", "function": FUNCTION}]
options = {"num_predict": 60, "temperature": 0}

assert any(model in listed.model for listed in client.list().models)
assert client.show(model).capabilities
assert "".join(
    chunk.response for chunk in client.generate(model, "hi", stream=True, options={"num_predict": 8})
)
talk = [{"role": "user", "content": "What is the weather in Paris?"}]
said = client.chat(model, messages=talk, tools=tools, options=options).message
# a small model calls no tool unasked: what follows is the shape of one that was
called = [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]
talk += [
    {"role": "assistant", "content": said.content or "", "tool_calls": said.tool_calls or called},
    {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
]
assert client.chat(model, messages=talk, tools=tools, options=options).done
print(version("ollama"))
