"""Parse tool calls out of a stream of text, for every family: `CallParser`.

Outside a section everything is text, but for what could still become a marker. A section holds calls,
read one object at a time: it keeps all that it was fed and walks it with one cursor. A call is emitted
once it is whole, known and valid JSON; if it cannot be one, its text is emitted to the last character.
With `certain` (the output is constrained, so calls are well formed) name and arguments are streamed.
"""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from edgeinfer.runtime.chat_format.tool_call_formats import (
    ToolFormat,
    could_become,
    first_marker,
    hold_back,
)
from edgeinfer.runtime.events import Parsed, TextDelta, ToolCallDelta
from edgeinfer.runtime.requests import random_bytes

_ALPHABET = string.ascii_letters + string.digits


def call_id(*, short: bool = False) -> str:
    """Make a unique call id: nine letters and digits for Mistral, else `call_` and 24."""
    drawn = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in random_bytes(24))
    return drawn[:9] if short else f"call_{drawn}"


class CallParser:
    """Split one generation's text into text and calls; `tools` are schemas by name."""

    def __init__(
        self, form: ToolFormat, tools: Tools, *, certain: bool = False, special_tokens: bool = False
    ) -> None:
        self._form = form
        self._tools = tools
        self._certain = certain
        self._count = 0
        self._text = ""
        self._space = ""
        self._fresh = True
        self._after_call = False
        self._section: Section | None = None
        self.special_tokens = special_tokens
        self.n_broken_calls = 0

    def feed(self, text: str) -> Sequence[Parsed]:
        """Return the events certain after `text`, without what could still become a marker."""
        events: list[Parsed] = []
        self._text += text
        while self._step(events):
            pass
        return _merged(events)

    def finish(self) -> Sequence[Parsed]:
        """Return what was held back, at the end of the generation."""
        events: list[Parsed] = []
        if self._section is not None:
            self._section.finish()
            events += self._section.take_events()
            self._close(self._section, events)
        text, self._text = self._text, ""
        self._say(text, events)
        if not self._after_call:
            self._flush_space(events)
        return _merged(events)

    def _step(self, events: list[Parsed]) -> bool:
        if self._section is None:
            return self._outside(events)
        text, self._text = self._text, ""
        self._section.feed(text)
        events += self._section.take_events()
        if not self._section.is_over:
            return False
        self._close(self._section, events)
        return bool(self._text)

    def _close(self, section: Section, events: list[Parsed]) -> None:
        """Leave the section; the marker of one that failed is text, or it would open again."""
        marker, rest = section.leftover
        self._section = None
        self.n_broken_calls += bool(marker)
        self._say(marker, events)
        self._text = rest + self._text

    def _outside(self, events: list[Parsed]) -> bool:
        if self._form.bare and self._fresh and self._opens_bare():
            return True
        at, marker = first_marker(self._text, self._form.begin)
        if at < 0:
            certain, self._text = hold_back(self._text, self._form.begin)
            self._say(certain, events)
            return False
        self._say(self._text[:at], events)
        self._text = self._text[at + len(marker) :]
        self._open(marker)
        return True

    def _opens_bare(self) -> bool:
        """Open a section for an answer that begins with a bracket, in families without a marker."""
        stripped = self._text.lstrip()
        if not stripped or stripped[0] not in "{[":
            return False
        self._space += self._text[: len(self._text) - len(stripped)]
        self._text = stripped
        self._open("")
        return True

    def _open(self, marker: str) -> None:
        self._fresh = False
        self._section = Section(self._form, marker, self._tools, self._certain, self._call)

    def _call(self) -> tuple[int, str]:
        """Return (index, id) of a new call. White space before it was layout."""
        self._space = ""
        self._after_call = True
        self._count += 1
        return self._count - 1, call_id(short=self._form.short_ids)

    def _say(self, text: str, events: list[Parsed]) -> None:
        """Emit text; white space at the beginning and after a call waits for what follows."""
        if self._fresh or self._after_call:
            stripped = text.lstrip()
            self._space += text[: len(text) - len(stripped)]
            text = stripped
        if text:
            self._fresh = self._after_call = False
            self._flush_space(events)
            events.append(TextDelta(text))

    def _flush_space(self, events: list[Parsed]) -> None:
        if self._space:
            events.append(TextDelta(self._space))
            self._space = ""


def _merged(events: list[Parsed]) -> list[Parsed]:
    merged: list[Parsed] = []
    for event in events:
        if merged and isinstance(event, TextDelta) and isinstance(merged[-1], TextDelta):
            merged[-1] = TextDelta(merged[-1].text + event.text)
        else:
            merged.append(event)
    return merged


_BRACKETS = ("[", ",", "]")
#: The longest name, and the most that may stand between a name and its arguments, characters.
_MAX_NAME = 256
_FENCE = "```"


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
        self._end = _FENCE if marker.startswith(_FENCE) else form.end
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

    def finish(self) -> None:
        """End inside the section: the generation is over."""
        if self.is_over:
            return
        self.is_over = True
        if self._step == self._block and self._block_calls(self._raw[len(self._marker) :]):
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
            if len(rest) > _MAX_NAME:
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
            if len(self._raw) - self._at > _MAX_NAME:
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
        return self._form.inner != "json" and (not self._form.bare or self._end == _FENCE)

    def _block(self) -> bool:
        """Parse calls that are not JSON, up to the end of the section."""
        at = self._raw.find(self._end, self._at)
        if at < 0:
            return False
        if self._block_calls(self._raw[len(self._marker) : at]):
            self._at = at + len(self._end)
            self._over()
        else:
            self._stop()
        return False

    def _block_calls(self, code: str) -> bool:
        calls = python_calls(code) if self._form.inner == "python" else xml_calls(code, self._tools)
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
#: Schemas of the arguments by the tool's name.
Tools = Mapping[str, Mapping[str, Any]]

_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


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


def xml_calls(text: str, tools: Tools) -> list[tuple[str, str]] | None:
    """Parse (name, arguments as JSON) of every call; None if the text is anything else."""
    if _FUNCTION.sub("", text).strip():
        return None
    calls = []
    for name, body in _FUNCTION.findall(text):
        if _PARAMETER.sub("", body).strip():
            return None
        properties = tools.get(name.strip(), {}).get("properties", {})
        arguments = {
            key.strip(): _value(value, properties.get(key.strip()))
            for key, value in _PARAMETER.findall(body)
        }
        calls.append((name.strip(), json.dumps(arguments, ensure_ascii=False)))
    return calls or None


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return text if kind == "string" else _decoded(text, otherwise=text)
