"""Exchange JSON-RPC messages with an MCP server: by a child's stdin and stdout, or by HTTP.

`send` never blocks; its future is done once the message is written or, over HTTP, answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from edgeinfer.config.config_file import refuse_offline
from edgeinfer.errors import EdgeInferError, ToolServerError
from edgeinfer.platform.process import start_child

if TYPE_CHECKING:
    import httpx2

#: Largest message (bytes) of an MCP server; a larger one ends the session.
MAX_MESSAGE = 16 << 20
#: Maximum time (s) to wait for an answer of an MCP server, even if the server reports progress.
MAX_ANSWER_S = 3600.0
#: How long (s) to wait for the end of an MCP server's process, and again after SIGTERM; also the
#: timeout of the DELETE request that ends an HTTP session.
_CLOSE_S = 0.5
#: Maximum number of messages that wait to be sent to an MCP server; sending more fails.
_MAX_UNSENT = 1000
#: Timeout (s) of an HTTP request with a notification, for which the MCP server sends no answer.
_NOTIFY_S = 10.0
#: How long (s) the stream of an HTTP response is still read after the answer, to receive notifications.
_AFTER_ANSWER_S = 0.5
_MAX_REDIRECTS = 3
#: Exceptions of Popen. ValueError means that an argument contains NUL, or a variable's name contains
#: `=`.
_START_ERRORS = (OSError, ValueError, subprocess.SubprocessError)
_BOM = b"\xef\xbb\xbf"

Message = dict[str, Any]
Received = Callable[[Message], None]
Lost = Callable[[str], None]


class SessionEndedError(ToolServerError):
    """The HTTP server no longer knows the session: the client must begin another one."""


class UnansweredError(ToolServerError):
    """The HTTP server ended its response without an answer to the request."""


def decode_messages(data: bytes | bytearray) -> list[Message]:
    """Return the messages in a JSON text, one or a batch; an empty list if the text is invalid."""
    try:
        value = msgspec.json.decode(bytes(data).strip().removeprefix(_BOM))
    except (msgspec.MsgspecError, RecursionError):
        return []
    batch = value if isinstance(value, list) else [value]
    return [message for message in batch if isinstance(message, dict)]


class StdioTransport:
    """Exchanges messages, one per line, with a child process.

    The callback `received` gets each message; `lost` gets the reason when the child ends. The thread
    that reads the messages also starts the child, because the kernel kills the child when that thread
    ends. If `folder` is None, the child runs in a new empty folder.
    """

    #: Session id and protocol version: empty here, because only the HTTP transport has them.
    session = version = ""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        folder: Path | None,
        received: Received,
        lost: Lost,
    ) -> None:
        self._received, self._lost = received, lost
        self._output: deque[str] = deque(maxlen=5)
        self._unsent: queue.SimpleQueue[tuple[bytes, Future[None]] | None] = queue.SimpleQueue()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(list(command), variables, folder, started), daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except _START_ERRORS as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ToolServerError(
                f"{command[0]} cannot be started: {reason}",
                hint="install the program, or correct `command` in the configuration",
            ) from error

    def _run(
        self,
        command: list[str],
        variables: Mapping[str, str],
        folder: Path | None,
        started: Future[None],
    ) -> None:
        with contextlib.ExitStack() as stack:
            try:
                if folder is None:
                    empty = tempfile.TemporaryDirectory(
                        prefix="edgeinfer-server-", ignore_cleanup_errors=True
                    )
                    folder = Path(stack.enter_context(empty))
                self._child = start_child(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=variables,
                    cwd=folder,
                    start_new_session=True,
                )
            except _START_ERRORS as error:
                started.set_exception(error)
                return
            started.set_result(None)
            self._serve(self._child)

    def _serve(self, child: subprocess.Popen[bytes]) -> None:
        """Read messages until the child ends."""
        assert child.stdin and child.stdout and child.stderr  # noqa: PT018
        errors = threading.Thread(target=self._read_errors, args=(child.stderr,), daemon=True)
        errors.start()
        threading.Thread(target=self._write, args=(child.stdin,), daemon=True).start()
        reason = self._read(child.stdout)
        self._unsent.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_CLOSE_S)
        self.kill(signal.SIGKILL)  # ends the child's own children, too
        child.wait()
        errors.join(_CLOSE_S)
        child.stdout.close()
        # close stderr only if the thread that reads it has ended. `close` would wait for the thread,
        # which reads until the child's descendants in other process groups end, too
        if not errors.is_alive():
            child.stderr.close()
        self._lost(reason or f"it ended with status {child.returncode}{self.last_output()}")

    def _read(self, stream: IO[bytes]) -> str:
        """Read messages until the stream ends; return "", or how the server violated the protocol."""
        text = bytearray()
        while line := stream.readline(MAX_MESSAGE + 1):
            is_continued = bool(text) and line[:1] in (b" ", b"\t", b"}", b"]")
            if not is_continued:
                text.clear()
            text += line
            if len(text) > MAX_MESSAGE:
                return f"it sent a message of more than {MAX_MESSAGE >> 20} MiB"
            # a message may be printed over several lines. An indented line is not the last one
            if is_continued and line[:1] in b" \t":
                continue
            messages = decode_messages(text)
            for message in messages:
                self._received(message)
            if messages or is_continued or not text.lstrip(_BOM + b" ").startswith((b"{", b"[")):
                # this line is not JSON; the MCP server should have printed it to stderr
                if not messages and line.strip():
                    shown = line[:80].decode(errors="replace").strip()
                    self._output.append(f"not a message: {shown}")
                text.clear()
        return ""

    def _read_errors(self, stream: IO[bytes]) -> None:
        while line := stream.readline(4096):
            if line.strip():
                self._output.append(line.decode(errors="replace").strip())

    def last_output(self) -> str:
        """Return ": LAST LINE" of the child's output, for an error message; "" without output."""
        return f": {self._output[-1]}" if self._output else ""

    def send(self, message: Message) -> Future[None]:
        """Queue a message; the future ends when the message is written to the child's stdin.

        The future fails with ToolServerError if 1,000 others are still queued, or the child has ended.
        """
        sent: Future[None] = Future()
        if self._unsent.qsize() < _MAX_UNSENT:
            self._unsent.put((msgspec.json.encode(message) + b"\n", sent))
        else:
            sent.set_exception(ToolServerError("the server does not read what is sent to it"))
        return sent

    def _write(self, stream: IO[bytes]) -> None:
        """Write queued messages; only this thread may block on a child that does not read."""
        while unsent := self._unsent.get():
            data, sent = unsent
            if not sent.set_running_or_notify_cancel():
                continue
            try:
                stream.write(data)
                stream.flush()
                sent.set_result(None)
            except OSError:
                sent.set_exception(ToolServerError("the server has ended"))
        with contextlib.suppress(OSError):
            stream.close()

    def abandon(self, sent: Future[None], *, is_late: bool) -> bool:
        """Cancel the unanswered request `sent`; return whether the server was killed.

        The server is killed if the request has timed out (`is_late`) before the server has read it.
        """
        is_ended = is_late and not sent.done()
        sent.cancel()
        if is_ended:
            self.kill(signal.SIGKILL)
        return is_ended

    def close(self) -> None:
        """End the child and its process group: close its stdin, then SIGTERM, then SIGKILL."""
        self._unsent.put(None)
        self._thread.join(_CLOSE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._thread.is_alive():
                self.kill(number)
                self._thread.join(_CLOSE_S)

    def kill(self, number: int) -> None:
        """Send the signal `number` to the child's process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


class HttpTransport:
    """MCP's streamable HTTP: messages are POSTs, answered with JSON or an event stream."""

    def __init__(self, url: str, headers: Mapping[str, str], received: Received) -> None:
        import httpx2  # slow import (75 to 120 ms)

        from edgeinfer.models.fetching.http_client import is_loopback

        self._url = url
        try:
            host = httpx2.URL(url).host
            sent_headers = httpx2.Headers(dict(headers))
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise ToolServerError(f"{url}: {error}", hint="correct `url` or `headers`") from error
        if not is_loopback(host):
            refuse_offline(host)
        self._received = received
        self._client = httpx2.AsyncClient(
            headers=sent_headers, timeout=httpx2.Timeout(None, connect=10.0), follow_redirects=False
        )
        self.version = self.session = ""
        self._is_closed = False
        self._posts: set[asyncio.Task[Any]] = set()
        self._notifying = asyncio.Lock()
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._runner:
            self._loop.run_forever()
            self._loop.run_until_complete(self._close())

    def last_output(self) -> str:
        """Return "": over HTTP there is no other output than answers."""
        return ""

    def send(self, message: Message) -> Future[None]:
        """Post a message; the callback `received` gets the response.

        The future fails with ToolServerError if there is no valid response.
        """
        if self._is_closed:
            refused: Future[None] = Future()
            refused.set_exception(ToolServerError("the session is closed"))
            return refused
        return asyncio.run_coroutine_threadsafe(self._post_in_task(message), self._loop)

    async def _post_in_task(self, message: Message) -> None:
        """Post a message in a task that `close` can cancel."""
        task = asyncio.current_task()
        assert task is not None
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)
        is_request = "method" in message and "id" in message
        await (self._ask(message) if is_request else self._notify(message))

    def abandon(self, sent: Future[None], *, is_late: bool) -> bool:
        """Cancel the unanswered request `sent`; return False, because an HTTP server is not killed."""
        sent.cancel()
        return False

    async def _notify(self, message: Message) -> None:
        """Post a message that has no answer, after all earlier ones; if too many wait, drop it."""
        if len(self._posts) <= _MAX_UNSENT:
            with contextlib.suppress(TimeoutError):
                async with self._notifying, asyncio.timeout(_NOTIFY_S):
                    await self._post(message)

    async def _ask(self, message: Message) -> None:
        try:
            async with asyncio.timeout(MAX_ANSWER_S):
                is_answered = await self._post(message)
        except TimeoutError as error:
            raise ToolServerError(
                f"{self._url}: no answer within {MAX_ANSWER_S:g} s",
                hint="restart that server, then repeat the call",
            ) from error
        if not is_answered:
            raise UnansweredError(f"{self._url}: no response to {message['method']}")

    async def _post(self, message: Message) -> bool:
        """Post a message; return whether it was answered. Raises ToolServerError."""
        import httpx2

        try:
            for _ in range(_MAX_REDIRECTS + 1):
                used_session = self.session
                async with self._client.stream(
                    "POST", self._url, content=msgspec.json.encode(message), headers=self._headers()
                ) as response:
                    if response.has_redirect_location:
                        self._follow(response)
                        continue
                    if response.status_code >= 300:
                        await self._refuse(response, used_session)
                    session = response.headers.get("mcp-session-id", self.session)
                    if not session.isascii():
                        raise ToolServerError(
                            f"{self._url}: the server's header Mcp-Session-Id is not ASCII",
                            hint="update the server, or report this fault to its authors",
                        )
                    self.session = session
                    return await self._read(response, message.get("id"))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ToolServerError(
                f"{self._url} cannot be used: {str(error) or type(error).__name__}",
                hint="check `url`, and that the server runs and can be reached",
            ) from error
        raise ToolServerError(
            f"{self._url}: more than {_MAX_REDIRECTS} redirects",
            hint="set `url` to the server's final address",
        )

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if self.session:
            headers["Mcp-Session-Id"] = self.session
        if self.version:
            headers["MCP-Protocol-Version"] = self.version
        return headers

    def _follow(self, response: httpx2.Response) -> None:
        """Use a redirect's target from now on. Raises ToolServerError if it is on another server."""
        target = response.url.join(response.headers["Location"])
        origins = {(url.scheme, url.host, url.port) for url in (response.url, target)}
        if response.status_code not in (307, 308) or len(origins) > 1:
            raise ToolServerError(f"{self._url} has moved to {target}", hint=f'set `url = "{target}"`')
        self._url = str(target)

    async def _refuse(self, response: httpx2.Response, used_session: str) -> None:
        status = response.status_code
        if status == 404 and used_session:
            if self.session == used_session:
                self.session = ""
            raise SessionEndedError(f"{self._url} answers 404: the session has ended")
        messages = decode_messages(await _body(response))
        failure = messages[0].get("error") if messages else None
        text = failure.get("message") if isinstance(failure, dict) else "no MCP server at this URL?"
        if status == 401:
            raise ToolServerError(
                f"{self._url} answers 401: the server needs a key",
                hint='set `headers`, e.g. `Authorization = "Bearer KEY"`',
            )
        hint = "look into the server's log" if status >= 500 else "correct `url` or `headers`"
        raise ToolServerError(f"{self._url} answers {status}: {text}", hint=hint)

    async def _read(self, response: httpx2.Response, number: Any) -> bool:
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "text/event-stream":
            return self._decode(await _body(response), number)
        is_answered = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                async for data in _events(response.aiter_bytes()):
                    if self._decode(data, number):
                        is_answered = True
                        limit.reschedule(self._loop.time() + _AFTER_ANSWER_S)
        return is_answered

    def _decode(self, data: bytes | bytearray, number: Any) -> bool:
        """Give messages to `received`; return whether one is the response to request `number`."""
        messages = decode_messages(data)
        if data.strip() and not messages:
            shown = bytes(data[:80]).decode(errors="replace").strip()
            raise ToolServerError(
                f"{self._url} did not answer in JSON-RPC: {shown}",
                hint="correct `url`, e.g. https://mcp.example.com/mcp",
            )
        for message in messages:
            self._received(message)
        return any("method" not in m and str(m.get("id")) == str(number) for m in messages)

    def close(self) -> None:
        """End the session and all connections. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(3 * _CLOSE_S)

    async def _close(self) -> None:
        import httpx2

        posts = tuple(self._posts)
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        if self.session:
            with contextlib.suppress(httpx2.HTTPError, EdgeInferError):
                await self._client.delete(self._url, headers=self._headers(), timeout=_CLOSE_S)
        await self._client.aclose()


async def _body(response: httpx2.Response) -> bytearray:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        _refuse_long(len(body))
    return body


def _refuse_long(size: int) -> None:
    if size > MAX_MESSAGE:
        raise ToolServerError(
            f"the server sent a message of more than {MAX_MESSAGE >> 20} MiB",
            hint="ask the tool for less data in one call",
        )


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the `data` of each server-sent event."""
    line_start, data = b"", bytearray()
    async for piece in pieces:
        line_start += piece
        _refuse_long(len(line_start) + len(data))
        *lines, line_start = line_start.split(b"\n")
        for line in lines:
            line = line.removeprefix(_BOM).rstrip(b"\r")
            if line.startswith(b"data:"):
                data += (b"\n" if data else b"") + line[5:].removeprefix(b" ")
            elif not line and data:
                yield bytes(data)
                data = bytearray()
