"""The payload log: what it holds, what it cuts out, and that nobody's words are left under --redact."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.events import (
    Finished,
    Logprob,
    ReasoningDelta,
    TextDelta,
    Timings,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from edgeinfer.runtime.fake import FakeEngine, Gate
from edgeinfer.server.app import OPERATIONS
from edgeinfer.server.payload_log import PayloadLog

#: Words that no field, type or number contains.
WORD = st.text("qxzjvkwy", min_size=6, max_size=12)

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/tokenize",
    "/v1/batches",
    "/apply-template",
    "/infer",
    "/infill",
    "/completion",
    "/reranking",
    "/v1/responses/input_tokens",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/api/pull",
    "/api/create",
    "/api/copy",
    "/v1/models/{id}/recall",
    "/v1/models/{id}/snapshot",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)


def _lines(path: Path, until, count: int) -> list[dict]:
    """The log's lines; a line is written after the answer's last byte, so it may come a moment later."""
    until(lambda: path.exists() and path.read_text().count("\n") >= count, f"{count} lines")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_payloads_are_written_only_when_asked_with_secrets_cut_out(serve, tmp_path, until):
    path = tmp_path / "payloads.jsonl"
    here = serve(FakeEngine([["answer sk-abcdefghijklmnopqrst"]]), payloads=PayloadLog(path))
    here.client.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "my key is ei-abcdefghijklmnopqrstuvwxyz"}],
            "chat_template_kwargs": {"ei-abcdefghijklmnopqrstuvwxyz": 1},
        },
        headers={"authorization": "Bearer very-secret-key-0123456789"},
    )
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
    gate = Gate(threading.Event())
    here = serve(FakeEngine([["one ", gate, "two"]]), payloads=PayloadLog(path))
    asking = threading.Thread(target=lambda: here.chat(stream=True))
    asking.start()
    assert gate.reached.wait(20)
    here.drain()
    here.drain()
    asking.join(30)
    (line,) = _lines(path, until, 1)
    assert line["answer"]["choices"][0]["message"]["content"] == "one "
    assert line["outcome"] == "shutting_down"


def test_what_is_redacted_keeps_its_shape(serve, tmp_path, until):
    path = tmp_path / "p"
    here = serve(FakeEngine([["Hello"]]), payloads=PayloadLog(path, redact=True))
    here.chat(max_tokens=7, stop=["a", "bc"], logit_bias={"5": 1}, tool_choice="none")
    (line,) = _lines(path, until, 1)
    request = line["request"]
    assert request["messages"] == [{"role": "user", "content": "<2 characters>"}]
    assert (request["max_tokens"], request["tool_choice"]) == (7, "none")
    assert request["stop"] == ["<1 characters>", "<2 characters>"]
    assert request["logit_bias"] == "<1 fields>"
    (choice,) = line["answer"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "<5 characters>"}
    assert choice["finish_reason"] == "stop"
    assert line["answer"]["usage"]["completion_tokens"] == 1


@st.composite
def _asked(draw: st.DrawFn) -> tuple[str, Any, list[str]]:
    """A path, a body for it, and the words that are in it."""
    words: list[str] = []

    def word() -> str:
        words.append(draw(WORD))
        return words[-1]

    def schema() -> dict[str, Any]:
        return {"type": "object", "description": word(), "properties": {word(): {"enum": [word()]}}}

    function = {"name": word(), "description": word(), "parameters": schema()}
    call = {"id": word(), "function": {"name": word(), "arguments": json.dumps({word(): word()})}}
    turns = [
        {"role": "system", "content": word()},
        {"role": "user", "content": [{"type": "text", "text": word()}], "name": word()},
        {"role": "assistant", "content": None, "reasoning_content": word(), "tool_calls": [call]},
        {"role": "tool", "content": word(), "tool_call_id": word()},
    ]
    stream = {"stream": draw(st.booleans())}
    bodies = {
        "/v1/chat/completions": {
            "messages": turns,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": function["name"]}},
            "stop": [word()],
            "user": word(),
            "chat_template_kwargs": {word(): word()},
            "logprobs": True,
            "top_logprobs": 2,
            **stream,
        },
        "/v1/completions": {"prompt": [word()], "stop": word(), "user": word(), **stream},
        "/v1/responses": {
            "input": [{"role": "user", "content": word()}],
            "instructions": word(),
            "user": word(),
            **stream,
        },
        "/v1/messages": {
            "max_tokens": 9,
            "system": word(),
            "messages": [{"role": "user", "content": word()}],
            "tools": [{"name": word(), "description": word(), "input_schema": schema()}],
            "stop_sequences": [word()],
            "metadata": {"user_id": word()},
            **stream,
        },
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": word()}]},
        "/v1/embeddings": {"input": [word(), word()], "user": word()},
        "/v1/rerank": {
            "query": word(),
            "documents": [word(), {"text": word()}],
            "return_documents": True,
        },
        "/tokenize": {"prompt": word(), "return_token_strs": True},
        "/apply-template": {"messages": turns[:2], "tools": [{"function": function}]},
        "/infer": {"prompt": word(), "system": word(), "stop": [word()]},
        "/completion": {"prompt": word(), "stop": [word()], "n_probs": 2, **stream},
        "/reranking": {"query": word(), "documents": [word()]},
        "/v1/responses/input_tokens": {"input": word(), "instructions": word()},
        "/infill": {
            "input_prefix": word(),
            "input_suffix": word(),
            "input_extra": [{"filename": word(), "text": word()}],
            "prompt": word(),
            "stop": [word()],
            **stream,
        },
        "/api/chat": {
            "model": "fake",
            "messages": _ollama_turns(word),
            "tools": [{"type": "function", "function": function}],
            "options": {"stop": [word()]},
            "format": schema(),
            "logprobs": True,
            **stream,
        },
        "/api/generate": {
            "model": "fake",
            "prompt": word(),
            "system": word(),
            "suffix": draw(st.sampled_from(["", word()])),
            **stream,
        },
        "/api/embed": {"model": "fake", "input": [word(), word()]},
        "/api/embeddings": {"model": "fake", "prompt": word()},
        "/api/show": {"model": "fake"},
        "/api/pull": {"model": word()},
        "/api/create": {"model": word(), "from": word()},
        "/api/copy": {"source": word(), "destination": word()},
        "/v1/models/{id}/recall": {"agent": word(), "folder": word()},
        "/v1/models/{id}/snapshot": {"name": word()},
        "/v1/batches": {
            "input_file_id": word(),
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {word(): word()},
        },
        "/v1/load_lora_adapter": {"lora_name": word(), "lora_path": word()},
        "/v1/unload_lora_adapter": {"lora_name": word()},
    }
    path = draw(st.sampled_from(ROUTES))
    body = bodies[path]
    broken = draw(st.sampled_from(["no", "no", "no", "unknown field", "no such model", "no JSON"]))
    if broken == "unknown field":
        body = {**body, word(): word()}
    elif broken == "no such model":
        body = {**body, "model": word()}
    raw = json.dumps(body)
    return path, raw[:-1] if broken == "no JSON" else raw, words


def _ollama_turns(word: Callable[[], str]) -> list[dict[str, Any]]:
    call = {"function": {"name": word(), "arguments": {word(): word()}}}
    return [
        {"role": "user", "content": word()},
        {"role": "assistant", "content": "", "thinking": word(), "tool_calls": [call]},
        {"role": "tool", "tool_name": word(), "content": word()},
    ]


def _answer(words: list[str]) -> list[Any]:
    """A script that says every word in every way that an answer has."""
    pieces = [Logprob(7, word.encode(), -0.5) for word in words]
    script: list[Any] = [
        ReasoningDelta(words[0]),
        TextDelta(words[1], (TokenLogprobs(pieces[1], tuple(pieces)),)),
    ]
    script.append(ToolCallDelta(index=0, id=words[2], name=words[3], arguments=f'{{"{words[4]}":'))
    script.append(ToolCallDelta(index=0, arguments=f'"{words[5]}"}}'))
    end = Finished(reason="stop", usage=Usage(), timings=Timings(), stop_sequence=words[0])
    return [*script, end]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=_asked(), said=st.lists(WORD, min_size=6, max_size=6))
def test_no_word_of_a_request_or_an_answer_is_in_a_redacted_log(redacting, asked, said):
    here, path, engine, until = redacting
    engine.said = said
    path.unlink(missing_ok=True)
    route, body, words = asked
    answer = here.client.post(
        route.replace("{id}", "fake"),
        content=body,
        headers={"content-type": "application/json", "x-request-id": words[0]},
    )
    (line,) = _lines(path, until, 1)
    assert line["status"] == answer.status_code
    written = path.read_text()
    for word in (*words, *said):
        assert word not in written
    if answer.status_code == 200:
        assert isinstance(line["request"], dict)
        assert isinstance(line["answer"], dict), line


class _Speaker(FakeEngine):
    """Answers every request with the words it was given last."""

    def __init__(self) -> None:
        super().__init__(lambda request: _answer(self.said))
        self.said: list[str] = []


@pytest.fixture
def redacting(serve, tmp_path, until):
    path = tmp_path / "redacted.jsonl"
    engine = _Speaker()
    return serve(engine, payloads=PayloadLog(path, redact=True)), path, engine, until


def test_the_property_reaches_every_route_that_reads_a_text():
    asked = {operation.path for operation in OPERATIONS if operation.body is not None}
    numbers_alone = {"/detokenize", "/lora-adapters"}
    assert asked - set(ROUTES) == {"/api/delete", *numbers_alone}


def test_token_ids_are_words_in_another_spelling(serve, tmp_path, until):
    path = tmp_path / "p"
    here = serve(FakeEngine(), payloads=PayloadLog(path, redact=True))
    here.client.post("/detokenize", json={"tokens": [104, 105]})
    here.client.post("/v1/completions", json={"prompt": [104, 105]})
    here.client.post("/tokenize", json={"content": "hi", "with_pieces": True})
    back, completed, pieces = _lines(path, until, 3)
    assert back["request"]["tokens"] == "<2 numbers>"
    assert completed["request"]["prompt"] == "<2 numbers>"
    assert pieces["answer"]["tokens"] == [{"id": "<a number>", "piece": "<1 characters>"}] * 2


@pytest.mark.parametrize(
    "given", ["my-name-is-ada", "req_0123456789abcdef01234567", "9b2f3c0e-5b57-4b7c-9d7a-0c3d5a5b1f00"]
)
def test_clients_id_is_text_under_redaction(serve, tmp_path, until, given):
    path = tmp_path / "p"
    here = serve(FakeEngine(), payloads=PayloadLog(path, redact=True))
    here.client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": given})
    (line,) = _lines(path, until, 1)
    assert line["request_id"].startswith("sha256:") is given.startswith("my")
    assert ("ada" in path.read_text()) is False


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
        log.write({"request_id": str(number)}, None, json.dumps({"pad": "x" * 60}).encode())
    files = sorted(f.name for f in tmp_path.iterdir())
    assert files == ["p", "p.1", "p.2"]
    assert all(f.stat().st_size <= 300 for f in tmp_path.iterdir())
    assert '"19"' in (tmp_path / "p").read_text()


def test_a_payload_log_that_cannot_be_written_does_not_stop_serving(serve, tmp_path, until):
    here = serve(FakeEngine(), payloads=PayloadLog(tmp_path / "no" / "such" / "folder"))
    assert here.chat().status_code == 200
    until(lambda: '"event":"payload-log"' in here.log.getvalue(), "the log to say so")
