"""Stored responses: gone on from, read again, and read on from where a connection was lost."""

import contextlib
import gc
import threading

import openai
import pytest
from fake_engine import FakeEngine, StepGate

from edgeinfer.server.context import RequestContext
from edgeinfer.server.limits import Limits

URL = "/v1/responses"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def client(serve):
    """An endpoint that stores, and the official client of it."""
    with contextlib.ExitStack() as stack:

        def make(engine: FakeEngine | None = None, **fields):
            here = serve(engine or FakeEngine(), store_responses=True, **fields)
            made = openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)
            return here, stack.enter_context(made)

        yield make


def said(engine: FakeEngine) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in engine.requests[-1].messages]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_goes_on_from_a_stored_response(client, streamed: bool) -> None:
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
    assert said(engine) == [
        ("user", "One."),
        ("assistant", "blue"),
        ("user", "Two."),
        ("assistant", "green"),
        ("user", "Three."),
    ]
    assert third.previous_response_id == second.id
    assert openai_client.responses.retrieve(first.id).output_text == "blue"


def test_a_tools_output_alone_goes_on(client) -> None:
    engine = FakeEngine()
    _, openai_client = client(engine)
    items = [
        {"role": "user", "content": "add"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
    ]
    first = openai_client.responses.create(model="fake", input=items, tools=[TOOL])
    output = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    openai_client.responses.create(
        model="fake", input=[output], tools=[TOOL], previous_response_id=first.id
    )
    assert [role for role, _ in said(engine)][-1] == "tool"


def test_what_is_not_to_be_stored_is_not(client) -> None:
    here, openai_client = client()
    done = openai_client.responses.create(model="fake", input="x", store=False)
    assert done.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(done.id)
    with pytest.raises(openai.BadRequestError, match="not found") as caught:
        openai_client.responses.create(model="fake", input="x", previous_response_id=done.id)
    assert caught.value.code == "previous_response_not_found"
    assert here.client.post(URL, json={"input": "x"}).json()["store"] is True


def test_off_as_it_is_by_default(serve) -> None:
    here = serve(FakeEngine())
    reply = here.client.post(URL, json={"input": "x", "store": True})
    assert reply.json()["store"] is False
    assert "store" in reply.headers["x-edgeinfer-ignored"]
    refused = here.client.post(URL, json={"input": "x", "previous_response_id": "resp_1"})
    assert "store-responses" in refused.json()["error"]["message"]
    assert here.client.get(f"{URL}/resp_1").status_code == 404


def test_deleted_and_anothers(client) -> None:
    here, _ = client(keys=["alpha-key", "beta-key"])
    alpha, beta = ({"x-api-key": key} for key in ("alpha-key", "beta-key"))
    name = here.client.post(URL, json={"input": "x"}, headers=alpha).json()["id"]
    for method in ("GET", "DELETE"):
        assert here.client.request(method, f"{URL}/{name}", headers=beta).status_code == 404
    assert here.client.get(f"{URL}/{name}", headers=alpha).json()["status"] == "completed"
    gone = here.client.delete(f"{URL}/{name}", headers=alpha).json()
    assert gone == {"id": name, "object": "response", "deleted": True}
    assert here.client.get(f"{URL}/{name}", headers=alpha).status_code == 404


def test_a_lost_stream_is_read_on_from_where_it_was(client, until) -> None:
    opened = threading.Event()
    engine = FakeEngine([["one ", StepGate(opened), "two"]])
    here, openai_client = client(engine)
    seen = []
    with openai_client.responses.create(model="fake", input="x", stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    until(lambda: '"event":"request"' in here.log.getvalue(), "the reader to be gone")
    name, last = seen[0].response.id, seen[-1].sequence_number
    assert openai_client.responses.retrieve(name).status == "in_progress"
    with pytest.raises(openai.ConflictError):
        openai_client.responses.create(model="fake", input="y", previous_response_id=name)
    with openai_client.responses.retrieve(name, stream=True, starting_after=last) as stream:
        opened.set()
        rest = list(stream)
    numbers = [event.sequence_number for event in (*seen, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].response.output_text == "one two"
    assert len(engine.requests) == 1


def test_stored_stream_without_a_reader_is_abandoned(client, until) -> None:
    here, openai_client = client(
        FakeEngine([["one ", StepGate(), "two"]]), limits=Limits(unread_s=0.01)
    )
    with openai_client.responses.create(model="fake", input="x", stream=True) as stream:
        name = next(iter(stream)).response.id
    until(lambda: not here.endpoint.in_flight, "the answer to be given up")
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(name)


def test_limits_come_before_the_body_of_a_stored_response(client, raw_exchange, until) -> None:
    here, openai_client = client(FakeEngine([["one ", StepGate()]]), limits=Limits(max_requests=1))
    with openai_client.responses.create(model="fake", input="x", stream=True) as stream:
        name = next(iter(stream)).response.id
    assert here.endpoint.in_flight == 1  # the answer holds its place after its reader left
    head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n"
    assert b" 503 " in raw_exchange(here.port, head).splitlines()[0]  # no byte of the body was sent
    openai_client.responses.delete(name)
    until(lambda: not here.endpoint.in_flight, "its end")


def test_a_whole_answer_is_no_stream(client) -> None:
    here, _ = client()
    name = here.client.post(URL, json={"input": "x"}).json()["id"]
    reply = here.client.get(f"{URL}/{name}?stream=true")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")
    assert here.client.get(f"{URL}/{name}?starting_after=-1").status_code == 400


def test_an_answer_beyond_the_limit_reaches_its_reader_and_is_not_stored(client) -> None:
    here, _ = client(FakeEngine([["word "] * 200]), limits=Limits(kept_bytes=2000))
    reply = here.client.post(URL, json={"input": "x", "stream": True})
    assert reply.text.count('"delta":"word ') == 200
    name = reply.text.partition('"id":"')[2].partition('"')[0]
    assert here.client.get(f"{URL}/{name}").status_code == 404


def test_the_oldest_go_first(client) -> None:
    here, _ = client(limits=Limits(kept_answers=2))
    names = [here.client.post(URL, json={"input": "x"}).json()["id"] for _ in range(3)]
    found = [here.client.get(f"{URL}/{name}").status_code for name in names]
    assert found == [404, 200, 200]


def test_answers_that_are_never_read_are_evicted(client) -> None:
    here, _ = client(limits=Limits(kept_answers=8, kept_bytes=100_000))
    for number in range(20):
        text = "x" * (30_000 if number > 15 else 10)
        assert here.client.post(URL, json={"input": text}).status_code == 200
        kept = here.endpoint.journal._answers.values()
        assert len(kept) <= 8
        assert sum(answer.size_bytes for answer in kept) <= 100_000
    assert len(kept) == 3


def test_stored_answer_does_not_keep_the_body_that_asked(client) -> None:
    here, _ = client()
    for _ in range(3):
        here.client.post(URL, json={"input": "x", "metadata": {"a": "b"}})
    answers = list(here.endpoint.journal._answers.values())
    del here
    contexts = [one for one in gc.get_objects() if isinstance(one, RequestContext)]
    assert len(answers) == 3
    assert not any(context.body for context in contexts)


@pytest.mark.parametrize("streamed", [False, True])
def test_reference_to_an_item_of_a_stored_response_is_resolved(client, streamed: bool) -> None:
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
    here = serve(FakeEngine())
    body = {"model": "fake", "input": [{"type": "item_reference", "id": "msg_1_0"}]}
    reply = here.client.post(URL, json=body)
    assert reply.status_code == 400
    assert "store-responses" in reply.text
