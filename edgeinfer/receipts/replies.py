"""Find receipts in replies of every API, whole or streamed, and the answers in the same replies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, TypeVar

import msgspec

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts.receipt import MAX_BYTES, parse_json
from edgeinfer.runtime.event_stream import CollectedAnswer, CollectedCall

_T = TypeVar("_T")
#: Keys of an answer's text and reasoning in whole replies, choices, messages and content blocks.
_TEXT_KEYS = ("content", "text", "response", "result")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_ARGUMENT_KEYS = ("arguments", "partial_json", "input")
#: Keys of objects with text, or of lists of such objects. An object with an _ANSWER_KEYS is an answer.
_ANSWER_KEYS = ("message", "delta", "content", "output")
_OTHER_KEYS = ("choices", "content_block", "tool_calls", "function", "item", "part", "response")
#: Events that end a stream without `[DONE]`.
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
#: Hint of the error for a file that is not a receipt.
_RECEIPT_HINT = (
    "a receipt is JSON that shows how an answer was made: `edgeinfer run --receipt FILE` writes one, "
    "and requests ask for it by `receipt: true`"
)


class Quote(msgspec.Struct, kw_only=True):
    """An answer's text in a reply that also has the answer's receipt.

    `calls` maps a tool call's number to [name, arguments]. `has_calls` is False if calls are left out.
    """

    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[Any]] = {}
    has_calls: bool = True

    def add(self, field: str, text: Any, number: int, *, may_repeat: bool) -> None:
        """Append to a field or to call `number`. If `may_repeat`, `text` may repeat the old text."""
        if field in ("name", "arguments"):
            call, i = self.calls.setdefault(number, ["", ""]), int(field == "arguments")
            call[i] = text if isinstance(text, dict) else f"{call[i]}{text}"
        else:
            before: str = getattr(self, field)
            is_repeated = may_repeat and text.startswith(before)
            setattr(self, field, text if is_repeated else before + text)

    def difference(self, answer: CollectedAnswer, *, prompt: str = "", is_cut: bool = False) -> str:
        """Return which part differs from `answer`, the text of the receipt's tokens; "" if none does.

        The text may begin with `prompt` (option `echo`). If `is_cut`, the reply may lack the end.
        """
        raw = answer.reasoning + answer.text  # some APIs join reasoning and text

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
        if len(quoted) < len(calls):  # Ollama's API leaves out a call that was cut off by max_tokens
            calls = [call for call in calls if _canonical(call.arguments)]
        return len(quoted) == len(calls) and all(map(_is_call, quoted, calls))


def _is_call(quoted: list[Any], call: CollectedCall) -> bool:
    name, arguments = quoted
    if isinstance(arguments, str) and arguments:
        return (name, arguments) == (call.name, call.arguments)
    return name == call.name and _canonical(arguments) == (_canonical(call.arguments) or "{}")


def _canonical(arguments: str | dict[str, Any]) -> str:
    """Return a call's arguments as JSON with sorted keys, "" if they are not a whole object."""
    try:
        decoded = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        return json.dumps(decoded, sort_keys=True) if isinstance(decoded, dict) else ""
    except (ValueError, RecursionError):
        return ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt, with each copy of the answer in its reply. If `is_lone`, there is no reply."""

    source: str = ""
    document: dict[str, Any]
    quotes: tuple[Quote, ...] = ()
    is_lone: bool = False


def read_replies(file: BinaryIO, name: str) -> Iterator[tuple[str, list[Any] | ReceiptError]]:
    """Yield (`FILE:LINE`, JSON documents) for each reply in a file; a stream has several documents.

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
                try:
                    document = parse_json(line + file.read(MAX_BYTES))
                except ReceiptError as fault:
                    raise ReceiptError(f"{name}: {fault.message}", hint=_RECEIPT_HINT) from fault
            # a list whose last member has `receipts` is one reply, with answers to several prompts
            if isinstance(document, list) and not any("receipts" in d for d in _dicts(document[-1:])):
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
    while line := file.readline(MAX_BYTES + 1):
        yield line
        while len(line) > MAX_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_BYTES + 1)


def _is_last(document: Any, *, is_event: bool) -> bool:
    """Return whether a document is the last one of its reply."""
    if not isinstance(document, dict):
        return not is_event
    if is_event:
        return document.get("type") in _LAST_EVENTS or document.get("stop") is True
    return document.get("done") is not False  # in Ollama's API, only the last line lacks `done: false`


def find_receipts(documents: list[Any], source: str = "") -> tuple[list[Entry], int]:
    """Return the receipts of a reply, and the number of its answers.

    `documents` are a receipt, a reply or a stream of an endpoint, or a line of a batch or payload log.
    """
    documents = _dicts(documents)
    last = documents[-1] if documents else {}
    while body := as_type(dict, as_type(dict, last.get("response")).get("body")):
        last, documents = body, [body]  # a line of `edgeinfer batch` has the reply in `response.body`
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
        for receipt in as_type(list, document.get("receipts")) or [document.get("receipt")]
    ]
    quotes = _quote_answers(documents)
    entries = [
        Entry(source=source, document=receipt, quotes=tuple(quotes.get(index, ())))
        for index, receipt in enumerate(receipts)
        if isinstance(receipt, dict) and "content_sha256" in receipt
    ]
    return entries, max(len(receipts), len(quotes), 1)


def _quote_answers(documents: list[dict[str, Any]]) -> dict[int, list[Quote]]:
    """Return each copy of every answer of a reply, by the answer's index."""
    copies: dict[int, dict[str, Quote]] = {}
    for document in documents:
        copy, pieces = _copy_and_pieces(document)
        for index, field, text, number in pieces:
            quote = copies.setdefault(index, {}).setdefault(copy, Quote(has_calls=copy != "part"))
            # in the Responses API, an item that follows a tool call repeats the text before the call
            quote.add(field, text, number, may_repeat=bool(copy))
    return {index: list(quotes.values()) for index, quotes in copies.items()}


#: (index of the answer, field of a quote or a call, its text, number of the call)
_Piece = tuple[int, str, Any, int]


def _copy_and_pieces(document: dict[str, Any]) -> tuple[str, Iterable[_Piece]]:
    """Return the name of the copy that `document` belongs to, and the pieces of answers in `document`.

    Streams of the Responses API repeat an answer as contents ("done"), as parts, as items, and as a
    whole ("response").
    """
    kind, index = as_type(str, document.get("type")), max(0, as_type(int, document.get("index")))
    if kind.startswith("content_block_"):  # in Anthropic's API, `index` counts blocks, not answers
        return "", _pieces(document, 0, index)
    if not kind.startswith("response."):
        return "response" if "output" in document else "", _pieces(document, index, 0)
    number = max(0, as_type(int, document.get("output_index")))
    if kind.endswith(".delta"):
        field = next((field for field in ("arguments", "reasoning") if field in kind), "text")
        return "", [(0, field, as_type(str, document.get("delta")), number)]
    copy = next((key for key in ("part", "item", "response") if key in document), "done")
    is_first = kind.endswith((".created", ".added"))
    return "" if is_first else copy, _pieces(document, 0, number)


def _pieces(document: dict[str, Any], index: int, number: int) -> Iterator[_Piece]:
    """Yield the texts, reasoning and tool calls in an object of a reply, at any depth."""
    pending = [(document, index, number)]
    while pending:
        node, index, number = pending.pop()
        if node.keys() & set(_ANSWER_KEYS):
            yield index, "text", "", 0  # so that an answer without text is compared, too
        is_reasoning = "reasoning" in as_type(str, node.get("type"))
        for key in (*_TEXT_KEYS, *_REASONING_KEYS):
            if isinstance(text := node.get(key), str):
                yield index, "text" if key in _TEXT_KEYS and not is_reasoning else "reasoning", text, 0
        arguments = [node[k] for k in _ARGUMENT_KEYS if isinstance(node.get(k), str | dict)]
        if arguments and isinstance(name := node.get("name"), str):
            namespace = node.get("namespace")
            yield index, "name", f"{namespace}.{name}" if namespace else name, number
        yield from ((index, "arguments", a, number) for a in arguments if a)
        children = list[tuple[dict[str, Any], int, int]]()
        for key in (*_ANSWER_KEYS, *_OTHER_KEYS):
            inner = node.get(key)
            for i, child in enumerate(_dicts(inner if isinstance(inner, list) else [inner])):
                position = max(0, as_type(int, child.get("index", number + i)))
                children.append((child, position, 0) if key == "choices" else (child, index, position))
        pending += reversed(children)


def as_type(kind: type[_T], value: Any) -> _T:
    """Return `value` if it has this type, otherwise the type's empty value."""
    return value if isinstance(value, kind) else kind()


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [element for element in as_type(list, value) if isinstance(element, dict)]
