"""/v1/files and /v1/batches, driven by OpenAI's own client."""

import json
import os
import time

import openai
import pytest
from fake_engine import FakeEngine, StepGate

from edgeinfer.server import batches
from edgeinfer.server.batches import Batches

URL = "/v1/chat/completions"


def _line(name: str, **fields: object) -> dict[str, object]:
    body = {"model": "fake", "messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "method": "POST", "url": URL, "body": body | fields}


def _jsonl(*lines: object) -> bytes:
    return b"\n".join(json.dumps(line).encode() for line in lines) + b"\n"


def _client(here, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{here.url}/v1", api_key=key, max_retries=0)


def _begin(client: openai.OpenAI, content: bytes) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h", metadata={"a": "b"}
    )


def _answers(client: openai.OpenAI, batch: openai.types.Batch) -> dict[str, dict[str, object]]:
    lines = client.files.content(batch.output_file_id).text.splitlines()
    return {line["custom_id"]: line["response"] for line in map(json.loads, lines)}


def _ended(client: openai.OpenAI, batch: openai.types.Batch, until) -> openai.types.Batch:
    until(lambda: client.batches.retrieve(batch.id).status != "in_progress", "the batch to end")
    return client.batches.retrieve(batch.id)


@pytest.fixture
def here(serve, tmp_path):
    engine = FakeEngine(lambda request: [f"<{request.messages[-1].content}>"])
    return serve(engine, batches=Batches(tmp_path / "batches"))


def test_batch_goes_from_upload_to_answers(here, until):
    client = _client(here)
    batch = _begin(client, _jsonl(*(_line(f"q{n}") for n in range(9)), _line("bad", temperature=9)))
    assert (batch.metadata, batch.request_counts.total) == ({"a": "b"}, 10)
    ended = _ended(client, batch, until)
    assert ended.status == "completed"
    assert (ended.request_counts.completed, ended.request_counts.failed) == (9, 1)
    answers = _answers(client, ended)
    assert answers["q3"]["body"]["choices"][0]["message"]["content"] == "<q3>"
    assert answers["bad"]["status_code"] == 400
    assert client.files.retrieve(ended.output_file_id).purpose == "batch_output"
    client.files.delete(ended.output_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(ended.output_file_id)


def test_cancelled_batch_keeps_what_it_has_answered(serve, tmp_path, until):
    gate = StepGate()
    engine = FakeEngine(lambda request: [gate] if request.messages[-1].content != "first" else ["done"])
    client = _client(serve(engine, batches=Batches(tmp_path / "batches")))
    batch = _begin(client, _jsonl(_line("first"), *(_line(str(n)) for n in range(20))))
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, "one answer")
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert list(_answers(client, batch)) == ["first"]
    assert client.batches.retrieve(batch.id).cancelled_at


@pytest.mark.parametrize(
    "content",
    [b"not json\n", _jsonl(_line("a") | {"url": "/v1/completions"})],
    ids=["text", "another-url"],
)
def test_wrong_line_is_named_before_anything_runs(here, content):
    with pytest.raises(openai.BadRequestError, match=r"Line \d: "):
        _begin(_client(here), content)


@pytest.mark.parametrize("name", ["file-" + "0" * 24, "../../etc/passwd", "file-x"])
def test_unknown_names_are_not_found(here, name):
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        assert here.client.get(path).status_code == 404


def test_form_without_a_file_is_refused(here):
    client = _client(here)
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("a", b"x"), purpose="assistants")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("a", b""), purpose="batch")
    assert here.client.post("/v1/files", json={}).json()["error"]["param"] == "purpose"


def test_key_sees_its_own_files_alone_and_its_batch_asks_with_it(serve, tmp_path, until):
    keys = ["one-key-of-many", "another-key-here"]
    here = serve(FakeEngine(lambda request: ["a"]), keys=keys, batches=Batches(tmp_path / "batches"))
    mine, other = (_client(here, key) for key in keys)
    batch = _begin(mine, _jsonl(_line("q")))
    assert _ended(mine, batch, until).request_counts.completed == 1
    for ask in (
        lambda: other.batches.retrieve(batch.id),
        lambda: other.files.content(batch.output_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


def test_files_are_bounded_and_expire(here, tmp_path, monkeypatch):
    client = _client(here)
    file = client.files.create(file=("a", b"x" * 1000), purpose="batch")
    monkeypatch.setattr(batches, "MOST_BYTES", 1500)
    monkeypatch.setattr("edgeinfer.server.openai.routes.MOST_BYTES", 1500)
    with pytest.raises(openai.APIStatusError) as full:
        client.files.create(file=("b", b"x" * 1000), purpose="batch")
    assert full.value.status_code == 413
    past = time.time() - batches.KEPT_S - 1
    for path in (tmp_path / "batches").glob("*/*"):
        os.utime(path, (past, past))
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert client.files.create(file=("b", b"x" * 1000), purpose="batch").id


def test_batch_of_a_process_that_ended_has_failed(here, until):
    client = _client(here)
    batch = _ended(client, _begin(client, _jsonl(_line("q"))), until)
    folder = here.endpoint.batches.folder("")
    record = folder / f"{batch.id}.json"
    record.write_text(record.read_text().replace('"status":"completed"', '"status":"in_progress"'))
    here.endpoint.batches = Batches(folder.parent)
    assert client.batches.retrieve(batch.id).status == "failed"


def test_endpoint_without_a_folder_keeps_no_files(serve):
    answer = serve(FakeEngine()).client.get("/v1/files/file-" + "0" * 24)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "files_not_kept")
