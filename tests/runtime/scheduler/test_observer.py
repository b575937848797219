"""Observers of requests: each event exactly once, and before its client, in every ending."""

import threading
from collections import Counter
from contextlib import closing

import pytest

from edgeinfer.errors import DecodeError, EngineError
from edgeinfer.runtime.events import Finished, PromptLogprobs
from edgeinfer.runtime.requests import Choice, GenerateRequest
from edgeinfer.runtime.scheduler.observer import SequenceObserver

from ..conftest import ask, collect, load


class Log(SequenceObserver):
    """What one request's observer was told."""

    def __init__(self, request):
        self.request = request
        self.calls = Counter()
        self.events = []
        self.tokens = []
        self.ends = []
        self.has_token, self.has_ended = threading.Event(), threading.Event()

    def on_logits(self, logits):
        assert not self.ends
        self.calls["logits"] += 1

    def on_token(self, token):
        assert not self.ends
        self.tokens.append(token)
        self.has_token.set()

    def on_event(self, event):
        assert not self.ends
        self.events.append(event)

    def on_end(self, event, n_broken_calls):
        self.ends.append(event)
        self.has_ended.set()


class Logs:
    def __init__(self):
        self.requests = []
        self.has_request = threading.Event()
        self.n_closed = 0

    def on_admit(self, request):
        self.requests.append(Log(request))
        self.has_request.set()
        return self.requests[-1]

    def close(self):
        self.n_closed += 1


@pytest.fixture
def logs(smol):
    smol.add_observer(logs := Logs())
    yield logs
    smol._core.queue.observers = ()


def answer_and_log(smol, logs, request: GenerateRequest):
    stream = list(smol.submit(request))
    [log] = logs.requests
    assert log.request is request
    assert log.ends == stream[-1:]
    text = [event for event in stream[:-1] if not isinstance(event, PromptLogprobs | type(stream[0]))]
    assert log.events == text
    assert len(log.tokens) == log.ends[0].usage.completion_tokens
    return log, collect(stream)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "length"),
        ({"stop": ("Paris",), "max_tokens": 30}, "stop"),
        ({"constraint": Choice(("a long enough answer",)), "max_tokens": 30}, "stop"),
        ({"max_tokens": 0}, "length"),
        ({"logprobs": 2, "prompt_logprobs": 1}, "length"),
        ({"deadline_s": 1e-6}, "deadline"),
    ],
)
def test_events_tokens_and_end_are_seen_once(smol, logs, fields, reason):
    log, answer = answer_and_log(smol, logs, ask(**fields))
    assert answer.finish.reason == reason
    assert log.calls["logits"] <= len(log.tokens)
    if "constraint" in fields:
        assert log.calls["logits"] < len(log.tokens), "the constraint forces tokens, without logits"


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "client gone"])
def test_cancel_and_leaving_client_end_once(smol, logs, is_cancelled):
    stream = smol.submit(ask(max_tokens=1500))
    events = iter(stream)
    next(events)
    assert logs.has_request.wait(60)
    [log] = logs.requests
    assert log.has_token.wait(60)
    stream.cancel() if is_cancelled else events.close()
    assert log.has_ended.wait(60)
    [event] = log.ends
    assert (type(event), event.reason) == (Finished, "cancelled")
    assert event.usage.completion_tokens == len(log.tokens)


def test_error_ends_once(smol, logs, monkeypatch):
    failure = DecodeError("a test's")

    def fail(entries):
        raise failure

    monkeypatch.setattr(type(smol._core.executor), "run", lambda self, entries: fail(entries))
    with pytest.raises(EngineError):
        list(smol.submit(ask()))
    [log] = logs.requests
    assert log.ends == [failure]
    assert log.tokens == log.events == []


def test_observers_are_closed_with_their_engine(smollm2):
    with closing(load(smollm2, n_ctx=256, n_parallel=1)) as engine:
        engine.add_observer(first := Logs())
        engine.add_observer(second := Logs())
        list(engine.submit(ask()))
    assert [len(logs.requests) for logs in (first, second)] == [1, 1]
    assert (first.n_closed, second.n_closed) == (1, 1)
