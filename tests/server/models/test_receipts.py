"""Receipts over HTTP: in the last object of every API's answer, checked by POST /v1/verify."""

import copy
import io
import json
import random
import re
import threading

import msgspec
import pytest
import raw_http
from fake_engine import FakeEngine, split_script
from least_requests import objects_of

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts import reply_shapes as shapes
from edgeinfer.receipts.receipt import Receipt
from edgeinfer.receipts.replies import TEXTS, find_receipts, read_replies
from edgeinfer.receipts.verify import ReceiptCheck
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.runtime.events import Event, ReasoningDelta, TextDelta, ToolCallDelta
from edgeinfer.server import generation_response, payload_log
from edgeinfer.server.anthropic import wire as anthropic_wire
from edgeinfer.server.native import wire as native_wire
from edgeinfer.server.ollama import wire as ollama_wire
from edgeinfer.server.openai import wire as openai_wire
from edgeinfer.server.payload_log import PayloadLog
from edgeinfer.server.responses import wire as responses_wire

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
EXAMPLE = msgspec.convert(
    {
        "version": 1,
        "program": "1",
        "kernel_revision": 1,
        "model": "fake",
        "model_sha256": "ab" * 32,
        "kv_type": "f16",
        "n_ctx": 64,
        "time": "2026-01-01T00:00:00Z",
        "sampling": {},
        "n_prompt": 1,
        "n_answer": 1,
        "finish_reason": "stop",
        "seconds": 1.0,
        "content_sha256": "cd" * 32,
    },
    Receipt,
)
FORMS = [(path, stream) for path in DIALECTS for stream in (False, True)]
FORMS.remove(("/infer", True))  # /infer does not stream


def last_object(reply):
    """Return the last JSON object of an answer, whole or streamed."""
    assert reply.status_code == 200, reply.text
    return [*objects_of(reply.text.splitlines())][-1]


def entries_of(content, name="reply"):
    [(_, documents)] = read_replies(io.BytesIO(content), name)
    return find_receipts(documents)[0]


def texts_of(entry):
    """Return the text of an answer at each place of its reply."""
    copies = [parts for quote in entry.quotes for parts in quote.copies.values()]
    return ["".join(map("".join, parts[p].values())) for parts in copies for p in TEXTS & parts.keys()]


def lines_of(folder):
    return "".join(path.read_text() for path in folder.iterdir()).splitlines()


def check(live_server, receipt):
    return live_server.post("/v1/verify", {"receipt": receipt}, status=200).json()


@pytest.mark.model
@pytest.mark.parametrize(("path", "stream"), FORMS)
def test_each_dialect_s_answer_ends_with_a_receipt_that_verifies(real, path, stream):
    fields = DIALECTS[path] | ({} if path == "/infer" else {"stream": stream})
    if path.startswith("/api"):
        fields = fields | {"receipt": True, "options": fields["options"] | {"temperature": 0.8}}
    else:
        fields = fields | SAMPLED
    reply = real.post(path, fields)
    receipt = last_object(reply)["receipt"]
    assert receipt["sampling"]["seed"] is not None
    result = check(real, receipt)
    assert (result["verdict"], result["n_answer"]) == ("verified", receipt["n_answer"])
    [entry] = entries_of(reply.content)
    assert entry.quotes
    assert not [quote for quote in entry.quotes if quote.difference(CollectedAnswer(result["text"]))]
    receipt["content"]["answer"][0] ^= 1  # the answer may be short: its seed is random
    assert check(real, receipt)["verdict"] == "differs"

    without = real.post(path, {k: v for k, v in fields.items() if k != "receipt"})
    assert "receipt" not in last_object(without)


_TEXT = [TextDelta("Ships: 1. Ägir\n2. "), TextDelta('Zoë 🚢 "3".')]
_CALLS = [
    ToolCallDelta(0, arguments='{"City": "Rom", "DAYS": 2}', id="call_1", name="get_Weather"),
    ToolCallDelta(1, arguments='{"Quote": "x\\"Y"}', id="call_2", name="Cite"),
]
SCRIPTS: dict[str, list[Event]] = {
    "text": [*_TEXT],
    "reasoning": [ReasoningDelta("Hmm, THREE…"), *_TEXT],
    "calls": [*_CALLS],
    "all": [ReasoningDelta("Hmm, THREE…"), *_TEXT, *_CALLS],
    "text after a call": [TextDelta("First. "), _CALLS[0], TextDelta("Then Zoë.")],
    "nothing": [],
}
#: APIs without tool calls. They join reasoning and text, or leave reasoning out.
_ONLY_TEXT = ("/v1/completions", "/api/generate", "/completion", "/infer")
_NOT_TEXT = (
    "receipt receipts type role object id call_id item_id logprobs model generation_settings".split()
)


def paths_of_answer(value, answer, path=()):
    """Yield the paths of all strings of a reply that are a piece of the answer."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in _NOT_TEXT:
                yield from paths_of_answer(inner, answer, (*path, key))
    elif isinstance(value, str) and value.strip() and any(value in text for text in answer):
        yield path


def with_another_character(documents, path, dice):
    *parents, last = path
    changed = inner = copy.deepcopy(documents)
    for key in parents:
        inner = inner[key]
    text, i = inner[last], dice.randrange(len(inner[last]))
    inner[last] = text[:i] + ("q" if text[i] != "q" else "w") + text[i + 1 :]
    return changed


def long_options(path):
    is_ollama = path.startswith("/api")
    return {"options": {"num_predict": 1000}, "model": "fake"} if is_ollama else {}


def with_receipt(receipt, monkeypatch):
    """Make the endpoint return this receipt."""
    monkeypatch.setattr(generation_response, "make_receipt", lambda *_args, **_options: receipt)


def documents_of(serve, monkeypatch, path, stream, script):
    """Return the JSON documents of a reply that has a receipt, and the answer in the reply."""
    with_receipt(EXAMPLE, monkeypatch)
    events = split_script(SCRIPTS[script], random.Random(f"{path} {stream} {script}"))
    answer = CollectedAnswer()
    for event in events:
        answer.add(event)
    client = serve(FakeEngine([events])).client
    fields = DIALECTS[path] | {"receipt": True} | ({} if path == "/infer" else {"stream": stream})
    limits = {"max_tokens", "max_output_tokens", "n_predict"} & fields.keys()
    reply = client.post(path, json=fields | dict.fromkeys(limits, 1000) | long_options(path))
    [(_, documents)] = read_replies(io.BytesIO(reply.content), "reply")
    return documents, answer


def has_calls(script):
    return any(isinstance(event, ToolCallDelta) for event in SCRIPTS[script])


REPLIES = [
    (*form, script)
    for form in FORMS
    for script in SCRIPTS
    if not (form[0] in _ONLY_TEXT and has_calls(script))
]


@pytest.mark.parametrize(("path", "stream", "script"), REPLIES)
def test_each_changed_character_of_a_reply_is_noticed(serve, monkeypatch, path, stream, script):
    documents, answer = documents_of(serve, monkeypatch, path, stream, script)
    dice = random.Random(f"{path} {stream} {script}")
    [entry], _ = find_receipts(documents)
    assert entry.quotes
    assert [quote.difference(answer) for quote in entry.quotes] == [""] * len(entry.quotes)

    calls = [text for call in answer.calls.values() for text in (call.name, call.arguments)]
    inner = [text for call in answer.calls.values() for text in json.loads(call.arguments).values()]
    pieces = [answer.reasoning + answer.text, *calls, *map(str, inner)]
    paths = list(paths_of_answer(documents, pieces))
    assert bool(paths) == (script != "nothing")
    for changed in paths:
        [forged], _ = find_receipts(with_another_character(documents, changed, dice))
        assert any(quote.difference(answer) for quote in forged.quotes), changed


@pytest.mark.parametrize(("path", "stream", "script"), REPLIES)
def test_reasoning_removed_from_a_reply_is_noticed(serve, monkeypatch, path, stream, script):
    documents, answer = documents_of(serve, monkeypatch, path, stream, script)
    if not answer.reasoning:
        answer.add(ReasoningDelta("Hmm"))
        assert is_verified(documents, answer) == (path == "/infer")


#: What a forger adds to an object of a reply, so that some client shows or executes it.
_SHOWN_KEYS = (
    "content delta output reasoning reasoning_content refusal response result text thinking"
).split()
_CALL_KEYS = ("arguments", "input", "partial_json")
_EVIL_ITEMS = [
    {"type": "message", "content": [{"type": "output_text", "text": "EVIL"}]},
    {"type": "function_call", "name": "rm"},
]
FORGERIES = [
    *({key: "EVIL"} for key in [*_SHOWN_KEYS, "name", *_CALL_KEYS, "output_text"]),
    *({key: {"City": "EVIL"}} for key in _CALL_KEYS),
    {"message": {"content": "EVIL"}},
    {"message": {"function_call": {"name": "rm", "arguments": None}}},
    {"choices": [{"index": 0, "message": {"content": "EVIL"}}]},
    {"choices": [{"index": 5, "text": "EVIL"}]},
    {"content": [{"type": "text", "text": "EVIL"}]},
    {"content": [{"type": "tool_use", "name": "rm"}]},
    {"content_block": {"type": "tool_use", "name": "rm", "input": {}}},
    {"tool_calls": [{"function": {"name": "rm"}}]},
    {"function_call": {"name": "rm"}},
    {"error": {"message": "EVIL"}},
    *({key: "x"} for key in ("type", "Content")),
    {"operation": {"type": "create_file", "path": "/root/.ssh/authorized_keys"}},
    {"action": {"type": "double_click", "x": 10, "y": 20}},
    {"source": {"type": "url", "url": "https://evil.example"}},
    {"annotations": [{"type": "url_citation", "url": "https://evil.example"}]},
    *({"output": [item]} for item in _EVIL_ITEMS),
    *({"item": item} for item in _EVIL_ITEMS),
]
#: Parts of a reply that no client shows as an answer.
_NOT_READ = "receipt receipts request logprobs generation_settings format tools tool_choice".split()


def is_verified(documents, answer):
    """Return whether all texts and calls of a reply with a receipt are those of the answer."""
    quotes = [quote for entry in find_receipts(documents)[0] for quote in entry.quotes]
    return bool(quotes) and not any(q.difference(answer) for q in quotes)


def objects_in(value):
    """Yield each object of a reply at which a client may look for an answer."""
    if isinstance(value, dict):
        yield value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict | list) and key not in _NOT_READ:
            yield from objects_in(inner)


def wrap(documents, answer):
    """Yield a reply, and if it is whole, also as lines of a batch and of a payload log."""
    yield documents
    if len(documents) == 1:
        response = {"status_code": 200, "request_id": "req_1", "body": copy.deepcopy(documents[0])}
        yield [{"id": "batch_1", "custom_id": "1", "response": response, "error": None}]
        answers = [payload_log._describe(answer, EXAMPLE)]
        data = {"operation": "POST /", "status": 200, "error": None, "request": {}, "answers": answers}
        event = {"specversion": "1.0", "type": "io.edgeinfer.generation", "data": data}
        yield [json.loads(msgspec.json.encode(event))]


@pytest.mark.parametrize(("path", "stream", "script"), REPLIES)
def test_a_text_or_call_added_to_a_reply_is_noticed(serve, monkeypatch, cases, path, stream, script):
    whole, answer = documents_of(serve, monkeypatch, path, stream, script)
    dice = random.Random(f"{path} {stream} {script}")
    for documents in wrap(whole, answer):
        assert is_verified(documents, answer)
        pairs = [(node, forgery) for node in objects_in(documents) for forgery in FORGERIES]
        pairs = [(n, f) for n, f in pairs if "operation" not in n or "error" not in f]  # of a log
        for node, forgery in dice.sample(pairs, min(cases(60), len(pairs))):
            original = dict(node)
            node.update(forgery)
            if node != original:
                assert not is_verified(documents, answer), (original.keys(), forgery)
            node.clear()
            node.update(original)
        assert is_verified(documents, answer)


def lists_in(value):
    """Yield each list of a reply that is not empty and has parts of an answer."""
    if isinstance(value, list) and value:
        yield value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict | list) and key not in _NOT_READ:
            yield from lists_in(inner)


@pytest.mark.parametrize(("path", "stream", "script"), REPLIES)
def test_a_repeated_part_of_a_reply_is_noticed(serve, monkeypatch, path, stream, script):
    documents, answer = documents_of(serve, monkeypatch, path, stream, script)
    pieces = [answer.reasoning + answer.text]
    pieces += [text for call in answer.calls.values() for text in (call.name, call.arguments)]
    for elements in lists_in(documents):
        for i, element in enumerate(elements):
            if "receipt" not in element and [*paths_of_answer(element, pieces)]:
                elements.insert(i, element)
                assert not is_verified(documents, answer), element
                del elements[i]
    assert is_verified(documents, answer)


WIRE_TYPES: list[tuple[type, dict[str, object]]] = [
    (openai_wire.ChatCompletion, shapes._CHAT),
    (openai_wire.ChatChoice, shapes._CHOICE | {"message": None}),
    (openai_wire.ReplyMessage, shapes._MESSAGE),
    (openai_wire.WireToolCall, shapes._CALL),
    (openai_wire.WireFunction, shapes._FUNCTION),
    (openai_wire.Completion, shapes._COMPLETION),
    (openai_wire.CompletionChoice, shapes._CHOICE | {"text": None}),
    (responses_wire.ResponseReply, shapes._RESPONSE),
    (responses_wire.IncompleteDetails, shapes._RESPONSE["incomplete_details"][1]),
    (responses_wire.MessageOut, shapes._MESSAGE_ITEM),
    (responses_wire.OutputTextOut, shapes._TEXT_PART),
    (responses_wire.ReasoningOut, shapes._REASONING_ITEM),
    (responses_wire.FunctionCallOut, shapes._CALL_ITEM),
    (anthropic_wire.MessageReply, shapes._ANTHROPIC),
    (anthropic_wire.TextOut, shapes._BLOCKS[0]),
    (anthropic_wire.ThinkingOut, shapes._BLOCKS[1]),
    (anthropic_wire.ToolUseOut, shapes._BLOCKS[2]),
    (ollama_wire.OllamaChatReply, shapes._OLLAMA_CHAT),
    (ollama_wire.OllamaGenerateReply, shapes._OLLAMA_GENERATE),
    (ollama_wire.OllamaMessage, shapes._OLLAMA_CHAT["message"]),
    (ollama_wire.CalledReply, shapes._OLLAMA_CALL["function"]),
    (native_wire.LlamaAnswer, shapes._LLAMA),
    (native_wire.InferReply, shapes._INFER),
]


@pytest.mark.parametrize(("wire_type", "shape"), WIRE_TYPES)
def test_a_shape_has_every_field_of_its_reply(wire_type, shape):
    missing = {*wire_type.__struct_encode_fields__} - shape.keys()
    assert not missing


CALLED = [(path, stream) for path, stream in FORMS if path not in _ONLY_TEXT]


@pytest.mark.parametrize(("path", "stream"), CALLED)
def test_arguments_of_another_call_are_noticed(serve, monkeypatch, path, stream):
    documents, answer = documents_of(serve, monkeypatch, path, stream, "calls")
    first, second = answer.calls.values()
    swapped = json.dumps(documents).replace(first.name, "\0").replace(second.name, first.name)
    swapped = json.loads(swapped.replace("\0", second.name))
    assert not is_verified(swapped, answer)
    assert is_verified(documents, answer)
    for node in objects_in(documents):
        for key in ("function", "delta"):
            if isinstance(node.get(key), dict) and "index" not in node[key]:
                node[key]["index"] = 1
                assert not is_verified(documents, answer)
                del node[key]["index"]


@pytest.mark.parametrize(("path", "stream", "script"), REPLIES)
def test_a_copy_of_the_real_answer_does_not_hide_a_changed_one(
    serve, monkeypatch, path, stream, script
):
    documents, answer = documents_of(serve, monkeypatch, path, stream, script)
    dice = random.Random(f"{path} {stream} {script}")
    real, receipt = documents[-1], documents[-1]["receipt"]
    described = json.loads(msgspec.json.encode(payload_log._describe(answer, EXAMPLE)))
    decoys = [
        {"type": "response.x.delta", "delta": answer.text},
        {"response": {"body": receipt}},
        {"response": {"body": real}},
        {"custom_id": "1", "response": {"body": real}},
        {"data": {"answers": [described]}},
        {"specversion": "1.0", "data": {"answers": [described]}},
        {"specversion": "1.0", "custom_id": "1", "data": {"answers": [described]}},
        {"text": answer.text, "reasoning": answer.reasoning, "tool_calls": described["tool_calls"]},
    ]
    paths = list(paths_of_answer(documents, [answer.reasoning + answer.text]))
    for decoy in decoys if paths else ():
        forged = with_another_character(documents, dice.choice(paths), dice)
        if not decoy.keys() & forged[-1].keys():
            forged[-1] |= copy.deepcopy(decoy)
            assert not is_verified(forged, answer), decoy


def reply_of(message, **more):
    example = json.loads(msgspec.json.encode(EXAMPLE))
    return {"choices": [{"index": 0, "message": message}], "receipt": example, **more}


def difference_of(reply, answer, **options):
    [entry], _ = find_receipts([reply])
    return next(filter(None, (quote.difference(answer, **options) for quote in entry.quotes)), "")


def test_two_arguments_of_a_call_are_a_difference():
    answer = CollectedAnswer()
    answer.add(ToolCallDelta(0, arguments='{"city": "Rom"}', id="call_1", name="weather"))
    real, evil = {"city": "Rom"}, {"city": "EVIL"}
    unknown = "part 'choices.message.tool_calls.function.input', which is unknown"
    both = [
        ({"arguments": json.dumps(real)}, ""),
        ({"arguments": real}, ""),
        ({"arguments": evil}, "tool arguments"),
        ({"arguments": None}, "tool arguments"),
        ({"arguments": json.dumps(real), "input": real}, unknown),
        ({"arguments": '{"city": "EVIL", "city": "Rom"}'}, "tool arguments"),
        ({"arguments": "rm"}, "tool arguments"),
        ({}, "tool arguments"),
    ]
    for arguments, difference in both:
        call = {"id": "call_1", "function": {"name": "weather", **arguments}}
        reply = reply_of({"content": None, "tool_calls": [call]})
        assert difference_of(reply, answer) == difference, arguments


def test_a_torn_call_that_an_api_leaves_out_is_no_difference():
    answer = CollectedAnswer("The sea")
    answer.add(ToolCallDelta(0, arguments='{"ci', id="call_1", name="weather"))
    receipt = json.loads(msgspec.json.encode(EXAMPLE))
    ollama = {"message": {"content": "The sea"}, "receipt": receipt}
    assert difference_of(ollama, answer) == ""
    assert difference_of(reply_of({"content": "The sea"}), answer) == "tool name"
    answer.add(ToolCallDelta(0, arguments='ty": "Rom"}'))
    assert difference_of(ollama, answer) == "tool name"


def test_pieces_in_another_order_are_a_difference(serve, monkeypatch):
    for path in ("/v1/responses", "/v1/messages"):
        documents, answer = documents_of(serve, monkeypatch, path, True, "text after a call")
        deltas = [i for i, d in enumerate(documents) if d["type"].endswith("text.delta")]
        deltas += [i for i, d in enumerate(documents) if "text" in (d.get("delta") or ())]
        first, last = deltas[0], deltas[-1]
        documents[first], documents[last] = documents[last], documents[first]
        assert not is_verified(documents, answer), path


def start(index, kind, **fields):
    block = {"type": kind, **fields}
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index, kind, **fields):
    change = {"type": kind, **fields}
    return {"type": "content_block_delta", "index": index, "delta": change}


def stop(index):
    return {"type": "content_block_stop", "index": index}


def chunk(finish=None, **change):
    return {"choices": [{"index": 0, "delta": change, "finish_reason": finish}]}


_USE = {"id": "call_1", "name": "rm", "input": {}}
_YES = [delta(0, "text_delta", text="Yes, "), delta(0, "text_delta", text="but no.")]
_RM = [{"index": 0, "function": {"name": "r"}}, {"index": 0, "function": {"name": "m"}}]
_ARGUMENTS = '{"a": 1}'
#: Streams of which some client shows another text than "Yes, but no.", or calls rm with other arguments.
_MISREAD = {
    "a text in another block": [start(0, "thinking"), *_YES, stop(0)],
    "a text after its block": [start(0, "text", text=""), stop(0), *_YES],
    "a text before its block": [*_YES, start(0, "text", text=""), stop(0)],
    "a block twice": [start(0, "text", text=""), start(0, "text", text=""), *_YES, stop(0)],
    "a delta whose type is a number": [start(0, "text", text=""), delta(0, 5, text="Yes, "), *_YES[1:]],
    "an event of the other API": [
        start(0, "text", text=""),
        *_YES,
        {
            "type": "response.content_part.added",
            "output_index": 0,
            "content_index": 0,
            "part": {"type": "output_text", "text": "", "annotations": []},
        },
        stop(0),
    ],
    "a block that stays open": [start(0, "text", text=""), *_YES, {"type": "message_delta"}],
    "arguments after the call": [
        start(0, "tool_use", **_USE),
        stop(0),
        delta(0, "input_json_delta", partial_json=_ARGUMENTS),
    ],
    "an early end": [chunk("stop", content="Yes, "), chunk(content="but no.")],
    "a second choice": [
        {"choices": [chunk(content=text)["choices"][0] for text in ("Yes, ", "but no.")]}
    ],
    "a name in pieces": [chunk(tool_calls=[{**_RM[0], "id": "1"}]), chunk(tool_calls=[_RM[1]])],
    "another API": [chunk(content=""), {"result": "Yes, but no."}],
    "two replies": [reply_of({"content": text}) for text in ("Yes, ", "but no.")],
    "a large index": [{"index": 1 << 53, "content": "Yes, but no.", "stop": False}],
}


@pytest.mark.parametrize("kind", _MISREAD)
def test_a_stream_that_some_client_misreads_is_noticed(kind):
    answer = CollectedAnswer("" if "name" in kind or "arguments" in kind else "Yes, but no.")
    if not answer.text:
        arguments = "" if "name" in kind else _ARGUMENTS
        answer.add(ToolCallDelta(0, arguments=arguments, id="call_1", name="rm"))
    last = {"type": "message_stop"} if "type" in _MISREAD[kind][0] else chunk()
    if kind == "a large index":
        last = {"index": 0, "content": "", "stop": True}
    receipt = json.loads(msgspec.json.encode(EXAMPLE))
    assert not is_verified([*_MISREAD[kind], last | {"receipt": receipt}], answer)


def test_a_stream_that_clients_read_alike_verifies():
    answer = CollectedAnswer("Yes, but no.")
    receipt = json.loads(msgspec.json.encode(EXAMPLE))
    blocks = [start(0, "text", text=""), *_YES, stop(0), {"type": "message_delta"}]
    assert is_verified([*blocks, {"type": "message_stop", "receipt": receipt}], answer)
    chunks = [chunk(content="Yes, "), chunk(content="but no."), chunk("stop")]
    assert is_verified([*chunks, chunk() | {"receipt": receipt}], answer)


def test_an_argument_named_type_is_no_type_of_an_event():
    answer = CollectedAnswer("")
    answer.add(ToolCallDelta(0, arguments='{"type": "completed"}', id="call_1", name="rm"))
    item = {"type": "function_call", "id": "f", "name": "rm", "arguments": ""}
    change = {"type": "response.function_call_arguments.delta", "output_index": 0, "item_id": "f"}
    begin = {"type": "response.output_item.added", "output_index": 0, "item": item}
    done = begin | {"type": "response.output_item.done"}
    done["item"] = item | {"arguments": answer.calls[0].arguments}
    last = {"type": "response.completed", "receipt": json.loads(msgspec.json.encode(EXAMPLE))}
    assert is_verified([begin, change | {"delta": answer.calls[0].arguments}, done, last], answer)
    assert not is_verified([change | {"delta": {"type": "completed"}}, begin, done, last], answer)


def test_many_texts_among_numbers_are_one_fault():
    usage = json.loads("[" * 300 + json.dumps([""] * 20_000) + "]" * 300)
    _, pieces = shapes.read_pieces(reply_of({"content": "x"}) | {"usage": usage})
    assert [piece.value for piece in pieces if piece.kind is shapes.Part.UNKNOWN] == ["usage"]


def test_torn_arguments_are_not_the_same_as_none():
    answer = CollectedAnswer()
    answer.add(ToolCallDelta(0, arguments='{"path": "/tmp/x", "rec', id="call_1", name="rm"))
    for arguments in ("{}", "", None):
        call = {"id": "call_1", "function": {"name": "rm", "arguments": arguments}}
        assert difference_of(reply_of({"content": None, "tool_calls": [call]}), answer)


def test_lines_of_several_streams_are_refused():
    event = json.dumps(chunk(content="a"))
    for text in (
        f"event: x\ndata:\ndata: {event}\n\n",
        f"data: {event}\ndata: {event}\n\n",
        f"data: {event}\n\n{event}\n",
        f"data: [DONE]\n\ndata: {event}\n\n",
    ):
        replies = [*read_replies(io.BytesIO(text.encode()), "reply")]
        assert any(isinstance(documents, ReceiptError) for _, documents in replies), text


@pytest.mark.parametrize("depth", [500, 987, 4000])
def test_a_call_with_deep_arguments_ends_no_run(depth):
    document = '{"type": "message", "content": [{"type": "tool_use", "name": "x", "input": {"a": '
    document += "[" * depth + "]" * depth + '}}], "receipt": {}}'
    for _, documents in read_replies(io.BytesIO(document.encode()), "reply.jsonl"):
        if not isinstance(documents, ReceiptError):
            find_receipts(documents)


def test_an_unknown_field_is_named_wherever_it_is(serve, monkeypatch):
    for path, stream in FORMS:
        documents, answer = documents_of(serve, monkeypatch, path, stream, "text")
        documents[0]["x_proxy"] = "1"
        quotes = [quote for entry in find_receipts(documents)[0] for quote in entry.quotes]
        assert quotes[0].difference(answer) == "part 'x_proxy', which is unknown"


def test_an_event_has_the_name_of_its_type():
    block = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "not "}}
    for name in ("event: ping\n", "", "event: content_block_delta\nevent: ping\n"):
        stream = f"{name}data: {json.dumps(block)}\n\n".encode()
        [(_, fault)] = read_replies(io.BytesIO(stream), "reply")
        assert isinstance(fault, ReceiptError)
    stream = f"event: content_block_delta\ndata: {json.dumps(block)}\n\n".encode()
    assert [*read_replies(io.BytesIO(stream), "reply")] == [("reply:2", [block])]


def test_a_deeply_nested_reply_is_refused_in_words():
    for text in ("[" * 5000 + "]" * 5000, '{"usage": ' + "[" * 900 + "]" * 900 + "}"):
        document = reply_of({"content": "x"}) | {"usage": None}
        raw = json.dumps(document).replace('"usage": null', f'"usage": {text}').encode()
        try:
            replies = [*read_replies(io.BytesIO(raw), "reply")]
        except ReceiptError:
            continue
        assert all(isinstance(d, ReceiptError) or find_receipts(d) for _, d in replies)


def test_a_cut_answer_has_a_part_of_the_tokens_and_no_other_call():
    answer = CollectedAnswer("The sea", "Hmm")
    answer.add(ToolCallDelta(0, arguments='{"city": "Rom"}', id="call_1", name="weather"))
    call, torn = ({"name": "weather", "arguments": text} for text in ('{"city": "Rom"}', '{"ci'))
    evil = {"name": "rm", "arguments": "{}"}
    parts = [((call,), ""), ((torn,), ""), ((), ""), ((evil,), "tool name")]
    parts.append((({**call, "name": "weath"},), "tool name"))
    for calls, difference in parts:
        message = {"content": "The s", "tool_calls": [{"function": function} for function in calls]}
        assert difference_of(reply_of(message), answer, is_cut=True) == difference
    for calls in ((call, evil), (torn, call)):
        message = {"content": "The s", "tool_calls": [{"function": function} for function in calls]}
        assert difference_of(reply_of(message), answer, is_cut=True)
    assert difference_of(reply_of({"content": "The x"}), answer, is_cut=True) == "text"


def test_a_carriage_return_hides_no_event():
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    events = f": 10 s\rdata: {json.dumps(chunk)}\r\rid: x\rdata: {json.dumps(reply_of({}))}\r\n\r\n"
    [entry] = entries_of(events.encode())
    assert texts_of(entry) == ["a"]


def test_an_answer_ends_with_the_receipts_of_all_answers():
    receipts = [json.loads(msgspec.json.encode(EXAMPLE))] * 2
    pieces = [(0, "a"), (1, "b"), (0, None), (1, "c"), (1, None)]
    events = [{"index": index, "content": text or "", "stop": text is None} for index, text in pieces]
    events[-1]["receipts"] = receipts
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    assert [texts_of(entry) for entry in entries_of(stream.encode())] == [["a"], ["bc"]]


def test_an_answer_joins_reasoning_and_text_only_where_its_api_does():
    answer = CollectedAnswer("The sea", "Hmm. ")
    assert difference_of(reply_of({"content": "Hmm. The sea"}), answer) == "text"
    receipt = json.loads(msgspec.json.encode(EXAMPLE))
    reply = {"choices": [{"index": 0, "text": "Why? Hmm. The sea"}], "receipt": receipt}
    assert difference_of(reply, answer) == "reasoning and text"
    assert difference_of(reply, answer, prompt="Why? ") == ""


def test_a_reply_of_a_stream_is_one_and_a_later_one_is_another(tmp_path):
    example = json.loads(msgspec.json.encode(EXAMPLE))
    chunk = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    last = {"choices": [{"index": 0, "delta": {}}], "receipt": example}

    def stream(*documents):
        return "".join(f"data: {json.dumps(document)}\n\n" for document in documents)

    sources = {
        stream(chunk, last) + "data: [DONE]\n\n": [["a"]],
        stream(chunk, last, chunk) + "data: [DONE]\n\n": [["aa"]],
        ": 10 s\n\n" + stream(chunk, chunk, last): [["aa"]],
        (stream(chunk, last) + "data: [DONE]\n\n") * 2: [["a"], ["a"]],
        json.dumps(chunk | last, indent=1): [[]],
        f"{json.dumps(chunk)}\n{json.dumps(chunk | {'receipt': example})}\n": [None, ["a"]],
    }
    for text, texts in sources.items():
        replies = [documents for _, documents in read_replies(io.BytesIO(text.encode()), "reply")]
        entries = [(find_receipts(documents)[0] or [None])[0] for documents in replies]
        assert [entry and texts_of(entry) for entry in entries] == texts, text


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_a_receipt_each(real, stream):
    asked = {"messages": TURNS, "n": 4, "max_tokens": 10, "seed": 5, "stream": stream}
    receipts = last_object(real.post(CHAT, asked | SAMPLED))["receipts"]
    assert [receipt.get("index", 0) for receipt in receipts] == [0, 1, 2, 3]
    assert [check(real, receipt)["verdict"] for receipt in receipts] == ["verified"] * 4


@pytest.mark.model
def test_what_is_no_receipt_is_refused_in_words(real):
    receipt = last_object(real.post(CHAT, {"messages": TURNS, "max_tokens": 4} | SAMPLED))
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
        [entry], n_answers = find_receipts([json.loads(line)])
        result = check(real, entry.document)
        assert (result["verdict"], n_answers) == ("verified", 1)
        assert texts_of(entry) == [result["text"]] != [""]


def test_an_answer_without_receipt_is_given_and_says_why(serve):
    live_server = serve(FakeEngine([["Hello"]]))
    for stream in (False, True):
        reply = live_server.chat(receipt=True, stream=stream)
        assert "recorded no tokens" in last_object(reply)["receipt"]["refused"]
        assert re.search("Hello", reply.text)


@pytest.mark.model
def test_a_check_ends_with_its_client_and_counts_in_the_queue(real, until, monkeypatch):
    whole = last_object(real.post(CHAT, {"messages": TURNS, "max_tokens": 4} | SAMPLED))
    cancelled, is_running = threading.Event(), threading.Event()

    def run(self):
        is_running.set()
        assert cancelled.wait(60)
        raise ReceiptError("the check was cancelled")

    monkeypatch.setattr(ReceiptCheck, "run", run)
    monkeypatch.setattr(ReceiptCheck, "cancel", lambda self: cancelled.set())
    with raw_http.connect(real.port) as client:
        client.sendall(raw_http.post({"receipt": whole["receipt"]}, path="/v1/verify"))
        assert is_running.wait(60)
        assert sum(real.endpoint.generation_counts.values()) == 1
    assert cancelled.wait(60)
    until(lambda: not real.endpoint.generation_counts and not real.endpoint.running, "the end")


@pytest.mark.model
def test_a_long_body_is_refused_before_it_is_sent(real):
    request = raw_http.post(b"", path="/v1/verify", length=5 << 20)
    assert raw_http.status(raw_http.exchange(real.port, request)) == 413


def test_a_receipt_that_is_not_wrapped_is_told_to_be(serve):
    document = json.loads(msgspec.json.encode(EXAMPLE))
    error = serve(FakeEngine([])).post("/v1/verify", document, status=400).json()["error"]
    assert 'a receipt is sent as {"receipt": …}' in error["message"]
    assert "load option" not in error["message"]
