"""strands-agents' own model for llama.cpp's server: two turns, told as they come."""

import asyncio
import sys
from importlib.metadata import version

from strands import Agent
from strands.models.llamacpp import LlamaCppModel

url, model = sys.argv[1:]
endpoint = LlamaCppModel(
    base_url=url, model_id=model, params={"max_tokens": 200, "temperature": 0, "stop": ["."]}
)
agent = Agent(model=endpoint, callback_handler=None)


async def answer_to(prompt: str) -> str:
    """Return the answer, joined from the stream's texts."""
    return "".join([event["data"] async for event in agent.stream_async(prompt) if "data" in event])


async def main() -> None:
    assert await answer_to("What is the weather in Paris?")
    assert await answer_to("And in Rome?")
    assert [turn["role"] for turn in agent.messages] == ["user", "assistant"] * 2


asyncio.run(main())
print(version("strands-agents"))
