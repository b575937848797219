"""`Idempotency-Key`: one answer for a request that is sent again, during it and after it."""

from __future__ import annotations

import json
import threading

import pytest

from edgeinfer.runtime.fake import FakeEngine, Gate
from edgeinfer.server.core.limits import Limits
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import Gate as Door

BODY = {"messages": [{"role": "user", "content": "hi"}]}


def ask(here, key: str = "k1", route: str = "/v1/chat/completions", **fields):
    headers = {"idempotency-key": key} | fields.pop("headers", {})
    return here.client.post(route, json=BODY | fields, headers=headers)


def test_sent_again_it_is_answered_once(serve) -> None:
    engine = FakeEngine()
    here = serve(engine)
    first = ask(here)
    again = ask(here)
    assert first.status_code == again.status_code == 200
    assert first.content == again.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert first.headers["x-request-id"] != again.headers["x-request-id"]
    assert len(engine.requests) == 1
    assert ask(here, "k2").status_code == 200
    assert len(engine.requests) == 2


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_is_told_again_from_its_beginning(serve, route: str) -> None:
    engine = FakeEngine()
    here = serve(engine)
    first, again = (ask(here, route=route, stream=True, max_tokens=9) for _ in range(2))
    assert first.headers["content-type"].startswith("text/event-stream")
    assert first.content == again.content
    assert len(engine.requests) == 1


def test_another_body_under_the_same_key_is_refused(serve) -> None:
    here = serve(FakeEngine())
    ask(here)
    other = ask(here, max_tokens=3)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    assert ask(here, route="/v1/messages", max_tokens=9).status_code == 422


def test_a_key_that_is_none(serve) -> None:
    here = serve(FakeEngine())
    for key in ("", "x" * 256, "with space"):
        assert ask(here, key).json()["error"]["code"] == "invalid_idempotency_key"


def test_one_api_keys_names_are_not_anothers(serve) -> None:
    engine = FakeEngine()
    here = serve(engine, gate=Door(keys=Keys(["alpha-key", "beta-key"])))
    for key in ("alpha-key", "beta-key"):
        assert ask(here, headers={"x-api-key": key}).status_code == 200
    assert len(engine.requests) == 2


def test_what_failed_may_be_tried_again(serve) -> None:
    here = serve(FakeEngine())
    assert ask(here, model="nowhere").status_code == 404
    assert ask(here).status_code == 200


def _gated():
    """A script that stops at a gate, and what opens it."""
    opened = threading.Event()
    return FakeEngine([["one ", Gate(opened), "two"]]), opened


def _open_stream(here, **fields):
    return here.client.stream(
        "POST",
        "/v1/chat/completions",
        json=BODY | {"stream": True} | fields,
        headers={"idempotency-key": "k1"},
    )


def test_who_lost_the_connection_joins_the_answer_being_made(serve, until) -> None:
    engine, opened = _gated()
    here = serve(engine)
    with _open_stream(here) as first:
        next(first.iter_lines())
    until(lambda: '"event":"request"' in here.log.getvalue(), "the first to be gone")
    with _open_stream(here) as again:
        lines = again.iter_lines()
        told = next(lines)
        opened.set()
        told += "".join(lines)
    text = "".join(
        json.loads(part)["choices"][0]["delta"].get("content") or ""
        for part in told.split("data: ")[1:-1]
        if '"choices":[{' in part
    )
    assert text.strip() == "one two"
    assert len(engine.requests) == 1


def test_nobody_comes_back_and_it_is_given_up(serve, until) -> None:
    engine, _ = _gated()
    here = serve(engine, limits=Limits(unread_s=0.01))
    with _open_stream(here) as first:
        next(first.iter_lines())
    until(lambda: not here.endpoint.in_flight, "the answer to be given up")
    assert here.endpoint.repeatable.find("", "k1") is None


def test_answers_are_kept_within_their_limits(serve) -> None:
    engine = FakeEngine()
    here = serve(engine, limits=Limits(kept_answers=2))
    for key in ("k1", "k2", "k3"):
        ask(here, key)
    assert "idempotent-replayed" in ask(here, "k3").headers
    assert "idempotent-replayed" not in ask(here, "k1").headers


def test_an_answer_beyond_the_limit_reaches_who_asked_and_is_not_kept(serve) -> None:
    engine = FakeEngine([["word "] * 200] * 2)
    here = serve(engine, limits=Limits(kept_bytes=2000))
    first = ask(here, stream=True)
    assert first.text.count("word") == 200
    assert "idempotent-replayed" not in ask(here, stream=True).headers
