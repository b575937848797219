"""Anthropic's package: messages, streams, counting, then two turns with a tool call."""

import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
}
tools = [{"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}]
talk = [{"role": "user", "content": "What is the weather in Paris?"}]

assert client.messages.count_tokens(model=model, messages=talk, tools=tools).input_tokens
with client.messages.stream(model=model, max_tokens=8, messages=talk) as stream:
    assert stream.get_final_message().usage.output_tokens
asked = {"model": model, "max_tokens": 60, "messages": talk, "tools": tools}
asked["system"] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
said = client.messages.create(**asked, tool_choice={"type": "any"}, metadata={"user_id": "somebody"})
(call,) = [block for block in said.content if block.type == "tool_use"]
result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
talk += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
client.messages.create(**asked)
print(anthropic.__version__)
