"""Find receipts in replies of every API, whole or streamed, and the answers in the same replies."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgspec

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts.receipt import MAX_BYTES, parse_json
from edgeinfer.receipts.reply_shapes import Part, Piece, read_pieces
from edgeinfer.runtime.event_stream import CollectedAnswer

#: Types of events that end a stream of /v1/messages or /v1/responses.
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
#: Prefixes of the lines of server-sent events that contain no data.
_OTHER_FIELDS = (b"event:", b"id:", b"retry:", b":")
#: Parts of a reply that may contain an answer's text. The replies of an API have only one of them.
TEXTS = {Part.TEXT, Part.JOINED, Part.ONLY_TEXT}

#: A copy of an answer in a reply: part (Part.TEXT) → position of a text or call → its strings.
_Copy = dict[Part, dict[tuple[int, ...], list[str]]]
#: A stream of /v1/responses sends an answer five times. These are the names of the five copies; other
#: replies have one copy.
_OF_RESPONSES = {"deltas", "texts", "parts", "items", "response"}
#: Copies of replies that are never streamed in pieces, so that each text and call occurs once.
_WHOLE = {"chat", "message", "infer"}
#: A file of more than `_MANY_DOCUMENTS` documents and receipts is refused if their mean length is less
#: than `_LEAST_MEAN_BYTES`. Events of edgeinfer are longer. Without this limit, a hostile file of 2 MB
#: takes up to 23 s to read.
_MANY_DOCUMENTS, _LEAST_MEAN_BYTES = 1000, 64
#: Copies in which a tool call's arguments are an object; `{}` if the model wrote an unfinished one.
_WITH_OBJECTS = {"message", "blocks", "Ollama's chat"}


class Quote(msgspec.Struct, kw_only=True):
    """An answer as its reply shows it to clients, to be compared with the receipt in the same reply.

    `copies` has the answer's strings, by the name that `read_pieces` returns: a stream of /v1/responses
    sends an answer five times, other replies send it once. `fault` describes the first part of the
    reply that edgeinfer does not send, or not at this place; "" if there is none. `is_ended` says
    whether the end of the answer has been read.
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
        """Return which part of the reply differs from `answer`; "" if none does.

        `answer` has the text and tool calls of the receipt's tokens. The text of a completion may begin
        with `prompt` (option `echo`). If `is_cut`, the reply may have only the beginning of the answer.
        """
        if self.fault:
            return self.fault
        if len(self.copies) > 1 and not self.copies.keys() <= _OF_RESPONSES:
            return "mixture of APIs"
        for copy, parts in (self.copies or {"": {}}).items():
            if difference := (
                _different_text(parts, answer, prompt=prompt, is_cut=is_cut)
                or _different_calls(copy, parts, answer, is_cut=is_cut)
            ):
                return difference
        return ""


def _different_text(parts: _Copy, answer: CollectedAnswer, *, prompt: str, is_cut: bool) -> str:
    """Return which text of a copy differs from the answer's; "" if none does."""
    joined = answer.reasoning + answer.text
    texts = {
        Part.TEXT: [answer.text],
        Part.ONLY_TEXT: [answer.text],
        Part.REASONING: [answer.reasoning],
        Part.JOINED: [joined, prompt + joined],
    }
    if not parts.keys() & {Part.JOINED, Part.ONLY_TEXT}:  # these APIs have no separate reasoning
        parts = {Part.TEXT: {}, Part.REASONING: {}} | parts
    for kind in [kind for kind in texts if kind in parts]:
        text = "".join(map("".join, parts[kind].values()))
        if not any(text == whole or (is_cut and whole.startswith(text)) for whole in texts[kind]):
            return kind
        blocks = [position[0] for position in parts[kind] if position]
        if any(b - a < 2 for a, b in itertools.pairwise(blocks)):  # a client may read only one
            return f"{kind}, which is divided"
    return ""


def _different_calls(copy: str, parts: _Copy, answer: CollectedAnswer, *, is_cut: bool) -> str:
    """Return which part of a copy's calls differs from those of the answer; "" if none does."""
    if copy == "parts":  # these events have only texts
        return ""
    names, arguments, spaces = (
        {position: "".join(texts) for position, texts in parts.get(kind, {}).items()}
        for kind in (Part.NAME, Part.ARGUMENTS, Part.NAMESPACE)
    )
    positions = sorted({*names, *arguments})
    calls = [call for _, call in sorted(answer.calls.items())]
    if copy == "Ollama's chat" and len(positions) < len(calls):  # it leaves out an unfinished call
        calls = [call for call in calls if _sort_keys(call.arguments, msgspec.json.decode)]
    if is_cut:
        calls = calls[: len(positions)]
    called = [f"{spaces.get(p, '')}.{names.get(p, '')}".removeprefix(".") for p in positions]
    if called != [call.name for call in calls]:
        return Part.NAME
    for position, call in zip(positions, calls, strict=True):
        text, is_last = arguments.get(position, ""), position == positions[-1]
        if text == call.arguments or (is_cut and is_last and call.arguments.startswith(text)):
            continue
        unfinished = "{}" if copy in _WITH_OBJECTS else None
        expected = _sort_keys(call.arguments, msgspec.json.decode) or unfinished
        if _sort_keys(text, parse_json) != expected:
            return Part.ARGUMENTS
    return ""


def _sort_keys(arguments: str, decode: Callable[[bytes], Any]) -> str:
    """Return a call's arguments with sorted keys; "" if `decode` returns no object for them.

    Servers decode the model's arguments with msgspec, which takes the last of equal keys. Those in a
    reply are decoded with `parse_json`, which refuses equal keys: a client may take the first one.
    """
    with contextlib.suppress(ReceiptError, ValueError, RecursionError):  # DecodeError is a ValueError
        if isinstance(fields := decode((arguments or "{}").encode()), dict):
            return json.dumps(fields, sort_keys=True)
    return ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt from a file, and the answer as the receipt's reply shows it.

    `document` is the receipt's JSON, not yet checked. `quotes` is None if the receipt is in no reply.
    Parts of the reply that belong to no receipt's answer are a separate element of `quotes`. `source`
    is the file and line of the reply.
    """

    source: str = ""
    document: Any
    quotes: tuple[Quote, ...] | None


def read_replies(file: BinaryIO, name: str) -> Iterator[tuple[str, list[Any] | ReceiptError]]:
    """Yield (`FILE:LINE`, JSON documents) for each reply in a file; a stream has several documents.

    The file is one document, or lines of JSON or of server-sent events. A line that is not JSON, or
    does not fit the lines before it, is yielded as an error. Raises OSError, and ReceiptError if the
    file is one document and not JSON, or has many very short documents or receipts.
    """
    documents, source = list[Any](), ""
    n_lines = n_bytes = n_documents = 0
    event = b""
    has_data = of_events = False
    for number, line in enumerate(_lines(file), 1):
        n_bytes += len(line)
        content, is_event = line.removeprefix(b"data:").strip(), line.startswith(b"data:")
        n_lines += bool(content)
        if not line.strip(b"\r\n"):
            event, has_data = b"", False
        if line.startswith(b"event:"):
            event = line[6:].strip()
        if not content or (line.startswith(_OTHER_FIELDS) and b"data:" not in line):
            continue  # after U+2028 in a comment, some clients read an event
        location = f"{name}:{number}"
        n_documents += 1
        _refuse_many_short(name, n_documents, n_bytes)
        is_mixed = (is_event and has_data) or (bool(documents) and is_event != of_events)
        of_events, has_data = is_event, is_event
        is_last = content == b"[DONE]"
        if is_mixed or (is_last and n_lines == 1):
            yield location, ReceiptError("the lines are not those of one stream")
            continue
        if not is_last:
            try:
                document = parse_json(content)
            except ReceiptError as error:
                if n_lines > 1 or is_event or name.endswith(".jsonl"):
                    yield location, error
                    continue
                later_lines = file.read(MAX_BYTES)
                n_bytes += len(later_lines)
                try:
                    document = parse_json(line + later_lines)
                except ReceiptError as fault:
                    raise ReceiptError(f"{name}: {fault.message}") from fault
            if reason := _why_not_a_reply(document, event if is_event else None):
                yield location, ReceiptError(reason)
                continue
            source = source or location
            added = document if isinstance(document, list) else [document]
            n_documents += len(added) - 1 + sum(map(len, map(_receipts, added)))
            _refuse_many_short(name, n_documents, n_bytes)
            documents += added
            is_last = _is_last(document, is_event=is_event)
        if is_last and documents:
            yield source, documents
            documents, source = [], ""
    if documents:
        yield source, documents


def _refuse_many_short(name: str, n_documents: int, n_bytes: int) -> None:
    """Raise ReceiptError if the first `n_bytes` of a file have many very short documents.

    `n_documents` counts receipts, too.
    """
    if n_documents > _MANY_DOCUMENTS and n_bytes < n_documents * _LEAST_MEAN_BYTES:
        mean = f"{n_bytes // n_documents} bytes on average"
        problem = f"{name}: edgeinfer's documents and receipts are longer than these ({mean})"
        raise ReceiptError(problem, hint="name a receipt, or a reply as the endpoint sent it")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines, long ones in pieces. A carriage return ends a line of server-sent events, too."""
    while line := file.readline(MAX_BYTES + 1):
        yield from line.splitlines() if line.startswith((b"data:", *_OTHER_FIELDS)) else [line]


def _why_not_a_reply(document: Any, event: bytes | None) -> str:
    """Return why a document is not part of a reply; "" if it may be. `event` is its event's name."""
    if event is not None and event.decode(errors="replace") != _type_of(document):
        return "the event's name is not the type in its data"
    if isinstance(document, list):  # with `receipts` at its end, it has the answers to several prompts
        answers = [as_type(dict, answer) for answer in document]
        if not answers or "receipts" not in answers[-1]:
            return "this is a list of replies; write one reply per line: `jq -c .[] FILE`"
        if any(answer.get("index", 0) != i for i, answer in enumerate(answers)):
            return "the answers of a list are not in their order"
    return ""


def _is_last(document: Any, *, is_event: bool) -> bool:
    """Return whether a document is the last one of its reply."""
    document = as_type(dict, document)
    if is_event:  # in llama.cpp's API, each of several answers ends with `stop`, the last has receipts
        is_stopped = document.get("stop") is True and bool(_receipts(document))
        return is_stopped or document.get("type") in _LAST_EVENTS or bool(document.get("error"))
    return document.get("done") is not False  # in Ollama's API, only the last line lacks `done: false`


#: Order of the events in a stream of /v1/messages, which has blocks, or of /v1/responses, which has
#: items, as letters of `_TYPES`. A block or item begins (capital letter), has only pieces of its own
#: kind, and ends (. or ,) before the next one begins and before the answer ends (/ or ;).
_ORDER = re.compile(
    r"(?:(?:Tt*|Rr*|Aa*)\.|/)*(?:Tt*|Rr*|Aa*)?|(?:(?:M[mp]*|S[sp]*|Ff*),|;)*(?:M[mp]*|S[sp]*|Ff*)?"
)
#: Letter in `_ORDER` → types of blocks, items, deltas and events for which it stands.
_TYPES = {
    "t": "text text_delta",
    "r": "thinking thinking_delta signature_delta",
    "a": "tool_use input_json_delta",
    ".": "content_block_stop",
    "/": "message_delta",
    "m": "message output_text",
    "s": "reasoning reasoning_text",
    "f": "function_call function_call_arguments",
    "p": "content_part",
    ",": "output_item",
    ";": "completed incomplete",
}
_LETTERS = {name: letter for letter, names in _TYPES.items() for name in names.split()}


def _is_in_order(documents: list[Any]) -> bool:
    """Return whether all clients read the blocks or items of a stream alike; True for other replies."""
    letters, newest = "", -1
    item_id: Any = None
    for document in documents:
        event, kind = as_type(dict, document), _type_of(document)
        index = event.get("index" if kind.startswith("content_block") else "output_index")
        name = kind.removeprefix("response.").partition(".")[0]
        if kind == "content_block_delta":
            name = _type_of(event.get("delta"))
        if begins := kind in ("content_block_start", "response.output_item.added"):
            block = as_type(dict, event.get("content_block") or event.get("item"))
            item_id, name = block.get("id"), _type_of(block)
            newest += 1
        letter = _LETTERS.get(name, "?")
        if letter in "/;":
            letters += letter
        elif begins or index is not None:
            letters += letter.upper() if begins else letter
            if index != newest or event.get("item_id", item_id) != item_id:
                return False
    return _ORDER.fullmatch(letters) is not None


def find_receipts(documents: list[Any], source: str = "") -> tuple[list[Entry], int]:
    """Return the receipts of a reply, and the number of its answers, of which some may have none.

    `documents` are a receipt, a reply or a stream of an endpoint, or a line of a batch or payload log.
    `source` is stored in each `Entry`.
    """
    receipts = [receipt for document in documents for receipt in _receipts(document)]
    ids = {id(receipt) for receipt in receipts}
    replies = [document for document in documents if id(document) not in ids]
    is_stream = len(replies) > 1
    quotes = {i: Quote() for i in range(len(receipts) * is_stream)}
    if not _is_in_order(replies):
        quotes[-1] = Quote(fault="order of events")
    answers = set[int]()
    for reply in replies:
        if answers and -1 in quotes and quotes[-1].fault:
            break  # this reply differs from each receipt, whatever follows
        copy, pieces = read_pieces(reply)
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
    """Return `value` if it has the type `kind`, otherwise this type's empty value, e.g. {} for dict."""
    return value if isinstance(value, kind) else kind()


def _type_of(document: Any) -> str:
    kind: str = as_type(str, as_type(dict, document).get("type"))
    return kind
