"""Parse calls in the notation of Qwen3-Coder and Qwen 3.5, which has no escapes: `XmlSection`.

`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`, any marker but the
second and third may be missing. A value is streamed as it comes; what may be its end is held until the
text after it tells: a value may itself show calls. It ends at the first closer that is not of a marker
inside it and is followed by the next parameter or call. At the end of the answer, where no such closer
is left, it ends at the first one after which no closer is without its opener.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from edgeinfer.runtime.chat_format.parameters import (
    json_text,
    parameter_kinds,
    property_schemas,
    typed_value,
)
from edgeinfer.runtime.chat_format.tool_call_formats import MAX_NAME, Tools, could_become
from edgeinfer.runtime.events import ToolCallDelta

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_OPENERS = {END_CALL: CALL, END_FUNCTION: FUNCTION, END_PARAMETER: PARAMETER}
_MARKER = re.compile("|".join((*_OPENERS, *_OPENERS.values())))
#: What follows the closer of a value.
_ENDED = re.compile(rf"\s*(?:{PARAMETER}|{END_FUNCTION}|{END_CALL}|\Z)")
_LONGEST = max(map(len, _OPENERS))
#: A scalar has fewer characters; a longer value is a text.
_MAX_SCALAR = 64
#: Characters of a value that tell whether it is a text.
_N_TOLD = 2 * _MAX_SCALAR

#: What a closer may be: no end, unknown until more text comes, an end, an end for want of a better one.
Verdict = Literal["no", "wait", "end", "perhaps"]


class XmlSection:
    """The calls after one marker. `new_call` returns the next (index, id)."""

    def __init__(
        self, marker: str, tools: Tools, certain: bool, new_call: Callable[[], tuple[int, str]]
    ) -> None:
        self._marker, self._tools = marker, tools
        self._certain = certain
        self._new_call = new_call
        self._raw = marker
        self._at = 0
        self._done_to = 0
        self._ended = self._cut = False
        self._step: Callable[[], bool] = self._between
        self._events: list[ToolCallDelta] = []
        self._index = -1
        self._name = ""
        self._keys: set[str] = set()
        self._key = ""
        self._known_keys: frozenset[str] = frozenset()
        self._is_first = True
        self._value = _Value(0, frozenset())
        self.is_over = False

    def feed(self, text: str) -> None:
        """Parse on. Sets `is_over` at the section's end or failure."""
        self._raw += text
        while not self.is_over and self._step():
            pass

    def finish(self, *, cut: bool) -> None:
        """End inside the section: the generation is over, `cut` if the model did not end it."""
        self._ended, self._cut = True, cut
        self.feed("")
        is_closed = self._done_to and END_CALL.startswith(self._raw[self._done_to :].strip())
        if not self.is_over and (self._index >= 0 or is_closed):
            self._at = self._done_to = len(self._raw)
        self.is_over = True

    def take_events(self) -> list[ToolCallDelta]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

    @property
    def leftover(self) -> tuple[str, str]:
        """Return (text, rest) that no call took; `rest` may hold more markers."""
        if self._index >= 0:  # begun, so it is no text: its arguments stay open
            return "", self._raw[self._at :]
        if self._done_to:
            return "", self._raw[self._done_to :]
        return self._marker, self._raw[len(self._marker) :]

    # the steps: each looks at what is after the cursor, and returns whether there is more to do

    def _between(self) -> bool:
        """Expect a function, or the end of the section."""
        text = self._skip_space()
        if could_become(text, (CALL, FUNCTION, END_CALL)):
            return self._wait()
        if text.startswith(END_CALL) and self._done_to:
            self._at += len(END_CALL)
            self._done_to = self._at
            self.is_over = True
        elif text.startswith(CALL) and not self._done_to:
            self._at += len(CALL)
        elif text.startswith(FUNCTION) and not (self._done_to and self._marker != CALL):
            return self._function(text)
        else:
            self.is_over = True
        return not self.is_over

    def _function(self, text: str) -> bool:
        name = _name_in(text)
        if name is None and not self._ended:
            return False
        if name is None or name not in self._tools:
            self.is_over = True
            return False
        self._name, self._keys = name, set()
        self._known_keys = frozenset(property_schemas(self._tools[name]))
        self._at += text.index(">") + 1
        self._step = self._parameters
        return True

    def _parameters(self) -> bool:
        """Expect a parameter, or the end of the function."""
        text = self._skip_space()
        if could_become(text, (PARAMETER, END_FUNCTION, END_CALL)):
            return self._wait()
        if text.startswith(PARAMETER):
            return self._parameter(text)
        if text.startswith(END_FUNCTION):
            self._at += len(END_FUNCTION)
        elif self._index < 0:  # the function was only named
            self.is_over = True
            return False
        self._end_call()
        return True

    def _parameter(self, text: str) -> bool:
        key = _name_in(text)
        start = self._at + text.find(">") + 1
        if key is None or (start == len(self._raw) and not self._ended):
            self.is_over = key is None and (self._ended or len(text) > MAX_NAME)
            return False
        self._begin_call()
        self._key = key
        self._at = start + self._raw.startswith("\n", start)
        self._value = _Value(self._at, parameter_kinds(self._tools[self._name], key))
        self._step = self._in_value
        return True

    def _in_value(self) -> bool:
        end = self._find_end()
        if end is None:
            self._say(self._value.grown(self._raw, self._certain))
            return False
        text = self._raw[self._value.start : end].removesuffix("\n")
        self._say(self._value.closed(text, self._certain))
        self._keys.add(self._key)
        self._at = end + len(END_PARAMETER) * self._raw.startswith(END_PARAMETER, end)
        self._step = self._parameters
        return True

    def _skip_space(self) -> str:
        text = self._raw[self._at :].lstrip()
        self._at = len(self._raw) - len(text)
        return text

    def _wait(self) -> bool:
        """Wait for more text. At the end of a generation that the model ended, a call may be closed."""
        if self._ended and not self._cut and self._index >= 0:
            self._at = len(self._raw)
            self._end_call()
        return False

    # where a value ends

    def _find_end(self) -> int | None:
        """Return where the value ends, None if that cannot be told yet."""
        value = self._value
        while marker := _MARKER.search(self._raw, value.seen):
            end = marker.end()
            verdict = self._verdict(marker)
            if verdict == "wait":
                value.seen = marker.start()
                break
            value.seen = end
            if marker[0] == PARAMETER:
                value.openers.append(end)
            if verdict == "end" and not value.openers:
                return marker.start()
            if verdict != "no":
                value.ends.append((marker.start(), len(value.openers), marker[0]))
            if marker[0] == END_PARAMETER and value.openers:
                is_of_line = "\n" not in self._raw[value.openers[-1] : end]
                if is_of_line or _ENDED.match(self._raw, end):
                    value.openers.pop()
        else:
            value.seen = max(value.seen, len(self._raw) - _LONGEST)
        return self._best_end() if self._ended else None

    def _verdict(self, marker: re.Match[str]) -> Verdict:
        kind, start = marker[0], marker.start()
        end = marker.end()
        if kind == PARAMETER:  # after a closer that is missing
            key = _name_in(self._raw[start:])
            if key is None:
                return "no" if self._ended or len(self._raw) - start > MAX_NAME else "wait"
            is_next = key in self._known_keys and key not in self._keys | {self._key}
            return "perhaps" if is_next and self._raw[start - 1] == "\n" else "no"
        if kind == END_FUNCTION:  # its own closer is missing
            verdict = self._after_function(end)
            return "perhaps" if verdict == "end" else verdict
        return self._after_parameter(end) if kind == END_PARAMETER else "no"

    def _after_parameter(self, at: int) -> Verdict:
        """Judge a closer by what follows it."""
        text = self._raw[at:].lstrip()
        if could_become(text, (PARAMETER, END_FUNCTION, END_CALL)):
            return self._at_the_end(text)
        if text.startswith(PARAMETER):
            key = _name_in(text)
            if key is None:
                return "no" if self._ended or len(text) > MAX_NAME else "wait"
            if key in self._keys | {self._key}:
                return "no"
            return "end" if key in self._known_keys or not self._known_keys else "perhaps"
        if text.startswith(END_FUNCTION):
            return self._after_function(len(self._raw) - len(text) + len(END_FUNCTION))
        return self._after_function(at) if text.startswith(END_CALL) else "no"

    def _after_function(self, at: int) -> Verdict:
        text = self._raw[at:].lstrip()
        if could_become(text, (END_CALL, CALL, FUNCTION)):
            return self._at_the_end(text)
        if text.startswith(END_CALL):
            text = text.removeprefix(END_CALL).lstrip()
            if could_become(text, (CALL, FUNCTION)):
                return self._at_the_end(text)
        if text.startswith(CALL):
            text = text.removeprefix(CALL).lstrip()
            if could_become(text, (FUNCTION,)):
                return self._at_the_end(text)
        if not text.startswith(FUNCTION):
            return "perhaps"
        name = _name_in(text)
        if name is None and not self._ended and len(text) <= MAX_NAME:
            return "wait"
        return "end" if name in self._tools else "perhaps"

    def _at_the_end(self, text: str) -> Verdict:
        if not self._ended:
            return "wait"
        return "perhaps" if text else "end"

    def _best_end(self) -> int | None:
        """Return where the value ends, at the end of the generation; None if it was cut."""
        if self._cut:
            return None
        ends = [end for end in self._value.ends if not self._dangles(end[0])]
        rows = (
            [at for at, depth, kind in ends if kind == END_PARAMETER and not depth],
            [at for at, _, kind in ends if kind != END_FUNCTION],
            [at for at, _, kind in ends if kind == END_FUNCTION],
            [at for at, _, kind in reversed(self._value.ends) if kind == END_PARAMETER],
        )
        return next((row[0] for row in rows if row), None)

    def _dangles(self, at: int) -> bool:
        """Return whether a closer without its opener follows the end of a value."""
        n_open = {CALL: 1, FUNCTION: 1, PARAMETER: 1}
        if self._raw.startswith((PARAMETER, END_FUNCTION), at):
            n_open[PARAMETER] = 0
        for marker in _MARKER.finditer(self._raw, at):
            opener = _OPENERS.get(marker[0], "")
            if n_open[PARAMETER] and PARAMETER not in (opener, marker[0]):
                continue  # within a value
            if marker[0] == END_PARAMETER and not _ENDED.match(self._raw, marker.end()):
                continue
            n_open[opener or marker[0]] += -1 if opener else 1
            if opener and n_open[opener] < 0:
                return True
        return False

    # what comes of it

    def _begin_call(self) -> None:
        if self._index < 0:
            self._index, call_id = self._new_call()
            self._events.append(ToolCallDelta(self._index, id=call_id, name=self._name))
            self._events.append(ToolCallDelta(self._index, arguments="{"))
            self._is_first = True

    def _say(self, text: str) -> None:
        if not text:
            return
        if not self._value.is_named:
            self._value.is_named = True
            text = f"{'' if self._is_first else ', '}{json_text(self._key)}: {text}"
            self._is_first = False
        last = self._events[-1] if self._events else None
        if last is not None and not last.name:
            text = self._events.pop().arguments + text
        self._events.append(ToolCallDelta(self._index, arguments=text))

    def _end_call(self) -> None:
        self._begin_call()
        self._value.is_named = True
        self._say("}")
        self._index = -1
        self._done_to = self._at
        self._step = self._between


class _Value:
    """One value: where it starts, what was seen of it, how much of it was streamed."""

    def __init__(self, start: int, kinds: frozenset[str]) -> None:
        self.start = self.seen = start
        self.kinds = kinds
        #: Places after the `<parameter=` inside it that are not closed.
        self.openers: list[int] = []
        #: (place, number of openers, marker) of what may be its end.
        self.ends: list[tuple[int, int, str]] = []
        self.is_named = False
        self._n_sent = 0
        self._quote: str | None = None

    def grown(self, raw: str, certain: bool) -> str:
        """Return more of the value as JSON; `certain`: other kinds than text are JSON already."""
        safe = min([self.seen, *(end[0] for end in self.ends[:1])])
        if safe > self.start and raw[safe - 1] == "\n":
            safe -= 1
        if self._quote is not None:
            return self._sent(raw[self.start + self._n_sent : safe])
        self._quote = self._chosen_quote(raw[self.start : min(safe, self.start + _N_TOLD)], certain)
        return self._quote + self._sent(raw[self.start : safe]) if self._quote is not None else ""

    def _sent(self, more: str) -> str:
        self._n_sent += len(more)
        return json_text(more)[1:-1] if self._quote else more

    def _chosen_quote(self, text: str, certain: bool) -> str | None:
        """Return the quote of a value that begins so, "" for one that is JSON; None: not known yet."""
        text, others = text.strip(), self.kinds - {"string"}
        if "string" not in self.kinds:
            return "" if certain and text else None
        if others == {"null"} and text:
            return None if "null".startswith(text) or "None".startswith(text) else '"'
        has_parts = bool(others & {"array", "object"}) and text[:1] in ("[", "{")
        return '"' if not others or (len(text) > _MAX_SCALAR and not has_parts) else None

    def closed(self, text: str, certain: bool) -> str:
        """Return the rest of the value as JSON; "" for an empty one that is no text."""
        if self._quote is not None:
            return self._sent(text[self._n_sent :]) + self._quote
        self._quote = self._chosen_quote(text[:_N_TOLD], certain)
        if self._quote is None:
            return typed_value(text, self.kinds)
        return self._quote + self._sent(text) + self._quote


def _name_in(text: str) -> str | None:
    """Return the name of `<function=NAME>…`, without quotes; None if it has no end."""
    head, closed, _ = text[: MAX_NAME + 1].partition(">")
    return head.partition("=")[2].strip().strip("\"'") if closed and "\n" not in head else None
