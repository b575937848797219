"""Parse tool calls in the notation of Qwen3-Coder and Qwen 3.5: `XmlSection`.

`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`. Models may omit
all tags except `<function=` and `<parameter=`. Nothing is escaped, so a value (source code, say) may
contain these tags itself. A value ends at the first closing tag that has no opening tag inside the
value, and that is followed by the next parameter or call. Values are streamed, except text after a
possible end. If the answer ends first, `_best_end` chooses the most likely end.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import Literal

from edgeinfer.runtime.chat_format.parameters import (
    json_text,
    parameter_kinds,
    property_schemas,
    typed_value,
)
from edgeinfer.runtime.chat_format.tool_call_formats import MAX_NAME, could_become
from edgeinfer.runtime.chat_format.tool_call_parser import Section

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_OPENERS = {END_CALL: CALL, END_FUNCTION: FUNCTION, END_PARAMETER: PARAMETER}
_MARKERS = (*_OPENERS, *_OPENERS.values())
_MARKER = re.compile("|".join(_MARKERS))
#: Matches the text after `</parameter>` if this tag belongs to an example of a call inside a value.
_AFTER_VALUE = re.compile(rf"\s*(?:{PARAMETER}|{END_FUNCTION}|{END_CALL}|\Z)")
_NAME = rf"([^>\n]{{0,{MAX_NAME}}})>"
_HEAD = re.compile(rf"(?:{FUNCTION}|{PARAMETER}){_NAME}")
#: Matches what may follow a parameter's value: the next parameter, or closing tags and the next call.
_TAIL = re.compile(
    rf"\s*(?:{PARAMETER}{_NAME}"
    rf"|(?P<closers>(?:{END_FUNCTION}\s*)?(?:{END_CALL}\s*)?)(?:{CALL}\s*)?(?:{FUNCTION}{_NAME})?)"
)
#: Longest number, boolean or null (characters) as a parameter's value. A longer value is a string.
_MAX_SCALAR = 64

#: Whether a tag ends a parameter's value: "no" and "end" are certain, "wait" needs more text to decide,
#: and "perhaps" means that the tag ends the value unless a later tag fits better.
Verdict = Literal["no", "wait", "end", "perhaps"]


class XmlSection(Section):
    """Parses calls in XML tags. The tools' schemas decide the types of the values."""

    def _parse(self) -> Iterator[None]:
        while text := (yield from self._upcoming((CALL, FUNCTION, END_CALL))):
            if text.startswith(END_CALL) and self._end_of_calls:
                self._cursor += len(END_CALL)
                break
            if text.startswith(CALL) and not self._end_of_calls:
                self._cursor += len(CALL)
                continue
            if not text.startswith(FUNCTION) or (self._end_of_calls and self._marker != CALL):
                break
            if not (yield from self._read_call()):
                return
        if self._end_of_calls:
            self._end_of_calls = self._cursor

    def _read_call(self) -> Generator[None, None, bool]:
        name = yield from self._read_name()
        if name not in self._tools:
            return False
        self._keys: set[str] = set()
        self._parameters = frozenset(property_schemas(self._tools[name]))
        literals = (PARAMETER, END_FUNCTION, END_CALL)
        while (text := (yield from self._upcoming(literals))).startswith(PARAMETER):
            key = yield from self._read_name()
            while self._cursor == len(self._raw) and not self._has_ended:
                yield
            if not key:
                return False
            self._begin(name)
            if not (yield from self._read_value(key, parameter_kinds(self._tools[name], key))):
                return False
        if text.startswith(END_FUNCTION):
            self._cursor += len(END_FUNCTION)
            self._begin(name)
        elif self._index < 0 or (not text and self._cut):  # no call has begun, or the call is cut
            return False
        self._send("}")
        self._end_call()
        return True

    def _begin(self, name: str) -> None:
        if self._index < 0:
            self._begin_call(name)
            self._send("{")
            self._separator = ""

    def _read_name(self) -> Generator[None, None, str]:
        """Return NAME of `<function=NAME>` or `<parameter=NAME>` at the cursor; "" if incomplete."""
        while not (head := _HEAD.match(self._raw, self._cursor)) and self._may_grow(self._cursor):
            yield
        self._cursor = head.end() if head else self._cursor
        return head[1].strip().strip("\"'") if head else ""

    def _may_grow(self, start: int) -> bool:
        """Return whether the tag that begins at `start` lacks its `>`, which may still come."""
        text = self._raw[start : start + MAX_NAME]
        return not self._has_ended and len(text) < MAX_NAME and not {">", "\n"} & set(text)

    def _read_value(self, key: str, kinds: frozenset[str]) -> Generator[None, None, bool]:
        """Emit a parameter's value; return False if the answer ends inside it."""
        self._cursor += self._raw.startswith("\n", self._cursor)
        value = _Value(self._cursor, kinds, is_json=self._constrained)
        self._keys.add(key)
        head = f"{self._separator}{json_text(key)}: "
        while (value_end := self._find_end(value)) is None:
            head = self._send_value(head, value.grow(self._raw))
            if self._has_ended:
                return False
            yield
        self._send_value(head, value.close(self._raw[value.start : value_end].removesuffix("\n")))
        self._cursor = value_end + len(END_PARAMETER) * self._raw.startswith(END_PARAMETER, value_end)
        return True

    def _send_value(self, head: str, text: str) -> str:
        """Emit `head` (the key) and `text`, and return ""; if `text` is "", only return `head`."""
        if not text:
            return head
        self._send(head + text)
        self._separator = ", "
        return ""

    def _find_end(self, value: _Value) -> int | None:
        """Return where the value ends; None if more text is needed."""
        while marker := _MARKER.search(self._raw, value.seen):
            start, marker_end = marker.span()
            verdict = self._judge(marker)
            if verdict == "wait":
                value.seen = start
                break
            value.seen = marker_end
            if marker[0] == PARAMETER:
                value.openers.append(marker_end)
            if verdict == "end" and not value.openers:
                return start
            if verdict != "no":
                value.ends.append((start, len(value.openers), marker[0]))
            if marker[0] == END_PARAMETER and value.openers:
                is_of_line = "\n" not in self._raw[value.openers[-1] : marker_end]
                if is_of_line or _AFTER_VALUE.match(self._raw, marker_end):
                    value.openers.pop()
        else:
            opening = self._raw.rfind("<", value.seen)
            is_open = opening >= 0 and could_become(self._raw[opening:], _MARKERS)
            value.seen = opening if is_open else len(self._raw)
        return self._best_end(value) if self._has_ended and not self._cut else None

    def _judge(self, marker: re.Match[str]) -> Verdict:
        """Return whether a tag ends the current value, according to the text after the tag."""
        kind, start = marker[0], marker.start()
        if kind not in (PARAMETER, END_FUNCTION, END_PARAMETER):
            return "no"
        has_closer = kind == END_PARAMETER
        tail = _TAIL.match(self._raw, marker.end() if has_closer else start)
        assert tail
        text = self._raw[tail.end() :]
        if not self._has_ended and self._is_open(text):
            return "wait"
        key, name = tail[1], tail[3]
        if key is not None:
            key = key.strip().strip("\"'")
            if key in self._keys or not (has_closer or self._raw[start - 1] == "\n"):
                return "no"
            is_known = key in self._parameters
            if not has_closer:
                return "perhaps" if is_known else "no"
            return "end" if is_known or not self._parameters else "perhaps"
        if not tail["closers"] and (text or not self._has_ended) and not could_become(text, _MARKERS):
            return "no"
        is_next = name is not None and name.strip().strip("\"'") in self._tools
        return "end" if has_closer and (is_next or (self._has_ended and not text)) else "perhaps"

    def _is_open(self, text: str) -> bool:
        """Return whether `text` is the incomplete beginning of a tag."""
        if text.startswith((PARAMETER, FUNCTION)):
            return self._may_grow(len(self._raw) - len(text))
        return not text or could_become(text, _MARKERS)

    def _best_end(self, value: _Value) -> int | None:
        """Return the most likely end of the value once the answer has ended; None if there is none."""
        ends = [candidate for candidate in value.ends if not self._has_unopened_tags(candidate[0])]
        rows = (
            [start for start, depth, kind in ends if kind == END_PARAMETER and not depth],
            [start for start, _, kind in ends if kind != END_FUNCTION],
            [start for start, _, kind in ends if kind == END_FUNCTION],
            [start for start, _, kind in reversed(value.ends) if kind == END_PARAMETER],
        )
        return next((row[0] for row in rows if row), None)

    def _has_unopened_tags(self, start: int) -> bool:
        """Return whether closing tags lack opening tags if the value ends at `start`."""
        n_open = {CALL: 1, FUNCTION: 1, PARAMETER: 1}
        if self._raw.startswith((PARAMETER, END_FUNCTION), start):
            n_open[PARAMETER] = 0
        for marker in _MARKER.finditer(self._raw, start):
            opener = _OPENERS.get(marker[0], "")
            if n_open[PARAMETER] and PARAMETER not in (opener, marker[0]):
                continue  # the tag is text of the next parameter
            if marker[0] == END_PARAMETER and not _AFTER_VALUE.match(self._raw, marker.end()):
                continue
            n_open[opener or marker[0]] += -1 if opener else 1
            if opener and n_open[opener] < 0:
                return True
        return False


class _Value:
    """The value of a parameter while it is parsed; converts its text to JSON.

    `is_json`: a grammar guarantees that a value that is not a string is JSON.
    """

    def __init__(self, start: int, kinds: frozenset[str], *, is_json: bool) -> None:
        self.start = self.seen = start
        self._kinds, self._is_json = kinds, is_json
        #: Offset after each unclosed `<parameter=` inside the value.
        self.openers: list[int] = []
        #: Each closing tag that may end the value: offset, number of `openers` there, and the tag.
        self.ends: list[tuple[int, int, str]] = []
        self._n_sent = 0
        #: Quote around the value in JSON; "" if the value is not a string, None while that is unknown.
        self._quote: str | None = None

    def grow(self, raw: str) -> str:
        """Return the next part of the value as JSON, up to the value's first possible end."""
        safe = self.ends[0][0] if self.ends else self.seen
        if safe > self.start and raw[safe - 1] == "\n":
            safe -= 1
        opening = ""
        if self._quote is None:
            opening = self._open(raw[self.start : min(safe, self.start + 2 * _MAX_SCALAR)])
        return opening + self._encode(raw[self.start + self._n_sent : safe])

    def close(self, text: str) -> str:
        """Return the rest of the value as JSON; `text` is the whole value."""
        opening = self._open(text[: 2 * _MAX_SCALAR]) if self._quote is None else ""
        if self._quote is None:
            return typed_value(text, self._kinds)
        return opening + self._encode(text[self._n_sent :]) + self._quote

    def _open(self, text: str) -> str:
        """Set `_quote` by `text`, the value's start; return the quote, "" if it is unknown."""
        self._quote = self._choose_quote(text.strip())
        return self._quote or ""

    def _choose_quote(self, text: str) -> str | None:
        other_kinds = self._kinds - {"string"}
        if "string" not in self._kinds:
            return "" if self._is_json and text else None
        if other_kinds == {"null"} and text:
            return None if "null".startswith(text) or "None".startswith(text) else '"'
        has_parts = bool(other_kinds & {"array", "object"}) and text[:1] in ("[", "{")
        return '"' if not other_kinds or (len(text) > _MAX_SCALAR and not has_parts) else None

    def _encode(self, more: str) -> str:
        if self._quote is None:
            return ""
        self._n_sent += len(more)
        return json_text(more)[1:-1] if self._quote else more
