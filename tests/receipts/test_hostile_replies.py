"""Hostile replies: the work of reading one is bounded by its size."""

import contextlib
import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from edgeinfer.errors import ReceiptError
from edgeinfer.receipts import reply_shapes as shapes
from edgeinfer.receipts.receipt import to_receipt
from edgeinfer.receipts.replies import find_receipts, read_replies
from edgeinfer.runtime.event_stream import CollectedAnswer
from edgeinfer.server.native.wire import LlamaAnswer

_N_BYTES = 60_000
#: A file may cause this many calls of Python functions: for each byte, for the file as a whole, and for
#: each of its first 1,000 lines.
_CALLS_PER_BYTE, _CALLS_PER_FILE = 2, 60_000
_CALLS_PER_LINE = 300

_SHAPES = [*shapes._DOCUMENTS.values(), *(shape for _, shape in shapes._EVENTS.values())]
_VALUES = ("0", "{}", "[]", "null", '""', "true", "[{}]", "[0]", '{"x":0}')


def _count_calls(data: bytes) -> int:
    """Read replies, receipts and quotes as `edgeinfer verify` does; return the number of calls."""
    n_calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    sys.setprofile(count)
    try:
        with contextlib.suppress(ReceiptError):
            for _, documents in read_replies(io.BytesIO(data), "reply"):
                if not isinstance(documents, ReceiptError):
                    _check(documents)
    finally:
        sys.setprofile(None)
    return n_calls


def _check(documents: list[Any]) -> None:
    entries, _ = find_receipts(documents)
    for entry in entries:
        with contextlib.suppress(ReceiptError):
            to_receipt(entry.document)
    for quote in (entries[0].quotes or ()) if entries else ():
        quote.difference(CollectedAnswer("x"))


def _keys(shape: Any) -> Iterator[str]:
    """Yield the keys of a shape and of all shapes in it, as JSON."""
    yield from map(json.dumps, shape if isinstance(shape, dict) else ())
    if isinstance(shape, dict | list | tuple):
        for inner in shape.values() if isinstance(shape, dict) else shape:
            yield from _keys(inner)


_KEYS = sorted({key for shape in _SHAPES for key in _keys(shape)})
_TYPES = sorted({'"x"', *map(json.dumps, shapes._EVENTS), '"function_call"', '"tool_use"'})


def _lists(shape: Any, before: str = "", after: str = "") -> Iterator[tuple[str, str]]:
    """Yield the JSON before and after the elements of each list in a document of this shape."""
    if isinstance(shape, list):
        yield f"{before}[", f"]{after}"
        yield from _lists(shape[-1], f"{before}[", f"]{after}")
    elif isinstance(shape, tuple):
        for alternative in shape:
            yield from _lists(alternative, before, after)
    elif isinstance(shape, dict):
        kind = f'"type":{json.dumps(shape["type"])},' if type(shape.get("type")) is str else ""
        for key, inner in shape.items():
            yield from _lists(inner, f'{before}{{{kind}"{key}":', f"}}{after}")


_LISTS = sorted({pair for shape in _SHAPES for pair in _lists(shape)})
#: Text before, between and after the documents or elements of a file.
_FRAMES = [
    ("", "\n", ""),
    ("data:", "\n\ndata:", "\n\n"),
    ("[", ",", ',{"receipts":[]}]'),
    ('{"content":"x","receipts":[', ",", "]}"),
    ('{"usage":[', ",", "]}"),
    *((before, ",", after) for before, after in _LISTS),
]


def _element(dice: random.Random) -> str:
    """Make a short value, or an object with one or two of the keys that replies have."""
    kind = f'"type":{dice.choice(_TYPES)}'
    fields = [f"{key}:{dice.choice(_VALUES)}" for key in dice.sample(_KEYS, dice.randrange(3))]
    objects = [f"{{{','.join(keys)}}}" for keys in ([kind, *fields], *[fields] * 9)]
    return dice.choice([*_VALUES, *objects])


def _fill(frame: tuple[str, str, str], elements: list[str]) -> bytes:
    before, separator, after = frame
    n = _N_BYTES // (sum(map(len, elements)) + len(separator) * len(elements))
    return (before + separator.join(elements * n) + after).encode()


@pytest.mark.parametrize("frame", _FRAMES, ids=lambda frame: frame[0])
def test_the_work_of_a_reply_is_bounded_by_its_size(
    frame: tuple[str, str, str], cases: Callable[[int], int]
) -> None:
    dice = random.Random(frame[0])
    lists = [[_element(dice) for _ in range(dice.choice([1, 1, 3]))] for _ in range(cases(12))]
    for elements in [*([value] for value in _VALUES), *lists]:
        data = _fill(frame, elements)
        line_calls = min(data.count(b"\n"), 1000) * _CALLS_PER_LINE
        limit = len(data) * _CALLS_PER_BYTE + _CALLS_PER_FILE + line_calls
        assert _count_calls(data) <= limit, elements


def test_a_long_stream_of_the_shortest_events_is_read() -> None:
    event = msgspec.json.encode(LlamaAnswer(content="a", model="m"))
    [(_, documents)] = read_replies(io.BytesIO(b"data: %s\n\n" % event * 5000), "reply")
    assert not isinstance(documents, ReceiptError)
    assert len(documents) == 5000


def test_a_file_of_many_short_replies_is_refused() -> None:
    replies = list(read_replies(io.BytesIO(b'{"usage":{}}\n' * 1000), "reply"))
    assert len(replies) == 1000
    with pytest.raises(ReceiptError, match=r"longer than these \(13 bytes on average\)$"):
        list(read_replies(io.BytesIO(b'{"usage":{}}\n' * 1001), "reply"))


_NESTED = [
    ("[", "]"),
    ('{"a":', "}"),
    ('{"choices":[', "]}"),
    ('{"usage":[', "]}"),
    ('{"message":', "}"),
]


@pytest.mark.parametrize(("opening", "closing"), _NESTED)
@pytest.mark.parametrize("depth", [90, 900, 9000])
def test_the_work_of_nested_values_is_bounded(opening: str, closing: str, depth: int) -> None:
    data = (opening * depth + "0" + closing * depth).encode()
    assert _count_calls(data) <= len(data) * _CALLS_PER_BYTE + _CALLS_PER_FILE


@pytest.mark.parametrize("character", ["a", " ", "\n", "\r", ",", "1", "\\u00e9", ":\n", "data:"])
def test_the_work_of_a_long_string_many_keys_or_odd_bytes_is_bounded(character: str) -> None:
    text = character * (_N_BYTES // len(character))
    keys = ",".join(f'"{character}{i}":0' for i in range(5000))
    for data in (text, f'{{"content":"{text}"}}', f"data:{text}", f"{{{keys}}}"):
        assert _count_calls(data.encode()) <= len(data) * _CALLS_PER_BYTE + _CALLS_PER_FILE
