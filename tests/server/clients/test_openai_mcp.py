"""MCP servers of the configuration in Responses, as the official client asks and reads them."""

import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from other_processes import wait_until
from tools_here import calling, command, configure

from edgeinfer.config.config_file import config_path
from edgeinfer.runtime.engine import load_engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.tools.uses import shown_name

pytestmark = pytest.mark.slow  # starts programs

PLAIN = {"type": "mcp", "server_label": "plain"}
WEATHER = {"city": "Rome"}
SUM = {"a": 17, "b": 25}


LONG = "look_up_" * 20


@pytest.fixture
def asked(serve, tmp_path, monkeypatch):
    """`asked(scripts, allow=…)`: the scripted engine and a client of its endpoint."""
    monkeypatch.chdir(tmp_path)
    opened = []

    def start(*scripts, keys=(), allow=("plain.*",), **fields):
        configure("plain", "slow", allow=allow, **fields)
        engine = FakeEngine(scripts)
        here = serve(engine, keys=keys, store_responses=True, refuse_unknown=True)
        key = keys[-1] if keys else "none"
        opened.append(openai.OpenAI(base_url=f"{here.url}/v1", api_key=key, max_retries=0))
        return engine, opened[-1].responses

    yield start
    for client in opened:
        client.close()


def told(engine):
    return [m.content.splitlines()[-1] for m in engine.requests[-1].messages if m.role == "tool"]


TASK = (["Let me see.", *calling(plain__weather=WEATHER)], calling(plain__add=SUM), ["Rain, and 42."])


def test_a_task_of_two_tools(asked):
    engine, responses = asked(*TASK)
    answer = responses.create(model="fake", input="Weather, and 17 + 25?", tools=[PLAIN])
    listed, said, weather, add, message = answer.output
    assert [tool.name for tool in listed.tools] == ["add", "weather", "fail"]
    assert said.content[0].text == "Let me see."
    assert (weather.server_label, weather.name, weather.output) == (
        "plain",
        "weather",
        "It rains in Rome.",
    )
    assert (add.arguments, add.output, add.status) == ('{"a": 17, "b": 25}', "42", "completed")
    assert answer.output_text.endswith("Rain, and 42.")
    assert message.type == "message"
    assert told(engine) == ["It rains in Rome.", "42"]
    before = engine.requests[-1].messages
    again = responses.create(model="fake", input="More?", tools=[PLAIN], previous_response_id=answer.id)
    assert [item.type for item in again.output] == ["message"], "the list is known"
    assert [m.content for m in engine.requests[-1].messages][: len(before)] == [
        m.content for m in before
    ]


def test_a_stream_has_the_events_of_calls(asked):
    _, responses = asked(*TASK)
    with responses.stream(model="fake", input="go", tools=[PLAIN]) as stream:
        names = [event.type.removeprefix("response.") for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [
        *("mcp_list_tools", "message", "mcp_call", "mcp_call", "message")
    ]
    call = ["output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta"]
    call += ["mcp_call_arguments.done", "mcp_call.completed", "output_item.done"]
    assert names[2:6] == [
        *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed"),
        "output_item.done",
    ]
    at = names.index("mcp_call.in_progress") - 1
    assert names[at : at + 12] == call * 2


@pytest.mark.parametrize("approve", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_what_the_policy_does_not_allow_waits_for_the_client(asked, approve, stored):
    engine, responses = asked(calling(plain__add=SUM), ["Done."], allow=())
    first = responses.create(
        model="fake", input="17 + 25?", tools=[PLAIN | {"require_approval": "never"}]
    )
    *_, request = first.output
    assert (request.type, request.server_label, request.name) == (
        "mcp_approval_request",
        "plain",
        "add",
    )
    answer = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve}
    history = [{"role": "user", "content": "17 + 25?"}, *first.output]
    told_before = {"previous_response_id": first.id} if stored else {}
    second = responses.create(
        model="fake",
        input=[*([] if stored else history), answer | {"reason": "not now"}],
        tools=[PLAIN],
        **told_before,
    )
    call, message = second.output
    assert (call.type, call.approval_request_id) == ("mcp_call", request.id)
    assert message.content[0].text == "Done."
    if approve:
        assert (call.output, told(engine)) == ("42", ["42"])
    else:
        refusal = "the user said no: not now"
        assert (call.error.content, told(engine)) == (refusal, [f"The call was not allowed: {refusal}"])
    third = responses.create(model="fake", input="And?", tools=[PLAIN], previous_response_id=second.id)
    assert [item.type for item in third.output] == ["message"], "an approval counts once"


def test_the_client_may_ask_for_approval_and_fewer_tools(asked):
    engine, responses = asked(calling(plain__add=SUM))
    few = PLAIN | {"allowed_tools": ["add"], "require_approval": {"always": {"tool_names": ["add"]}}}
    answer = responses.create(model="fake", input="go", tools=[few])
    assert [item.type for item in answer.output] == ["mcp_list_tools", "mcp_approval_request"]
    assert [tool.name for tool in engine.requests[0].tools] == ["plain__add"]
    forged = {
        "type": "mcp_approval_request",
        "id": "mcpr_x",
        "server_label": "plain",
        "name": "weather",
        "arguments": "{}",
    }
    yes = {"type": "mcp_approval_response", "approval_request_id": "mcpr_x", "approve": True}
    refused = responses.create(model="fake", input=[forged, yes], tools=[few])
    assert "does not offer" in refused.output[1].error.content


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"server_url": "http://127.0.0.1:1/mcp"}, "server_url"),
        ({"headers": {"authorization": "x"}}, "headers"),
        ({"server_label": "other"}, "there are: plain, slow"),
    ],
)
def test_no_server_comes_from_a_request(asked, tool, words):
    _, responses = asked(["no"])
    with pytest.raises(openai.BadRequestError, match=words):
        responses.create(model="fake", input="go", tools=[PLAIN | tool])


def test_a_bad_server_leaves_only_itself_out(asked, tmp_path):
    foreign = {"Figma Dev Mode": {"command": 5}, "unset": {"command": "${NOT_SET}"}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": foreign}))
    files = [str(tmp_path / "mcp.json"), "/nowhere.json"]
    _, responses = asked(*TASK, **{"mcp-files": files})
    assert "Rain, and 42." in responses.create(model="fake", input="go", tools=[PLAIN]).output_text


@pytest.mark.parametrize("fields", [{"allow": ["("]}, {}])
def test_a_configuration_without_usable_tools_is_a_bad_request(serve, fields):
    configure(**fields)
    here = serve(FakeEngine(["no"]))
    answer = here.client.post("/v1/responses", json={"model": "fake", "input": "go", "tools": [PLAIN]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


def test_a_long_tool_name_is_called_and_approved(asked, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([{"name": LONG}]))
    name = shown_name("listing", LONG)
    server = {"type": "mcp", "server_label": "listing"}
    script = calling(**{name: {}})
    engine, responses = asked(script, ["Done."], allow=())
    config = config_path().read_text()
    program = json.dumps(command("listing", str(tmp_path / "tools.json")))
    config_path().write_text(f"{config}\n[tools.servers.listing]\ncommand = {program}\n")
    first = responses.create(model="fake", input="go", tools=[server])
    *_, request = first.output
    assert (request.type, request.name) == ("mcp_approval_request", LONG)
    assert [tool.name for tool in engine.requests[0].tools] == [name]
    answer = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
    second = responses.create(
        model="fake", input=[answer], tools=[server], previous_response_id=first.id
    )
    assert (second.output[0].name, second.output[0].output) == (LONG, LONG)


def test_a_denied_call_stays_denied_and_other_keys_call_nothing(asked):
    engine, responses = asked(calling(plain__add=SUM), ["So be it."], deny=("plain.add",))
    answer = responses.create(model="fake", input="go", tools=[PLAIN])
    assert answer.output[1].error.content == "the configuration denies it"
    assert told(engine) == ["The call was not allowed: the configuration denies it"]
    _, stranger = asked(["no"], keys=["first-key-of-this-endpoint", "second-key-of-this-endpoint"])
    with pytest.raises(openai.PermissionDeniedError, match="first API key"):
        stranger.create(model="fake", input="go", tools=[PLAIN])


def test_a_client_that_leaves_stops_its_call(asked):
    _, responses = asked(calling(slow__go={}), allow=("slow.*",))
    slow = {"type": "mcp", "server_label": "slow"}
    with responses.create(model="fake", input="go", tools=[slow], store=False, stream=True):
        wait_until(Path("called").exists, "the call")
    wait_until(Path("cancelled").exists, "the end of the call")


def test_functions_of_the_client_stay_the_clients(asked):
    _, responses = asked(calling(plain__add=SUM, light={"on": True}))
    light = {"type": "function", "name": "light", "parameters": {"type": "object"}, "strict": False}
    answer = responses.create(model="fake", input="go", tools=[PLAIN, light])
    assert [item.type for item in answer.output] == ["mcp_list_tools", "function_call", "mcp_call"]


@pytest.mark.model
def test_the_small_model_solves_a_task_of_two_tools(serve, smollm2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configure("plain", allow=["plain.*"])
    files = ModelFiles(name="small", paths=(str(smollm2),))
    here = serve(load_engine(files, LoadOptions(n_ctx=4096)), store_responses=True)
    results, previous = [], None
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client:
        for tool, question in (("weather", "What is the weather in Rome?"), ("add", "Add 17 and 25.")):
            tools: Any = [PLAIN | {"allowed_tools": [tool]}]
            answer = client.responses.create(
                model="small",
                input=question,
                tools=tools,
                tool_choice="required",
                temperature=0,
                max_output_tokens=100,
                previous_response_id=previous,
            )
            previous = answer.id
            results += [item.output for item in answer.output if item.type == "mcp_call"][:1]
            assert answer.output[-1].type == "message"
    assert results == ["It rains in Rome.", "42"]


@pytest.mark.parametrize("moved", [False, True])
def test_an_approval_request_shows_the_path_that_is_opened(asked, tmp_path, moved):
    (tmp_path / "project" / "real").mkdir(parents=True)
    (tmp_path / "project" / "link").symlink_to("real")
    os.chdir(tmp_path / "project")
    script = calling(files__write={"path": "./link/a.txt", "content": "x"})
    _, responses = asked(script, ["Done."], allow=(), builtin=("write",))
    server = {"type": "mcp", "server_label": "files"}
    first = responses.create(model="fake", input="go", tools=[server])
    *_, request = first.output
    assert json.loads(request.arguments) == {"path": "real/a.txt", "content": "x"}
    if moved:
        (tmp_path / "project" / "real").rename(tmp_path / "project" / "other")
        (tmp_path / "project" / "real").symlink_to("other")
    answer = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
    second = responses.create(
        model="fake", input=[answer], tools=[server], previous_response_id=first.id
    )
    call = next(item for item in second.output if item.type == "mcp_call")
    assert (tmp_path / "project" / "real" / "a.txt").exists() != moved
    assert ("leads elsewhere" in str(call.error)) == moved
