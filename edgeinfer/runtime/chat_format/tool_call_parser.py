"""Parse the tool calls of an answer, which begin with a marker such as `<tool_call>`.

`JsonSection` parses calls in JSON, and in Python (`[f(x=1)]`) if the format allows it; `xml_calls`
parses calls in XML. A section is the part of the answer from a marker to the end of the calls after it.
The parser is a generator, which yields when it needs more text. A complete, valid call is emitted; a
section without one is emitted as text. If a grammar constrains calls, names and arguments are streamed.
"""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import msgspec

from edgeinfer.runtime.chat_format.tool_call_formats import MAX_NAME, ToolFormat, Tools, could_become
from edgeinfer.runtime.events import ToolCallDelta
from edgeinfer.runtime.requests import random_bytes

FENCE = "```"
_ALPHABET = string.ascii_letters + string.digits


def call_id(*, short: bool = False) -> str:
    """Make a unique tool-call id: `call_` and 24 letters and digits; if `short`, nine of these."""
    drawn = "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in random_bytes(24))
    return drawn[:9] if short else f"call_{drawn}"


class Section:
    """Parses the calls after a marker (base class). `n_calls` is the number of calls so far."""

    def __init__(
        self, form: ToolFormat, marker: str, tools: Tools, *, constrained: bool, n_calls: int
    ) -> None:
        self._form, self._tools = form, tools
        self._constrained, self.n_calls = constrained, n_calls
        self._marker = self._raw = marker
        self._cursor = self._end_of_calls = 0
        self._has_ended = self._cut = False
        self._events: list[ToolCallDelta] = []
        #: Index of the call whose arguments are being streamed; -1 if there is none.
        self._index = -1
        self._steps = self._parse()
        self.is_over = False

    def _parse(self) -> Iterator[None]:
        raise NotImplementedError

    def feed(self, text: str) -> None:
        """Parse more text. Sets `is_over` at the section's end or at an error."""
        self._raw += text
        self.is_over = next(self._steps, True) is True
        if self.is_over and self._index >= 0:  # the call's start was sent, so it cannot become text
            self._end_of_calls = self._cursor

    def finish(self, *, cut: bool) -> None:
        """Parse the rest. `cut`: a limit ended the answer, so the last call may be incomplete."""
        self._has_ended, self._cut = True, cut
        self.feed("")
        if self._index >= 0:
            self._end_of_calls = len(self._raw)
        self.is_over = True

    def take_events(self) -> list[ToolCallDelta]:
        """Return the events since the last call of this method."""
        events, self._events = self._events, []
        return events

    @property
    def leftover(self) -> tuple[str, str]:
        """Text of the section that belongs to no call, in two parts: the opening marker, and the rest.

        After a call, the first part is "". Without a marker, the first part is one character. The rest
        must be parsed again, outside the section.
        """
        n_text = 0 if self._end_of_calls else len(self._marker) or 1
        text_end = self._end_of_calls + n_text
        return self._raw[text_end - n_text : text_end], self._raw[text_end:]

    def _upcoming(self, literals: Sequence[str]) -> Generator[None, None, str]:
        """Skip white space and return the following text; "" at the end of the answer.

        Waits while the text may be the incomplete beginning of one of the `literals`.
        """
        while True:
            text = self._raw[self._cursor :].lstrip()
            self._cursor = len(self._raw) - len(text)
            if text and not could_become(text, literals):
                return text
            if self._has_ended:
                self._cursor = len(self._raw)
                return ""
            yield

    def _begin_call(self, name: str) -> None:
        self._index = self.n_calls
        self.n_calls += 1
        new_id = call_id(short=self._form.short_ids)
        self._events.append(ToolCallDelta(self._index, id=new_id, name=name))

    def _send(self, arguments: str) -> None:
        if not arguments:
            return
        if self._events and not self._events[-1].name:
            arguments = self._events.pop().arguments + arguments
        self._events.append(ToolCallDelta(self._index, arguments=arguments))

    def _end_call(self) -> None:
        self._index = -1
        self._end_of_calls = self._cursor


ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", "function", *ARGUMENT_KEYS)
_BRACKETS = ("[", ",", "]")
#: Longest tool call (characters). A longer one counts as text of the answer.
MAX_CALL = 1_000_000
#: To find the end of a JSON object: match the rest of a string after its opening quote, and JSON
#: outside strings and brackets.
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_OUTSIDE_STRINGS = re.compile(r"[ \t\r\n:+\-.0-9eEtrufalsn]*")


class JsonSection(Section):
    """Parses calls that are JSON objects, or Python if the format allows it."""

    def _parse(self) -> Iterator[None]:
        form = self._form
        self._cursor = len(self._marker)
        # a section of tool calls that began with ``` ends with ```
        closing = FENCE if self._marker.startswith(FENCE) else form.end
        brackets = () if form.named and form.end else _BRACKETS
        literals = sorted({*form.literals, closing, *brackets} - {""}, key=len, reverse=True)
        while text := (yield from self._upcoming(literals)):
            literal = next((literal for literal in literals if text.startswith(literal)), "")
            self._cursor += len(literal)
            if literal and literal == closing:
                break
            if literal:
                continue
            if not form.named and text[0] != "{":
                is_fenced = closing == FENCE or not form.bare
                if form.inner == "python" and is_fenced and not self._end_of_calls:
                    yield from self._read_python(closing)
                break
            if not (yield from self._read_call()):
                return
            self._end_call()
        if self._end_of_calls:
            self._end_of_calls = self._cursor

    def _find(self, *texts: str) -> Generator[None, None, int]:
        """Return the offset of the first of `texts`; -1 if none is in the next MAX_NAME characters."""
        begin, limit = self._cursor, self._cursor + MAX_NAME
        while True:
            places = [start for text in texts if (start := self._raw.find(text, begin, limit)) >= 0]
            if places or len(self._raw) >= limit:
                return min(places, default=-1)
            yield

    def _read_call(self) -> Generator[None, None, bool]:
        call = _JsonCall(is_bare=not self._form.named)
        if self._form.named:
            name_end = yield from self._find(*self._form.name_ends)
            call.name = self._raw[self._cursor : max(name_end, self._cursor)].strip()
            if call.name not in self._tools:
                return False
            self._cursor = name_end
            # an id, a marker or ```json may stand between the name and the arguments
            self._cursor = yield from self._find("{")
            if self._cursor < 0:
                return False
        call.start = self._cursor
        call.arguments_start = call.start if self._form.named else -1
        if not (yield from self._read_object(call)):
            return False
        if self._constrained:
            self._stream(call)
        if self._index >= 0:
            return True
        arguments = call.arguments(self._raw[call.start : self._cursor], self._raw)
        return arguments is not None and self._emit(call.name, arguments)

    def _skip(self, characters: re.Pattern[str], call: _JsonCall) -> Generator[None, None, str]:
        """Move the cursor over `characters`; return the next character, "" if the call is too long."""
        while True:
            skipped = characters.match(self._raw, self._cursor)
            self._cursor = skipped.end() if skipped else self._cursor
            if self._cursor - call.start > MAX_CALL:
                return ""
            if self._raw[self._cursor :] not in ("", "\\"):
                return self._raw[self._cursor]
            if self._constrained:
                self._stream(call)
            yield

    def _read_object(self, call: _JsonCall) -> Generator[None, None, bool]:
        """Move the cursor to the end of a JSON object; return False if the object cannot be a call."""
        depth, key = 0, None
        while character := (yield from self._skip(_OUTSIDE_STRINGS, call)):
            begin = self._cursor
            self._cursor += 1
            if character == '"':
                yield from self._skip(_IN_STRING, call)
                self._cursor += 1
                if depth == call.depth:
                    text = _decode(self._raw[begin : self._cursor])
                    if key is None and text not in _KEYS:
                        return False
                    if key == "name":
                        call.name = text if isinstance(text, str) else ""
                    key = key or text
            elif character in "{[":
                if depth == call.depth and character == "{":
                    if key in ARGUMENT_KEYS and call.arguments_start < 0:
                        call.arguments_start, call.arguments_depth = begin, depth
                    elif key == "function" and depth == 1:
                        call.depth, key = 2, None
                depth += 1
            elif character in "}]":
                depth -= 1
                if depth == call.arguments_depth and call.arguments_start >= 0 > call.arguments_end:
                    call.arguments_end = self._cursor
                if depth <= 0:
                    return True
            elif character != ",":
                return False
            elif depth == call.depth:
                key = None
        return False

    def _stream(self, call: _JsonCall) -> None:
        """Emit the part of the arguments that has not been emitted yet."""
        if call.arguments_start < 0 or call.name not in self._tools:
            return
        if self._index < 0:
            self._begin_call(call.name)
            call.n_sent = call.arguments_start
        sent_end = call.arguments_end if call.arguments_end >= 0 else len(self._raw)
        self._send(self._raw[call.n_sent : sent_end])
        call.n_sent = sent_end

    def _read_python(self, closing: str) -> Iterator[None]:
        """Parse calls in Python. The section ends at `closing`, unless a string contains it."""
        begin = search_from = len(self._marker)
        while True:
            while (closing_start := self._raw.find(closing, search_from)) < 0 and not self._has_ended:
                yield
            code = self._raw[begin : closing_start if closing_start >= 0 else None]
            calls = python_calls(code) or []
            is_whole = closing_start >= 0 or not self._cut
            if is_whole and calls and all(self._resolve(name) for name, _ in calls):
                for name, arguments in calls:
                    self._emit(name, arguments)
                self._end_of_calls = self._cursor = begin + len(code) + len(closing)
                return
            if closing_start < 0 or len(code) > _MAX_PYTHON or not _ends_in_string(code):
                return
            search_from = closing_start + len(closing)

    def _resolve(self, name: str) -> str:
        """Return the called tool's name, "" if unknown: `functions.search` means `search`."""
        candidates = (name, name.rpartition(".")[2])
        return next((candidate for candidate in candidates if candidate in self._tools), "")

    def _emit(self, name: str, arguments: str) -> bool:
        if tool := self._resolve(name):
            self._begin_call(tool)
            self._send(arguments)
            self._index = -1
        return bool(tool)


class _JsonCall:
    """Offsets of a JSON call and of its arguments in the section's text; -1 while unknown."""

    def __init__(self, *, is_bare: bool) -> None:
        self.name = ""
        self.start = self.n_sent = 0
        self.arguments_start = self.arguments_end = -1
        self.arguments_depth = 0
        #: Nesting depth of the object with the name: 2 in `{"function": {"name": …}}`; -1 if the name
        #: precedes the JSON.
        self.depth = 1 if is_bare else -1

    def arguments(self, text: str, raw: str) -> str | None:
        """Return the arguments of the complete call `text` as JSON; None if it is not a call."""
        call = _decode(text)
        if not isinstance(call, dict):
            return None
        if self.arguments_start >= 0:
            return raw[self.arguments_start : self.arguments_end]
        # some models omit the arguments, or write them as a string of JSON
        call = call.get("function", call)
        if not isinstance(call, dict):
            return None
        arguments: Any = next((call[key] for key in ARGUMENT_KEYS if key in call), {})
        if isinstance(arguments, str):
            return arguments if isinstance(_decode(arguments), dict) else None
        return "{}" if arguments in ({}, None) else None


def _decode(text: str) -> Any:
    """Decode JSON; return None for invalid JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


#: Longest list of calls in Python's notation (characters) that is parsed: `[search(text="x")]`.
_MAX_PYTHON = 20_000


def _ends_in_string(code: str) -> bool:
    try:
        ast.parse(code.strip(), mode="eval")
    except SyntaxError as error:
        return error.msg.startswith("unterminated")
    except (ValueError, RecursionError, MemoryError):
        pass
    return False


def python_calls(code: str) -> list[tuple[str, str]] | None:
    """Parse `[search(text="x")]` to [("search", '{"text": "x"}')]; return None for other code."""
    if len(code) > _MAX_PYTHON:
        return None
    try:
        tree = ast.parse(code.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_python_call(node) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> tuple[str, str]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]  # Gemma often writes print(search(…))
    if not isinstance(node, ast.Call) or node.args or None in [k.arg for k in node.keywords]:
        raise ValueError("not a call with keyword arguments")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)
