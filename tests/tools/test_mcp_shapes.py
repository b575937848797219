"""Unusual messages of servers: they are understood, or the error quotes them."""

import base64
import contextlib
import json
import threading

import pytest
from http_tool_servers import HttpToolServer
from made_documents import make_docx, make_pdf
from tool_servers import SHAPES, result_of

from edgeinfer.errors import ToolServerError
from edgeinfer.tools.mcp_client import CallResult, McpClient
from edgeinfer.tools.mcp_servers import ServerSpec
from edgeinfer.tools.tool_use import Stop, StoppedError

pytestmark = pytest.mark.slow  # starts programs

WENT = CallResult("went")


@pytest.fixture
def over_http(tmp_path):
    """`over_http(call)` starts a server that answers calls with `call`; returns a session."""
    with contextlib.ExitStack() as stack:

        def start(call, *sessions):
            server = stack.enter_context(HttpToolServer(call))
            server.sessions += sessions
            client = McpClient(ServerSpec(name="http", url=server.url), tmp_path, 60.0)
            stack.callback(client.close)
            return server, client

        yield start


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_over_stdio(connect, shape):
    client = connect("shaped", shape)
    assert [tool.name for tool in client.tools()] == ["go"]
    assert client.call("go", {}) == WENT


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/plain", ""])
@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"noise"}))
def test_answers_over_http(over_http, shape, kind):
    def call(handler, message):
        text = SHAPES[shape]({"jsonrpc": "2.0", "id": message["id"], "result": result_of(message)})
        if kind == "text/event-stream":
            text = "".join(f"data: {line}\n" for line in text.split("\n")) + "\n"
        handler.reply(200, text.encode(), {"Content-Type": kind})

    assert over_http(call)[1].call("go", {}) == WENT


def test_an_answer_that_is_no_message_is_quoted(over_http):
    _, client = over_http(lambda handler, message: handler.reply(200, b"<html>welcome</html>"))
    with pytest.raises(ToolServerError, match="did not answer in JSON-RPC: <html>welcome"):
        client.call("go", {})


def test_a_stream_that_stays_open_after_the_answer_delays_nothing(over_http):
    def call(handler, message):
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": result_of(message)}
        handler.begin_reply("text/event-stream")
        handler.write_until_ended([b"data: " + json.dumps(answer).encode() + b"\n\n"], 0)
        handler.server.ended.wait()

    assert over_http(call)[1].call("go", {}) == WENT


def test_a_forgotten_session_is_begun_anew_and_the_call_sent_again(over_http):
    def call(handler, message):
        if handler.headers.get("mcp-session-id") == server.sessions[-1]:
            handler.answer(message, result_of(message))
        else:
            handler.reply(404)

    server, client = over_http(call, "first")
    server.sessions.append("second")
    assert client.call("go", {}) == WENT
    assert client.call("go", {}) == WENT
    begin = ["initialize", "notifications/initialized"]
    assert server.posts == [*begin, "tools/call", *begin, "tools/call", "tools/call"]


def test_a_session_that_is_always_forgotten_fails_after_a_second_try(over_http):
    server, client = over_http(lambda handler, message: handler.reply(404), "first")
    with pytest.raises(ToolServerError, match="404: the session has ended"):
        client.call("go", {})
    assert server.posts.count("tools/call") == 2


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_within_the_origin_is_followed(over_http, status):
    def call(handler, message):
        if handler.path == "/mcp":
            handler.reply(status, headers={"Location": "/mcp/"})
        else:
            handler.answer(message, result_of(message))

    server, client = over_http(call)
    assert client.call("go", {}) == WENT
    assert client.call("go", {}) == WENT
    assert server.posts.count("tools/call") == 3, "the new address is remembered"


@pytest.mark.parametrize(
    ("status", "location"),
    [(307, "http://127.0.0.1:9/mcp"), (308, "https://example.com/mcp"), (302, "/elsewhere")],
)
def test_another_redirect_says_what_to_type(over_http, status, location):
    _, client = over_http(lambda h, _: h.reply(status, headers={"Location": location}))
    with pytest.raises(ToolServerError, match="has moved to") as raised:
        client.call("go", {})
    assert f'{location}"`' in raised.value.hint


def test_a_session_id_that_is_not_ascii_is_refused(over_http):
    with pytest.raises(ToolServerError, match="Mcp-Session-Id is not ASCII"):
        over_http(lambda handler, message: handler.reply(200), "\xff")


def test_a_stop_ends_the_wait_for_another_calls_new_session(over_http):
    _, client = over_http(lambda handler, message: handler.reply(404), "first")
    stop = Stop()
    with client._renewing:
        threading.Timer(0.5, stop.set).start()
        with pytest.raises(StoppedError):
            client.call("go", {}, stop)


def test_a_redirect_in_a_circle_ends(over_http):
    _, client = over_http(lambda h, _: h.reply(307, headers={"Location": "/mcp"}))
    with pytest.raises(ToolServerError, match="more than 3 redirects"):
        client.call("go", {})


def test_an_error_keeps_its_data_and_a_refusal_its_message(connect, over_http):
    with pytest.raises(ToolServerError, match=r'bad: \{"why":"no such city"\}'):
        connect("refusing").call("go", {})
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": 1, "message": "no session"}})
    _, client = over_http(lambda handler, message: handler.reply(400, body.encode()))
    with pytest.raises(ToolServerError, match="answers 400: no session"):
        client.call("go", {})


LINK = {"type": "resource_link", "uri": "file:///a"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"type": "text", "text": None}, ""),
        ({"type": "text"}, ""),
        (LINK, "[file:///a]"),
        (LINK | {"name": "a", "mimeType": "x/y", "description": "d"}, "[file:///a · a · x/y · d]"),
        ({"type": "resource", "resource": {"uri": "x:", "text": None}}, ""),
        ({"type": "resource", "resource": {"uri": "x:", "blob": "AAEC"}}, "[x:, of no type: not text]"),
        (
            {"type": "resource", "resource": {"uri": "x:", "blob": "!"}},
            "[x:: Only base64 data is allowed]",
        ),
        ({"type": "image", "mimeType": "image/png", "data": ""}, "[image, image/png: not shown]"),
        ({"type": []}, "[[], of no type: not shown]"),
    ],
)
def test_parts_of_results_become_text(connect, content, text):
    assert connect("parts").call("go", {"content": [content, 7, None]}).text == text


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.pdf", make_pdf(["Buy bread."])), ("a.docx", make_docx(["Buy bread."]))],
    ids=["pdf", "docx"],
)
def test_documents_in_results_are_read(connect, name, data):
    resource = {"uri": f"file:///{name}", "blob": base64.b64encode(data).decode()}
    content = [{"type": "resource", "resource": resource}]
    text = connect("parts").call("go", {"content": content}).text
    assert text.startswith(f"[file:///{name}]\n")
    assert "Buy bread." in text


def test_a_broken_document_is_named(connect):
    resource = {"uri": "file:///a.pdf", "blob": base64.b64encode(b"%PDF-1.4 nothing").decode()}
    content = [{"type": "resource", "resource": resource}, {"type": "text", "text": "b"}]
    text = connect("parts").call("go", {"content": content}).text
    assert text.startswith("[file:///a.pdf: ")
    assert text.endswith("]\nb")


@pytest.mark.parametrize("method", ["elicitation/create", "sampling/createMessage", "no/such"])
def test_requests_of_a_server_that_are_not_offered_are_refused(connect, method):
    answer = json.loads(connect("asking").call("go", {"method": method}).text)
    assert (answer["id"], answer["error"]["code"]) == ("own", -32601)


def test_a_server_that_speaks_first_is_answered(connect):
    assert json.loads(connect("forward").call("go", {}).text)["result"] == {}


def test_a_front_end_that_fails_to_show_progress_costs_no_call(connect):
    def fail(progress):
        raise RuntimeError("the screen is gone")

    assert connect("progressing").call("go", {}, on_progress=fail).text == "done"
