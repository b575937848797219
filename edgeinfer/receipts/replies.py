"""Find receipts in replies of every API, whole or streamed, and the answers in the same replies."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts.receipt import MAX_BYTES, parse_json
from edgeinfer.runtime.event_stream import CollectedAnswer

#: Keys of texts that clients show, and of the arguments of calls that they execute.
_TEXT = "content delta output reasoning reasoning_content refusal response result text thinking".split()
_ARGUMENT_KEYS = {"arguments", "input", "partial_json"}
#: Keys outside answers. A text with a key that is not in `_TEXT`, `_ARGUMENT_KEYS` or here is unknown.
_OTHER_KEYS = (
    "call_id completion_probabilities created_at custom_id datacontenttype done_reason effort "
    "finish_reason format generation_settings id incomplete_details instructions item_id key logprobs "
    "model name namespace object operation outcome previous_response_id prompt receipt receipts "
    "request request_id role service_tier signature source specversion status stop_reason "
    "stop_sequence stop_type stopping_word subject system_fingerprint time tool_choice tools "
    "truncation type"
).split()
#: Suffixes of the types of events that announce a text or a call; of events that end a stream.
_FIRST_EVENTS = ("_start", ".created", ".in_progress", ".added")
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
#: Prefixes of the lines of server-sent events that have no data.
_OTHER_FIELDS = (b"event:", b"id:", b"retry:", b":")
#: Matches the key paths of texts in /v1/completions and /completion, which join reasoning and text.
_JOINED = re.compile(r"(/response/body)?(/choices\d+/text|/content)")
#: Matches the key paths of texts in these APIs and in /infer, which leaves reasoning out.
_NO_REASONING = re.compile(rf"{_JOINED.pattern}|(/response/body)?/result")


class Quote(msgspec.Struct, kw_only=True):
    """All that clients show or execute of an answer in a reply that also has the answer's receipt.

    `pieces` maps a field and a key path to the pieces of each call. A key path consists of an event's
    type and of the keys that lead to a piece. A reply may repeat an answer: each path has all of it.
    """

    pieces: dict[tuple[str, str], dict[int, list[str]]] = {}
    has_unknown_text: bool = False

    def difference(self, answer: CollectedAnswer, *, prompt: str = "", is_cut: bool = False) -> str:
        """Return which field differs from `answer`, the text of the receipt's tokens; "" if none does.

        Completions begin with `prompt` (option `echo`). If `is_cut`, the reply may lack the end.
        """
        text_paths = [key_path for field, key_path in self.pieces if field == "text"]
        has_reasoning = not text_paths or not all(map(_NO_REASONING.fullmatch, text_paths))
        missing = {"text", "tool name", "tool arguments", *["reasoning"] * has_reasoning}
        for (field, key_path), calls in self.pieces.items():
            values = ["".join(calls[call]) for call in sorted(calls)]
            if field != "tool name" and key_path.partition("/")[0].endswith(_FIRST_EVENTS):
                expected = [""] * len(values)
            else:
                expected = _values_in(field, key_path, answer, prompt, len(values))
                missing.discard(field)
            if is_cut:
                *complete, last = [*expected, ""][: len(values)]
                expected = [*complete, values[-1] if last.startswith(values[-1]) else last]
            if values != expected and not (field == "tool arguments" and _are_same(values, expected)):
                return field
        lacks = (f for f in missing if {*_values_in(f, "", answer, "", 0)} - {"", "{}"})
        return "" if is_cut or self.has_unknown_text else min(lacks, default="")


def _values_in(field: str, key_path: str, answer: CollectedAnswer, prompt: str, n: int) -> list[str]:
    """Return what the reply must have in a field at a key path that has `n` texts or calls."""
    if field in ("text", "reasoning"):
        joined = prompt + answer.reasoning + answer.text
        return [joined if _JOINED.fullmatch(key_path) else getattr(answer, field)]
    calls = [call for _, call in sorted(answer.calls.items())]
    if n < len(calls):  # some APIs leave out a call that was cut off by max_tokens, or its arguments
        calls = [call for call in calls if call.arguments and _canonical(call.arguments)]
    return [getattr(call, field.removeprefix("tool ")) for call in calls]


def _are_same(texts: list[str], expected: list[str]) -> bool:
    return len(texts) == len(expected) and all(
        a == b or _canonical(a) == (_canonical(b) or "{}") for a, b in zip(texts, expected, strict=True)
    )


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
    n_lines = 0
    for number, line in enumerate(_lines(file), 1):
        content, is_event = line.removeprefix(b"data:").strip(), line.startswith(b"data:")
        n_lines += bool(content)
        if not content or line.startswith(_OTHER_FIELDS):
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
        return is_stopped or document.get("type") in _LAST_EVENTS
    return document.get("done") is not False  # in Ollama's API, only the last line lacks `done: false`


def find_receipts(documents: list[Any], source: str = "") -> tuple[list[Entry], int]:
    """Return the receipts of a reply, and the number of its answers.

    `documents` are a receipt, a reply or a stream of an endpoint, or a line of a batch or payload log.
    """
    receipts = [receipt for document in documents for receipt in _receipts(document)]
    replies = [d for d in documents if isinstance(d, dict) and all(d is not r for r in receipts)]
    quotes, indices = dict[int, Quote](), {0 for _ in replies}
    for index, field, key_path, text, call in (piece for reply in replies for piece in _pieces(reply)):
        indices.add(max(0, index))
        key = index if index in range(len(receipts)) else -1  # -1 is compared with all receipts
        quote = quotes.setdefault(0 if len(receipts) == 1 else key, Quote())
        quote.has_unknown_text |= not field
        if field:
            quote.pieces.setdefault((field, key_path), {}).setdefault(call, []).append(text)
    entries = list[Entry]()
    for i, receipt in enumerate(receipts):
        if receipt is not None and [*as_type(dict, receipt)] != ["refused"]:
            quoted = tuple(quotes[key] for key in (i, -1) if key in quotes) if replies else None
            entries.append(Entry(source=source, document=receipt, quotes=quoted))
    is_logged = any("specversion" in document for document in replies)
    return entries, len(receipts) if is_logged else max(len(receipts), len(indices))


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


def _pieces(document: dict[str, Any]) -> Iterator[tuple[int, str, str, str, int]]:
    """Yield (answer's index or -1, field, key path, piece, call) of all pieces, at any depth."""
    kind = as_type(str, document.get("type"))
    # in Anthropic's API, `index` counts blocks, not answers
    index = -1 if kind.startswith("content_block_") else as_type(int, document.get("index", -1))
    pending: list[Any] = [("", kind, document, index, as_type(int, document.get("output_index")))]
    while pending:
        key, key_path, node, index, call = pending.pop()
        children = list[Any]()
        is_answer = key in ("choices", "answers")
        if key in _ARGUMENT_KEYS or (key == "delta" and "arguments" in kind):
            arguments = node if isinstance(node, str) else _canonical(node or "") or "?"
            yield index, "tool arguments", key_path, arguments, call
        elif isinstance(node, list) and is_answer:
            children += [(key, f"{key_path}{i}", child, i, 0) for i, child in enumerate(node)]
        elif isinstance(node, list) and node:
            children += [(key, key_path, child, index, call + i) for i, child in enumerate(node)]
        elif isinstance(node, dict):
            if is_answer:
                index = as_type(int, node.get("index", index))
            else:
                call = as_type(int, node.get("index", call))
            if key not in ("", "tool_calls") and "type" in node:
                key_path += f":{as_type(str, node['type'])}"
            if isinstance(name := node.get("name"), str):
                namespace = as_type(str, node.get("namespace"))
                yield index, "tool name", key_path, f"{namespace}.{name}" if namespace else name, call
            fields = ((k, v) for k, v in node.items() if k not in _OTHER_KEYS)
            children += [(k, f"{key_path}/{k}", v, index, call) for k, v in fields]
        elif key in _TEXT and (node or isinstance(node, str) or key in ("content", "output")):
            is_reasoning = "reasoning" in key_path or "thinking" in key_path
            yield index, "reasoning" if is_reasoning else "text", key_path, f"{node or ''}", 0
        elif node and isinstance(node, str):
            yield index, "", key_path, node, 0
        pending += reversed(children)


def as_type(kind: type[Any], value: Any) -> Any:
    """Return `value` if it has this type, otherwise the type's empty value."""
    return value if isinstance(value, kind) else kind()
