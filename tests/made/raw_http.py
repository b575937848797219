"""HTTP requests as bytes, for tests of what a client library cannot send."""

import contextlib
import json
import re
import socket

CHAT = "/v1/chat/completions"
HI_BODY = {"messages": [{"role": "user", "content": "hi"}]}
JSON = "content-type: application/json"


def head(path: str, *lines: str, method: str = "POST", version: str = "1.1") -> bytes:
    """Return a request line and headers: Host, `lines`, and the blank line."""
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: localhost", *lines, "", ""]).encode()


def get(path: str, *lines: str, method: str = "GET") -> bytes:
    return head(path, "connection: close", *lines, method=method)


def post(
    body: bytes | dict, *lines: str, path: str = CHAT, length: int | None = None, version: str = "1.1"
) -> bytes:
    """Return a POST of JSON. `length` is another Content-Length than that of `body`."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if length is None else length
    return head(path, JSON, f"content-length: {size}", *lines, version=version) + content


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 60)


def read_all(client: socket.socket) -> bytes:
    """Read until the endpoint closes or resets the connection."""
    reply = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65_536):
            reply += piece
    return reply


def exchange(port: int, request: bytes) -> bytes:
    """Send bytes; return the reply until the endpoint closes, or its Content-Length is reached."""
    reply = b""
    with connect(port) as client:
        with contextlib.suppress(ConnectionError):  # the endpoint closed: its reply is still there
            client.sendall(request)
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65_536):
                reply += piece
                start, _, body = reply.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", start)
                if length and len(body) >= int(length[1]):
                    break
    return reply


def status(reply: bytes) -> int:
    """Return the status of a reply; 0 if there is none."""
    return int(reply.split(b" ", 2)[1]) if reply else 0
