"""Carries JSON-RPC messages to an MCP server and back: a child's standard streams, or HTTP."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer.config.config_file import refuse_offline
from edgeinfer.errors import EdgeInferError, ToolServerError

if TYPE_CHECKING:
    import httpx2

#: Bytes of one message; a server that sends more is ended.
MAX_MESSAGE = 16 << 20
#: Seconds for a child to end by itself once its stdin is closed.
_END_S = 2.0
_PR_SET_PDEATHSIG = 1
#: The variables that a server may see without being named.
_PASSED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER")

Received = Callable[[dict[str, Any]], None]
Lost = Callable[[str], None]


def environment(named: Mapping[str, str]) -> dict[str, str]:
    """Return a child's variables: a few that programs need, and those that its configuration names."""
    return {name: os.environ[name] for name in _PASSED if name in os.environ} | dict(named)


class StdioTransport:
    """A child with one message a line. Its reader thread starts it: PDEATHSIG follows that thread."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        cwd: Path,
        received: Received,
        lost: Lost,
    ) -> None:
        self._received = received
        self._lost = lost
        self._words: deque[str] = deque(maxlen=5)
        self._writing = threading.Lock()
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(list(command), environment(variables), cwd, started), daemon=True
        )
        self._thread.start()
        child = started.get()
        if isinstance(child, OSError):
            raise ToolServerError(
                f"{command[0]} cannot be started: {child.strerror}",
                hint="install it, or correct `command` in the configuration",
            )
        self._child = child

    def _run(
        self,
        command: list[str],
        variables: dict[str, str],
        cwd: Path,
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError],
    ) -> None:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=variables,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_die_with_thread(),
            )
        except OSError as error:
            started.put(error)
            return
        started.put(child)
        words = threading.Thread(target=self._read_words, args=(child,), daemon=True)
        words.start()
        why = self._read(child)
        self._end(child)
        words.join(_END_S)
        for stream in (child.stdin, child.stdout, child.stderr):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        said = f": {self._words[-1]}" if self._words else ""
        self._lost(why or f"it ended with status {child.returncode}{said}")

    def _read(self, child: subprocess.Popen[bytes]) -> str:
        """Read messages to the end; return what broke the protocol, or ""."""
        assert child.stdout is not None
        while line := child.stdout.readline(MAX_MESSAGE + 1):
            if len(line) > MAX_MESSAGE:
                return f"it sent a message of more than {MAX_MESSAGE >> 20} MiB"
            if not line.strip():
                continue
            try:
                message = msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.MsgspecError, RecursionError):
                self._words.append(f"not a message: {line[:80].decode(errors='replace').strip()}")
                continue  # programs print to stdout what belongs to stderr
            self._received(message)
        return ""

    def _read_words(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None
        while line := child.stderr.readline(4096):
            if line.strip():
                self._words.append(line.decode(errors="replace").strip())

    def send(
        self, message: dict[str, Any], stop: Callable[[Callable[[], object]], object] | None = None
    ) -> None:
        """Send one message. Raises ToolServerError if the child has ended."""
        assert self._child.stdin is not None
        try:
            with self._writing:
                self._child.stdin.write(msgspec.json.encode(message) + b"\n")
                self._child.stdin.flush()
        except (OSError, ValueError) as error:
            raise ToolServerError("the server has ended") from error

    def close(self) -> None:
        """Close the child's stdin, and end its process group."""
        with contextlib.suppress(OSError, ValueError):
            assert self._child.stdin is not None
            self._child.stdin.close()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            self._kill(self._child, signal.SIGTERM)
            self._thread.join(_END_S)
            self._kill(self._child, signal.SIGKILL)
            self._thread.join(_END_S)

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
        self._kill(child, signal.SIGKILL)  # the group: its children too
        child.wait()

    def _kill(self, child: subprocess.Popen[bytes], number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)


def _die_with_thread() -> Callable[[], object] | None:
    """Return a function for the child that asks Linux to kill it when this thread ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # found before the fork: the child only calls it
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class HttpTransport:
    """Streamable HTTP: each message is a POST, whose answer is JSON or a stream of events."""

    def __init__(
        self, url: str, headers: Mapping[str, str], timeout_s: float, received: Received
    ) -> None:
        import httpx2  # 75 to 120 ms, for servers behind a URL alone

        from edgeinfer.models.fetching.http_client import is_loopback

        self._url = url
        try:
            host = httpx2.URL(url).host
        except httpx2.InvalidURL as error:
            raise ToolServerError(f"{url}: {error}", hint="correct `url`") from error
        if not is_loopback(host):
            refuse_offline(host)
        self._received = received
        self._client = httpx2.Client(
            headers=dict(headers), timeout=httpx2.Timeout(10.0, read=timeout_s), follow_redirects=False
        )
        self.version = ""
        self._session = ""

    def send(
        self, message: dict[str, Any], stop: Callable[[Callable[[], object]], object] | None = None
    ) -> None:
        """Send a message and hand on all that is answered to it. Raises ToolServerError.

        `stop` gets a function that ends the wait from another thread.
        """
        import httpx2

        from edgeinfer.models.fetching.http_client import hang_up

        try:
            with self._client.stream(
                "POST", self._url, content=msgspec.json.encode(message), headers=self._headers()
            ) as response:
                if stop is not None:
                    stop(lambda: hang_up(response))
                self._session = response.headers.get("mcp-session-id", self._session)
                self._answered(response)
        except httpx2.HTTPError as error:
            raise ToolServerError(f"{self._url}: {str(error) or type(error).__name__}") from error

    def _headers(self) -> dict[str, str]:
        found = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if self._session:
            found["Mcp-Session-Id"] = self._session
        if self.version:
            found["MCP-Protocol-Version"] = self.version
        return found

    def _answered(self, response: httpx2.Response) -> None:
        if response.status_code >= 300:
            words = {401: "it wants a key: set `headers`", 404: "the session has ended"}
            status = response.status_code
            raise ToolServerError(
                f"{self._url} answers {status}: {words.get(status, 'no MCP server there?')}"
            )
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if response.status_code == 202:
            return
        if kind == "text/event-stream":
            for data in _events(response.iter_bytes()):
                self._decoded(data)
        elif kind == "application/json":
            body = bytearray()
            for piece in response.iter_bytes():
                body += piece
                _refuse_long(len(body))
            self._decoded(bytes(body))

    def _decoded(self, data: bytes) -> None:
        try:
            self._received(msgspec.json.decode(data, type=dict[str, Any]))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ToolServerError(f"{self._url} sends no JSON-RPC: {error}") from error

    def close(self) -> None:
        """End the session, and every connection."""
        import httpx2

        if self._session:
            with contextlib.suppress(httpx2.HTTPError, EdgeInferError):
                self._client.request("DELETE", self._url, headers=self._headers(), timeout=_END_S)
        self._client.close()


def _refuse_long(size: int) -> None:
    if size > MAX_MESSAGE:
        raise ToolServerError(f"the server sent a message of more than {MAX_MESSAGE >> 20} MiB")


def _events(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events."""
    rest, data = b"", bytearray()
    for piece in pieces:
        rest += piece
        _refuse_long(len(rest) + len(data))
        *lines, rest = rest.split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data += (b"\n" if data else b"") + line[5:].removeprefix(b" ")
            elif not line and data:
                yield bytes(data)
                data = bytearray()
