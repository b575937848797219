"""Receipts over HTTP: in the last object of every API's answer, checked by POST /v1/verify."""

import json
import re
import socket
import threading

import pytest
from fake_engine import FakeEngine

from edgeinfer.cli.verbs.verify import find_receipts
from edgeinfer.errors import ReceiptError
from edgeinfer.receipts.verify import ReceiptCheck
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
FORMS = [(path, stream) for path in DIALECTS for stream in (False, True)]
FORMS.remove(("/infer", True))  # it does not stream


def last_object(reply):
    """The last JSON object of an answer, whole or streamed."""
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    return json.loads([line for line in lines if line.startswith("{")][-1])


def lines_of(folder):
    return "".join(path.read_text() for path in folder.iterdir()).splitlines()


def check(live_server, receipt):
    reply = live_server.client.post("/v1/verify", json={"receipt": receipt})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.model
@pytest.mark.parametrize(("path", "stream"), FORMS)
def test_each_dialect_s_answer_ends_with_a_receipt_that_verifies(real, path, stream):
    fields = DIALECTS[path] | ({} if path == "/infer" else {"stream": stream})
    if path.startswith("/api"):
        fields = fields | {"receipt": True, "options": fields["options"] | {"temperature": 0.8}}
    else:
        fields = fields | SAMPLED
    reply = real.client.post(path, json=fields)
    receipt = last_object(reply)["receipt"]
    assert receipt["sampling"]["seed"] is not None
    result = check(real, receipt)
    assert (result["verdict"], result["n_answer"]) == ("verified", 12)
    [entry], _ = find_receipts(
        json.loads(reply.text) if not fields.get("stream") else {"receipt": receipt}
    )
    if entry.quote:
        assert entry.quote.text == result["text"]
    else:
        assert fields.get("stream") or path in ("/v1/responses", "/v1/messages")
    receipt["content"]["answer"][3] ^= 1
    assert check(real, receipt)["verdict"] == "differs"

    without = real.client.post(path, json={k: v for k, v in fields.items() if k != "receipt"})
    assert "receipt" not in last_object(without)


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_a_receipt_each(real, stream):
    asked = {"messages": TURNS, "n": 4, "max_tokens": 10, "seed": 5, "stream": stream}
    receipts = last_object(real.client.post(CHAT, json=asked | SAMPLED))["receipts"]
    assert [receipt.get("index", 0) for receipt in receipts] == [0, 1, 2, 3]
    assert [check(real, receipt)["verdict"] for receipt in receipts] == ["verified"] * 4


@pytest.mark.model
def test_what_is_no_receipt_is_refused_in_words(real):
    receipt = last_object(real.client.post(CHAT, json={"messages": TURNS, "max_tokens": 4} | SAMPLED))
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
        [entry], n_answers = find_receipts(json.loads(line))
        result = check(real, entry.document)
        assert (result["verdict"], n_answers) == ("verified", 1)
        assert entry.quote.text == result["text"] != ""


def test_an_answer_without_receipt_is_given_and_says_why(serve):
    live_server = serve(FakeEngine([["Hello"]]))
    for stream in (False, True):
        reply = live_server.chat(receipt=True, stream=stream)
        assert "recorded no tokens" in last_object(reply)["receipt"]["refused"]
        assert re.search("Hello", reply.text)


@pytest.mark.model
def test_a_check_ends_with_its_client_and_counts_in_the_queue(real, until, monkeypatch):
    whole = last_object(real.client.post(CHAT, json={"messages": TURNS, "max_tokens": 4} | SAMPLED))
    cancelled, begun = threading.Event(), threading.Event()

    def run(self):
        begun.set()
        assert cancelled.wait(60)
        raise ReceiptError("the check was cancelled")

    monkeypatch.setattr(ReceiptCheck, "run", run)
    monkeypatch.setattr(ReceiptCheck, "cancel", lambda self: cancelled.set())
    address = real.client.base_url
    body = json.dumps({"receipt": whole["receipt"]}).encode()
    with socket.create_connection((address.host, address.port)) as client:
        head = f"POST /v1/verify HTTP/1.1\r\nhost: {address.host}\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert begun.wait(60)
        assert sum(real.endpoint.generation_counts.values()) == 1
    assert cancelled.wait(60)
    until(lambda: not real.endpoint.generation_counts and not real.endpoint.running, "the end")


@pytest.mark.model
def test_a_long_body_is_refused_before_it_is_parsed(real):
    reply = real.client.post("/v1/verify", json={"receipt": {"program": "x" * (5 << 20)}})
    assert reply.status_code == 413
