"""LangChain's OpenAI binding: embeddings of many texts, then two turns with a tool call."""

import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

url, model = sys.argv[1:]
options = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "max_retries": 0, "timeout": 300}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA}

texts = OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_documents(
    ["a", "b", "c"] * 30
)
assert len(texts) == 90
chat = ChatOpenAI(**options, max_tokens=40, temperature=0)
assert any(chunk.content for chunk in chat.stream("hi"))
asking = chat.bind_tools([{"type": "function", "function": FUNCTION}], tool_choice="get_weather")
talk = [HumanMessage("What is the weather in Paris?")]
said = asking.invoke(talk)
talk += [said, ToolMessage("sunny", tool_call_id=said.tool_calls[0]["id"])]
assert chat.bind_tools([{"type": "function", "function": FUNCTION}]).invoke(talk).id
print(version("langchain-openai"))
