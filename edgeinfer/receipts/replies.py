"""Find receipts and the answers next to them in replies of every API, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts.receipt import MAX_BYTES, parse_json
from edgeinfer.runtime.event_stream import CollectedAnswer, CollectedCall

#: Keys of an answer's text and reasoning in whole replies, choices, messages and content blocks.
_TEXT_KEYS = ("content", "text", "response", "result")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
#: Events that end a stream without `[DONE]`.
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")


class Quote(msgspec.Struct, kw_only=True):
    """An answer as it stands next to its receipt.

    `calls` are [name, arguments] by the call's number. `has_calls` False: this copy leaves them out.
    """

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[Any]] = {}
    has_calls: bool = True

    def add(self, field: str, text: Any, number: int, *, may_repeat: bool) -> None:
        """Add a part of a field, or of call `number`. `may_repeat`: it may repeat the text so far."""
        if field in ("name", "arguments"):
            call, i = self.calls.setdefault(number, ["", ""]), int(field == "arguments")
            call[i] = text if isinstance(text, dict) else f"{call[i]}{text}"
        else:
            before: str = getattr(self, field)
            is_repeated = may_repeat and text.startswith(before)
            setattr(self, field, text if is_repeated else before + text)

    def difference(self, answer: CollectedAnswer, *, prompt: str = "", is_cut: bool = False) -> str:
        """Say which part differs from `answer`, the text of the receipt's tokens; "" if none does.

        `prompt` may come first (`echo`). `is_cut`: the end of the text, or of a call, was kept back.
        """
        raw = answer.reasoning + answer.text  # some APIs join both

        def is_one_of(text: str, *texts: str) -> bool:
            return text in texts or (is_cut and any(whole.startswith(text) for whole in texts))

        if self.reasoning and not is_one_of(self.reasoning, answer.reasoning):
            return "the response's reasoning differs from the receipt's tokens"
        if not is_one_of(self.text, answer.text, raw, prompt + raw):
            return "the response's text differs from the receipt's tokens"
        if self.has_calls and not is_cut and not self._has_calls_of(answer):
            return "the response's tool calls differ from the receipt's tokens"
        return ""

    def _has_calls_of(self, answer: CollectedAnswer) -> bool:
        calls = [call for _, call in sorted(answer.calls.items())]
        quoted = [call for _, call in sorted(self.calls.items())]
        if len(quoted) < len(calls):  # Ollama's API leaves out a call that a limit cut
            calls = [call for call in calls if _decode(call) is not None]
        return len(quoted) == len(calls) and all(map(_is_call, quoted, calls))


def _is_call(quoted: list[Any], call: CollectedCall) -> bool:
    name, arguments = quoted
    if isinstance(arguments, str) and arguments:
        return (name, arguments) == (call.name, call.arguments)
    pair = (arguments or {}, _decode(call) or {})
    try:
        return name == call.name and len({json.dumps(value, sort_keys=True) for value in pair}) == 1
    except RecursionError:
        return False


def _decode(call: CollectedCall) -> dict[str, Any] | None:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt as it was found, with each copy of its answer; a `lone` one is a file of its own."""

    source: str = ""
    document: dict[str, Any]
    quotes: tuple[Quote, ...] = ()
    is_lone: bool = False


def read_replies(file: BinaryIO, name: str) -> Iterator[tuple[str, list[Any] | ReceiptError]]:
    """Yield where each reply of a file begins, and its JSON documents: a stream has several.

    The file is one document, or lines of JSON or of server-sent events. A line that is not JSON is
    yielded as an error. Raises OSError, and ReceiptError if the file is one document and not JSON.
    """
    documents, source = list[Any](), ""
    n_lines = 0
    for number, line in enumerate(_lines(file), 1):
        content, is_event = line.removeprefix(b"data:").strip(), line.startswith(b"data:")
        n_lines += bool(content)
        if not content or line.startswith((b"event:", b"id:", b"retry:", b":")):
            continue
        is_last = content == b"[DONE]"
        if not is_last:
            try:
                document = parse_json(content)
            except ReceiptError as error:
                if n_lines > 1 or is_event or name.endswith(".jsonl"):
                    yield f"{name}:{number}", error
                    continue
                document = parse_json(line + file.read(MAX_BYTES))
            if isinstance(document, list) and not _are_answers(document):
                problem = "this is a list; `jq -c .[]` writes its replies as lines"
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
    while line := file.readline(MAX_BYTES + 1):
        yield line
        while len(line) > MAX_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_BYTES + 1)


def _is_last(document: Any, *, is_event: bool) -> bool:
    """Return whether a document ends its reply."""
    if not isinstance(document, dict):
        return not is_event
    if is_event:
        return document.get("type") in _LAST_EVENTS or document.get("stop") is True
    return document.get("done") is not False  # Ollama's API streams lines


def _are_answers(documents: list[Any]) -> bool:
    """Return whether a list is a reply to several prompts: its last answer has all receipts."""
    return bool(documents) and isinstance(documents[-1], dict) and "receipts" in documents[-1]


def find_receipts(documents: list[Any], source: str = "") -> tuple[list[Entry], int]:
    """Return the receipts of a reply, and the number of its answers.

    It is a receipt, a reply of the endpoint, its stream, or a line of a batch or of a payload log.
    """
    documents = _dicts(documents)
    last = documents[-1] if documents else {}
    while isinstance(body := last.get("response"), dict) and isinstance(body.get("body"), dict):
        last = body["body"]  # of a batch
        documents = [last]
    if "content_sha256" in last:
        return [Entry(source=source, document=last, is_lone=True)], 1
    if not isinstance(data := last.get("data"), dict):
        return _entries(documents, source) if documents else ([], 0)
    pairs = [_entries([answer], source) for answer in _dicts(data.get("answers"))]
    return [entry for entries, _ in pairs for entry in entries], len(pairs)


def _entries(documents: list[dict[str, Any]], source: str) -> tuple[list[Entry], int]:
    receipts = [
        receipt
        for document in documents
        if document.keys() & {"receipt", "receipts"}
        for receipt in _list(document.get("receipts")) or [document.get("receipt")]
    ]
    quotes = quote_answers(documents)
    entries = [
        Entry(source=source, document=receipt, quotes=tuple(quotes.get(index, ())))
        for index, receipt in enumerate(receipts)
        if isinstance(receipt, dict) and "content_sha256" in receipt
    ]
    return entries, max(len(receipts), len(quotes), 1)


def quote_answers(documents: list[dict[str, Any]]) -> dict[int, list[Quote]]:
    """Return each copy of every answer of a reply, by the answer's index."""
    copies: dict[int, dict[str, Quote]] = {}
    for document in documents:
        for index, copy, field, text, number in _fragments(document):
            quote = copies.setdefault(index, {}).setdefault(copy, Quote(has_calls=copy != "part"))
            # an item after a call repeats the text before it
            quote.add(field, text, number, may_repeat=bool(copy))
    return {index: list(quotes.values()) for index, quotes in copies.items()}


#: (index of the answer, which copy of it, field of a quote or a call, text, number of the call)
_Fragment = tuple[int, str, str, Any, int]


def _fragments(document: dict[str, Any]) -> Iterator[_Fragment]:
    """Yield the pieces of answers in a reply, or in an event of a stream."""
    kind, index = str(document.get("type")), _number(document.get("index"))
    if kind.startswith("response."):
        yield from _of_response_event(kind, document)
        return
    for choice in _dicts(document.get("choices")):
        number = _number(choice.get("index"))
        yield number, "", "text", "", 0
        for message in (choice, choice.get("delta"), choice.get("message")):
            yield from _of_message(message, number)
    if kind.startswith("content_block_"):  # Anthropic's; its index is the block's
        for block in (document.get("content_block"), document.get("delta")):
            yield from _of_message(block, number=index)
    else:
        for message in (document, document.get("message")):
            yield from _of_message(message, index)
    if "output" in document:
        yield from _of_items(document)


def _of_response_event(kind: str, event: dict[str, Any]) -> Iterator[_Fragment]:
    """Yield the pieces of an event of the Responses API, whose streams repeat an answer as contents
    ("done"), as parts, as items, and as a whole ("output").
    """
    number = _number(event.get("output_index"))
    if kind == "response.created":
        yield 0, "", "text", "", 0
    if kind.endswith(".delta"):
        fields = [field for field in ("arguments", "reasoning") if field in kind]
        yield 0, "", fields[0] if fields else "text", str(event.get("delta")), number
    elif kind.endswith(".added"):
        yield from _of_message(event.get("item", event.get("part")), number=number)
    elif "part" in event or "item" in event:
        copy = "part" if "part" in event else "item"
        yield from _of_message(event[copy], copy=copy, number=number)
    elif isinstance(response := event.get("response"), dict):
        yield from _of_items(response)
    else:
        yield from _of_message(event, copy="done", number=number)


def _of_items(response: dict[str, Any]) -> Iterator[_Fragment]:
    yield 0, "output", "text", "", 0
    for number, item in enumerate(_dicts(response.get("output"))):
        yield from _of_message(item, copy="output", number=number)


def _of_message(
    message: Any, index: int = 0, *, copy: str = "", number: int = 0
) -> Iterator[_Fragment]:
    """Yield text, reasoning and calls of a message, an item, a content block or their like."""
    if not isinstance(message, dict):
        return
    blocks = list(enumerate([message], number))
    if isinstance(content := message.get("content"), list):
        yield index, copy, "text", "", 0
        blocks += enumerate(_dicts(content), number)
    for position, block in blocks:
        is_reasoning = "reasoning" in str(block.get("type"))
        for key in (*_TEXT_KEYS, *_REASONING_KEYS):
            if isinstance(text := block.get(key), str):
                is_text = key in _TEXT_KEYS and not is_reasoning
                yield index, copy, "text" if is_text else "reasoning", text, 0
        yield from _of_call(block, index, copy, position)
    for position, call in enumerate(_dicts(message.get("tool_calls"))):
        function = call.get("function", call)
        if isinstance(function, dict):
            position = _number(function.get("index", call.get("index", position)))
            yield from _of_call(function, index, copy, position)


def _of_call(call: dict[str, Any], index: int, copy: str, number: int) -> Iterator[_Fragment]:
    values = [call[key] for key in ("arguments", "partial_json", "input") if key in call]
    if values and isinstance(name := call.get("name"), str):
        namespace = call.get("namespace")
        yield index, copy, "name", f"{namespace}.{name}" if namespace else name, number
    for arguments in values:
        if isinstance(arguments, str | dict) and arguments:
            yield index, copy, "arguments", arguments, number


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [element for element in _list(value) if isinstance(element, dict)]


def _number(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
