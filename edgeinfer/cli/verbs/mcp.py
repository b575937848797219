"""`edgeinfer mcp`: this user's endpoint as an MCP server on standard streams."""

from __future__ import annotations

import argparse
import secrets
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
from edgeinfer.tools.mcp_transports import MAX_MESSAGE, HttpTransport

#: Seconds that an answer may take, from the first token on the queue to the last.
_PATIENCE_S = 3600.0
_PARSE_ERROR, _INTERNAL_ERROR = -32700, -32603


class McpResult(Result, frozen=True, kw_only=True):
    """The client has closed its end."""

    def human(self) -> str:
        return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "default model, if an endpoint is started for it")


def run(options: argparse.Namespace, host: Host) -> McpResult:
    """Carry messages until stdin ends. Raises ServeError, and what naming a model raises."""
    bridge = _Bridge(options, host)
    if sys.stdin.isatty():
        sys.stderr.write("ready for an MCP client, which starts this command itself; Ctrl+D ends it\n")
    while line := sys.stdin.buffer.readline(MAX_MESSAGE):
        try:
            message = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            bridge.write(_failure(None, _PARSE_ERROR, str(error)))
            continue
        if message.get("method") == "tools/call":  # others may be sent, or cancel it, meanwhile
            threading.Thread(target=bridge.send, args=(message,), daemon=True).start()
        else:
            bridge.send(message)
    return McpResult()


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
        key = self._remote.key
        headers = {"Mcp-Session-Id": self._session}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._transport = HttpTransport(f"{self._remote.url}/mcp", headers, _PATIENCE_S, self.write)

    def send(self, message: dict[str, Any]) -> None:
        remote = self._remote
        try:
            try:
                self._transport.send(message)
            except ToolServerError:
                with self._connecting:
                    if self._remote is remote:
                        if endpoint.look_at(remote.url, remote.key) is not None:
                            raise
                        self._connect()  # it leaves after some minutes without a request
                self._transport.send(message)
        except EdgeInferError as error:
            if "id" in message:
                self.write(_failure(message["id"], _INTERNAL_ERROR, error.message))

    def write(self, message: dict[str, Any]) -> None:
        with self._writing:
            sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
            sys.stdout.buffer.flush()


def _failure(number: Any, code: int, words: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": words}}
