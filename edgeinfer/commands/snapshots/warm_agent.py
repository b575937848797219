"""`edgeinfer warm --agent`: read what an agent begins with, before anybody asks it anything."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from typing import Any, ClassVar

from edgeinfer.agents import capture
from edgeinfer.agents.endpoint import Found
from edgeinfer.agents.running import find_program
from edgeinfer.agents.table import AGENTS, WARMING, Agent
from edgeinfer.commands.answering.launch import asked, find_target
from edgeinfer.host import Host
from edgeinfer.result import Result

#: The field of each route that says how much is to be answered; the others say `max_tokens`.
_LIMITS = {"/v1/responses": "max_output_tokens"}
#: What would contradict that nothing is to be answered.
_DROPPED = ("stream_options", "max_completion_tokens")


class WarmAgentResult(Result, frozen=True, kw_only=True):
    """What was read. `shared_tokens` of the `prompt_tokens` are what any session begins with."""

    kind: ClassVar[str] = "warm-agent"

    agent: str
    model: str
    prompt_tokens: int
    shared_tokens: int
    wall_s: float

    def human(self) -> str:
        return (
            f"{self.agent} begins with {self.prompt_tokens:,} tokens for {self.model}; "
            f"{self.shared_tokens:,} of them are the same in every session, and on the disk now "
            f"({self.wall_s:.1f} s)"
        )


def warm_agent(options: argparse.Namespace, host: Host) -> WarmAgentResult:
    """Ask the agent twice, each time in another empty folder: what both begin with is no person's.

    Raises as `launch` does.
    """
    began = time.monotonic()
    agent = AGENTS[options.agent]
    options.anyway = False
    find_program(agent)  # before a model is loaded for it
    target = find_target(agent, options, host)
    found = asked(target)
    slots: list[dict[str, Any]] = []
    for _ in range(2):
        request = capture.first_request(agent, target)
        if not options.quiet and not slots:
            print(f"reading what {agent.title} begins with …", file=sys.stderr, flush=True)  # noqa: T201
        slots.append(_read(found, agent, request, target.model))
    return WarmAgentResult(
        agent=agent.name,
        model=target.model,
        prompt_tokens=slots[1]["n_prompt_tokens"],
        shared_tokens=slots[1]["cache_n"],
        wall_s=round(time.monotonic() - began, 2),
    )


def _read(found: Found, agent: Agent, asked: capture.Captured, model: str) -> dict[str, Any]:
    """Have the prompt computed and nothing answered; what /slots says of it. Raises ServeError."""
    limit = _LIMITS.get(asked.path, "max_tokens")
    body = {key: value for key, value in asked.body.items() if key not in _DROPPED}
    body |= {"model": model, "stream": False, limit: 0}
    request_id = f"warm-{secrets.token_hex(8)}"
    headers = {"user-agent": f"{WARMING}{agent.name}", "x-request-id": request_id}
    found.ask("POST", asked.path, body, headers)
    slots: list[dict[str, Any]] = found.ask("GET", "/slots")["slots"]
    return next(slot for slot in slots if slot["id_task"] == request_id)
