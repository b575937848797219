"""Responses that are kept: to go on from, to be read again, and to be read on from where one left off.

What is kept is the answer's own messages (`core.kept`) and the conversation that it ends. It is in
memory alone, belongs to the API key that asked, and is bounded by `Limits`.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

from edgeinfer.server.answer_journal import Cut, Kept, KeptAnswers
from edgeinfer.server.context import Exchange
from edgeinfer.server.problems import Problem
from edgeinfer.server.request_body import Reading
from edgeinfer.server.responses import wire
from edgeinfer.server.responses.render import ResponseRenderer

_OFF = "responses are not stored, send the conversation; `store-responses` under [serve] switches it on"
_SEQUENCE = re.compile(rb'^data: \{"type":"[\w.]+","sequence_number":(\d+)', re.MULTILINE)


class Stored(msgspec.Struct):
    """What is stored with an answer: the conversation before it, and the response while it is made."""

    items: tuple[wire.Item, ...]
    in_progress: wire.ResponseReply


class _Told(msgspec.Struct):
    response: msgspec.Raw = msgspec.Raw(b"")


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


def go_on(exchange: Exchange, body: wire.ResponsesRequest) -> wire.ResponsesRequest:
    """Put the conversation before the request's own items.

    Raises Problem 400 where nothing is stored or not that response, 409 while it is being made.
    """
    name, param = body.previous_response_id, "previous_response_id"
    if name is None:
        return body
    kept_answers = exchange.endpoint.stored
    if kept_answers is None:
        said = f"'{param}' is not supported here: {_OFF}."
        raise Problem(400, said, param=param, code="unsupported_parameter")
    kept = kept_answers.find(exchange.key, name)
    if kept is None:
        said = f"Previous response with id '{name}' not found."
        raise Problem(400, said, param=param, code="previous_response_not_found")
    if not kept.is_done:
        said = f"Previous response with id '{name}' is still being made."
        raise Problem(409, said, param=param, code="previous_response_in_progress")
    stored = _about(kept)
    return msgspec.structs.replace(body, input=[*stored.items, *_output(kept), *_own(body)])


def store(exchange: Exchange, body: wire.ResponsesRequest) -> str:
    """Store the answer that is being made, if that is wanted and switched on; return its id.

    Raises UnknownModelError.
    """
    kept, answers = exchange.kept, exchange.endpoint.stored
    if body.store is True and answers is None:
        exchange.ignore(["store"])
    if kept is None or answers is None or body.store not in (None, True):
        return f"resp_{exchange.plain_id}"
    name = f"resp_{secrets.token_hex(24)}"
    items = tuple(_own(body))
    model = exchange.endpoint.models.resolve(body.model)
    in_progress = ResponseRenderer(name, model, body, stored=True).reply("in_progress")
    kept.about = Stored(items, in_progress)
    kept.size_bytes += len(msgspec.json.encode(items))
    kept.unread_s = max(kept.unread_s, exchange.endpoint.limits.unread_s)
    answers.add(exchange.key, name, kept)
    return name


def find(exchange: Exchange, name: str) -> tuple[KeptAnswers, Kept]:
    """The stored response called so. Raises Problem 404."""
    answers = exchange.endpoint.stored
    kept = answers.find(exchange.key, name) if answers is not None else None
    if answers is None or kept is None:
        said = f"Response with id '{name[:200]}' not found."
        raise Problem(404, said if answers is not None else f"{said[:-1]}: {_OFF}.", code="not_found")
    return answers, kept


def reply_of(kept: Kept) -> bytes:
    """The response as it is now."""
    about = _about(kept)
    if not kept.is_done:
        return msgspec.json.encode(about.in_progress)
    return bytes(_told(kept.body)) if kept.is_stream else kept.body


def after(sequence: int) -> Cut:
    """Leave out the events of a stream up to this number; a message holds whole events."""

    def cut(body: bytes) -> bytes:
        events = [event for event in body.split(b"\n\n") if event]
        return b"".join(event + b"\n\n" for event in events if _number(event) > sequence)

    return cut


def _number(event: bytes) -> int:
    found = _SEQUENCE.search(event)
    return int(found[1]) if found else -1


def _about(kept: Kept) -> Stored:
    assert isinstance(kept.about, Stored)
    return kept.about


def _told(stream: bytes) -> msgspec.Raw:
    for event in reversed(stream.split(b"\n\n")):
        data = event.rpartition(b"\ndata: ")[2]
        if data.startswith(b"{"):
            response = msgspec.json.decode(data, type=_Told).response
            if bytes(response):
                return response
    return msgspec.Raw(b"{}")


def _own(body: wire.ResponsesRequest) -> list[wire.Item]:
    if isinstance(body.input, str):
        return [wire.MessageItem(role="user", content=body.input)]
    return body.input


def _output(kept: Kept) -> list[wire.Item]:
    output = msgspec.json.decode(reply_of(kept), type=_Output).output
    if not output:
        return []
    return _own(Reading(refuse_unknown=False).read({"input": output}, wire.ResponsesRequest))
