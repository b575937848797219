"""A client of the Model Context Protocol: one session with one server.

The official SDK would cost 0.7 s of import and 70 MB (docs/decisions/108-own-mcp-client.md).
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import edgeinfer
from edgeinfer.errors import ToolServerError
from edgeinfer.tools.mcp_servers import ServerSpec
from edgeinfer.tools.mcp_transports import HttpTransport, StdioTransport
from edgeinfer.tools.uses import Stop

#: The newest version first; a server answers with one that it speaks.
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
#: Pages of a list that are read, and entries in all.
_MAX_PAGES, _MAX_ENTRIES = 64, 2000
_METHOD_NOT_FOUND = -32601
_START_S = 60.0


class ToolInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as its server describes it. `destructive`, `read_only`: its claims, False if not made."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    destructive: bool = False
    read_only: bool = False


class CallResult(msgspec.Struct, frozen=True):
    """The text of a call's result, as the server sent it."""

    text: str
    is_error: bool = False


class StoppedError(Exception):
    """The user stopped the call: no failure, so it has no code."""


class _Pending:
    def __init__(self, on_progress: Callable[[str], object] | None) -> None:
        self.answer: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        self.on_progress = on_progress


class McpClient:
    """A session with a server, started by the constructor. Any thread. Raises ToolServerError."""

    def __init__(
        self,
        spec: ServerSpec,
        folder: Path,
        timeout_s: float,
        elicit: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self.spec = spec
        self._elicit = elicit
        self._asking = threading.Lock()
        self._folder = folder
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self.lost = ""
        self.list_changed = False
        self.capabilities: dict[str, Any] = {}
        self._transport: StdioTransport | HttpTransport
        if spec.url:
            self._transport = HttpTransport(spec.url, spec.headers, timeout_s, self._received)
        else:
            self._transport = StdioTransport(spec.command, spec.env, folder, self._received, self._lost)
        try:
            self._initialize()
        except BaseException:
            self.close()
            raise

    def _initialize(self) -> None:
        client = {"name": "edgeinfer", "version": edgeinfer.__version__}
        offered: dict[str, Any] = {"roots": {}} | ({"elicitation": {}} if self._elicit else {})
        asked = {"protocolVersion": VERSIONS[0], "capabilities": offered, "clientInfo": client}
        found = self.request("initialize", asked, timeout_s=_START_S)
        version = found.get("protocolVersion")
        if version not in VERSIONS:
            known = f"{VERSIONS[-1]} to {VERSIONS[0]}"
            raise self._error(f"it speaks version {version!r} of the protocol; known here: {known}")
        capabilities = found.get("capabilities")
        self.capabilities = capabilities if isinstance(capabilities, dict) else {}
        if isinstance(self._transport, HttpTransport):
            self._transport.version = version
        self._notify("notifications/initialized")

    # what a server offers

    def tools(self) -> list[ToolInfo]:
        """List the tools. Raises ToolServerError."""
        self.list_changed = False
        return [_tool(entry) for entry in self._listed("tools")]

    def call(
        self,
        name: str,
        arguments: dict[str, Any],
        stop: Stop | None = None,
        on_progress: Callable[[str], object] | None = None,
    ) -> CallResult:
        """Call a tool; `on_progress` gets words. Raises ToolServerError, StoppedError."""
        found = self.request(
            "tools/call", {"name": name, "arguments": arguments}, stop=stop, on_progress=on_progress
        )
        text = "\n".join(map(_part_text, _dicts(found.get("content"))))
        if not text and "structuredContent" in found:
            text = msgspec.json.encode(found["structuredContent"]).decode()
        return CallResult(text, found.get("isError") is True)

    def read(self, uri: str) -> str:
        """Read a resource as text. Raises ToolServerError."""
        found = self.request("resources/read", {"uri": uri})
        return "\n".join(_resource_text(part) for part in _dicts(found.get("contents")))

    def prompts(self) -> list[dict[str, Any]]:
        """List the prompts as the protocol has them; none if the server has none."""
        return self._listed("prompts") if "prompts" in self.capabilities else []

    def prompt(self, name: str, arguments: dict[str, str]) -> str:
        """Return the text of a prompt. Raises ToolServerError."""
        found = self.request("prompts/get", {"name": name, "arguments": arguments})
        parts = [message.get("content") for message in _dicts(found.get("messages"))]
        return "\n\n".join(map(_part_text, _dicts(parts)))

    def _listed(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            page = self.request(f"{kind}/list", cursor)
            found += _dicts(page.get(kind))
            if not page.get("nextCursor") or len(found) >= _MAX_ENTRIES:
                return found[:_MAX_ENTRIES]
            cursor = {"cursor": page["nextCursor"]}
        return found

    # JSON-RPC

    def request(
        self,
        method: str,
        params: dict[str, Any],
        *,
        timeout_s: float | None = None,
        stop: Stop | None = None,
        on_progress: Callable[[str], object] | None = None,
    ) -> dict[str, Any]:
        """Return the result of one request. Raises ToolServerError, StoppedError."""
        number = next(self._ids)
        pending = _Pending(on_progress)
        with self._lock:
            self._pending[number] = pending
        if self.lost:
            pending.answer.put(self._error(self.lost))
        if on_progress is not None:
            params = {**params, "_meta": {"progressToken": number}}
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        hang_ups: list[Callable[[], object]] = []

        def stopped() -> None:
            pending.answer.put(StoppedError("stopped"))
            for hang_up in hang_ups:
                hang_up()

        if stop is not None:
            stop.add(stopped)
        try:
            return self._answered(message, pending, hang_ups, timeout_s or self._timeout_s)
        except StoppedError:
            self._cancel(number)
            raise
        finally:
            if stop is not None:
                stop.remove(stopped)
            with self._lock:
                self._pending.pop(number, None)

    def _answered(
        self,
        message: dict[str, Any],
        pending: _Pending,
        hang_ups: list[Callable[[], object]],
        timeout_s: float,
    ) -> dict[str, Any]:
        try:
            self._transport.send(message, hang_ups.append)
        except ToolServerError as error:
            if pending.answer.empty():  # otherwise it was stopped, or answered before the line broke
                self.lost = error.message
                raise self._error(error.message) from error
        answer: dict[str, Any] | Exception | None = None
        while answer is None:
            try:
                # over HTTP all has come by now
                answer = pending.answer.get(timeout=0.1 if self.spec.url else timeout_s)
            except queue.Empty:
                if self._asking.locked() and not self.spec.url:
                    continue  # the server waits for the user, too
                self._cancel(message["id"])
                waited = "no answer" if self.spec.url else f"no answer within {timeout_s:g} s"
                raise self._error(f"{message['method']}: {waited}") from None
        if isinstance(answer, Exception):
            raise answer
        failure = answer.get("error")
        if isinstance(failure, dict):
            raise self._error(str(failure.get("message", "an error without words")))
        result = answer.get("result")
        if not isinstance(result, dict):
            raise self._error(f"{message['method']}: an answer without a result")
        return result

    def _error(self, words: str) -> ToolServerError:
        return ToolServerError(f"tool server {self.spec.name}: {words}")

    def _cancel(self, number: int) -> None:
        self._notify("notifications/cancelled", {"requestId": number})

    def _notify(self, method: str, params: dict[str, Any] | None = None) -> None:
        self._send({"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._transport.send(message)
        except ToolServerError as error:
            self.lost = self.lost or error.message

    def _received(self, message: dict[str, Any]) -> None:
        method, number = message.get("method"), message.get("id")
        if method is None:
            with self._lock:
                pending = self._pending.get(number) if isinstance(number, int) else None
            if pending is not None:
                pending.answer.put(message)
        elif number is not None:
            # not here: over HTTP this thread reads the stream that the server writes
            answering = (number, method, message.get("params"))
            threading.Thread(target=self._answer, args=answering, daemon=True).start()
        elif method == "notifications/tools/list_changed":
            self.list_changed = True
        elif method == "notifications/progress":
            self._progressed(message.get("params"))

    def _progressed(self, params: Any) -> None:
        params = params if isinstance(params, dict) else {}
        token = params.get("progressToken")
        pending = self._pending.get(token) if isinstance(token, int) else None
        if pending is not None and pending.on_progress is not None:
            done, total = params.get("progress"), params.get("total")
            share = f"{done:g} of {total:g}" if _are_numbers(done, total) else ""
            pending.on_progress(str(params.get("message") or share))

    def _answer(self, number: Any, method: str, params: Any) -> None:
        """Answer a request of the server's own."""
        body: dict[str, Any]
        if method == "ping":
            body = {"result": {}}
        elif method == "roots/list":
            root = {"uri": self._folder.as_uri(), "name": self._folder.name}
            body = {"result": {"roots": [root]}}
        elif method == "elicitation/create" and self._elicit is not None and isinstance(params, dict):
            body = {"result": {"action": "cancel"}}
            if self._asking.acquire(blocking=False):  # one question at a time
                try:
                    body = {"result": self._elicit(params)}
                finally:
                    self._asking.release()
        else:
            body = {"error": {"code": _METHOD_NOT_FOUND, "message": f"{method} is not offered"}}
        self._send({"jsonrpc": "2.0", "id": number, **body})

    def _lost(self, why: str) -> None:
        self.lost = self.lost or why
        with self._lock:
            waiting = list(self._pending.values())
        for pending in waiting:
            pending.answer.put(self._error(self.lost))

    def close(self) -> None:
        """End the session and the child. Idempotent."""
        self.lost = self.lost or "the session is closed"
        self._transport.close()


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    yield from (part for part in value if isinstance(part, dict)) if isinstance(value, list) else ()


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _tool(entry: dict[str, Any]) -> ToolInfo:
    schema, claims = entry.get("inputSchema"), entry.get("annotations")
    claims = claims if isinstance(claims, dict) else {}
    return ToolInfo(
        name=str(entry.get("name", "")),
        description=str(entry.get("description") or ""),
        parameters=schema if isinstance(schema, dict) else {},
        destructive=claims.get("destructiveHint") is True,
        read_only=claims.get("readOnlyHint") is True,
    )


def _part_text(part: dict[str, Any]) -> str:
    match part.get("type"):
        case "text":
            return str(part.get("text", ""))
        case "resource":
            inner = part.get("resource")
            return _resource_text(inner) if isinstance(inner, dict) else ""
        case "resource_link":
            return f"[{part.get('uri', '')}]"
        case kind:
            return f"[{kind}, {part.get('mimeType', 'of no type')}: not shown]"


def _resource_text(part: dict[str, Any]) -> str:
    return str(part["text"]) if "text" in part else f"[{part.get('uri', '')}: not text]"
