"""Find receipts in replies of every API, whole or streamed, and the answers in the same replies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts.receipt import MAX_BYTES, parse_json
from edgeinfer.receipts.reply_shapes import Part, Piece, read_pieces
from edgeinfer.runtime.event_stream import CollectedAnswer

#: Types of events that end a stream.
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
#: Prefixes of the lines of server-sent events that have no data.
_OTHER_FIELDS = (b"event:", b"id:", b"retry:", b":")
#: Parts that contain the text of an answer, and those of APIs that need no separate reasoning.
TEXTS, _NO_REASONING = {Part.TEXT, Part.JOINED, Part.ONLY_TEXT}, {Part.JOINED, Part.ONLY_TEXT}


_Copy = dict[Part, dict[tuple[int, ...], str]]


class Quote(msgspec.Struct, kw_only=True):
    """All that clients show or execute of an answer in a reply that also has the answer's receipt.

    A reply may repeat an answer, as streams do in their last events: each of its copies has all of it.
    `fault` names a part that no reply of edgeinfer has, or parts in another order; "" if there is none.
    """

    copies: dict[str, _Copy] = {}
    fault: str = ""

    def add(self, copy: str, piece: Piece) -> None:
        if piece.kind is Part.UNKNOWN:
            self.fault = self.fault or f"part {piece.value!r}, which is unknown"
            return
        texts = self.copies.setdefault(copy, {}).setdefault(piece.kind, {})
        if texts and piece.position < max(texts):  # a client may show the pieces as they come
            self.fault = self.fault or f"order of {piece.kind}"
        texts[piece.position] = texts.get(piece.position, "") + piece.value

    def difference(self, answer: CollectedAnswer, *, prompt: str = "", is_cut: bool = False) -> str:
        """Return which part differs from `answer`, the text of the receipt's tokens; "" if none does.

        Completions begin with `prompt` (option `echo`). If `is_cut`, the reply may lack the end.
        """
        if self.fault:
            return self.fault
        joined = prompt + answer.reasoning + answer.text
        texts = {
            Part.TEXT: answer.text,
            Part.ONLY_TEXT: answer.text,
            Part.REASONING: answer.reasoning,
            Part.JOINED: joined,
        }
        for parts in self.copies.values():
            for kind in texts.keys() & parts.keys():
                text = "".join(parts[kind][position] for position in sorted(parts[kind]))
                if text != texts[kind] and not (is_cut and texts[kind].startswith(text)):
                    return kind
            if difference := _different_calls(parts, answer, is_cut=is_cut):
                return difference
        return "" if is_cut else self._missing(answer)

    def _missing(self, answer: CollectedAnswer) -> str:
        kinds = {kind for copy in self.copies.values() for kind in copy}
        if answer.text and not kinds & TEXTS:
            return Part.TEXT
        if answer.reasoning and not kinds & {Part.REASONING, *_NO_REASONING}:
            return Part.REASONING
        has_call = any(_canonical(call.arguments) for call in answer.calls.values())
        return Part.NAME if has_call and Part.NAME not in kinds else ""


def _different_calls(parts: _Copy, answer: CollectedAnswer, *, is_cut: bool) -> str:
    """Return which part of a copy's calls differs from those of the answer; "" if none does."""
    names, arguments, spaces = (parts.get(p, {}) for p in (Part.NAME, Part.ARGUMENTS, Part.NAMESPACE))
    positions = sorted({*names, *arguments})
    calls = [call for _, call in sorted(answer.calls.items())]
    if len(positions) < len(calls):  # some APIs leave out a call that was cut off by max_tokens
        calls = [call for call in calls if call.arguments and _canonical(call.arguments)]
    if is_cut:
        calls = calls[: len(positions)]
    called = [f"{spaces.get(p, '')}.{names.get(p, '')}".removeprefix(".") for p in positions]
    if positions and (len(positions) != len(calls) or (names and called != [c.name for c in calls])):
        return Part.NAME
    for position, call in zip(positions, calls, strict=False):
        text, is_last = arguments.get(position, ""), position == positions[-1]
        is_same = text == call.arguments or _canonical(text) == (_canonical(call.arguments) or "{}")
        if not is_same and not (is_cut and is_last and call.arguments.startswith(text)):
            return Part.ARGUMENTS
    return ""


def _canonical(arguments: Any) -> str:
    """Return a call's arguments as JSON with sorted keys, "" if they are not a whole object."""
    with contextlib.suppress(ReceiptError, ValueError, RecursionError):
        if isinstance(arguments, str):
            arguments = parse_json((arguments or "{}").encode())
        if isinstance(arguments, dict):
            return json.dumps(arguments, sort_keys=True)
    return ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt, with what its reply has of the answer; `quotes` is None if there is no reply."""

    source: str = ""
    document: Any
    quotes: tuple[Quote, ...] | None


def read_replies(file: BinaryIO, name: str) -> Iterator[tuple[str, list[Any] | ReceiptError]]:
    """Yield (`FILE:LINE`, JSON documents) for each reply in a file; a stream has several documents.

    The file is one document, or lines of JSON or of server-sent events. A line that is not JSON is
    yielded as an error. Raises OSError, and ReceiptError if the file is one document and not JSON.
    """
    documents, source = list[Any](), ""
    n_lines, event = 0, b""
    for number, line in enumerate(_lines(file), 1):
        content, is_event = line.removeprefix(b"data:").strip(), line.startswith(b"data:")
        n_lines += bool(content)
        if not content or line.startswith(b"event:"):
            event = line[6:].strip()
        if not content or (line.startswith(_OTHER_FIELDS) and b"data:" not in line):
            continue  # after U+2028 in a comment, some clients read an event
        is_last = content == b"[DONE]"
        if not is_last:
            try:
                document = parse_json(content)
            except ReceiptError as error:
                if n_lines > 1 or is_event or name.endswith(".jsonl"):
                    yield f"{name}:{number}", error
                    continue
                try:
                    document = parse_json(line + file.read(MAX_BYTES))
                except ReceiptError as fault:
                    raise ReceiptError(f"{name}: {fault.message}") from fault
            if is_event and event.decode(errors="replace") != as_type(
                str, as_type(dict, document).get("type")
            ):
                yield f"{name}:{number}", ReceiptError("the event's name is not the type in its data")
                continue
            # a list whose last member has `receipts` is one reply, with answers to several prompts
            if isinstance(document, list) and "receipts" not in as_type(dict, (document or [0])[-1]):
                problem = "this is a list of replies; write one reply per line: `jq -c .[] FILE`"
                yield f"{name}:{number}", ReceiptError(problem)
                continue
            source = source or f"{name}:{number}"
            documents += document if isinstance(document, list) else [document]
            is_last = _is_last(document, is_event=is_event)
        if is_last and documents:
            yield source, documents
            documents, source = [], ""
    if documents:
        yield source, documents


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines, long ones in pieces. A carriage return ends a line of server-sent events, too."""
    while line := file.readline(MAX_BYTES + 1):
        yield from line.splitlines() if line.startswith((b"data:", *_OTHER_FIELDS)) else [line]


def _is_last(document: Any, *, is_event: bool) -> bool:
    """Return whether a document is the last one of its reply."""
    document = as_type(dict, document)
    if is_event:  # in llama.cpp's API, each of several answers ends with `stop`, the last has receipts
        is_stopped = document.get("stop") is True and bool(_receipts(document))
        return is_stopped or document.get("type") in _LAST_EVENTS or bool(document.get("error"))
    return document.get("done") is not False  # in Ollama's API, only the last line lacks `done: false`


def find_receipts(documents: list[Any], source: str = "") -> tuple[list[Entry], int]:
    """Return the receipts of a reply, and the number of its answers.

    `documents` are a receipt, a reply or a stream of an endpoint, or a line of a batch or payload log.
    """
    receipts = [receipt for document in documents for receipt in _receipts(document)]
    replies = [document for document in documents if all(document is not r for r in receipts)]
    is_stream = len(replies) > 1
    quotes = {i: Quote() for i in range(len(receipts) * is_stream)}
    answers = set[int]()
    for reply in replies:
        copy, pieces = read_pieces(reply)
        for piece in pieces:  # a line of a failed request has none, and no answer
            answers.add(piece.answer)
            is_known = piece.kind is not Part.UNKNOWN and piece.answer in range(len(receipts))
            key = piece.answer if is_known else -1  # compared with all receipts
            quotes.setdefault(key, Quote()).add(copy, piece)
    entries = list[Entry]()
    for i, receipt in enumerate(receipts):
        if receipt is not None and [*as_type(dict, receipt)] != ["refused"]:
            quoted = tuple(quotes[key] for key in (i, -1) if key in quotes) if replies else None
            entries.append(Entry(source=source, document=receipt, quotes=quoted))
    return entries, max(len(receipts), len(answers))


def _receipts(document: Any) -> list[Any]:
    """Return the receipts in a document; None for an answer without one in a payload log's line."""
    document = as_type(dict, document)
    if "custom_id" in document:  # a line of `edgeinfer batch`
        document = as_type(dict, as_type(dict, document.get("response")).get("body"))
    elif "specversion" in document:  # a line of the payload log
        answers = as_type(list, as_type(dict, document.get("data")).get("answers"))
        return [as_type(dict, answer).get("receipt") for answer in answers]
    if "content_sha256" in document:
        return [document]
    values = [document[key] for key in ("receipt", "receipts") if key in document]
    return [receipt for value in values for receipt in (value if isinstance(value, list) else [value])]


def as_type(kind: type[Any], value: Any) -> Any:
    """Return `value` if it has this type, otherwise the type's empty value."""
    return value if isinstance(value, kind) else kind()
