"""Stored responses: continued by id, retrieved, and streamed again from any event.

The answer journal holds their messages, in memory, per API key, bounded by `Limits`; with each lies the
conversation before it.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

from edgeinfer.server.answer_journal import AnswerJournal, BodyFilter, JournaledAnswer
from edgeinfer.server.context import RequestContext
from edgeinfer.server.problems import Problem, unsupported
from edgeinfer.server.request_body import LenientDecoder
from edgeinfer.server.responses import wire
from edgeinfer.server.responses.render import ResponseRenderer

_OFF = "responses are not stored, send the conversation; `store-responses` under [serve] switches it on"
_SEQUENCE = re.compile(rb'^data: \{"type":"[\w.]+","sequence_number":(\d+)', re.MULTILINE)


class StoredResponse(msgspec.Struct):
    """The conversation before an answer, and the response object while it is generated."""

    items: tuple[wire.Item, ...]
    in_progress: wire.ResponseReply


class _LastEvent(msgspec.Struct):
    response: msgspec.Raw


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


def with_previous(context: RequestContext, body: wire.ResponsesRequest) -> wire.ResponsesRequest:
    """Prepend the conversation of `previous_response_id`.

    Raises Problem 400 if that response is not stored, 409 while it is generated.
    """
    name, param = body.previous_response_id, "previous_response_id"
    if name is None:
        return body
    journal = context.endpoint.journal
    if journal is None:
        raise unsupported(param, _OFF)
    answer = journal.find(context.key, name)
    if answer is None:
        message = f"Previous response with id '{name}' not found."
        raise Problem(400, message, param=param, code="previous_response_not_found")
    if not answer.is_done:
        message = f"Previous response with id '{name}' is still being made."
        raise Problem(409, message, param=param, code="previous_response_in_progress")
    stored = _stored(answer)
    return msgspec.structs.replace(
        body, input=[*stored.items, *_output_items(answer), *_own_items(body)]
    )


def journal_answer(context: RequestContext, body: wire.ResponsesRequest) -> str:
    """Store the answer under a new id if the request and the configuration allow; return its id.

    Raises UnknownModelError.
    """
    answer, journal = context.journaled, context.endpoint.journal
    if body.store is True and journal is None:
        context.ignore(["store"])
    if answer is None or journal is None or body.store not in (None, True):
        return f"resp_{context.plain_id}"
    name = f"resp_{secrets.token_hex(24)}"
    items = tuple(_own_items(body))
    model = context.endpoint.models.resolve(body.model)
    in_progress = ResponseRenderer(name, model, body, stored=True).reply("in_progress")
    answer.attachment = StoredResponse(items, in_progress)
    answer.size_bytes += len(msgspec.json.encode(items))
    answer.unread_s = max(answer.unread_s, context.endpoint.limits.unread_s)
    journal.add(context.key, name, answer)
    return name


def find(context: RequestContext, name: str) -> tuple[AnswerJournal, JournaledAnswer]:
    """Find a stored response by id. Raises Problem 404."""
    journal = context.endpoint.journal
    answer = journal.find(context.key, name) if journal is not None else None
    if journal is None or answer is None:
        message = f"Response with id '{name[:200]}' not found."
        raise Problem(
            404, message if journal is not None else f"{message[:-1]}: {_OFF}.", code="not_found"
        )
    return journal, answer


def reply_of(answer: JournaledAnswer) -> bytes:
    """Return the response object, in progress or complete, as JSON."""
    if not answer.is_done:
        return msgspec.json.encode(_stored(answer).in_progress)
    if not answer.is_stream:
        return answer.body
    last = answer.body.rpartition(b"\ndata: ")[2]  # `response.completed`, or `response.incomplete`
    return bytes(msgspec.json.decode(last, type=_LastEvent).response)


def skip_events(sequence: int) -> BodyFilter:
    """Make a filter that drops events up to this number; a message holds whole events."""

    def drop(body: bytes) -> bytes:
        events = [event for event in body.split(b"\n\n") if event]
        return b"".join(event + b"\n\n" for event in events if _number(event) > sequence)

    return drop


def _number(event: bytes) -> int:
    found = _SEQUENCE.search(event)
    return int(found[1]) if found else -1


def _stored(answer: JournaledAnswer) -> StoredResponse:
    assert isinstance(answer.attachment, StoredResponse)
    return answer.attachment


def _own_items(body: wire.ResponsesRequest) -> list[wire.Item]:
    if isinstance(body.input, str):
        return [wire.MessageItem(role="user", content=body.input)]
    return body.input


def _output_items(answer: JournaledAnswer) -> list[wire.Item]:
    output = msgspec.json.decode(reply_of(answer), type=_Output).output
    if not output:
        return []
    return _own_items(
        LenientDecoder(refuse_unknown=False).read({"input": output}, wire.ResponsesRequest)
    )
