"""/v1/files and /v1/batches, driven by OpenAI's own client."""

import json
import os
import time
import tracemalloc

import httpx2
import openai
import pytest
from fake_engine import FakeEngine, StepGate

from edgeinfer.server import batches
from edgeinfer.server.app import OPERATIONS
from edgeinfer.server.batches import Batches
from edgeinfer.server.guards.keys import Keys
from edgeinfer.server.guards.security import Gate
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_body import read_form

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
    with pytest.raises(openai.APIStatusError) as full:
        client.files.create(file=("b", b"x" * 1000), purpose="batch")
    assert full.value.status_code == 413
    past = time.time() - batches.KEPT_S - 1
    for path in (tmp_path / "batches").glob("*/*"):
        os.utime(path, (past, past))
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert client.files.create(file=("b", b"x" * 1000), purpose="batch").id


def test_batch_of_a_process_that_ended_has_failed(here, until, tmp_path):
    client = _client(here)
    batch = _ended(client, _begin(client, _jsonl(_line("q"))), until)
    (record,) = tmp_path.glob(f"batches/*/{batch.id}.json")
    record.write_text(record.read_text().replace('"status":"completed"', '"status":"in_progress"'))
    here.endpoint.batches = Batches(tmp_path / "batches")
    assert client.batches.retrieve(batch.id).status == "failed"


def test_endpoint_without_a_folder_keeps_no_files(serve):
    answer = serve(FakeEngine()).client.get("/v1/files/file-" + "0" * 24)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "files_not_kept")


def test_lists_are_read_page_by_page(here, until):
    client = _client(here)
    batches_here = [_ended(client, _begin(client, _jsonl(_line("q"))), until) for _ in range(3)]
    assert {batch.id for batch in client.batches.list(limit=2)} == {batch.id for batch in batches_here}
    files = list(client.files.list(limit=2))
    assert {file.id for file in files} >= {batch.input_file_id for batch in batches_here}
    assert len(files) == 6
    assert {file.purpose for file in client.files.list(purpose="batch_output")} == {"batch_output"}


def test_files_are_of_one_user_alone(here, until, tmp_path):
    _ended(_client(here), _begin(_client(here), _jsonl(_line("q"))), until)
    files = [path for path in (tmp_path / "batches").rglob("*") if path.is_file()]
    assert len(files) == 5
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_number_of_files_is_bounded(here, monkeypatch):
    monkeypatch.setattr(batches, "MOST_FILES", 2)
    client = _client(here)
    for _ in range(2):
        client.files.create(file=("a", b"x"), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="delete some with DELETE"):
        client.files.create(file=("a", b"x"), purpose="batch")


def test_uploads_at_once_do_not_pass_the_limit_together(here, monkeypatch):
    monkeypatch.setattr(batches, "MOST_BYTES", 25_000)
    client = _client(here)

    def upload(_: int) -> int:
        return client.files.with_raw_response.create(
            file=("a", b"x" * 10_000), purpose="batch"
        ).status_code

    codes = []
    for asking in [here.pool.submit(upload, n) for n in range(12)]:
        try:
            codes.append(asking.result())
        except openai.APIStatusError as error:
            codes.append(error.status_code)
    assert sorted(codes) == [200] * 2 + [413] * 10


def test_answers_count_as_files(serve, tmp_path, until, monkeypatch):
    here = serve(FakeEngine(lambda request: ["x" * 2000]), batches=Batches(tmp_path / "batches"))
    monkeypatch.setattr(batches, "MOST_BYTES", 12_000)
    client = _client(here)
    ended = _ended(client, _begin(client, _jsonl(*(_line(str(n)) for n in range(20)))), until)
    assert ended.status == "failed"
    assert 0 < ended.request_counts.completed < 6


def test_refused_upload_ends_no_running_batch(serve, tmp_path, until, monkeypatch):
    gate = StepGate()
    here = serve(FakeEngine([[gate, "x"]]), batches=Batches(tmp_path / "batches"))
    monkeypatch.setattr(batches, "MOST_BYTES", 12_000)
    client = _client(here)
    spare = client.files.create(file=("a", b"x" * 11_000), purpose="batch")
    batch = _begin(client, _jsonl(_line("q")))
    with pytest.raises(openai.APIStatusError, match="delete some with DELETE"):
        client.files.create(file=("b", b"x" * 11_000), purpose="batch")
    client.files.delete(spare.id)
    gate.opened.set()
    assert _ended(client, batch, until).status == "completed"


def test_answers_are_no_input_of_a_batch(here, until):
    client = _client(here)
    batch = _ended(client, _begin(client, _jsonl(_line("q"))), until)
    with pytest.raises(openai.BadRequestError, match="not an uploaded file"):
        client.batches.create(input_file_id=batch.output_file_id, endpoint=URL, completion_window="24h")


def test_large_answers_are_sent_from_the_disk(here):
    folder, size = here.endpoint.batches.folder(""), 64 << 20
    record = batches.new_record(f"file-{7:024x}", size, "a", "batch_output")
    folder.write(record)
    with folder.open_output(record.id) as file:
        file.truncate(size)
    tracemalloc.start()
    try:
        with here.client.stream("GET", f"/v1/files/{record.id}/content") as reply:
            assert sum(map(len, reply.iter_raw())) == size
        assert tracemalloc.get_traced_memory()[1] < size // 4
    finally:
        tracemalloc.stop()


def test_files_that_come_and_go_do_not_stop_an_upload(tmp_path, monkeypatch):
    folder = Batches(tmp_path / "batches").folder("")
    record = folder.add(b"x", "a")

    def iterdir(path):
        names = list(os.scandir(path))
        folder.delete(record.id)
        return [path / entry.name for entry in names]

    monkeypatch.setattr("pathlib.Path.iterdir", iterdir)
    assert folder.add(b"y", "b").bytes == 1


def test_key_does_not_take_all_batches(serve, tmp_path):
    keys = ["one-key-of-many", "another-key-here"]
    engine = FakeEngine([[StepGate()]])
    here = serve(engine, keys=keys, batches=Batches(tmp_path / "batches"))
    mine, other = (_client(here, key) for key in keys)
    for _ in range(4):
        _begin(mine, _jsonl(_line("q")))
    with pytest.raises(openai.RateLimitError, match="of this key"):
        _begin(mine, _jsonl(_line("q")))
    assert _begin(other, _jsonl(_line("q"))).status == "in_progress"


ADMINS_ALONE = [
    ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_label": "sandbox"}]}, 403),
    (URL, {"messages": [{"role": "user", "content": "x"}], "keep_alive": 0}, 200),
]


@pytest.mark.parametrize(("url", "body", "status"), ADMINS_ALONE, ids=["tools", "unload"])
def test_batch_may_do_what_its_caller_may(serve, tmp_path, until, url, body, status):
    keys = ["one-key-of-many", "another-key-here"]
    here = serve(FakeEngine(), keys=keys, batches=Batches(tmp_path / "batches"))
    client = _client(here, keys[1])
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    file = client.files.create(file=("in.jsonl", _jsonl(line)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={}
    )
    (answer,) = _answers(client, _ended(client, batch, until)).values()
    assert answer["status_code"] == status
    assert here.endpoint.models.is_loaded("fake")


def _as_other_user(
    another_user, here, path: str, method: str = "", **body: object
) -> tuple[int, bytes]:
    """Ask as another user: one request in each connection, which is made as that user."""
    with another_user(), httpx2.Client(base_url=here.url, timeout=30) as client:
        reply = client.request(method or ("POST" if body else "GET"), path, **body)
        return reply.status_code, reply.content


def test_users_of_one_machine_share_no_file_batch_or_tool(serve, tmp_path, until, another_user):
    gate = Gate(keys=Keys([]), owner=os.getuid(), any_user=True)
    here = serve(FakeEngine(), gate=gate, batches=Batches(tmp_path / "batches"), store_responses=True)
    client = _client(here)
    mine = _ended(client, _begin(client, _jsonl(_line("q"))), until)
    kept = here.client.post("/v1/responses", json={"input": "x"}).json()["id"]
    paths = [f"/v1/files/{mine.input_file_id}", f"/v1/files/{mine.output_file_id}/content"]
    paths += [f"/v1/batches/{mine.id}", f"/v1/responses/{kept}"]
    for path in paths:
        assert here.client.get(path).status_code == 200, path
        assert _as_other_user(another_user, here, path)[0] == 404, path
    ids = [mine.input_file_id, mine.output_file_id, mine.id, kept]
    for operation in (
        o for o in OPERATIONS if "{id}" in o.path and not o.path.startswith("/v1/models")
    ):
        for name in ids:
            path = operation.path.replace("{id}", name)
            status, _ = _as_other_user(another_user, here, path, operation.method)
            assert status in (400, 403, 404), (operation.method, path)
    for path in paths:
        assert here.client.get(path).status_code == 200, path
    for path in ("/v1/files", "/v1/batches"):
        assert json.loads(_as_other_user(another_user, here, path)[1])["data"] == []
    assert json.loads(_as_other_user(another_user, here, "/slots")[1])["slots"] == []

    url, tools = "/v1/responses", [{"type": "mcp", "server_label": "sandbox"}]
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"input": "x", "tools": tools}}
    form = {"files": {"file": ("in.jsonl", _jsonl(line))}, "data": {"purpose": "batch"}}
    status, reply = _as_other_user(another_user, here, "/v1/files", **form)
    assert status == 200
    asked = {"input_file_id": json.loads(reply)["id"], "endpoint": url, "completion_window": "24h"}
    assert client.files.list().data[0].id != asked["input_file_id"]
    theirs = json.loads(_as_other_user(another_user, here, "/v1/batches", json=asked)[1])

    def ended() -> bool:
        reply = _as_other_user(another_user, here, f"/v1/batches/{theirs['id']}")[1]
        return json.loads(reply)["status"] == "completed"

    until(ended, "the batch to end")
    path = f"/v1/files/{theirs['output_file_id']}/content"
    answer = json.loads(_as_other_user(another_user, here, path)[1])["response"]
    assert (answer["status_code"], answer["body"]["error"]["code"]) == (403, "admin_only")
    assert here.endpoint.tools is None


def test_prefixes_of_two_users_are_salted(serve, another_user):
    engine = FakeEngine()
    here = serve(engine, gate=Gate(keys=Keys([]), owner=os.getuid(), any_user=True))
    body = {"messages": [{"role": "user", "content": "x"}]}
    here.client.post(URL, json=body)
    _as_other_user(another_user, here, URL, json=body)
    mine, theirs = (request.cache_salt for request in engine.requests)
    assert not mine
    assert theirs


def test_request_without_a_connection_is_nobodys(tmp_path):
    gate = Gate(keys=Keys([]), owner=os.getuid())
    with pytest.raises(Problem, match="user"):
        gate.caller("", None)


def _form(body: bytes, boundary: str = "a") -> dict[str, tuple[bytes, str]]:
    return read_form(f"multipart/form-data; boundary={boundary}", body)


def test_boundary_counts_at_the_start_of_a_line_alone():
    head = b'content-disposition: form-data; name="%b"\r\n\r\n'
    content = b"one--a\r\n--ab\r\n --a\r\ntwo\n--a\n"
    body = b"--a\r\n" + head % b"x" + content + b"\r\n--a \r\n" + head % b"y" + b"z\r\n--a--\r\n"
    assert _form(body) == {"x": (content, ""), "y": (b"z", "")}
    assert _form(b"--a--a" * 1000) == {}
    assert _form(b"") == _form(b"--a--") == {}


def test_form_has_a_bounded_number_of_parts(here):
    part = b"\r\n--a\r\n" * 100_000
    with pytest.raises(Problem, match="16 parts"):
        _form(part)
    headers = {"content-type": "multipart/form-data; boundary=a"}
    reply = here.client.post("/v1/files", content=part, headers=headers)
    assert reply.status_code == 400


def test_file_survives_the_form_byte_by_byte(here):
    content = bytes(range(256)) * 40 + b"\r\n--\r\n--a--\r\n"
    client = _client(here)
    file = client.files.create(file=("a", content), purpose="batch")
    assert client.files.content(file.id).content == content
