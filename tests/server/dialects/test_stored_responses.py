"""Stored responses: continued and retrieved by id, bounded in number, bytes and time."""

import contextlib
import gc

import pytest
from fake_engine import FakeEngine, StepGate

from edgeinfer.server.context import RequestContext
from edgeinfer.server.limits import Limits

URL = "/v1/responses"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def client(serve, openai):
    """Return a function that starts an endpoint with stored responses, and its official client."""
    with contextlib.ExitStack() as stack:

        def make(engine: FakeEngine | None = None, **fields):
            live_server = serve(engine or FakeEngine(), store_responses=True, **fields)
            url = f"{live_server.url}/v1"
            openai_client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
            return live_server, stack.enter_context(openai_client)

        yield make


def said(engine: FakeEngine) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in engine.requests[-1].messages]


@pytest.mark.parametrize("streamed", [False, True])
def test_conversation_continues_from_a_stored_response(client, streamed: bool) -> None:
    engine = FakeEngine([["blue"], ["green"], ["red"]])
    _, openai_client = client(engine)

    def ask(text: str, **fields):
        if not streamed:
            return openai_client.responses.create(model="fake", input=text, **fields)
        with openai_client.responses.stream(model="fake", input=text, **fields) as stream:
            return stream.get_final_response()

    first = ask("One.", instructions="Be brief.")
    second = ask("Two.", previous_response_id=first.id)
    third = ask("Three.", previous_response_id=second.id)
    turns = [("user", "One."), ("assistant", "blue"), ("user", "Two."), ("assistant", "green")]
    assert said(engine) == [*turns, ("user", "Three.")]
    assert third.previous_response_id == second.id
    assert openai_client.responses.retrieve(first.id).output_text == "blue"


def test_tool_output_alone_continues_a_stored_response(client) -> None:
    engine = FakeEngine()
    _, openai_client = client(engine)
    asked = {"model": "fake", "tools": [TOOL]}
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    items = [{"role": "user", "content": "add"}, call]
    first = openai_client.responses.create(input=items, **asked)
    output = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    openai_client.responses.create(input=[output], previous_response_id=first.id, **asked)
    assert [role for role, _ in said(engine)][-1] == "tool"


def test_response_with_store_false_is_not_stored(client, openai) -> None:
    live_server, openai_client = client()
    done = openai_client.responses.create(model="fake", input="x", store=False)
    assert done.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(done.id)
    with pytest.raises(openai.BadRequestError, match="not found") as caught:
        openai_client.responses.create(model="fake", input="x", previous_response_id=done.id)
    assert caught.value.code == "previous_response_not_found"
    assert live_server.post(URL, {"input": "x"}).json()["store"] is True


def test_off_as_it_is_by_default(serve) -> None:
    live_server = serve(FakeEngine())
    reply = live_server.post(URL, {"input": "x", "store": True})
    assert reply.json()["store"] is False
    assert "store" in reply.headers["x-edgeinfer-ignored"]
    refused = live_server.post(URL, {"input": "x", "previous_response_id": "resp_1"})
    assert "store-responses" in refused.json()["error"]["message"]
    assert live_server.get(f"{URL}/resp_1").status_code == 404


def test_stored_response_is_deleted_only_by_its_key(client) -> None:
    live_server, _ = client(keys=["alpha-key", "beta-key"])
    alpha, beta = ({"x-api-key": key} for key in ("alpha-key", "beta-key"))
    name = live_server.post(URL, {"input": "x"}, headers=alpha).json()["id"]
    for method in ("GET", "DELETE"):
        assert live_server.client.request(method, f"{URL}/{name}", headers=beta).status_code == 404
    assert live_server.get(f"{URL}/{name}", headers=alpha).json()["status"] == "completed"
    gone = live_server.client.delete(f"{URL}/{name}", headers=alpha).json()
    assert gone == {"id": name, "object": "response", "deleted": True}
    assert live_server.get(f"{URL}/{name}", headers=alpha).status_code == 404


def test_streams_are_not_stored(client) -> None:
    live_server, _ = client()
    name = live_server.post(URL, {"input": "x", "stream": True}).text
    name = name.partition('"id":"')[2].partition('"')[0]
    assert live_server.get(f"{URL}/{name}?stream=false").json()["status"] == "completed"
    reply = live_server.get(f"{URL}/{name}?stream=true&starting_after=1")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")


def test_an_answer_whose_client_left_is_not_stored(client, openai, until) -> None:
    engine = FakeEngine([["one ", StepGate(), "two"]])
    live_server, openai_client = client(engine)
    with openai_client.responses.create(model="fake", input="x", stream=True) as stream:
        name = next(iter(stream)).response.id
    until(lambda: not live_server.endpoint.in_flight, "the answer to be cancelled")
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(name)


def test_an_answer_beyond_the_limit_reaches_its_reader_and_is_not_stored(client) -> None:
    live_server, _ = client(FakeEngine([["word "] * 200]), limits=Limits(stored_bytes=2000))
    reply = live_server.post(URL, {"input": "x", "stream": True})
    assert reply.text.count('"delta":"word ') == 200
    name = reply.text.partition('"id":"')[2].partition('"')[0]
    assert live_server.get(f"{URL}/{name}").status_code == 404


def test_oldest_answers_are_evicted_beyond_number_and_bytes(client) -> None:
    live_server, _ = client(limits=Limits(stored_responses=8, stored_bytes=100_000))
    names = []
    for number in range(20):
        text = "x" * (30_000 if number > 15 else 10)
        names.append(live_server.post(URL, {"input": text}).json()["id"])
        stored = live_server.endpoint.responses._responses.values()
        assert len(stored) <= 8
        assert sum(answer.size_bytes for answer in stored) <= 100_000
    codes = [live_server.get(f"{URL}/{name}").status_code for name in names]
    assert codes == [404] * 17 + [200] * 3


def test_stored_response_does_not_keep_the_request_body(client) -> None:
    live_server, _ = client()
    for _ in range(3):
        live_server.post(URL, {"input": "x", "metadata": {"a": "b"}})
    answers = list(live_server.endpoint.responses._responses.values())
    del live_server
    assert len(answers) == 3
    assert not any(o.body for o in gc.get_objects() if isinstance(o, RequestContext))


@pytest.mark.parametrize("streamed", [False, True])
def test_reference_to_an_item_of_a_stored_response_is_resolved(client, openai, streamed: bool) -> None:
    engine = FakeEngine([["blue"], ["green"]])
    _, openai_client = client(engine)
    if streamed:
        with openai_client.responses.stream(model="fake", input="One.") as stream:
            first = stream.get_final_response()
    else:
        first = openai_client.responses.create(model="fake", input="One.")
    reference = {"type": "item_reference", "id": first.output[0].id}
    items = [{"role": "user", "content": "One."}, reference, {"role": "user", "content": "Two."}]
    openai_client.responses.create(model="fake", input=items)
    assert said(engine) == [("user", "One."), ("assistant", "blue"), ("user", "Two.")]
    reference["id"] = "msg_nowhere_0"
    with pytest.raises(openai.BadRequestError, match="send the item itself"):
        openai_client.responses.create(model="fake", input=items)


def test_reference_where_nothing_is_stored_names_the_way_out(serve) -> None:
    live_server = serve(FakeEngine())
    body = {"model": "fake", "input": [{"type": "item_reference", "id": "msg_1_0"}]}
    assert "store-responses" in live_server.post(URL, body, status=400).text
