"""Lines that agents change in every request: cut, or moved behind what sessions share."""

from __future__ import annotations

import pytest

from edgeinfer.config import ServeConfig
from edgeinfer.runtime.fake import FakeEngine
from edgeinfer.runtime.requests import Message
from edgeinfer.server.core.changing_lines import NAMES, settle

TOOL = {"name": "read", "description": "Read a file.", "input_schema": {"type": "object"}}
RULES = "Follow the house rules, every one of them, in the order in which they are written here. " * 12


def _claude(billing: str, text: str) -> dict[str, object]:
    """The head of a request of Claude Code."""
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.330.{billing};"},
        {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}},
    ]
    messages = [{"role": "user", "content": text}]
    return {
        "model": "smollm2",
        "max_tokens": 1,
        "system": system,
        "messages": messages,
        "tools": [TOOL],
    }


@pytest.mark.model
def test_two_sessions_that_differ_in_the_billing_line_share_their_prefix(real):
    real.client.post("/v1/messages", json=_claude("0e0", "hello")).raise_for_status()
    answer = real.client.post("/v1/messages", json=_claude("f8c", "bye"))
    usage = answer.raise_for_status().json()["usage"]
    assert usage["cache_read_input_tokens"] > 150
    assert usage["input_tokens"] < 16
    assert answer.headers["x-edgeinfer-settled"] == "billing-header"
    count = real.client.post("/v1/messages/count_tokens", json=_without(_claude("f8c", "bye"))).json()
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def _without(body: dict[str, object]) -> dict[str, object]:
    """What is counted has no limit."""
    return {key: value for key, value in body.items() if key != "max_tokens"}


def test_an_environment_stands_behind_the_first_words_of_the_user():
    system = "Rules.\n<env>\n  Working directory: /w\n</env>\nSkills."
    turns = (
        _turn("system", system),
        _turn("user", "hi"),
        _turn("assistant", "ho"),
        _turn("user", "on"),
    )
    settled, applied = settle(turns)
    assert applied == ("environment",)
    assert [turn.content for turn in settled] == [
        "Rules.\nSkills.",
        "hi\n\n<env>\n  Working directory: /w\n</env>",
        "ho",
        "on",
    ]


def test_what_claude_code_says_behind_the_first_words_stands_before_them():
    said = "# Environment\n - Primary working directory: /w\n - Platform: linux\n\nAgents: many."
    turns = (_turn("system", "Rules."), _turn("user", "hi"), _turn("system", said))
    settled, applied = settle((*turns, _turn("assistant", "ho"), _turn("system", "later")))
    assert applied == ("standing", "environment")
    assert [(turn.role, turn.content) for turn in settled] == [
        ("system", "Rules.\n\n# Environment\n - Platform: linux\n\nAgents: many."),
        ("user", "hi\n\n- Primary working directory: /w"),
        ("assistant", "ho"),
        ("system", "later"),
    ]


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        ("Current working directory: /w", ""),
        ("You have a persistent file-based memory at `/h/-w/memory/`.", "Each is a file:"),
        (
            "You have a persistent file-based memory at `/w/m/`. This directory already exists — write to it (do not look).",
            "Each is a file:",
        ),
        ("- PROJECT memory (this project only): `/h/-w/memory`", ""),
        ("## /h/-w/memory/MEMORY.md", ""),
    ],
)
def test_a_line_that_names_a_project_stands_with_the_users_words(line, rest):
    system = f"Rules.\n{line}{' ' if rest else ''}{rest}\nBe brief."
    settled, applied = settle((_turn("system", system), _turn("user", "hi")))
    assert applied == ("environment",)
    assert settled[0].content == f"Rules.\n{rest}{chr(10) if rest else ''}Be brief."
    assert settled[1].content == f"hi\n\n{line}"


def test_a_clock_stands_behind_the_last_turn():
    system = "You are at home.\nCurrent time is 12:34:56. Today's date is 2026-11-22.\nBe brief."
    settled, applied = settle((_turn("system", system), _turn("user", "hi")))
    assert applied == ("clock",)
    assert [turn.content for turn in settled] == [
        "You are at home.\nBe brief.",
        "hi\n\nCurrent time is 12:34:56. Today's date is 2026-11-22.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "The current time zone is UTC.",
        "Say the current time when you are asked: 12:34 is a time.",
        "An <env> that never ends",
        "</env> before <env>",
        "mentions x-anthropic-billing-header: in a line",
    ],
)
def test_what_only_looks_like_it_stays(text):
    turns = (_turn("system", text), _turn("user", "hi"))
    assert settle(turns) == (turns, ())


def test_what_a_person_says_stays():
    turns = (_turn("user", "x-anthropic-billing-header: a\n<env>b</env>\nCurrent time: 12:34"),)
    assert settle(turns) == (turns, ())


def test_what_has_no_turn_to_go_to_stays():
    turns = (_turn("system", "<env>b</env>\nCurrent time: 12:34"),)
    assert settle(turns) == (turns, ())


def test_a_turn_that_is_only_such_a_line_is_gone():
    turns = (_turn("system", "x-anthropic-billing-header: a"), _turn("user", "hi"))
    assert settle(turns) == ((_turn("user", "hi"),), ("billing-header",))


def test_a_rule_can_be_switched_off(serve):
    assert ServeConfig().settled_lines == NAMES
    engine = FakeEngine()
    here = serve(engine)
    here.endpoint.settled_lines = tuple(name for name in NAMES if name != "billing-header")
    here.client.post("/v1/messages", json=_claude("0e0", "hello") | {"model": "fake"})
    assert engine.requests[0].messages[0].content.startswith("x-anthropic-billing-header")


def _turn(role: str, content: str) -> Message:
    return Message(role=role, content=content)
