"""Receipts over HTTP: in the last object of every API's answer, checked by POST /v1/verify."""

import copy
import io
import json
import random
import re
import threading

import msgspec
import pytest
import raw_http
from fake_engine import FakeEngine, split_script
from least_requests import objects_of

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts.receipt import Receipt
from edgeinfer.receipts.replies import find_receipts, read_replies
from edgeinfer.receipts.verify import ReceiptCheck
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Event, ReasoningDelta, TextDelta, ToolCallDelta
from edgeinfer.server import generation_response
from edgeinfer.server.payload_log import PayloadLog

CHAT = "/v1/chat/completions"
TURNS = [{"role": "user", "content": "Name three ships."}]
SAMPLED = {"temperature": 0.8, "receipt": True}
DIALECTS = {
    CHAT: {"messages": TURNS, "max_tokens": 12},
    "/v1/completions": {"prompt": "The sea", "max_tokens": 12, "repeat_penalty": 1.1},
    "/v1/responses": {"input": "Name three ships.", "max_output_tokens": 12},
    "/v1/messages": {"messages": TURNS, "max_tokens": 12, "model": "smollm2"},
    "/api/chat": {"messages": TURNS, "model": "smollm2", "options": {"num_predict": 12}},
    "/api/generate": {"prompt": "The sea", "model": "smollm2", "options": {"num_predict": 12}},
    "/completion": {"prompt": "The sea", "n_predict": 12},
    "/infer": {"prompt": "Name three ships.", "max_tokens": 12},
}
EXAMPLE = msgspec.convert(
    {
        "version": 1,
        "program": "1",
        "kernel_revision": 1,
        "model": "fake",
        "model_sha256": "ab" * 32,
        "kv_type": "f16",
        "n_ctx": 64,
        "time": "2026-01-01T00:00:00Z",
        "sampling": {},
        "n_prompt": 1,
        "n_answer": 1,
        "finish_reason": "stop",
        "seconds": 1.0,
        "content_sha256": "cd" * 32,
    },
    Receipt,
)
FORMS = [(path, stream) for path in DIALECTS for stream in (False, True)]
FORMS.remove(("/infer", True))  # /infer does not stream


def last_object(reply):
    """Return the last JSON object of an answer, whole or streamed."""
    assert reply.status_code == 200, reply.text
    return [*objects_of(reply.text.splitlines())][-1]


def entries_of(content, name="reply"):
    [(_, documents)] = read_replies(io.BytesIO(content), name)
    return find_receipts(documents)[0]


def lines_of(folder):
    return "".join(path.read_text() for path in folder.iterdir()).splitlines()


def check(live_server, receipt):
    return live_server.post("/v1/verify", {"receipt": receipt}, status=200).json()


@pytest.mark.model
@pytest.mark.parametrize(("path", "stream"), FORMS)
def test_each_dialect_s_answer_ends_with_a_receipt_that_verifies(real, path, stream):
    fields = DIALECTS[path] | ({} if path == "/infer" else {"stream": stream})
    if path.startswith("/api"):
        fields = fields | {"receipt": True, "options": fields["options"] | {"temperature": 0.8}}
    else:
        fields = fields | SAMPLED
    reply = real.post(path, fields)
    receipt = last_object(reply)["receipt"]
    assert receipt["sampling"]["seed"] is not None
    result = check(real, receipt)
    assert (result["verdict"], result["n_answer"]) == ("verified", receipt["n_answer"])
    [entry] = entries_of(reply.content)
    assert entry.quotes
    assert not [quote for quote in entry.quotes if quote.difference(CollectedAnswer(result["text"]))]
    receipt["content"]["answer"][0] ^= 1  # the answer may be short: its seed is random
    assert check(real, receipt)["verdict"] == "differs"

    without = real.post(path, {k: v for k, v in fields.items() if k != "receipt"})
    assert "receipt" not in last_object(without)


_TEXT = [TextDelta("Ships: 1. Ägir\n2. "), TextDelta('Zoë 🚢 "3".')]
_CALLS = [
    ToolCallDelta(0, arguments='{"City": "Rom", "DAYS": 2}', id="call_1", name="get_Weather"),
    ToolCallDelta(1, arguments='{"Quote": "x\\"Y"}', id="call_2", name="Cite"),
]
SCRIPTS: dict[str, list[Event]] = {
    "text": [*_TEXT],
    "reasoning": [ReasoningDelta("Hmm, THREE…"), *_TEXT],
    "calls": [*_CALLS],
    "all": [ReasoningDelta("Hmm, THREE…"), *_TEXT, *_CALLS],
    "text after a call": [TextDelta("First. "), _CALLS[0], TextDelta("Then Zoë.")],
    "nothing": [],
}
#: APIs without tool calls. They join reasoning and text, or leave reasoning out.
_ONLY_TEXT = ("/v1/completions", "/api/generate", "/completion", "/infer")
_NOT_TEXT = (
    "receipt receipts type role object id call_id item_id logprobs model generation_settings".split()
)


def paths_of_answer(value, answer, path=()):
    """Yield the paths of all strings of a reply that are a piece of the answer."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in _NOT_TEXT:
                yield from paths_of_answer(inner, answer, (*path, key))
    elif isinstance(value, str) and value.strip() and any(value in text for text in answer):
        yield path


def with_another_character(documents, path, dice):
    *parents, last = path
    changed = inner = copy.deepcopy(documents)
    for key in parents:
        inner = inner[key]
    text, i = inner[last], dice.randrange(len(inner[last]))
    inner[last] = text[:i] + ("q" if text[i] != "q" else "w") + text[i + 1 :]
    return changed


def long_options(path):
    is_ollama = path.startswith("/api")
    return {"options": {"num_predict": 1000}, "model": "fake"} if is_ollama else {}


def with_receipt(receipt, monkeypatch):
    """Make the endpoint return this receipt."""
    monkeypatch.setattr(generation_response, "make_receipt", lambda *_args, **_options: receipt)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("path", "stream"), FORMS)
def test_each_changed_character_of_a_reply_is_noticed(serve, monkeypatch, path, stream, script):
    if path in _ONLY_TEXT and any(isinstance(event, ToolCallDelta) for event in SCRIPTS[script]):
        return
    with_receipt(EXAMPLE, monkeypatch)
    dice = random.Random(f"{path} {stream} {script}")
    events = split_script(SCRIPTS[script], dice)
    answer = CollectedAnswer()
    for event in events:
        answer.add(event)
    client = serve(FakeEngine([events])).client
    fields = DIALECTS[path] | {"receipt": True} | ({} if path == "/infer" else {"stream": stream})
    limits = {"max_tokens", "max_output_tokens", "n_predict"} & fields.keys()
    reply = client.post(path, json=fields | dict.fromkeys(limits, 1000) | long_options(path))
    [(_, documents)] = read_replies(io.BytesIO(reply.content), "reply")
    [entry], _ = find_receipts(documents)
    assert entry.quotes
    assert [quote.difference(answer) for quote in entry.quotes] == [""] * len(entry.quotes)

    calls = [text for call in answer.calls.values() for text in (call.name, call.arguments)]
    inner = [text for call in answer.calls.values() for text in json.loads(call.arguments).values()]
    pieces = [answer.reasoning + answer.text, *calls, *map(str, inner)]
    paths = list(paths_of_answer(documents, pieces))
    assert bool(paths) == bool(events)
    for changed in paths:
        [forged], _ = find_receipts(with_another_character(documents, changed, dice))
        assert any(quote.difference(answer) for quote in forged.quotes), changed


def test_a_reply_of_a_stream_is_one_and_a_later_one_is_another(tmp_path):
    example = json.loads(msgspec.json.encode(EXAMPLE))
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    last = {"choices": [{"index": 0, "delta": {}}], "receipt": example}

    def stream(*documents):
        return "".join(f"data: {json.dumps(document)}\n\n" for document in documents)

    sources = {
        stream(chunk, last) + "data: [DONE]\n\n": ["a"],
        stream(chunk, last, chunk) + "data: [DONE]\n\n": ["aa"],
        ": 10 s\n\n" + stream(chunk, chunk, last): ["aa"],
        (stream(chunk, last) + "data: [DONE]\n\n") * 2: ["a", "a"],
        json.dumps(chunk | last, indent=1): [""],
        f"{json.dumps(chunk)}\n{json.dumps(chunk | {'receipt': example})}\n": [None, "a"],
    }
    for text, texts in sources.items():
        replies = [documents for _, documents in read_replies(io.BytesIO(text.encode()), "reply")]
        entries = [(find_receipts(documents)[0] or [None])[0] for documents in replies]
        assert [entry and entry.quotes[0].text for entry in entries] == texts, text


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_a_receipt_each(real, stream):
    asked = {"messages": TURNS, "n": 4, "max_tokens": 10, "seed": 5, "stream": stream}
    receipts = last_object(real.post(CHAT, asked | SAMPLED))["receipts"]
    assert [receipt.get("index", 0) for receipt in receipts] == [0, 1, 2, 3]
    assert [check(real, receipt)["verdict"] for receipt in receipts] == ["verified"] * 4


@pytest.mark.model
def test_what_is_no_receipt_is_refused_in_words(real):
    receipt = last_object(real.post(CHAT, {"messages": TURNS, "max_tokens": 4} | SAMPLED))
    whole = receipt["receipt"]
    twice = json.dumps({"receipt": whole}).replace('"version"', '"version": 1, "version"')
    wrong = [json.dumps({"receipt": {**whole, "n_ctx": "x"}}), twice, '{"receipt": {}}']
    wrong.append(json.dumps({"receipt": {**whole, "content": None}}))
    headers = {"content-type": "application/json"}
    for body in wrong:
        reply = real.client.post("/v1/verify", content=body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_receipt")


@pytest.mark.model
def test_the_payload_log_has_receipts(real, tmp_path, until, monkeypatch):
    monkeypatch.setattr(real.endpoint, "payload_log", PayloadLog(tmp_path, real.endpoint))
    for stream in (False, True):
        reply = real.chat(max_tokens=8, stream=stream)
        assert "receipt" not in reply.text
    until(lambda: len(lines_of(tmp_path)) == 2, "two lines")
    for line in lines_of(tmp_path):
        [entry], n_answers = find_receipts([json.loads(line)])
        result = check(real, entry.document)
        assert (result["verdict"], n_answers) == ("verified", 1)
        assert [quote.text for quote in entry.quotes] == [result["text"]] != [""]


def test_an_answer_without_receipt_is_given_and_says_why(serve):
    live_server = serve(FakeEngine([["Hello"]]))
    for stream in (False, True):
        reply = live_server.chat(receipt=True, stream=stream)
        assert "recorded no tokens" in last_object(reply)["receipt"]["refused"]
        assert re.search("Hello", reply.text)


@pytest.mark.model
def test_a_check_ends_with_its_client_and_counts_in_the_queue(real, until, monkeypatch):
    whole = last_object(real.post(CHAT, {"messages": TURNS, "max_tokens": 4} | SAMPLED))
    cancelled, is_running = threading.Event(), threading.Event()

    def run(self):
        is_running.set()
        assert cancelled.wait(60)
        raise ReceiptError("the check was cancelled")

    monkeypatch.setattr(ReceiptCheck, "run", run)
    monkeypatch.setattr(ReceiptCheck, "cancel", lambda self: cancelled.set())
    with raw_http.connect(real.port) as client:
        client.sendall(raw_http.post({"receipt": whole["receipt"]}, path="/v1/verify"))
        assert is_running.wait(60)
        assert sum(real.endpoint.generation_counts.values()) == 1
    assert cancelled.wait(60)
    until(lambda: not real.endpoint.generation_counts and not real.endpoint.running, "the end")


@pytest.mark.model
def test_a_long_body_is_refused_before_it_is_sent(real):
    request = raw_http.post(b"", path="/v1/verify", length=5 << 20)
    assert raw_http.status(raw_http.exchange(real.port, request)) == 413
