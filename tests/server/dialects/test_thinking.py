"""Reasoning fields of each API reach the chat template, and the engine enforces the budget."""

import pytest
from fake_engine import FakeEngine
from least_requests import STREAMING

from edgeinfer.runtime.events import ReasoningDelta

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ON = {"enable_thinking": True}
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def engine():
    thought = [ReasoningDelta(f"{i} ") for i in range(9)]
    return FakeEngine(lambda request: [*thought, "done"])


@pytest.mark.parametrize(
    ("path", "sent", "options", "budget"),
    [
        (CHAT, {}, {}, None),
        (CHAT, {"reasoning_effort": "none"}, OFF, 0),
        (CHAT, {"reasoning_effort": "minimal"}, ON | {"reasoning_effort": "low"}, None),
        (CHAT, {"reasoning_effort": "max"}, ON | {"reasoning_effort": "high"}, None),
        (CHAT, {"reasoning_budget": 7}, {}, 7),
        (CHAT, {"chat_template_kwargs": OFF}, OFF, 0),
        (CHAT, {"reasoning_effort": "none", "chat_template_kwargs": ON}, ON, None),
        (RESPONSES, {"reasoning": {"effort": "high"}}, ON | {"reasoning_effort": "high"}, None),
        (RESPONSES, {"reasoning": {"effort": "none"}}, OFF, 0),
        (RESPONSES, {"reasoning_budget": 7}, {}, 7),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ON, 1024),
        (MESSAGES, {"thinking": {"type": "disabled"}}, OFF, 0),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, ON, None),
        (MESSAGES, {"thinking": {"type": "between_tools"}}, ON, None),
        (MESSAGES, {"output_config": {"effort": "xhigh"}}, ON | {"reasoning_effort": "high"}, None),
        (
            MESSAGES,
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            OFF | {"reasoning_effort": "low"},
            0,
        ),
    ],
)
def test_reasoning_fields_reach_template_and_engine(live_server, engine, path, sent, options, budget):
    assert live_server.post(path, STREAMING[path] | sent).status_code == 200
    assert engine.requests[-1].template_options == options
    assert engine.requests[-1].reasoning_budget == budget


def test_the_budget_closes_the_reasoning(live_server):
    sent = {"thinking": {"type": "enabled", "budget_tokens": 2}}
    thought, said = live_server.post(MESSAGES, STREAMING[MESSAGES] | sent).json()["content"]
    assert (thought["thinking"], said["text"]) == ("0 1 ", "done")
