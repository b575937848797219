"""Find, start and call an edgeinfer endpoint, as an HTTP client.

Any user of this machine may listen on a free port and imitate an endpoint. So nothing is sent until the
kernel has confirmed that the listening process belongs to this user or to root.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from edgeinfer.errors import ServeError
from edgeinfer.platform import paths, tcp
from edgeinfer.platform.process import start_child

#: Timeout (s) of /health, which an edgeinfer endpoint answers at once.
_HEALTH_S = 5.0
#: Timeout (s) of a request that may have to load a model first.
_LOAD_S = 900.0
#: Interval (s) of the checks whether the endpoint has started.
_CHECK_S = 0.05
_LOG_NAME = "launch-serve.log"


class RemoteEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A client of a running endpoint. `model` is the endpoint's default, `key` the API key or ""."""

    url: str
    model: str
    key: str = ""

    def n_ctx(self, model: str) -> int:
        """Return the context (tokens) of `model`, after loading it if necessary. Raises ServeError."""
        if not (n_ctx := self._loaded_n_ctx(model)):
            self.request("POST", "/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 0})
            n_ctx = self._loaded_n_ctx(model)
        return n_ctx

    def _loaded_n_ctx(self, model: str) -> int:
        sizes = {m["id"]: m["info"].get("n_ctx", 0) for m in self.request("GET", "/props")["models"]}
        return int(sizes.get(model, 0))

    def has(self, path: str) -> bool:
        """Return whether a HEAD request for `path`, without the API key, gets the status 200.

        Raises ServeError if the endpoint does not answer.
        """
        with self._connect(_HEALTH_S) as connection:
            connection.request("HEAD", path)
            return connection.getresponse().status == 200

    def request(self, method: str, path: str, body: Any = None, timeout_s: float = _LOAD_S) -> Any:
        """Send a request; return the decoded JSON of the response.

        Raises ServeError if the endpoint does not answer with JSON, or answers with an error status.
        An error status of /health is accepted, because the JSON says why.
        """
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        raw = None if body is None else msgspec.json.encode(body)
        with self._connect(timeout_s) as connection:
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            content = response.read()
        try:
            value = msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise ServeError(f"{self.url} is not an edgeinfer endpoint") from error
        if response.status >= 400 and path != "/health":
            log = paths.state_dir() / _LOG_NAME
            hint = f"read the output of `serve`, which is in {log} if `launch` started it"
            raise ServeError(f"{self.url} reports an error: {_message(value)}", hint=hint)
        return value

    @contextlib.contextmanager
    def _connect(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        """Yield a connection to this user's endpoint. Raises ServeError, also if a request fails."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
        try:
            with contextlib.closing(connection):
                connection.connect()
                self._check_listener(connection.port)
                yield connection
        except (OSError, http.client.HTTPException) as error:
            raise ServeError(f"{self.url} does not answer: {error}") from error

    def _check_listener(self, port: int) -> None:
        """Raise ServeError unless this user or root listens at `port`."""
        uids = tcp.listener_uids(port)
        if not uids:
            raise ServeError(f"{self.url} is not your endpoint: no local program listens at that port")
        if uids - {os.getuid(), 0}:
            problem = f"{self.url} is not your endpoint: another user's program listens there"
            raise ServeError(problem, hint="`edgeinfer serve --port N` uses another port")


def _message(value: Any) -> str:
    error = value.get("error") if isinstance(value, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else str(value)


def probe(url: str, key: str) -> RemoteEndpoint | None:
    """Return a client that sends `key` to the endpoint at `url`; None if no endpoint serves there."""
    endpoint = RemoteEndpoint(url=url, model="")
    try:
        health = endpoint.request("GET", "/health", timeout_s=_HEALTH_S)
    except ServeError:
        return None
    if not isinstance(health, dict) or health.get("status", "draining") == "draining":
        return None
    return RemoteEndpoint(url=url, model=health["model"], key=key) if "model" in health else None


def find(urls: Iterable[str], key: str) -> RemoteEndpoint | None:
    """Return a client of the first of `urls` at which an endpoint answers; None if none does."""
    return next((endpoint for url in dict.fromkeys(urls) if (endpoint := probe(url, key))), None)


def start(
    command: list[str],
    key: str,
    environment: Mapping[str, str] = os.environ,
    *,
    dies_with_parent: bool = False,
) -> tuple[RemoteEndpoint, int]:
    """Run `command`, an `edgeinfer serve`, and wait until it answers; return a client and the PID.

    The client sends `key`. `launch-serve.log` in the state folder gets the endpoint's stderr. With
    `dies_with_parent`, the endpoint ends with this thread. Raises ServeError if the start fails.
    """
    log = paths.state_dir() / _LOG_NAME
    paths.make_folder(log.parent)
    log.unlink(missing_ok=True)
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        start_process = start_child if dies_with_parent else subprocess.Popen
        process = start_process(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=out,
            start_new_session=True,
        )
    try:
        remote = _wait_for(process, log, key)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.returncode = 0  # otherwise Popen's destructor warns that the process still runs
    return remote, process.pid


def _wait_for(process: subprocess.Popen[bytes], log: Path, key: str) -> RemoteEndpoint:
    while True:
        if process.poll() is not None:
            problem = f"the endpoint did not start: {_last_error(log)}"
            raise ServeError(problem, hint=f"read the endpoint's log: {log}")
        time.sleep(_CHECK_S)
        url = next((line["url"].split()[0] for line in _lines(log) if "url" in line), "")
        if url and (remote := probe(url, key)):
            return remote


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a log; skip incomplete lines and other text."""
    for line in log.read_bytes().splitlines(keepends=True):
        with contextlib.suppress(msgspec.DecodeError):
            value = msgspec.json.decode(line)
            if line.endswith(b"\n") and isinstance(value, dict):
                yield value


def _last_error(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no message"])[-1]
