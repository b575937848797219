"""Parse tool calls in JSON or Python out of a section of an answer: `Section`.

It holds calls, read one object at a time: it keeps all that it was fed and walks it with one cursor. A
call is emitted once it is whole, known and valid JSON; if it cannot be one, its text is emitted to the
last character. With `certain` (the output is constrained, so calls are well formed) name and arguments
are streamed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from edgeinfer.runtime.chat_format.tool_call_formats import MAX_NAME, ToolFormat, Tools, could_become
from edgeinfer.runtime.events import ToolCallDelta

_BRACKETS = ("[", ",", "]")
FENCE = "```"


class Section:
    """One section, opened by `marker` or "". `new_call` gives the next (index, id)."""

    def __init__(
        self,
        form: ToolFormat,
        marker: str,
        tools: Tools,
        certain: bool,
        new_call: Callable[[], tuple[int, str]],
    ) -> None:
        self._form = form
        self._marker = marker
        self._tools = tools
        self._certain = certain
        self._new_call = new_call
        self._raw = marker
        self._at = len(marker)
        self._done_to = 0
        # a fence closes what a fence opened, the family's own end any other
        self._end = FENCE if marker.startswith(FENCE) else form.end
        brackets = () if form.named and form.end else _BRACKETS
        self._literals = tuple(
            sorted({*form.literals, self._end, *brackets} - {""}, key=len, reverse=True)
        )
        self._step: Callable[[], bool] = self._between
        self._name = ""
        self._reader: ObjectReader | None = None
        self._sent, self._index = 0, -1
        self._events: list[ToolCallDelta] = []
        self.is_over = False

    def feed(self, text: str) -> None:
        """Parse on. Sets `is_over` at the section's end or failure."""
        self._raw += text
        while not self.is_over and self._step():
            pass

    def finish(self, *, cut: bool) -> None:
        """End inside the section: the generation is over; what was not whole before is no call."""
        if self.is_over:
            return
        self.is_over = True
        if not cut and self._step == self._block and self._block_calls(self._raw[len(self._marker) :]):
            return
        rest = self._raw[self._done_to :].strip()
        cut_while_streaming = self._index >= 0
        if cut_while_streaming or (self._done_to and (not rest or rest in self._literals)):
            self._at = self._done_to = len(self._raw)

    def take_events(self) -> list[ToolCallDelta]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

    @property
    def leftover(self) -> tuple[str, str]:
        """Return (text, rest) that no call took; `rest` may hold more markers."""
        if self._done_to:
            return "", self._raw[self._done_to :]
        return self._marker or self._raw[:1], self._raw[len(self._marker) or 1 :]

    # the steps: each looks at what is behind the cursor, and says whether there is more to do

    def _between(self) -> bool:
        """Expect white space, a literal to skip, a name, or an object."""
        rest = self._raw[self._at :].lstrip()
        self._at = len(self._raw) - len(rest)
        if not rest or could_become(rest, self._literals):
            return False
        literal = next((literal for literal in self._literals if rest.startswith(literal)), "")
        if literal:
            self._at += len(literal)
            if literal == self._end:
                self._close()
        elif rest[0] == "{" and (self._name or not self._form.named):
            self._begin_object()
        elif self._form.named and not self._name and not rest[0].isspace():
            self._step = self._naming
        elif self._may_hold_block and not self._done_to:
            self._step = self._block
        else:
            self._stop()
        return not self.is_over

    def _naming(self) -> bool:
        rest = self._raw[self._at :]
        ends = [at for at in (rest.find(ending) for ending in self._form.name_ends) if at >= 0]
        if not ends:
            if len(rest) > MAX_NAME:
                self._stop()
            return False
        name = rest[: min(ends)].strip()
        if name not in self._tools:
            self._stop()
            return False
        self._name = name
        self._at += min(ends)
        self._step = self._awaiting
        return True

    def _awaiting(self) -> bool:
        """Skip an id, a marker or a fence between a name and its arguments."""
        at = self._raw.find("{", self._at)
        if at < 0:
            if len(self._raw) - self._at > MAX_NAME:
                self._stop()
            return False
        self._at = at
        self._begin_object()
        return True

    def _begin_object(self) -> None:
        self._reader = ObjectReader(self._name, whole=self._form.named)
        self._index = -1
        self._step = self._object

    def _object(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._at += reader.feed(self._raw[self._at :])
        if reader.failed:
            self._stop()
            return False
        if self._certain:
            self._stream(reader)
        if not reader.done:
            return False
        arguments = reader.arguments()
        if self._index < 0 and (arguments is None or not self._emit(reader.name, arguments)):
            self._stop()
            return False
        self._called()
        return True

    @property
    def _may_hold_block(self) -> bool:
        return self._form.inner == "python" and (not self._form.bare or self._end == FENCE)

    def _block(self) -> bool:
        """Parse calls of Python, up to the first end of the section that is not in a string."""
        at = self._raw.find(self._end, self._at)
        if at < 0:
            return False
        code = self._raw[len(self._marker) : at]
        if self._block_calls(code):
            self._at = at + len(self._end)
            self._over()
        elif len(code) <= _MAX_PYTHON and _ends_in_string(code):
            self._at = at + len(self._end)
            return True
        else:
            self._stop()
        return False

    def _block_calls(self, code: str) -> bool:
        calls = python_calls(code)
        if not calls or any(not self._known(name) for name, _ in calls):
            return False
        for name, arguments in calls:
            self._emit(name, arguments)
        self._done_to = len(self._raw)
        return True

    # what comes of it

    def _known(self, name: str) -> str:
        """Resolve a tool's name, `functions.get_weather` being get_weather; "" for none."""
        candidates = (name, name.rpartition(".")[2])
        return next((one for one in candidates if one in self._tools), "")

    def _emit(self, name: str, arguments: str) -> bool:
        known = self._known(name)
        if known:
            index, made = self._new_call()
            self._events += [
                ToolCallDelta(index, id=made, name=known),
                ToolCallDelta(index, arguments=arguments),
            ]
        return bool(known)

    def _stream(self, reader: ObjectReader) -> None:
        if reader.args_start < 0 or reader.name not in self._tools:
            return
        if self._index < 0:
            self._index, made = self._new_call()
            self._events.append(ToolCallDelta(self._index, id=made, name=reader.name))
            self._sent = reader.args_start
        end = reader.args_end if reader.args_end >= 0 else len(reader.raw)
        if end > self._sent:
            self._events.append(ToolCallDelta(self._index, arguments=reader.raw[self._sent : end]))
            self._sent = end

    def _called(self) -> None:
        self._reader = None
        self._name = ""
        self._index = -1
        self._done_to = self._at
        self._step = self._between

    def _over(self) -> None:
        self._done_to = self._at
        self.is_over = True

    def _close(self) -> None:
        """Close at the marker; without a call the whole section is text."""
        self._over() if self._done_to else self._stop()

    def _stop(self) -> None:
        """Take no further call: the section ends after a whole one, else it failed."""
        if self._done_to and self._step == self._between:
            self._done_to = self._at
        self.is_over = True


ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", "function", *ARGUMENT_KEYS)
#: What JSON has outside of strings, brackets aside.
_OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")
#: The longest call, characters; a longer one is text.
MAX_CALL = 1_000_000


class ObjectReader:
    """Read one object. `whole`: it is the arguments themselves, and the name is known already."""

    def __init__(self, name: str = "", *, whole: bool = False) -> None:
        self.name = name
        self.raw = ""
        self.done = False
        self.failed = False
        self.args_start = 0 if whole else -1
        self.args_end = -1
        self._depth = 0
        #: Depth of the object with the name: calls come as `{"function": {…}}` too.
        self._call_depth = -1 if whole else 1
        self._args_depth = 0
        self._in_string = False
        self._escaped = False
        self._string_start = 0
        self._key: str | None = None
        self._at = 0

    def feed(self, text: str) -> int:
        """Take characters up to the object's end; return how many. Sets `done` or `failed`."""
        base = len(self.raw)
        self.raw += text
        for i, c in enumerate(text):
            self._at = base + i
            if self._in_string:
                self._string_character(c)
            else:
                self._structure(c)
            if self.done or self.failed:
                self.raw = self.raw[: self._at + 1]
                return i + 1
        self.failed = self.failed or len(self.raw) > MAX_CALL
        return len(text)

    def _string_character(self, c: str) -> None:
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._in_string = False
            self._string_ended()

    def _string_ended(self) -> None:
        if self._depth != self._call_depth:
            return
        text = _decoded(self.raw[self._string_start : self._at + 1])
        if self._key is None:
            if text not in _KEYS:
                self.failed = True
            self._key = text if isinstance(text, str) else ""
        elif self._key == "name":
            self.name = text if isinstance(text, str) else ""

    def _structure(self, c: str) -> None:
        if self._depth == 0 and c != "{":
            self.failed = True
        elif c == '"':
            self._string_start = self._at
            self._in_string = True
        elif c in "{[":
            self._opened(c)
        elif c in "}]":
            self._closed()
        elif c == "," and self._depth == self._call_depth:
            self._key = None
        elif c not in _OUTSIDE_STRINGS:
            self.failed = True

    def _opened(self, c: str) -> None:
        if self._depth == self._call_depth and c == "{":
            if self._key in ARGUMENT_KEYS and self.args_start < 0:
                self.args_start, self._args_depth = self._at, self._depth
            elif self._key == "function" and self._call_depth == 1:
                self._call_depth, self._key = 2, None
        self._depth += 1

    def _closed(self) -> None:
        self._depth -= 1
        if self.args_start >= 0 and self.args_end < 0 and self._depth == self._args_depth:
            self.args_end = self._at + 1
        self.done = self._depth <= 0

    def arguments(self) -> str | None:
        """Return the arguments as JSON text, once `done`; None if this is no call."""
        call = _decoded(self.raw)
        if not isinstance(call, dict):
            return None
        if self.args_start >= 0:
            return self.raw[self.args_start : self.args_end]
        return _loose_arguments(call.get("function", call))


def _decoded(text: str, otherwise: Any = None) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return otherwise


def _loose_arguments(call: Any) -> str | None:
    """Return arguments that are missing, or an object in a string, as some models write it."""
    if not isinstance(call, dict):
        return None
    value: Any = next((call[key] for key in ARGUMENT_KEYS if key in call), {})
    if isinstance(value, str):
        return value if isinstance(_decoded(value), dict) else None
    return "{}" if value in ({}, None) else None


#: The longest block that is parsed, characters.
_MAX_PYTHON = 20_000
#: A whole string of Python.
_STRING = re.compile(
    "|".join(
        rf"{quote}(?:\\.|[^{taboo}\\])*?{quote}"
        for quote, taboo in (('"""', ""), ("'''", ""), ('"', '"\n'), ("'", "'\n"))
    ),
    re.DOTALL,
)


def _ends_in_string(code: str) -> bool:
    text = _STRING.sub("", code)
    return bool(re.search("\"{3}|'{3}", text) or re.search("[\"']", text.rpartition("\n")[2]))


def python_calls(code: str) -> list[tuple[str, str]] | None:
    """Parse (name, arguments as JSON) of every call; None for anything but literal keywords."""
    if len(code) > _MAX_PYTHON:
        return None
    try:
        tree = ast.parse(code.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_call(node) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]  # Gemma likes to print what it calls
    if not isinstance(node, ast.Call) or node.args or None in [k.arg for k in node.keywords]:
        raise ValueError("not a call with keyword arguments")
    name = ast.unparse(node.func)
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return name, json.dumps(arguments, ensure_ascii=False)
