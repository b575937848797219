"""A waiting client gets events, not only comments; the error for a too long prompt has its numbers."""

import itertools
import json
from types import SimpleNamespace

import pytest
from fake_engine import DEFAULT_INFO, FakeEngine, StepGate
from least_requests import STREAMING

from edgeinfer.errors import ContextLengthError, from_fields, to_fields
from edgeinfer.runtime.events import Progress
from edgeinfer.server.anthropic.messages import MessageRenderer
from edgeinfer.server.anthropic.wire import MessagesRequest
from edgeinfer.server.limits import Limits

MESSAGE = "the prompt has 9 tokens and the context 8, which must hold the answer too"
TOO_LONG = ContextLengthError(MESSAGE, param="messages", n_tokens=9, n_ctx=8)


def _events(lines, n):
    """Return the first `n` events of a stream that has not ended."""
    events = []
    for line in lines:
        if line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: ")))
        if len(events) == n:
            return events
    raise AssertionError(events)


@pytest.mark.parametrize("path", STREAMING)
def test_a_client_that_waits_for_its_prompt_gets_events(serve, path):
    gate = StepGate()
    live_server = serve(FakeEngine([[Progress(2, 9), gate, "x"]]), limits=Limits(comment_s=0.02))
    with live_server.client.stream("POST", path, json=STREAMING[path] | {"stream": True}) as answer:
        lines = answer.iter_lines()
        waiting = _events(lines, 5)[-1]
        gate.opened.set()
        remaining = list(lines)
    if path == "/v1/responses":
        assert waiting["type"] == "response.in_progress"
        assert waiting["response"]["status"] == "in_progress"
    elif path == "/v1/messages":
        assert waiting == {"type": "ping"}
    else:
        choice = waiting["choices"][0]
        assert choice["finish_reason"] is None
        assert choice.get("delta", choice.get("text")) in ({}, "")
    assert any(line.startswith("data: ") for line in remaining)


@pytest.mark.parametrize("path", STREAMING)
def test_pause_between_tokens_is_bridged_and_called_by_its_name(serve, path):
    gate = StepGate()
    engine = FakeEngine([[Progress(9, 9), "first", gate, "last"]])
    live_server = serve(engine, limits=Limits(comment_s=0.02))
    with live_server.client.stream("POST", path, json=STREAMING[path] | {"stream": True}) as answer:
        lines = answer.iter_lines()
        opening = list(itertools.takewhile(lambda line: "first" not in line, lines))
        comments = [line for line in itertools.islice(lines, 20) if line.startswith(":")]
        gate.opened.set()
        remaining = "\n".join(lines)
    assert not any("generating" in line for line in opening)
    assert comments
    assert set(comments) == {": generating"}
    assert "last" in remaining


def test_a_message_begins_once_its_prompt_is_known():
    context = SimpleNamespace(plain_id="1", model="fake")
    renderer = MessageRenderer(context, MessagesRequest(messages=[], max_tokens=1), DEFAULT_INFO)
    assert renderer.opening() + renderer.event(0, Progress(0, 9, queued=True)) == b""
    opening = renderer.event(0, Progress(2, 9))
    usage = json.loads(opening.partition(b"data: ")[2].partition(b"\n")[0])["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (7, 2)
    assert renderer.event(0, Progress(9, 9)) == b""


@pytest.mark.parametrize("path", STREAMING)
@pytest.mark.parametrize("stream", [False, True])
def test_error_for_a_too_long_prompt_has_the_text_clients_search_for(serve, monkeypatch, path, stream):
    engine = FakeEngine()

    def refuse(request):
        raise TOO_LONG

    monkeypatch.setattr(engine, "submit", refuse)
    answer = serve(engine).client.post(path, json=STREAMING[path] | {"stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert TOO_LONG.message in error["message"]
    if path == "/v1/messages":
        assert error["message"].startswith("prompt is too long: 9 tokens > 8 maximum")
    else:
        assert error["message"].startswith("This model's maximum context length is 8 tokens")
        assert error["code"] == "context_length_exceeded"


def test_context_length_error_keeps_its_numbers_across_processes():
    received = from_fields(to_fields(TOO_LONG))
    assert isinstance(received, ContextLengthError)
    assert (received.n_tokens, received.n_ctx, received.param) == (9, 8, "messages")
