"""`edgeinfer mcp`: this user's endpoint as an MCP server on standard streams."""

from __future__ import annotations

import argparse
import secrets
import select
import sys
import threading
from typing import Any

import msgspec

from edgeinfer.agents import endpoint
from edgeinfer.cli.options import add_model
from edgeinfer.cli.result import Result
from edgeinfer.cli.verbs.launch import own_endpoint
from edgeinfer.errors import EdgeInferError, ToolServerError
from edgeinfer.host import Host
from edgeinfer.tools.mcp_transports import MAX_MESSAGE, HttpTransport, UnansweredError, decode_messages

#: Interval (s) of checks that the client still reads stdout, after stdin has ended.
_LOOK_S = 0.2
_PARSE_ERROR, _INTERNAL_ERROR = -32700, -32603


class McpResult(Result, frozen=True, kw_only=True):
    """The client has closed its end."""

    def human(self) -> str:
        return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "default model, if an endpoint is started for it")


def run(options: argparse.Namespace, host: Host) -> McpResult:
    """Carry messages until stdin ends and all is answered.

    Raises ServeError, and what naming a model raises.
    """
    bridge = _Bridge(options, host)
    if sys.stdin.isatty():
        sys.stderr.write("ready for an MCP client, which starts this command itself; Ctrl+D ends it\n")
    calls: list[threading.Thread] = []
    while line := sys.stdin.buffer.readline(MAX_MESSAGE):
        messages = decode_messages(line)
        if not messages:
            bridge.write(_failure(None, _PARSE_ERROR, "the line is not a JSON-RPC message"))
        for message in messages:
            if message.get("method") == "tools/call":  # others may be sent, or cancel it, meanwhile
                calls = [call for call in calls if call.is_alive()]
                calls.append(threading.Thread(target=bridge.send, args=(message,), daemon=True))
                calls[-1].start()
            else:
                bridge.send(message)
    for call in calls:
        while call.is_alive() and _is_read(sys.stdout.fileno()):
            call.join(_LOOK_S)
    bridge.close()
    return McpResult()


def _is_read(pipe: int) -> bool:
    """Return whether the other end of a pipe is still open."""
    poll = select.poll()
    poll.register(pipe, 0)
    return not poll.poll(0)


class _Bridge:
    """Posts messages to the endpoint's /mcp, and writes what is answered. Any thread."""

    def __init__(self, options: argparse.Namespace, host: Host) -> None:
        self._options = options
        self._host = host
        self._connecting = threading.Lock()
        self._writing = threading.Lock()
        #: Where an endpoint is started anew, no client asks for a session: cancels need one.
        self._session = secrets.token_hex(16)
        self._connect()

    def _connect(self) -> None:
        self._remote = own_endpoint(self._options, self._host)
        headers = {"Mcp-Session-Id": self._session}
        if self._remote.key:
            headers["Authorization"] = f"Bearer {self._remote.key}"
        self._transport = HttpTransport(f"{self._remote.url}/mcp", headers, self.write)

    def close(self) -> None:
        self._transport.close()

    def send(self, message: dict[str, Any]) -> None:
        remote = self._remote
        try:
            try:
                self._transport.send(message).result()
            except UnansweredError:
                raise
            except ToolServerError:
                with self._connecting:
                    if self._remote is remote:
                        if endpoint.look_at(remote.url, remote.key) is not None:
                            raise
                        self.close()
                        self._connect()  # it leaves after some minutes without a request
                self._transport.send(message).result()
        except UnansweredError:
            pass  # it is cancelled
        except EdgeInferError as error:
            if "id" in message:
                self.write(_failure(message["id"], _INTERNAL_ERROR, error.message))

    def write(self, message: dict[str, Any]) -> None:
        with self._writing:
            sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
            sys.stdout.buffer.flush()


def _failure(number: Any, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}
