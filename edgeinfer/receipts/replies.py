"""Find receipts in replies of every API, whole or streamed, and the answers in the same replies."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts.receipt import MAX_BYTES, parse_json
from edgeinfer.receipts.reply_shapes import Part, Piece, read_pieces
from edgeinfer.runtime.event_stream import CollectedAnswer, CollectedCall

#: Types of events that end a stream.
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
#: Prefixes of the lines of server-sent events that have no data.
_OTHER_FIELDS = (b"event:", b"id:", b"retry:", b":")
#: Parts that contain the text of an answer, and those of APIs that need no separate reasoning.
TEXTS, _NO_REASONING = {Part.TEXT, Part.JOINED, Part.ONLY_TEXT}, {Part.JOINED, Part.ONLY_TEXT}


_Copy = dict[Part, dict[tuple[int, ...], list[str]]]
#: Copies of an answer in a stream of /v1/responses; other streams have one copy.
_OF_RESPONSES = {"deltas", "texts", "parts", "items", "response"}
#: Copies of an answer that are one document; and those whose calls have arguments as objects.
_WHOLE, _WITH_OBJECTS = {"chat", "message", "infer"}, {"message", "blocks", "Ollama's chat"}


class Quote(msgspec.Struct, kw_only=True):
    """All that clients show or execute of an answer in a reply that also has the answer's receipt.

    A reply may repeat an answer, as streams do in their last events: each of its copies has all of it.
    `fault` names what no reply of edgeinfer has; "" if there is none.
    """

    copies: dict[str, _Copy] = {}
    fault: str = ""
    is_ended: bool = False

    def add(self, copy: str, piece: Piece) -> None:
        texts = self.copies.setdefault(copy, {}).setdefault(piece.kind, {})
        self.fault = self.fault or self._fault_of(copy, piece, texts)
        texts.setdefault(piece.position, []).append(piece.value)

    def _fault_of(self, copy: str, piece: Piece, texts: dict[tuple[int, ...], list[str]]) -> str:
        if piece.kind is Part.UNKNOWN:
            return f"part {piece.value!r}, which is unknown"
        if piece.kind is Part.END:
            self.is_ended = True
        elif self.is_ended and piece.value:
            return f"{piece.kind} after its end"
        if texts and piece.position < next(reversed(texts)):  # clients may show pieces as they come
            return f"order of {piece.kind}"
        is_name = piece.kind in (Part.NAME, Part.NAMESPACE) and piece.value
        if piece.position in texts and (copy in _WHOLE or is_name):
            return f"second {piece.kind}"
        return ""

    def difference(self, answer: CollectedAnswer, *, prompt: str = "", is_cut: bool = False) -> str:
        """Return which part differs from `answer`, the text of the receipt's tokens; "" if none does.

        Completions begin with `prompt` (option `echo`). If `is_cut`, the reply may lack the end.
        """
        if self.fault:
            return self.fault
        if len(self.copies) > 1 and not self.copies.keys() <= _OF_RESPONSES:
            return "mixture of APIs"
        joined = prompt + answer.reasoning + answer.text
        texts = {
            Part.TEXT: answer.text,
            Part.ONLY_TEXT: answer.text,
            Part.REASONING: answer.reasoning,
            Part.JOINED: joined,
        }
        for copy, parts in (self.copies or {"": {}}).items():
            for kind in texts.keys() & parts.keys():
                text = "".join(map("".join, parts[kind].values()))
                if text != texts[kind] and not (is_cut and texts[kind].startswith(text)):
                    return kind
                blocks = [position[0] for position in parts[kind] if position]
                if any(b - a < 2 for a, b in itertools.pairwise(blocks)):  # a client may read only one
                    return f"{kind}, which is divided"
            if difference := _different_calls(copy, parts, answer, is_cut=is_cut):
                return difference
            if not is_cut and (missing := _missing(copy, parts, answer)):
                return missing
        return ""


def _missing(copy: str, parts: _Copy, answer: CollectedAnswer) -> str:
    if answer.text and not parts.keys() & TEXTS:
        return Part.TEXT
    if answer.reasoning and not parts.keys() & {Part.REASONING, *_NO_REASONING}:
        return Part.REASONING
    calls = list(answer.calls.values())
    if copy == "Ollama's chat":  # it leaves out a call that was cut off by max_tokens
        calls = [call for call in calls if _object_of(call)]
    return Part.NAME if calls and copy != "parts" and Part.NAME not in parts else ""


def _different_calls(copy: str, parts: _Copy, answer: CollectedAnswer, *, is_cut: bool) -> str:
    """Return which part of a copy's calls differs from those of the answer; "" if none does."""
    names, arguments, spaces = (
        {position: "".join(texts) for position, texts in parts.get(kind, {}).items()}
        for kind in (Part.NAME, Part.ARGUMENTS, Part.NAMESPACE)
    )
    positions = sorted({*names, *arguments})
    calls = [call for _, call in sorted(answer.calls.items())]
    if copy == "Ollama's chat" and len(positions) < len(calls):
        calls = [call for call in calls if _object_of(call)]
    if is_cut:
        calls = calls[: len(positions)]
    called = [f"{spaces.get(p, '')}.{names.get(p, '')}".removeprefix(".") for p in positions]
    if positions and (len(positions) != len(calls) or (names and called != [c.name for c in calls])):
        return Part.NAME
    for position, call in zip(positions, calls, strict=False):
        text, is_last = arguments.get(position, ""), position == positions[-1]
        torn = "{}" if copy in _WITH_OBJECTS or not call.arguments else None
        is_same = text == call.arguments or _canonical(text) == (_object_of(call) or torn)
        if not is_same and not (is_cut and is_last and call.arguments.startswith(text)):
            return Part.ARGUMENTS
    return ""


def _object_of(call: CollectedCall) -> str:
    """Return a call's arguments as servers decode them, with sorted keys; "" if they are torn."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeError):
        return json.dumps(msgspec.json.decode(call.arguments or "{}", type=dict), sort_keys=True)
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
    has_data = of_events = False
    for number, line in enumerate(_lines(file), 1):
        content, is_event = line.removeprefix(b"data:").strip(), line.startswith(b"data:")
        n_lines += bool(content)
        if not line.strip(b"\r\n"):
            event, has_data = b"", False
        if line.startswith(b"event:"):
            event = line[6:].strip()
        if not content or (line.startswith(_OTHER_FIELDS) and b"data:" not in line):
            continue  # after U+2028 in a comment, some clients read an event
        is_mixed = (is_event and has_data) or (bool(documents) and is_event != of_events)
        of_events, has_data = is_event, is_event
        if is_mixed or (content == b"[DONE]" and n_lines == 1):
            yield f"{name}:{number}", ReceiptError("the lines are not those of one stream")
            continue
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
            if isinstance(document, list) and any(
                as_type(dict, d).get("index", 0) != i for i, d in enumerate(document)
            ):
                yield f"{name}:{number}", ReceiptError("the answers of a list are not in their order")
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


#: Kind of a block or item → words in the types of the events and deltas that may belong to it.
_PARTS_OF = {
    "text": ("text_delta",),
    "thinking": ("thinking_delta", "signature_delta"),
    "tool_use": ("input_json_delta",),
    "message": ("output_text", "content_part"),
    "reasoning": ("reasoning_text", "content_part"),
    "function_call": ("function_call_arguments",),
}


class _OpenBlock:
    """The block (Anthropic) or item (Responses) of a stream to which the next event must belong."""

    def __init__(self) -> None:
        self._n, self._kind = 0, ""
        self._id: Any = None

    def takes(self, event: dict[str, Any]) -> bool:
        """Return whether an event may follow, and note it. Other documents may always follow."""
        kind = as_type(str, event.get("type"))
        index = event.get("index" if kind.startswith("content_block") else "output_index")
        if kind in ("content_block_start", "response.output_item.added"):
            block = as_type(dict, event.get("content_block") or event.get("item"))
            is_next = index == self._n and not self._kind
            self._n += 1
            self._kind, self._id = as_type(str, block.get("type")), block.get("id")
            return is_next
        if kind in ("message_delta", "response.completed", "response.incomplete"):
            return not self._kind
        if index is None:
            return True
        detail = as_type(str, as_type(dict, event.get("delta")).get("type", kind))
        is_open = bool(self._kind) and index == self._n - 1
        if kind in ("content_block_stop", "response.output_item.done"):
            self._kind = ""
            return is_open
        is_part = any(word in detail for word in _PARTS_OF.get(self._kind, ()))
        return is_open and is_part and event.get("item_id", self._id) == self._id


def find_receipts(documents: list[Any], source: str = "") -> tuple[list[Entry], int]:
    """Return the receipts of a reply, and the number of its answers.

    `documents` are a receipt, a reply or a stream of an endpoint, or a line of a batch or payload log.
    """
    receipts = [receipt for document in documents for receipt in _receipts(document)]
    ids = {id(receipt) for receipt in receipts}
    replies = [document for document in documents if id(document) not in ids]
    is_stream = len(replies) > 1
    quotes = {i: Quote() for i in range(len(receipts) * is_stream)}
    answers, block = set[int](), _OpenBlock()
    for reply in replies:
        copy, pieces = read_pieces(reply)
        if not block.takes(as_type(dict, reply)):
            quotes.setdefault(-1, Quote()).fault = "order of events"
        for piece in pieces:  # a line of a failed request has none, and no answer
            answers.add(piece.answer)
            is_known = piece.kind is not Part.UNKNOWN and piece.answer in range(len(receipts))
            key = piece.answer if is_known else -1  # compared with all receipts
            quotes.setdefault(key, Quote()).add(copy, piece)
    entries = list[Entry]()
    for i, receipt in enumerate(receipts):
        if receipt is not None and [*as_type(dict, receipt)] != ["refused"]:
            quoted = tuple(quotes[key] for key in (-1, i) if key in quotes) if replies else None
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
