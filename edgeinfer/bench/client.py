"""One streamed request to an OpenAI-compatible server, with the time at which each piece of it arrived.

The client shares the processors with the server that it measures, so it stamps what comes, looks for no
more than the end of the answer, and reads the answer then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

from edgeinfer.errors import ServeError
from edgeinfer.safe_text import without_controls

#: The longest answer that is read (bytes), and for how long (s).
_MOST_BYTES, _MOST_S = 64 << 20, 1800.0
_READ_BYTES, _CONNECT_S = 64 << 10, 10.0
_CHARACTERS_OF_ERROR = 300
#: A thread for each answer that streams.
_STREAMS = ThreadPoolExecutor(256, "stream")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server's address (`http://host:port`), the model to ask, and the API key; "" for none."""

    url: str
    model: str = ""
    key: str = ""

    @property
    def is_here(self) -> bool:
        """Return whether the address is of this machine."""
        return urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")

    @property
    def label(self) -> str:
        """Return the address and the model, as a name."""
        return f"{urlsplit(self.url).netloc} {self.model}".strip()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. `arrivals`: seconds from the request to each event with text.

    `cached_tokens` is None if the server does not tell.
    """

    arrivals: tuple[float, ...]
    total_s: float
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0]

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.arrivals)]


class _Body:
    """`pieces` of a body with the times of their arrival: callbacks of httptools."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.at, self.is_complete = 0.0, False

    def on_body(self, data: bytes) -> None:
        self.pieces.append((self.at, data))

    def on_message_complete(self) -> None:
        self.is_complete = True


def _connect(url: SplitResult) -> socket.socket:
    secure = url.scheme == "https"
    host, port = url.hostname or "", url.port or (443 if secure else 80)
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    if secure:
        connection = ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    return connection


def _exchange(connection: socket.socket, request: bytes) -> tuple[int, list[tuple[float, bytes]]]:
    """Return the status, and each line of the body with the seconds until it had arrived.

    Reads block: beside a server that keeps both processors busy, an event loop cost its decode 2 %.
    """
    body, size = _Body(), 0
    began = time.perf_counter()
    parser = httptools.HttpResponseParser(body)
    connection.sendall(request)
    while not body.is_complete and (data := connection.recv(_READ_BYTES)):
        body.at = time.perf_counter() - began
        size += len(data)
        if size > _MOST_BYTES or body.at > _MOST_S:
            break
        parser.feed_data(data)
    lines, rest = [], b""
    for at, piece in body.pieces:
        *whole, rest = (rest + piece).split(b"\n")
        lines += [(at, line) for line in whole]
    lines.append((time.perf_counter() - began, rest))
    return parser.get_status_code(), lines


async def _post(target: Target, path: str, body: Any) -> tuple[int, list[tuple[float, bytes]]]:
    url = urlsplit(target.url)
    content = msgspec.json.encode(body)
    head = [
        f"POST {url.path.rstrip('/')}{path} HTTP/1.1",
        f"host: {url.netloc}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *([f"authorization: Bearer {target.key}"] if target.key else []),
    ]
    request = "\r\n".join([*head, "", ""]).encode() + content
    try:
        with _connect(url) as connection:
            connection.settimeout(_MOST_S)
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(_STREAMS, _exchange, connection, request)
            finally:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # ends the thread of a cancelled task
    except (OSError, httptools.HttpParserError, ValueError) as error:
        raise ServeError(f"{target.url} does not answer: {error or 'no end of its answer'}") from error


async def ask(target: Target, path: str, body: dict[str, Any]) -> Answer:
    """Stream one completion. Raises ServeError, also for an answer without text or number of tokens."""
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    model = {"model": target.model} if target.model else {}
    status, lines = await _post(target, path, fields | model | body)
    if status != 200:
        said = b" ".join(line for _, line in lines).decode(errors="replace")
        text = without_controls(said)[:_CHARACTERS_OF_ERROR]
        raise ServeError(f"{target.url}{path} answered {status}: {text}")
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    try:
        for at, line in lines:
            if line.startswith(b"data:") and not line.endswith((b"[DONE]", b"[DONE]\r")):
                event = msgspec.json.decode(line[5:])
                usage = event.get("usage") or usage
                arrivals += [at for choice in event.get("choices") or () if _has_text(choice)]
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not arrivals:
            raise ValueError("no text")
        return Answer(
            arrivals=tuple(arrivals),
            total_s=lines[-1][0],
            prompt_tokens=int(tokens[0]),
            completion_tokens=int(tokens[1]),
            cached_tokens=None if cached is None else int(cached),
        )
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ServeError(f"{target.url}{path} streams no text with its number of tokens") from error


def _has_text(choice: dict[str, Any]) -> bool:
    found = choice.get("delta") or choice
    return any(found.get(name) for name in ("text", "content", "reasoning_content", "reasoning"))
