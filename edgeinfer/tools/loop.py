"""Run the tool calls of an answer: approval, calls in parallel, results for the model.

The front end (`CallFrontEnd`) shows calls and asks the user.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import msgspec

from edgeinfer.config.config_file import ToolsConfig
from edgeinfer.errors import ConfigError, EdgeInferError, UsageError
from edgeinfer.runtime.requests import Tool, ToolChoice
from edgeinfer.safe_text import escape_hidden
from edgeinfer.tools import approval
from edgeinfer.tools.approval import Approvals, Decision, Level
from edgeinfer.tools.mcp_client import ToolInfo
from edgeinfer.tools.tool_use import STOPPED, Stop, StoppedError, ToolUse, safe_text
from edgeinfer.tools.toolbox import BoundTool, Toolbox

_MOST_SHOWN = 4000
#: Maximum number of answers with tool calls after a question, and maximum size (bytes) of the result of
#: a call that the model gets.
_MOST_ROUNDS, _MOST_RESULT_BYTES = 10, 32 << 10
#: Maximum number of lines, and of characters, on each page of a `Card` (a call to allow or refuse) that
#: a terminal shows.
_PAGE_LINES, _PAGE_CHARACTERS = 40, 4000
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NO_MORE = "the limit of calls is reached: answer with the results so far, without another call"
_REPEATED = "the same call was made before: answer with its result, which is above"

#: Hint if no tools are configured.
HOW_TO_ADD = 'add some to config.toml, e.g. `builtin = ["read", "glob", "grep"]` under `[tools]`'

#: The calls since a question, grouped by the answer that made them.
Rounds = Sequence[Sequence[ToolUse]]
#: Arguments of a tool call: name → value.
_Arguments = dict[str, Any]
#: Tool and arguments of an approved tool call.
_Call = tuple[BoundTool, _Arguments]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call that needs the user's approval, as shown to the user.

    `diff` is the change that the call would make to a file, `warning` a risk; "" if there is none.
    Invisible characters are escaped only in `text` and `page_fields`.
    """

    id: str
    server: str
    tool: str
    arguments: dict[str, Any]
    #: Pattern proposed to allow similar calls; "" if none is specific enough.
    pattern: str
    diff: str = ""
    warning: str = ""

    def _shown_arguments(self) -> dict[str, str]:
        """Return the arguments to show; if there is a diff, only the path."""
        arguments = {"path": self.arguments.get("path")} if self.diff else self.arguments
        texts = {
            name: escape_hidden(approval.argument_text(value)) for name, value in arguments.items()
        }
        return {n if _PLAIN_NAME.fullmatch(n) else json.dumps(n): text for n, text in texts.items()}

    def page_fields(self) -> dict[str, Any]:
        """Return the fields for the web page, with invisible characters escaped."""
        fields = msgspec.structs.asdict(self) | {"arguments": ""}
        escaped = {name: escape_hidden(text) for name, text in fields.items()}
        return escaped | {"arguments": self._shown_arguments()}

    def text(self) -> str:
        """Return the card as text: the call, its diff, the warning, and the possible answers."""
        lines = [f"{_on_one_line(self.server)} · {_on_one_line(self.tool)} wants to run"]
        # mark the second and later lines of an argument with "|"
        for name, text in self._shown_arguments().items():
            lines.append(f"  {name}: {text}".replace("\n", "\n  | "))
        lines += [escape_hidden(self.diff)] if self.diff else []
        lines += [f"  ! {escape_hidden(self.warning)}"] if self.warning else []
        always = f" · p always {escape_hidden(self.pattern)}" if self.pattern else ""
        return "\n".join([*lines, f"y once · a always in this conversation{always} · n REASON refuses"])

    def ask(self, ask: Callable[[str], str | None]) -> Decision:
        """Show the card page by page with `ask`, and return the decision.

        `ask` returns what the user typed, None to stop. Only the last page accepts a yes.
        """
        *pages, last = _pages(self.text())
        for number, page in enumerate(pages, 1):
            typed = ask(f"{page}… page {number} of {len(pages) + 1} · m next page · n REASON refuses")
            if typed is None or (
                typed.strip().lower() not in ("", "m") and approval.parse_decision(typed).choice == "no"
            ):
                return _decision(typed)
        return _decision(ask(last))


def _decision(typed: str | None) -> Decision:
    return Decision("no", "stopped") if typed is None else approval.parse_decision(typed)


def _on_one_line(text: str) -> str:
    return escape_hidden(text).replace("\n", "\\x0a")


def _pages(text: str) -> list[str]:
    """Split a text into pages, at lines; very long lines are split too."""
    pages, lines = [""], 0
    for row in re.findall(rf"[^\n]{{1,{_PAGE_CHARACTERS}}}\n?|\n", text):
        if lines == _PAGE_LINES or len(pages[-1]) + len(row) > _PAGE_CHARACTERS:
            pages[-1] += "" if pages[-1].endswith("\n") else "\n"
            pages, lines = [*pages, ""], 0
        pages[-1] += row
        lines += 1
    return pages


class CallFrontEnd(Protocol):
    """The methods of a front end that `ChatTools.run` calls, in its thread or in that of a call."""

    def decide(self, card: Card) -> Decision:
        """Ask the user whether a call may run, and wait for the decision."""

    def show_use(self, use: ToolUse, progress: str) -> None:
        """Show `progress` about a running tool call or, if the text is "", the result."""


def require_tools(config: ToolsConfig) -> None:
    """Raise UsageError if no tools are configured."""
    if not config.has_tools:
        raise UsageError("no tools are configured", hint=HOW_TO_ADD)


class ChatTools:
    """The tools of a chat: lists them for requests, and runs the model's calls. Thread-safe.

    While calls of `start` run, `running` stops them; otherwise it is None. `close` stops all calls.
    """

    def __init__(self, config: ToolsConfig, folder: Path) -> None:
        require_tools(config)
        self.toolbox = Toolbox(config, folder)
        self._approvals = Approvals(config, folder)
        self._tools: tuple[Tool, ...] | None = None
        self.running: Stop | None = None
        self._closing = Stop()

    def prepare(self, *, refresh: bool = False) -> list[str]:
        """Wait for the tool lists of servers that have sent none; return the messages of `notices`.

        With `refresh`, every server is asked for its list.
        """
        self.toolbox.prepare(refresh=refresh)
        self._tools = self.toolbox.tools()
        return self.notices()

    def request_tools(self) -> tuple[Tool, ...]:
        """Return the tools for a request; () before `prepare`.

        After a server has changed its list, the old list is returned until `notices` is called.
        """
        return self._tools or ()

    def fields(self, past: Rounds) -> dict[str, Any]:
        """Return a request's fields `tools` and `tool_choice`. `past`: calls since the last question.

        The model must answer with text if its last calls were refused as too many or as repeated.
        """
        mode: Literal["auto", "required", "none"] = "auto"
        if not past and self._tools:
            mode = self.toolbox.config.choice
        elif past and all(use.result in (_NO_MORE, _REPEATED) for use in past[-1]):
            mode = "none"
        return {"tools": self.request_tools(), "tool_choice": ToolChoice(mode=mode)}

    def tools_by_server(self) -> dict[str, list[tuple[ToolInfo, Level]]]:
        """Return each server's tools, each with the approval level of a call without arguments."""
        offered: dict[str, list[tuple[ToolInfo, Level]]] = {}
        for tool in self.toolbox.bound_tools().values():
            level: Level = "ask" if tool.is_new else self._level(tool, {}, 0)
            offered.setdefault(tool.server, []).append((tool.info, level))
        return offered

    def describe(self) -> str:
        """Return the names of the tools, one server per line."""
        by_server = self.tools_by_server().items()
        names = {server: ", ".join(info.name for info, _ in offered) for server, offered in by_server}
        lines = (f"{server}: {listed}" for server, listed in names.items())
        return safe_text("\n".join(lines), _MOST_SHOWN) or "No server offers a tool."

    def notices(self) -> list[str]:
        """Return new messages for the user, e.g. about failed servers and changed tools, each once.

        If there are any, `request_tools` returns the servers' current tools from now on.
        """
        notices, self.toolbox.notices = self.toolbox.notices, []
        if notices and self._tools is not None:
            self._tools = self.toolbox.tools()
        return notices

    def start(
        self,
        uses: Sequence[ToolUse],
        front: CallFrontEnd,
        *,
        past: Rounds = (),
        conversation: object = 0,
    ) -> Callable[[], tuple[ToolUse, ...]]:
        """Return a function that runs the calls; from now on, `running` can stop them.

        The parameters and the function's result are those of `run`.
        """
        stop = self.running = Stop()

        def run() -> tuple[ToolUse, ...]:
            try:
                return self.run(uses, front, stop, past=past, conversation=conversation)
            finally:
                self.running = None

        return run

    def stop(self) -> bool:
        """Stop the running calls; return False if there are none."""
        running = self.running
        if running is not None:
            running.set()
        return running is not None

    def close(self) -> None:
        """Stop calls, and end every server."""
        self._closing.set()
        self.toolbox.close()

    def run(
        self,
        uses: Sequence[ToolUse],
        front: CallFrontEnd,
        stop: Stop,
        *,
        past: Rounds = (),
        conversation: object = 0,
    ) -> tuple[ToolUse, ...]:
        """Run the calls, and return them with results, in the same order.

        `front` asks the user for approval and shows results; `stop` stops the calls. `past`: earlier
        calls since the last question; repeated and too many calls are refused. A user's permission for
        "this conversation" applies to later calls with the same `conversation`.
        """
        results = list(uses)
        if len(past) >= _MOST_ROUNDS:
            return tuple(use.end("refused", _NO_MORE) for use in uses)
        # refuse a call that each of the last two answers made with the same result: small models repeat
        # such calls forever
        repeated = {call[:2] for call in _made_calls(past[-1:]) & _made_calls(past[-2:-1])}
        threads: list[threading.Thread] = []
        with self._closing.calling(stop.set):
            for index, use in enumerate(uses):
                if (use.name, use.arguments) in repeated:
                    call_or_end: ToolUse | _Call = use.end("refused", _REPEATED)
                else:
                    call_or_end = self._approve(use, front, stop, conversation)
                if isinstance(call_or_end, ToolUse):
                    results[index] = call_or_end
                    front.show_use(call_or_end, "")
                    continue

                def call(index: int = index, call_or_end: _Call = call_or_end) -> None:
                    results[index] = self._call(uses[index], *call_or_end, front, stop)
                    front.show_use(results[index], "")

                threads.append(threading.Thread(target=call, name=f"tool {use.name}", daemon=True))
                threads[-1].start()
            for thread in threads:
                thread.join()
        return tuple(results)

    def _approve(
        self, use: ToolUse, front: CallFrontEnd, stop: Stop, conversation: object
    ) -> ToolUse | _Call:
        """Return tool and arguments of a call that may run, otherwise the call with its refusal."""
        if stop.is_set:
            return use.end("stopped", "the user stopped the calls")
        try:
            arguments = msgspec.json.decode(use.arguments or "{}", type=dict[str, Any])
            return self._judge(use, arguments, front, stop, conversation)
        except (msgspec.MsgspecError, RecursionError) as error:
            return use.end("failed", f"the arguments are not a JSON object: {error}")
        except StoppedError:
            return use.end("stopped", STOPPED)
        except EdgeInferError as error:
            return use.end("failed", safe_text(error.message, 2000))

    def _judge(
        self, use: ToolUse, arguments: _Arguments, front: CallFrontEnd, stop: Stop, conversation: object
    ) -> ToolUse | _Call:
        bound = self.toolbox.bound_tools().get(use.name)
        if bound is None:
            return use.end("failed", "there is no such tool")
        front.show_use(use, "starting…")
        server = self.toolbox.start(bound.server, stop)
        # an MCP server that was just started sends its list of tools anew, maybe without this tool
        bound = self.toolbox.bound_tools().get(use.name)
        if bound is None:
            return use.end("failed", "the server no longer has this tool")
        if wrong := server.argument_error(bound.info, arguments):
            return use.end("failed", safe_text(f"wrong arguments: {wrong}", 2000))
        arguments = server.canonical(bound.info.name, arguments)
        level = self._level(bound, arguments, conversation)
        if level == "deny":
            return use.end("refused", "the configuration denies this call")
        warning = server.warning(bound.info.name, arguments)
        if level == "allow" and not bound.is_new and not warning:
            return bound, arguments
        card = _card(use, bound, arguments, warning, server.preview(bound.info.name, arguments))
        decision = front.decide(card)
        if decision.choice != "no":
            self._note_decision(decision, bound, card, conversation)
        if stop.is_set:
            return use.end("stopped", "the user stopped the calls")
        if decision.choice == "no":
            reason = f": {decision.reason}" if decision.reason else ""
            return use.end("refused", f"the user said no{reason}")
        return bound, arguments

    def _note_decision(
        self, decision: Decision, bound: BoundTool, card: Card, conversation: object
    ) -> None:
        """Store the permission that the user gave."""
        self.toolbox.approve(bound)
        if decision.choice == "conversation":
            self._approvals.allow_here(conversation, card.server, card.tool)
        elif decision.choice == "pattern" and card.pattern:
            try:
                self._approvals.allow_always(card.pattern)
            except ConfigError as error:
                self.toolbox.notices.append(f"the pattern is valid only in this chat: {error.message}")

    def _level(self, bound: BoundTool, arguments: _Arguments, conversation: object) -> Level:
        return self._approvals.level(
            bound.server,
            bound.info.name,
            arguments,
            conversation=conversation,
            destructive=bound.info.destructive,
            harmless=bound.server in self.toolbox.builtin and bound.info.read_only,
        )

    def _call(
        self, use: ToolUse, bound: BoundTool, arguments: _Arguments, front: CallFrontEnd, stop: Stop
    ) -> ToolUse:
        start_s = time.monotonic()

        def progress(progress_text: str) -> None:
            front.show_use(use, safe_text(progress_text, 200))

        try:
            session = self.toolbox.start(bound.server, stop)
            result = session.call(bound.info.name, arguments, stop, progress)
        except StoppedError:
            return use.end("stopped", STOPPED)
        except EdgeInferError as error:
            return use.end("failed", safe_text(error.message, 2000))
        took_ms = (time.monotonic() - start_s) * 1000
        text = safe_text(result.text, _MOST_RESULT_BYTES)
        return use.end("failed" if result.is_error else "done", text or "(empty)", took_ms)


def _card(use: ToolUse, bound: BoundTool, arguments: _Arguments, warning: str, diff: str) -> Card:
    server, tool = bound.server, bound.info.name
    warnings = [
        warning,
        "the server has added or changed this tool since you first saw it" if bound.is_new else "",
        "the server says that this tool may destroy data" if bound.info.destructive else "",
    ]
    return Card(
        id=use.id,
        server=server,
        tool=tool,
        arguments=arguments,
        pattern=approval.pattern_for(server, tool, arguments),
        diff=diff,
        warning="; ".join(filter(None, warnings)),
    )


def _made_calls(rounds: Rounds) -> set[tuple[str, str, str]]:
    """Return (name, arguments, result) of the calls that were run in these rounds."""
    return {(u.name, u.arguments, u.result) for uses in rounds for u in uses if u.status == "done"}


class NoFrontEnd:
    """A front end without a user, which refuses every call that needs approval.

    `refused` lists patterns that would allow these calls.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.refused: list[str] = []

    def decide(self, card: Card) -> Decision:
        self.refused.append(card.pattern or f"{card.server}.{card.tool}")
        return Decision("no", "there is no user to allow it")

    def show_use(self, use: ToolUse, progress: str) -> None:
        if not progress:
            arguments = " ".join(use.arguments.split())
            self.say([f"{use.name} {arguments}: {use.status}, {len(use.result.encode()):,} bytes"])

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._out.write(f"tools: {safe_text(line, _MOST_SHOWN)}\n")
        self._out.flush()
