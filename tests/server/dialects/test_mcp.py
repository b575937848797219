"""The endpoint as an MCP server, before the official client over both transports, and hostile ones."""

import asyncio
import json
import os
import subprocess
import sys

import httpx2
import msgspec
import pytest
from fake_engine import DEFAULT_INFO, FakeEngine, StepGate
from other_processes import wait_until

from edgeinfer.config.config_file import config_path
from edgeinfer.errors import EngineError
from edgeinfer.server.limits import Limits
from tests.server.conftest import with_page

mcp = pytest.importorskip("mcp")

OURS = ["ask", "embed", "search_conversations", "read_document"]


@pytest.fixture
def gate():
    """Where an answer to "wait" waits."""
    return StepGate()


@pytest.fixture
def page(serve, gate):
    def script(request):
        if request.messages[-1].content == "fail":
            return (EngineError("out of cells"),)
        return ("a", gate, "b") if request.messages[-1].content == "wait" else ("It is ", "bread.")

    return with_page(serve(FakeEngine(script)))


@pytest.fixture
def stdio(page):
    """The parameters of `edgeinfer mcp`, which finds the endpoint of `page`."""
    config_path().parent.mkdir(parents=True, exist_ok=True)
    config_path().write_text(f"[serve]\nport = {page.port}\n")
    words = ["-m", "edgeinfer", "mcp"]
    return mcp.StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))


@pytest.fixture(params=["http", pytest.param("stdio", marks=pytest.mark.slow)])
def where(request, page):
    """Return the address, or the command, that the official client connects to."""
    return f"{page.url}/mcp" if request.param == "http" else request.getfixturevalue("stdio")


def used(where, work):
    """Return what `work(client)` returns."""

    async def using():
        async with mcp.Client(where, mode="legacy") as client:
            return await asyncio.wait_for(work(client), 60)

    return asyncio.run(using())


def test_official_client_uses_every_tool(where, page, tmp_path):
    (tmp_path / "plan.md").write_text("Buy bread.")

    async def work(client):
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == OURS
        assert all(tool.description and tool.input_schema["type"] == "object" for tool in tools)
        path = str(tmp_path / "plan.md")
        return [
            await client.call_tool("read_document", {"path": path}),
            await client.call_tool(
                "ask", {"question": "What is it?", "document": path, "max_tokens": 9}
            ),
            await client.call_tool("embed", {"texts": ["a", "b"]}),
            await client.call_tool("search_conversations", {"words": "nothing"}),
        ]

    read, answer, vectors, found = used(where, work)
    assert "plan.md in the background" in read.content[0].text
    assert answer.content[0].text == "It is bread."
    assert len(vectors.structured_content["embeddings"]) == 2
    assert found.structured_content == {"conversations": []}
    engine = page.endpoint.models.engines()[0][1]
    asked = engine.requests[-1]
    assert asked.max_tokens == 9
    wait_until(lambda: engine.read, "the document to be read")
    prefix, prompt = engine.read[-1].prompt, engine.tokenize_chat(asked)
    assert list(prefix) == prompt[: len(prefix)]
    assert "Buy bread." in engine.detokenize(prefix).decode()


def test_official_client_of_today_negotiates(where):
    async def using():
        async with mcp.Client(where) as client:
            return [tool.name for tool in (await client.list_tools()).tools]

    assert asyncio.run(using()) == OURS


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("ask", {}, "missing required field `question`"),
        ("ask", {"question": "x", "modle": "y"}, "unknown field `modle`"),
        ("ask", {"question": "x", "model": "nobody/none"}, "nobody/none"),
        ("ask", {"question": "x", "document": "plan.md"}, "not an absolute path"),
        ("ask", {"question": "x", "document": "~nobodyx/x"}, "home directory"),
        ("read_document", {"path": "~nobodyx/x"}, "home directory"),
        ("read_document", {"path": "~/.ssh/id_rsa"}, "is hidden"),
        ("read_document", {"path": "/proc/self/../../.ssh"}, "is hidden"),
        ("ask", {"question": "fail"}, "out of cells"),
        ("read_document", {"path": "/nowhere"}, "No such file"),
        ("read_document", {"path": "/a\0b"}, "null"),
        ("read_document", {"path": "/dev/zero"}, "no file or folder"),
        ("embed", {"texts": []}, "length"),
        ("search_conversations", {"words": "a", "limit": 1000}, "60"),
    ],
)
def test_failures_are_results(page, tool, arguments, said):
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    message["params"] = {"name": tool, "arguments": arguments}
    result = page.client.post("/mcp", json=message).json()["result"]
    assert result["isError"]
    assert said in result["content"][0]["text"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, -32700),
        (b"{", 400, -32700),
        pytest.param(b"[" * 100_000, 400, -32600, id="deep"),
        (b"[]", 400, -32600),
        (b"[" + b"1," * 64 + b"1]", 400, -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', 400, -32600),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', 400, -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}', 400, -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"resources/list"}', 200, -32601),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"rm"}}', 200, -32602),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":[]}}', 200, -32602),
        (b'{"jsonrpc":"2.0","id":"x","method":"ping"}', 200, None),
        (b'{"jsonrpc":"2.0","id":1,"result":{}}', 202, None),
        (b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":[]}}', 202, None),
    ],
)
def test_malformed_messages_have_an_answer(page, body, status, code):
    answer = page.client.post("/mcp", content=body, headers={"Mcp-Session-Id": "s"})
    assert answer.status_code == status
    if status != 202:
        assert answer.json().get("error", {}).get("code") == code


def test_versions_methods_and_pages_are_checked(page):
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    answers = [
        page.client.post("/mcp", json=ping, headers={"MCP-Protocol-Version": "1999-01-01"}),
        page.client.get("/mcp"),
        page.client.post("/mcp", json=ping, headers={"Origin": "https://evil.example"}),
        page.client.post("/mcp", json=ping, headers={"Host": "evil.example"}),
    ]
    assert [answer.status_code for answer in answers] == [400, 405, 403, 403]
    params = {"protocolVersion": "2024-11-05"}
    begun = page.client.post("/mcp", json={**ping, "method": "initialize", "params": params}).json()
    assert begun["result"]["protocolVersion"] == "2024-11-05"


@pytest.mark.parametrize("version", ["", "2025-03-26", "2024-11-05"])
def test_batches_are_answered_in_the_versions_that_have_them(page, version):
    ask = {"name": "ask", "arguments": {"question": "x"}}
    batch = [
        {"jsonrpc": "2.0", "id": 1, "method": "ping"},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": "b", "method": "tools/call", "params": ask},
        7,
        {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": ask},
        {"jsonrpc": "2.0", "id": 4, "method": "no/such"},
    ]
    headers = {"MCP-Protocol-Version": version} if version else {}
    answers = page.client.post("/mcp", json=batch, headers=headers).json()
    assert [answer["id"] for answer in answers] == [1, "b", None, 3, 4]
    assert [answer["result"]["content"][0]["text"] for answer in answers[1:4:2]] == ["It is bread."] * 2
    assert [answer["error"]["code"] for answer in answers[2::2]] == [-32600, -32601]


def test_batches_of_notifications_and_of_later_versions(page):
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert page.client.post("/mcp", json=[note, note]).status_code == 202
    headers = {"MCP-Protocol-Version": "2025-06-18"}
    assert page.client.post("/mcp", json=[note], headers=headers).status_code == 400


def test_a_link_to_a_hidden_file_is_not_read(page, tmp_path):
    (tmp_path / ".secret").write_text("secret")
    (tmp_path / "plain.txt").symlink_to(tmp_path / ".secret")
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    message["params"] = {"name": "read_document", "arguments": {"path": str(tmp_path / "plain.txt")}}
    result = page.client.post("/mcp", json=message).json()["result"]
    assert result["isError"]
    assert "is hidden" in result["content"][0]["text"]


def test_only_embed_claims_to_be_harmless(page):
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    tools = page.client.post("/mcp", json=listing).json()["result"]["tools"]
    assert [tool["name"] for tool in tools if tool["annotations"]["readOnlyHint"]] == ["embed"]


def test_a_defect_in_a_call_keeps_the_id(page, monkeypatch):
    def fail(path):
        raise ZeroDivisionError

    monkeypatch.setattr("edgeinfer.server.mcp._read_document", fail)
    message = {"jsonrpc": "2.0", "id": 9, "method": "tools/call"}
    message["params"] = {"name": "read_document", "arguments": {"path": "/x"}}
    answer = page.client.post("/mcp", json=message)
    assert (answer.status_code, answer.json()["id"]) == (200, 9)
    assert answer.json()["result"]["isError"]


def test_only_the_first_key_names_files_and_conversations(serve, tmp_path):
    (tmp_path / "secret").write_text("secret")
    page = with_page(serve(FakeEngine(), keys=["one", "two"]), ["one", "two"])
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    assert page.client.post("/mcp", json=listing).status_code == 401
    names = {}
    for key in ("one", "two"):
        page.client.headers["Authorization"] = f"Bearer {key}"
        tools = page.client.post("/mcp", json=listing).json()["result"]["tools"]
        names[key] = [tool["name"] for tool in tools]
    assert names == {"one": OURS, "two": ["ask", "embed"]}
    arguments = {"question": "x", "document": str(tmp_path / "secret")}
    params = {"name": "ask", "arguments": arguments}
    refused = page.client.post("/mcp", json={**listing, "method": "tools/call", "params": params})
    assert "operator" in refused.json()["result"]["content"][0]["text"]


def test_clients_of_a_unix_socket_name_no_files_or_conversations(page, tmp_path):
    """Such a client may be Ray's replica or a proxy, which answers anybody."""
    config, state = page.server.config, page.server.server_state
    path = str(tmp_path / "socket")

    def protocol():
        return config.http_protocol_class(config=config, server_state=state, app_state={})

    def on_loop(work):
        return asyncio.run_coroutine_threadsafe(work, page.loop).result(20)

    async def closed(server):
        server.close()

    server = on_loop(page.loop.create_unix_server(protocol, path))
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=path)) as client:
        tools = client.post("http://localhost/mcp", json=listing).json()["result"]["tools"]
    on_loop(closed(server))
    assert [tool["name"] for tool in tools] == ["ask", "embed"]


def test_read_document_counts_and_has_a_limit(serve, gate, tmp_path):
    (tmp_path / "plan.md").write_text("Buy bread.")
    info = msgspec.structs.replace(DEFAULT_INFO, n_parallel=1)
    engine = FakeEngine(info=info, prefill=[gate])
    here = serve(engine, limits=Limits(max_queue=0))
    read = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    read["params"] = {"name": "read_document", "arguments": {"path": str(tmp_path / "plan.md")}}
    said = [here.client.post("/mcp", json=read).json()["result"] for _ in range(2)]
    assert [one["isError"] for one in said] == [False, True]
    assert "queue of fake is full" in said[1]["content"][0]["text"]
    wait_until(lambda: here.endpoint.in_flight == 1, "the requests to be answered")
    assert here.endpoint.running
    gate.opened.set()
    wait_until(lambda: not here.endpoint.in_flight, "the document to be read")
    assert not here.endpoint.inside
    assert not here.endpoint.running


def test_a_document_beyond_the_context_is_refused(serve, chatterer, tmp_path):
    (tmp_path / "long.md").write_text("bread " * 300)
    read = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    read["params"] = {"name": "read_document", "arguments": {"path": str(tmp_path / "long.md")}}
    result = serve(chatterer()).client.post("/mcp", json=read).json()["result"]
    assert result["isError"]
    assert "the context 256" in result["content"][0]["text"]


def test_without_the_page_conversations_are_not_searched(serve):
    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    tools = serve(FakeEngine()).client.post("/mcp", json=listing).json()["result"]["tools"]
    assert [tool["name"] for tool in tools] == ["ask", "embed", "read_document"]


def test_a_notification_cancels(page, gate):
    here = page
    ask = {"jsonrpc": "2.0", "id": 7, "method": "tools/call"}
    ask["params"] = {"name": "ask", "arguments": {"question": "wait"}}
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    mine, other = {"Mcp-Session-Id": "mine"}, {"Mcp-Session-Id": "other"}
    asking = here.pool.submit(here.client.post, "/mcp", json=ask, headers=mine)
    assert gate.reached.wait(20)
    for headers in ({}, other):
        assert here.client.post("/mcp", json=cancel, headers=headers).status_code == 202
    assert here.endpoint.running
    here.client.post("/mcp", json=cancel, headers=mine)
    assert asking.result(20).status_code == 202
    wait_until(lambda: not here.endpoint.running, "the generation to end")


@pytest.mark.slow
def test_stdio_survives_nonsense_and_ends_with_its_input(stdio, page):
    lines = [
        b"nonsense",
        b"[]",
        b'{"jsonrpc":"2.0","id":1,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":2}',
    ]
    with subprocess.Popen(
        [stdio.command, *stdio.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=stdio.env
    ) as process:
        out, _ = process.communicate(b"\n".join([*lines, b""]), timeout=60)
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer.get("error", {}).get("code") for answer in answers] == [-32700, -32700, None]
    assert answers[2] == {"jsonrpc": "2.0", "id": 1, "result": {}}


@pytest.mark.slow
def test_stdio_answers_a_file_of_calls_before_it_ends(stdio, page, gate, tmp_path):
    ask = {"jsonrpc": "2.0", "method": "tools/call"}
    questions = ["wait", "What?", "What?"]
    lines = [
        json.dumps({**ask, "id": i, "params": {"name": "ask", "arguments": {"question": question}}})
        for i, question in enumerate(questions)
    ]
    batch = json.dumps([{"jsonrpc": "2.0", "id": i, "method": "ping"} for i in (7, 8)])
    (tmp_path / "calls").write_text("\ufeff" + "\n".join([*lines, batch]))
    with (
        open(tmp_path / "calls", "rb") as calls,
        subprocess.Popen(
            [stdio.command, *stdio.args], stdin=calls, stdout=subprocess.PIPE, env=stdio.env
        ) as process,
    ):
        assert gate.reached.wait(30)
        gate.opened.set()
        out, _ = process.communicate(timeout=60)
    assert sorted(json.loads(line)["id"] for line in out.splitlines()) == [0, 1, 2, 7, 8]


@pytest.mark.slow
def test_stdio_ends_when_its_reader_is_gone(stdio, page, gate):
    ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    ask["params"] = {"name": "ask", "arguments": {"question": "wait"}}
    with subprocess.Popen(
        [stdio.command, *stdio.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=stdio.env
    ) as process:
        process.stdin.write(json.dumps(ask).encode() + b"\n")
        process.stdin.close()
        assert gate.reached.wait(30)
        process.stdout.close()
        assert process.wait(30) == 0


@pytest.mark.slow
def test_stdio_answers_calls_when_no_endpoint_can_be_started(stdio, page):
    words = [stdio.command, *stdio.args, "nobody/none"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=stdio.env
    ) as process:
        for number, method in enumerate(["ping", "tools/call", "ping"]):
            message = {"jsonrpc": "2.0", "id": number, "method": method, "params": {"name": "embed"}}
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert answer["id"] == number
            assert ("nobody/none" in answer.get("error", {}).get("message", "")) is (number > 0)
            if number == 0:
                page.drain()
                page.wait_ended()
        process.stdin.close()
        assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, pytest.param(False, id="endpoint-started-anew")])
def test_stdio_cancels(stdio, page, gate, begins):
    ask = {"jsonrpc": "2.0", "id": 5, "method": "tools/call"}
    ask["params"] = {"name": "ask", "arguments": {"question": "wait"}}
    with subprocess.Popen(
        [stdio.command, *stdio.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=stdio.env
    ) as process:

        def send(**message):
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            process.stdin.flush()

        if begins:
            send(id=1, method="initialize", params={"protocolVersion": "2025-06-18"})
            assert json.loads(process.stdout.readline())["id"] == 1
        send(**ask)
        assert gate.reached.wait(20)
        wait_until(lambda: page.endpoint.running, "the generation to be counted")
        send(method="notifications/cancelled", params={"requestId": 5})
        wait_until(lambda: not page.endpoint.running, "the generation to end")
        send(id=6, method="ping")
        assert json.loads(process.stdout.readline())["id"] == 6
        process.stdin.close()
        assert process.stdout.read() == b""
