"""Shapes of the replies of every API: where a reply has pieces of an answer, and what else it may have.

A reply that has anything else is none of edgeinfer's: some client may show or execute that part.
The types of the replies are in `server/*/wire.py`; tests/server/models/test_receipts.py compares.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Part(enum.StrEnum):
    """Kinds of values that a field of a reply may have.

    The first seven, TEXT to NAMESPACE, are parts of an answer. If one of them differs from the receipt,
    the verdict of `edgeinfer verify` names this part.
    """

    TEXT = "text"
    REASONING = "reasoning"
    JOINED = "reasoning and text"
    #: Text of an answer whose API does not send the reasoning.
    ONLY_TEXT = "text without reasoning"
    NAME = "tool name"
    ARGUMENTS = "tool arguments"
    NAMESPACE = "namespace"
    #: Index of an answer among those in the reply.
    ANSWER = "answer"
    #: Index of a text or tool call in its answer, such as `output_index`.
    INDEX = "index"
    #: A field such as `finish_reason`: in a stream, null or false until the answer ends.
    END = "end"
    #: An empty value: null, false, 0, "", [] or {}.
    EMPTY = "empty"
    #: Neither list nor object. Clients do not show or execute fields of this and the next two kinds.
    SCALAR = "scalar"
    #: A value that contains no string at any depth, such as the object `usage`.
    NUMBERS = "numbers"
    ANY = "any"
    #: A field that the reply's shape lacks, or a value that the shape does not allow.
    UNKNOWN = "unknown"


class Piece(NamedTuple):
    """A string of an answer in a reply, or a field that replies of edgeinfer do not have.

    `answer` is the answer's index in the reply; `position` says to which text or call of the answer the
    string belongs. Strings of equal kind and position are joined in the order of the reply. If `kind`
    is UNKNOWN, `value` is the path of the field ("choices.x").
    """

    answer: int
    position: tuple[int, ...]
    kind: Part
    value: str


#: Allowed indices of answers, texts and calls. Very large integers are not exact in all clients.
_INDICES = range(1 << 16)
#: A document with this many unknown parts is read no further: the first one decides the verdict.
_MOST_UNKNOWN = 10
_PARTS_OF_ANSWERS = tuple(Part)[:7]
#: Types of values that are refused in a field that is not a part of an answer.
_REFUSED_TYPES = {Part.SCALAR: (dict, list), Part.ANY: ()}


#: Fields passed to `_fields` by name whose values need not be scalars → what the values may be.
_OTHER_FIELDS = dict.fromkeys("usage timings tokens".split(), Part.NUMBERS) | dict.fromkeys(
    "completion_probabilities generation_settings logprobs receipt receipts request tool_choice "
    "tools".split(),
    Part.ANY,
)


# A shape says what a JSON value may be: a Part (`Part.TEXT`), a string (the only value allowed), a dict
# (the keys that an object may have), `[shape]` (a list), or a tuple of alternatives. `[Part.ANSWER,
# shape]` is a list of answers.
def _fields(names: str, **shapes: Any) -> dict[str, Any]:
    """Return an object's shape. `names` are fields that belong to no answer; `shapes` has others."""
    return {name: _OTHER_FIELDS.get(name, Part.SCALAR) for name in names.split()} | shapes


def _without_text(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of an object as a stream begins it: later events send texts and arguments."""
    later = (Part.TEXT, Part.REASONING, Part.ARGUMENTS)
    keys = [k for k, v in shape.items() if isinstance(v, list) or (isinstance(v, Part) and v in later)]
    return shape | dict.fromkeys(keys, Part.EMPTY)


_FUNCTION = {"name": Part.NAME, "arguments": Part.ARGUMENTS}
_CALL = _fields("id", type="function", function=_FUNCTION)
_MESSAGE = {"content": Part.TEXT, "reasoning_content": Part.REASONING, "tool_calls": [_CALL]}
_MESSAGE |= _fields("role", refusal=Part.EMPTY)
_DELTA = _MESSAGE | {"tool_calls": [_CALL | {"index": Part.INDEX}]}
_CHOICE = _fields("logprobs", index=Part.ANSWER, finish_reason=Part.END)
_OPENAI = _fields(
    "id created model object usage timings system_fingerprint service_tier receipt receipts"
)
_CHAT = _OPENAI | {"choices": [_CHOICE | {"message": _MESSAGE}]}
_CHAT_CHUNK = _OPENAI | {"choices": [_CHOICE | {"delta": _DELTA}]}
_COMPLETION = _OPENAI | {"choices": [_CHOICE | {"text": Part.JOINED}]}

_TEXT_PART = _fields("logprobs", type="output_text", text=Part.TEXT, annotations=Part.EMPTY)
_REASONING_PART = {"type": "reasoning_text", "text": Part.REASONING}
_ITEM = _fields("id status")
_MESSAGE_ITEM = _ITEM | _fields("role", type="message", content=[_TEXT_PART])
_REASONING_ITEM = _ITEM | {"type": "reasoning", "content": [_REASONING_PART], "summary": Part.EMPTY}
_NAMED_FUNCTION = {"namespace": Part.NAMESPACE, **_FUNCTION}
_CALL_ITEM = _ITEM | _fields("call_id", type="function_call", **_NAMED_FUNCTION)
_ITEMS = (_MESSAGE_ITEM, _REASONING_ITEM, _CALL_ITEM)
_NEW_ITEM = tuple(map(_without_text, _ITEMS))
_NEW_PART = (_without_text(_TEXT_PART), _without_text(_REASONING_PART))
_RESPONSE = _fields(
    "id created_at model status usage tools tool_choice parallel_tool_calls instructions "
    "max_output_tokens temperature top_p truncation previous_response_id store background "
    "service_tier object timings receipt",
    error=Part.EMPTY,
    metadata=Part.EMPTY,
    incomplete_details=(Part.EMPTY, _fields("reason")),
    reasoning=(Part.EMPTY, _fields("effort")),
    text={"format": Part.ANY},
    output=[_ITEMS],
)
_OF_ITEM = _fields("type sequence_number item_id receipt", output_index=Part.INDEX)
_OF_PART = _OF_ITEM | {"content_index": Part.INDEX}

_BLOCKS = (
    {"type": "text", "text": Part.TEXT},
    _fields("signature", type="thinking", thinking=Part.REASONING),
    _fields("id", type="tool_use", name=Part.NAME, input=Part.ARGUMENTS),
)
_NEW_BLOCK = tuple(map(_without_text, _BLOCKS))
_BLOCK_DELTA = (
    {"type": "text_delta", "text": Part.TEXT},
    {"type": "thinking_delta", "thinking": Part.REASONING},
    _fields("signature", type="signature_delta"),
    {"type": "input_json_delta", "partial_json": Part.ARGUMENTS},
)
_ANTHROPIC = _fields(
    "id model stop_reason stop_sequence usage role timings receipt", type="message", content=[_BLOCKS]
)
_END = _fields("stop_reason stop_sequence")
#: Type of a stream's event → name of the answer's copy to which the event belongs, and its shape.
_EVENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "response.created": ("deltas", _OF_ITEM | {"response": _without_text(_RESPONSE)}),
    "response.in_progress": ("deltas", _OF_ITEM | {"response": _without_text(_RESPONSE)}),
    "response.output_item.added": ("deltas", _OF_ITEM | {"item": _NEW_ITEM}),
    "response.content_part.added": ("deltas", _OF_PART | {"part": _NEW_PART}),
    "response.output_text.delta": ("deltas", _OF_PART | _fields("logprobs", delta=Part.TEXT)),
    "response.reasoning_text.delta": ("deltas", _OF_PART | {"delta": Part.REASONING}),
    "response.function_call_arguments.delta": ("deltas", _OF_ITEM | {"delta": Part.ARGUMENTS}),
    "response.output_text.done": ("texts", _OF_PART | _fields("logprobs", text=Part.TEXT)),
    "response.reasoning_text.done": ("texts", _OF_PART | {"text": Part.REASONING}),
    "response.function_call_arguments.done": ("texts", _OF_ITEM | _NAMED_FUNCTION),
    "response.content_part.done": ("parts", _OF_PART | {"part": (_TEXT_PART, _REASONING_PART)}),
    "response.output_item.done": ("items", _OF_ITEM | {"item": _ITEMS}),
    "response.completed": ("response", _OF_ITEM | {"response": _RESPONSE}),
    "response.incomplete": ("response", _OF_ITEM | {"response": _RESPONSE}),
    "message_start": ("blocks", _fields("type", message=_without_text(_ANTHROPIC))),
    "ping": ("blocks", _fields("type")),
    "content_block_start": ("blocks", _fields("type", index=Part.INDEX, content_block=_NEW_BLOCK)),
    "content_block_delta": ("blocks", _fields("type", index=Part.INDEX, delta=_BLOCK_DELTA)),
    "content_block_stop": ("blocks", _fields("type", index=Part.INDEX)),
    "message_delta": ("blocks", _fields("type usage timings", delta=_END)),
    "message_stop": ("blocks", _fields("type receipt")),
}

_OLLAMA = _fields(
    "model created_at done done_reason total_duration load_duration prompt_eval_count "
    "prompt_eval_duration eval_count eval_duration logprobs receipt"
)
_OLLAMA_CALL = _fields("id", function=_FUNCTION | {"index": Part.INDEX})
_OLLAMA_MESSAGE = {"content": Part.TEXT, "thinking": Part.REASONING, "tool_calls": [_OLLAMA_CALL]}
_OLLAMA_CHAT = _OLLAMA | {"message": _fields("role") | _OLLAMA_MESSAGE}
_OLLAMA_GENERATE = _OLLAMA | {"response": Part.TEXT, "thinking": Part.REASONING}
_LLAMA = _fields(
    "id_slot model tokens completion_probabilities tokens_predicted tokens_evaluated "
    "tokens_cached prompt generation_settings truncated stop_type stopping_word timings receipt "
    "receipts",
    content=Part.JOINED,
    index=Part.ANSWER,
    stop=Part.END,
)
_INFER = _fields("model finish_reason timings receipt", result=Part.ONLY_TEXT)

_REPLIES: dict[str, dict[str, Any]] = {
    "chat": _CHAT,
    "chat chunks": _CHAT_CHUNK,
    "completion": _COMPLETION,
    "response": _RESPONSE,
    "message": _ANTHROPIC,
    "Ollama's chat": _OLLAMA_CHAT,
    "Ollama's generate": _OLLAMA_GENERATE,
    "llama.cpp's completion": _LLAMA,
    "infer": _INFER,
}
_ERROR = (Part.EMPTY, _fields("code message"))
_FAILED = {"error": _fields("message type param code")}
_EMBEDDINGS = _fields("object model usage", data=Part.ANY)
_BODIES = (*_REPLIES.values(), _FAILED, _EMBEDDINGS)
_BATCH_RESPONSE = _fields("status_code request_id", body=_BODIES)
_BATCH_LINE = _fields("id custom_id", error=Part.EMPTY, response=(Part.EMPTY, _BATCH_RESPONSE))
_ANSWER = {"text": Part.TEXT, "reasoning": Part.REASONING, "tool_calls": [_fields("id", **_FUNCTION)]}
_LOG_DATA = _fields(
    "request_id operation key status outcome ms request",
    error=_ERROR,
    answers=[Part.ANSWER, _fields("finish_reason usage timings receipt") | _ANSWER],
)
_LOG_LINE = _fields("specversion id source time subject datacontenttype", data=_LOG_DATA)
_LOG_LINE["type"] = "io.edgeinfer.generation"
_DOCUMENTS = _REPLIES | {"batch": _BATCH_LINE, "log": _LOG_LINE}


def read_pieces(document: Any) -> tuple[str, list[Piece]]:
    """Return the name of a document's format (such as "chat"), and the pieces of its answers.

    Fields that this format does not have are pieces of kind UNKNOWN. A stream of /v1/responses sends an
    answer five times, each time in events of another name.
    """
    kind = document.get("type") if isinstance(document, dict) else None
    event = _EVENTS.get(kind) if isinstance(kind, str) else None
    shapes = [event] if event else _DOCUMENTS.items()
    try:
        return _read_best(shapes, document, _Spot())
    except RecursionError:
        return "", [_Spot().piece(Part.UNKNOWN, "(nested too deeply)")]


class _Spot(NamedTuple):
    path: str = ""
    answer: int = 0
    position: tuple[int, ...] = ()

    def field(self, key: str) -> _Spot:
        return self._replace(path=f"{self.path}.{key}".removeprefix("."))

    def piece(self, kind: Part, value: str) -> Piece:
        return Piece(self.answer, self.position, kind, value)


def _read_best(shapes: Iterable[tuple[str, Any]], node: Any, spot: _Spot) -> tuple[str, list[Piece]]:
    """Return the name and the pieces of the shape with the fewest unknown parts."""
    best, fewest = ("", list[Piece]()), math.inf
    for name, shape in shapes:
        if _least_unknown(shape, node) >= fewest:
            continue
        pieces, n_unknown = list[Piece](), 0
        for piece in _pieces(shape, node, spot):
            pieces.append(piece)
            n_unknown += piece.kind is Part.UNKNOWN
            if n_unknown >= min(fewest, _MOST_UNKNOWN):
                break
        if n_unknown < fewest:
            best, fewest = (name, pieces), n_unknown
        if not n_unknown:
            break
    return best


def _least_unknown(shape: Any, node: Any) -> int:
    """Return the least number of unknown parts of an object, judged by its keys and its `type`."""
    if not (isinstance(shape, dict) and isinstance(node, dict)):
        return 0
    kind = shape.get("type")
    has_other_type = type(kind) is str and node.get("type", kind) != kind
    return len([key for key in node if key not in shape]) + has_other_type


def _pieces(shape: Any, node: Any, spot: _Spot) -> Iterator[Piece]:
    match shape:
        case Part.ARGUMENTS if isinstance(node, dict):
            yield spot.piece(shape, json.dumps(node))
        case Part() if shape in _PARTS_OF_ANSWERS and (node is None or isinstance(node, str)):
            yield spot.piece(shape, node or "")
        case Part.END if not isinstance(node, dict | list):
            if node:
                yield spot.piece(shape, "")
        case Part.NUMBERS if not _has_string(node):
            pass
        case Part.EMPTY if not node:
            pass
        case Part() if shape in _REFUSED_TYPES and not isinstance(node, _REFUSED_TYPES[shape]):
            pass
        case str() if node == shape and not isinstance(shape, Part):
            pass
        case tuple():
            yield from _read_best((("", alternative) for alternative in shape), node, spot)[1]
        case [Part.ANSWER, inner] if isinstance(node, list):
            for i, child in enumerate(node):
                # an empty object becomes None, which is an unknown part
                yield from _pieces(inner, child or None, spot._replace(answer=i))
        case [inner] if node is None or isinstance(node, list):
            children, numbers = node or [], _numbers(inner)
            for i, child in enumerate(children):
                is_ith = isinstance(child, dict) and [child.get(key) for key in numbers] == [i]
                if numbers and len(children) > 1 and not is_ith:
                    yield spot.piece(Part.UNKNOWN, spot.path)  # clients read elements by their place
                position = spot.position if numbers else (*spot.position, i)
                yield from _pieces(inner, child or None, spot._replace(position=position))
        case dict() if isinstance(node, dict):
            numbers = _numbers(shape)
            for key in numbers:
                if type(number := node.get(key, 0)) is not int or number not in _INDICES:
                    yield spot.piece(Part.UNKNOWN, spot.field(key).path)
                elif shape[key] is Part.ANSWER:
                    spot = spot._replace(answer=number)
                elif key in node:
                    spot = spot._replace(position=(*spot.position, number))
            for key in [key for key in node if key not in numbers]:
                yield from _pieces(shape.get(key, Part.UNKNOWN), node[key], spot.field(key))
        case _:
            yield spot.piece(Part.UNKNOWN, spot.path)


def _has_string(node: Any) -> bool:
    nodes = [node]
    for value in nodes:  # not recursive: a forger may nest lists deeply
        if isinstance(value, dict | list):
            nodes += value.values() if isinstance(value, dict) else value
    return any(isinstance(value, str) for value in nodes)


def _numbers(shape: Any) -> list[str]:
    """Return the keys of the numbers in an object; none for another shape."""
    fields = shape.items() if isinstance(shape, dict) else ()
    return [key for key, kind in fields if kind in (Part.ANSWER, Part.INDEX)]
