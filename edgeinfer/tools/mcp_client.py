"""A client for the Model Context Protocol (MCP): one session with one tool server.

The official SDK would take 0.7 s to import and 70 MB (docs/decisions/108-own-mcp-client.md).
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import edgeinfer
from edgeinfer.errors import EdgeInferError, ToolServerError
from edgeinfer.media import document_files
from edgeinfer.tools.approval import argument_text
from edgeinfer.tools.mcp_servers import ServerSpec, plan_start, plan_start_apart
from edgeinfer.tools.mcp_transports import (
    MAX_ANSWER_S,
    HttpTransport,
    Message,
    SessionEndedError,
    StdioTransport,
)
from edgeinfer.tools.tool_use import Progress, Stop, StoppedError, safe_text

#: Supported versions of the MCP protocol, newest first. The MCP server chooses one of them.
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
#: Maximum number of pages and of entries of an MCP server's list of tools, and its maximum size
#: (bytes).
_MAX_PAGES, _MAX_ENTRIES = 64, 2000
_MAX_LIST_BYTES = 4 << 20
#: Maximum size (bytes) of the tool names in a notice about an MCP server's invalid tools.
_MAX_NAMES = 500
_METHOD_NOT_FOUND = -32601
_START_S = 60.0


class ToolInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as its server describes it. `parameters` is the JSON schema of the arguments.

    `destructive` (the tool may destroy data) and `read_only` are unchecked claims of the server.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    destructive: bool = False
    read_only: bool = False


class CallResult(msgspec.Struct, frozen=True):
    """The result of a call, as the server sent it. `is_error`: the tool reports a failure."""

    text: str
    is_error: bool = False


class _Pending:
    def __init__(self, on_progress: Progress | None) -> None:
        self.answer: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        self.on_progress = on_progress
        self.began_s = self.heard_s = time.monotonic()

    def note_sent(self, sent: Future[None]) -> None:
        """If the request could not be sent, let `wait` return the error."""
        if not sent.cancelled() and (error := sent.exception()) is not None:
            self.answer.put(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def wait(self, timeout_s: float) -> dict[str, Any] | Exception | None:
        """Return the answer; None if neither answer nor progress came for `timeout_s`."""
        while True:
            end_s = min(self.heard_s + timeout_s, self.began_s + max(timeout_s, MAX_ANSWER_S))
            left_s = end_s - time.monotonic()
            try:
                return self.answer.get(timeout=max(left_s, 0))
            except queue.Empty:
                if left_s <= 0:
                    return None


class ToolServer:
    """Base class of tool servers, MCP and built-in ones.

    The tool loop calls `argument_error`, `canonical`, `warning` and `preview` before it calls a tool.
    These defaults are for MCP servers; built-in servers override them.
    """

    def argument_error(self, tool: ToolInfo, arguments: dict[str, Any]) -> str:
        """Return which arguments are missing, unknown or (built-in tools) mistyped; "" for none."""
        schema = tool.parameters
        required, properties = schema.get("required"), schema.get("properties", {})
        required = required if isinstance(required, list) else []
        is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        unknown = [name for name in arguments if is_closed and name not in properties]
        missing = [f"missing argument: {name}" for name in required if name not in arguments]
        return "; ".join([*missing, *(f"unknown argument: {name}" for name in unknown)])

    def canonical(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with links in paths resolved, to be approved and used for the call."""
        return arguments

    def warning(self, name: str, arguments: dict[str, Any]) -> str:
        """Return why this call needs approval even if a pattern allows it; "" if it does not."""
        return ""

    def preview(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the change that the call would make to a file, as a diff; "" for no such change."""
        return ""


class McpClient(ToolServer):
    """A session with a tool server, which the constructor starts. Thread-safe.

    With `is_apart`, the server executes nothing below `folder`, because the model's commands may have
    changed programs there. The constructor raises ToolServerError, or StoppedError if `stop` is set.
    """

    def __init__(
        self,
        spec: ServerSpec,
        folder: Path,
        timeout_s: float,
        *,
        is_apart: bool = False,
        stop: Stop | None = None,
    ) -> None:
        self.spec = spec
        self._folder = folder
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self.lost = ""
        #: Notices for the user about invalid tools of this MCP server, and about incomplete lists.
        self.notices: list[str] = []
        self.list_changed = False
        self._transport: StdioTransport | HttpTransport
        self._is_connected = threading.Event()
        if spec.url:
            self._transport = HttpTransport(spec.url, spec.headers, self._receive)
        else:
            plan = plan_start_apart if is_apart else plan_start
            command, variables, cwd = plan(spec, folder)
            self._transport = StdioTransport(command, variables, cwd, self._receive, self._note_lost)
        self._is_connected.set()
        try:
            self._initialize(stop)
        except BaseException:
            self.close()
            raise

    def _initialize(self, stop: Stop | None) -> None:
        params = {
            "protocolVersion": VERSIONS[0],
            "capabilities": {"roots": {}},
            "clientInfo": {"name": "edgeinfer", "version": edgeinfer.__version__},
        }
        result = self.request("initialize", params, timeout_s=_START_S, stop=stop)
        version = result.get("protocolVersion")
        if version not in VERSIONS:
            range_text = f"supported: {VERSIONS[-1]} to {VERSIONS[0]}"
            raise self._error(f"it uses protocol version {version!r}; {range_text}")
        if isinstance(self._transport, HttpTransport):
            self._transport.version = version
        self._notify("notifications/initialized", stop=stop or Stop())

    def tools(self, stop: Stop | None = None) -> list[ToolInfo]:
        """Request the server's tools, and return the valid ones; `notices` names the invalid ones.

        Raises ToolServerError, or StoppedError if `stop` is set.
        """
        self.list_changed = False
        entries = self._list_tools(stop)
        tools = [_tool(entry) for entry in entries]
        pairs = zip(entries, tools, strict=True)
        wrong = [str(entry.get("name", "")) for entry, tool in pairs if tool is None]
        if wrong:
            names = safe_text(", ".join(name or "(no name)" for name in wrong), _MAX_NAMES)
            self.notices.append(f"tools of {self.spec.name} without a name or a valid schema: {names}")
        return [tool for tool in tools if tool is not None]

    def call(
        self,
        name: str,
        arguments: dict[str, Any],
        stop: Stop | None = None,
        on_progress: Progress | None = None,
    ) -> CallResult:
        """Call a tool; `on_progress` gets texts to show. Raises ToolServerError, StoppedError."""
        params = {"name": name, "arguments": arguments}
        result = self.request("tools/call", params, stop=stop, on_progress=on_progress)
        text = "\n".join(map(_item_text, _dicts(result.get("content"))))
        if not text and "structuredContent" in result:
            text = msgspec.json.encode(result["structuredContent"]).decode()
        return CallResult(text, result.get("isError") is True)

    def _list_tools(self, stop: Stop | None) -> list[dict[str, Any]]:
        """Return the server's tools as it describes them, up to limits of size and time."""
        entries: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        end_s, left_bytes = time.monotonic() + self._timeout_s, _MAX_LIST_BYTES
        for _ in range(_MAX_PAGES):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            page = self.request("tools/list", cursor, timeout_s=left_s, stop=stop)
            for entry in _dicts(page.get("tools")):
                left_bytes -= len(msgspec.json.encode(entry))
                if left_bytes >= 0 and len(entries) < _MAX_ENTRIES:
                    entries.append(entry)
            if not page.get("nextCursor"):
                return entries
            if left_bytes < 0 or len(entries) == _MAX_ENTRIES:
                break
            cursor = {"cursor": page["nextCursor"]}
        self.notices.append(f"tools of {self.spec.name}: too long or slow; some are missing")
        return entries

    def request(
        self,
        method: str,
        params: dict[str, Any],
        *,
        timeout_s: float | None = None,
        stop: Stop | None = None,
        on_progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the result. A session that the server has ended is replaced.

        Each report of progress restarts `timeout_s`. Raises ToolServerError, or StoppedError if `stop`
        is set.
        """
        stop = stop or Stop()
        ask = partial(self._ask, method, params, timeout_s or self._timeout_s, stop, on_progress)
        try:
            return ask()
        except SessionEndedError:
            with stop.holding(self._renewing):
                if not self._transport.session:
                    self._transport.version = ""
                    self._initialize(stop)
            return ask()

    def _ask(
        self, method: str, params: Message, timeout_s: float, stop: Stop, on_progress: Progress | None
    ) -> Message:
        if stop.is_set:
            raise StoppedError
        number, pending = next(self._ids), _Pending(on_progress)
        with self._lock:
            self._pending[number] = pending
        if self.lost:
            pending.answer.put(self._error(self.lost))
        if on_progress is not None:
            params = {**params, "_meta": {"progressToken": number}}

        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        try:
            with stop.calling(partial(pending.answer.put, StoppedError())):
                sent = self._transport.send(message)
                sent.add_done_callback(pending.note_sent)
                answer = pending.wait(timeout_s)
        finally:
            with self._lock:
                self._pending.pop(number, None)
        if answer is None or isinstance(answer, StoppedError):
            if self._transport.abandon(sent, is_late=answer is None):
                self._note_lost("the server does not read its messages")
            if method != "initialize":
                self._notify("notifications/cancelled", {"requestId": number})
        if answer is None:
            printed = self._transport.last_output()
            raise self._error(f"{method}: no answer within {timeout_s:.3g} s{printed}")
        return self._result(method, answer)

    def _result(self, method: str, answer: dict[str, Any] | Exception) -> dict[str, Any]:
        if isinstance(answer, SessionEndedError | StoppedError):
            raise answer
        if isinstance(answer, ToolServerError):  # `lost` makes the next call begin another session
            self.lost = self.lost or answer.message
            raise self._error(answer.message, answer.hint) from answer
        if isinstance(answer, Exception):
            raise self._error(f"{method}: {answer!r}") from answer
        failure = answer.get("error")
        if isinstance(failure, dict):
            text = str(failure.get("message") or "the server reports an error without a message")
            data = failure.get("data")
            raise self._error(text if data is None else f"{text}: {argument_text(data)}")
        result = answer.get("result")
        if not isinstance(result, dict):
            raise self._error(f"{method}: the response has no result")
        return result

    def _error(self, text: str, hint: str | None = None) -> ToolServerError:
        start = f"tool server {self.spec.name}: "
        return ToolServerError(start + text.removeprefix(start), hint=hint)

    def _notify(
        self, method: str, params: dict[str, Any] | None = None, stop: Stop | None = None
    ) -> None:
        """Send a notification. With `stop`, wait until it is sent, or `stop` is set."""
        with_params = {"params": params} if params else {}
        sent = self._transport.send({"jsonrpc": "2.0", "method": method, **with_params})
        if stop is not None:
            is_over = threading.Event()
            sent.add_done_callback(lambda _: is_over.set())
            with stop.calling(is_over.set):
                is_over.wait(self._timeout_s)

    def _receive(self, message: dict[str, Any]) -> None:
        self._is_connected.wait()  # a server may send messages before the constructor has ended
        method, number = message.get("method"), message.get("id")
        if method is None:
            if (pending := self._pending_of(number)) is not None:
                pending.answer.put(message)
        elif number is not None:
            self._transport.send({"jsonrpc": "2.0", "id": number, **self._answer(method)})
        elif method == "notifications/tools/list_changed":
            self.list_changed = True
        elif method == "notifications/progress":
            self._note_progress(message.get("params"))

    def _pending_of(self, number: Any) -> _Pending | None:
        """Return the pending request with this id, which may be a string or float; None for none."""
        with contextlib.suppress(TypeError, ValueError, OverflowError), self._lock:
            return self._pending.get(int(number))
        return None

    def _note_progress(self, params: Any) -> None:
        params = params if isinstance(params, dict) else {}
        pending = self._pending_of(params.get("progressToken"))
        if pending is not None and pending.on_progress is not None:
            pending.heard_s = time.monotonic()
            done, total = params.get("progress"), params.get("total")
            # an exception in the front end's callback must not end the thread that reads the server's
            # messages
            with contextlib.suppress(Exception):
                share = f"{done:g} of {total:g}" if _are_numbers(done, total) else ""
                pending.on_progress(str(params.get("message") or share))

    def _answer(self, method: Any) -> dict[str, Any]:
        """Return the response to a request that the server sent: `ping`, `roots/list` or an error."""
        if method == "ping":
            return {"result": {}}
        if method == "roots/list":
            root = {"uri": self._folder.as_uri(), "name": self._folder.name}
            return {"result": {"roots": [root]}}
        return {"error": {"code": _METHOD_NOT_FOUND, "message": f"{method} is not supported"}}

    def _note_lost(self, reason: str) -> None:
        self.lost = self.lost or reason
        with self._lock:
            waiting = list(self._pending.values())
        for pending in waiting:
            pending.answer.put(self._error(self.lost))

    def close(self) -> None:
        """End the session and the server's process. Idempotent."""
        self._note_lost("the session is closed")
        self._transport.close()


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    yield from (item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _tool(entry: dict[str, Any]) -> ToolInfo | None:
    """Parse a tool; None if its name is not printable, or its schema does not describe an object."""
    name, claims = entry.get("name"), entry.get("annotations")
    schema = entry.get("inputSchema") or {}
    if not isinstance(name, str) or not name or not name.isprintable():
        return None
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return None
    claims = claims if isinstance(claims, dict) else {}
    return ToolInfo(
        name=name,
        description=str(entry.get("description") or ""),
        parameters=schema,
        destructive=claims.get("destructiveHint") is True,
        read_only=claims.get("readOnlyHint") is True,
    )


def _item_text(item: dict[str, Any]) -> str:
    match item.get("type"):
        case "text":
            return str(item.get("text") or "")
        case "resource":
            inner = item.get("resource")
            return _resource_text(inner) if isinstance(inner, dict) else ""
        case "resource_link":
            fields = (item.get(name) for name in ("uri", "name", "mimeType", "description"))
            return f"[{' · '.join(str(field) for field in fields if field)}]"
        case kind:
            return f"[{kind}, {item.get('mimeType', 'of no type')}: not shown]"


def _resource_text(item: dict[str, Any]) -> str:
    if "text" in item:
        return str(item["text"] or "")
    uri = str(item.get("uri") or "")
    try:
        data = base64.b64decode(str(item.get("blob") or ""), validate=True)
        if document_files.is_document(data):
            return f"[{uri}]\n{document_files.text_of(data, uri.rpartition('/')[2] or 'document')}"
    except (ValueError, EdgeInferError) as error:
        return f"[{uri}: {error}]"
    return f"[{uri}, {item.get('mimeType', 'of no type')}: not text]"
