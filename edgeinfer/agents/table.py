"""The agents that `edgeinfer launch` knows. A new one is an entry here and a function in setups.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edgeinfer.agents import setups
from edgeinfer.agents.setups import Setup, Target

#: What must fit behind an agent's first request: answers, and what its tools find.
_ROOM_TOKENS = 4096


class Agent(NamedTuple):
    """`program` is looked for on PATH; `install` is what to type when it is not there.

    `first_tokens`: what its first request was counted to have (SmolLM2's tokens; others differ by a
    fifth). `user_agent`: how its requests begin that header when it is launched, "" where it does not
    say who it is. `room_tokens`: what it must have beyond the first request, or it compacts at once.
    """

    name: str
    title: str
    program: str
    install: str
    setup: Callable[[Target, Path], Setup]
    first_tokens: int
    user_agent: str
    room_tokens: int = _ROOM_TOKENS

    @property
    def needs_tokens(self) -> int:
        """The smallest context that this agent can work in."""
        return self.first_tokens + self.room_tokens


AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "claude",
            "Claude Code",
            "claude",
            "npm install -g @anthropic-ai/claude-code",
            setups.claude,
            12_101,
            "claude-cli/",
            room_tokens=20_000,
        ),
        Agent("codex", "Codex", "codex", "npm install -g @openai/codex", setups.codex, 6_248, "codex_"),
        Agent(
            "opencode",
            "opencode",
            "opencode",
            "npm install -g opencode-ai",
            setups.opencode,
            7_377,
            "opencode/",
        ),
        Agent(
            "aider",
            "aider",
            "aider",
            "python -m pip install aider-install && aider-install",
            setups.aider,
            829,
            "",
        ),
        Agent(
            "pi",
            "pi",
            "pi",
            "npm install -g @mariozechner/pi-coding-agent",
            setups.pi,
            1_326,
            "pi/",
            room_tokens=22_000,
        ),
        Agent(
            "qwen",
            "qwen-code",
            "qwen",
            "npm install -g @qwen-code/qwen-code",
            setups.qwen,
            17_900,
            "QwenCode/",
        ),
        Agent(
            "goose",
            "goose",
            "goose",
            "see https://github.com/aaif-goose/goose",
            setups.goose,
            4_174,
            "goose/",
        ),
    )
}


def agent_of(user_agent: str) -> str:
    """The name of the agent that says this of itself, "" for none that is known."""
    begins = (a.name for a in AGENTS.values() if a.user_agent and user_agent.startswith(a.user_agent))
    return next(begins, "")
