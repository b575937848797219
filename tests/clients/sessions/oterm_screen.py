"""oterm's client, without its screen: Ollama's list and facts, then two turns with a tool call."""

import asyncio
import os
import sys
from importlib.metadata import version

url, model = sys.argv[1:]
os.environ["OLLAMA_URL"] = url

from oterm.agent import get_agent  # noqa: E402  it reads the environment
from oterm.providers.ollama import list_models  # noqa: E402


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


async def main() -> None:
    from pydantic_ai import Tool

    agent = get_agent("ollama", model, tools=[Tool(get_weather)])
    first = await agent.run("What is the weather in Paris?")
    assert first.output == "The tool has done it.", first.output
    second = await agent.run("And now?", message_history=first.all_messages())
    assert "second turn" in second.output, second.output


assert any(model in str(one) for one in list_models())
asyncio.run(main())
print(version("oterm"))
