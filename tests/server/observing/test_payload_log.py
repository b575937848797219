"""The payload log: what it holds, and what it cuts out."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from edgeinfer.runtime.fake import FakeEngine, StepGate
from edgeinfer.server.payload_log import PayloadLog


def _lines(path: Path, until, count: int) -> list[dict]:
    """The log's lines; a line is written after the answer's last byte, so it may come a moment later."""
    until(lambda: path.exists() and path.read_text().count("\n") >= count, f"{count} lines")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_payloads_are_written_only_when_asked_with_secrets_cut_out(serve, tmp_path, until):
    path = tmp_path / "payloads.jsonl"
    here = serve(FakeEngine([["answer sk-abcdefghijklmnopqrst"]]), payloads=PayloadLog(path))
    key = "ei-abcdefghijklmnopqrstuvwxyz"
    turns = [{"role": "user", "content": f"my key is {key}"}]
    here.client.headers["authorization"] = "Bearer very-secret-key-0123456789"
    here.chat(messages=turns, chat_template_kwargs={key: 1})
    here.chat(stream=True)
    whole, streamed = _lines(path, until, 2)
    assert whole["request"]["messages"][0]["content"] == "my key is <redacted>"
    assert whole["request"]["chat_template_kwargs"] == {"<redacted>": 1}
    for line in (whole, streamed):
        assert line["answer"]["choices"][0]["message"]["content"] == "answer <redacted>"
        assert (line["status"], line["model"], line["outcome"]) == (200, "fake", "stop")
    assert "very-secret" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("body", "outcome", "request_shown"),
    [
        (b'{"colour": 1}', "unknown_parameter", {"colour": 1}),
        (b'{"messages"', "invalid_json", '{"messages"'),
    ],
)
def test_a_request_that_is_refused_is_written_with_its_error(
    serve, tmp_path, until, body, outcome, request_shown
):
    path = tmp_path / "p"
    here = serve(FakeEngine(), payloads=PayloadLog(path), refuse_unknown=True)
    here.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    (line,) = _lines(path, until, 1)
    assert (line["status"], line["outcome"], line["request"]) == (400, outcome, request_shown)
    assert line["answer"]["error"]["code"] == outcome


def test_a_stream_that_is_cut_leaves_what_was_said(serve, tmp_path, until):
    path = tmp_path / "p"
    gate = StepGate()
    here = serve(FakeEngine([["one ", gate, "two"]]), payloads=PayloadLog(path))
    asking = here.begin(gate, stream=True)
    here.drain()
    here.drain()
    asking.result(30)
    (line,) = _lines(path, until, 1)
    assert line["answer"]["choices"][0]["message"]["content"] == "one "
    assert line["outcome"] == "shutting_down"


@pytest.mark.parametrize(
    "secret",
    [
        "glpat-abcdefghij0123456789",
        "xoxb-123456789012-abcdefghijkl",
        "AIzaSyA0123456789abcdefghijklmnopqrstuvw",
        "github_pat_11ABCDEFG0abcdefghijkl",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIEpAIBAAKCAQEA",
        "postgres://ada@host/db?password=hunter2xyz",
        'api_key: "0123456789"',
    ],
)
def test_secrets_of_many_shapes_are_cut_out(tmp_path, secret):
    log = PayloadLog(tmp_path / "p")
    log.write({"request_id": "r"}, json.dumps({"text": f"It is {secret} here"}).encode(), None)
    written = (tmp_path / "p").read_text()
    assert "<redacted>" in written
    for part in ("abcdefghij", "hunter2", "MIIE", "dozjg", "0123456789"):
        assert part not in written


def test_payloads_rotate_and_only_so_many_are_kept(tmp_path):
    log = PayloadLog(tmp_path / "p", max_bytes=300, keep=2)
    for number in range(20):
        log.write({"request_id": str(number)}, b"{}", json.dumps({"pad": "x" * 60}).encode())
    files = sorted(f.name for f in tmp_path.iterdir())
    assert files == ["p", "p.1", "p.2"]
    assert all(f.stat().st_size <= 300 for f in tmp_path.iterdir())
    assert '"19"' in (tmp_path / "p").read_text()


def test_a_payload_log_that_cannot_be_written_does_not_stop_serving(serve, tmp_path, until):
    here = serve(FakeEngine(), payloads=PayloadLog(tmp_path / "no" / "such" / "folder"))
    assert here.chat().status_code == 200
    until(lambda: '"event":"payload-log"' in here.log.getvalue(), "the log to say so")
