"""An HTTP client for models and snapshots that turns failures into edgeinfer's errors.

It refuses to connect in offline mode, and follows redirects only to HTTPS, or from HTTP to HTTP.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2  # slow import (75 to 120 ms): only a pull imports this module

from edgeinfer.config.config_file import refuse_offline
from edgeinfer.errors import AuthenticationError, DownloadError, SourceNotFoundError
from edgeinfer.models.sources import is_address

#: Largest manifest, login token or error response (bytes) that is read; registries have the same limit.
SMALL_BYTES = 4 << 20
#: Hint of an error that is not temporary, because the server behaves wrongly.
OTHER_SOURCE = "check the address, or use another source"
_NO_LOGIN = "use an address that needs no login, or download the file with a browser"
_AGAIN = {408, 425, 429, 500, 502, 503, 504}


@contextmanager
def client(origin: str, timeout: float | httpx2.Timeout) -> Iterator[httpx2.Client]:
    """Open a client. `origin` names the requested file in errors.

    Raises OfflineError. Requests raise DownloadError instead of following an unsafe redirect.
    """
    refuse_offline(origin)

    def refuse_redirect(response: httpx2.Response) -> None:
        if response.has_redirect_location:
            location = response.headers["Location"]
            try:
                target = response.url.join(location)
                if not is_address(str(target)):
                    raise ValueError("no host or port that can exist")
            except (httpx2.InvalidURL, ValueError) as error:
                problem = f"the server redirects to {location[:80]!r}, which is not an address"
                raise DownloadError(f"{origin}: {problem}", hint=OTHER_SOURCE) from error
            refuse_downgrade(origin, response.url, target)

    hooks = {"response": [refuse_redirect]}
    with httpx2.Client(timeout=timeout, follow_redirects=True, event_hooks=hooks) as client:
        yield client


def refuse_downgrade(origin: str, asked: httpx2.URL, target: httpx2.URL) -> None:
    """Raise DownloadError unless the redirect's `target` is HTTPS, or `asked` and `target` are HTTP."""
    if target.scheme == "https" or target.scheme == asked.scheme == "http":
        return
    destination = "an unencrypted address" if target.scheme == "http" else f"a {target.scheme}: address"
    raise DownloadError(f"{origin}: the server redirects to {destination}", hint=OTHER_SOURCE)


def is_loopback(host: str) -> bool:
    """Return whether `host`, with or without a port, is this machine."""
    name = host.rpartition(":")[0] if host.count(":") == 1 else host
    return name == "localhost" or name.startswith("127.") or name in ("::1", "[::1]")


class RetryableError(Exception):
    """A failure that a retry may fix. `wait_s` is the pause (s) that the server requests, or 0."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def read_small(response: httpx2.Response, origin: str) -> bytes:
    """Return a response's body. Raises DownloadError if it is larger than `SMALL_BYTES`."""
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) > SMALL_BYTES:
            server = f"{origin}: {response.url.host}"
            problem = f"{server} answers with more than {SMALL_BYTES >> 20} MiB; a few KiB are usual"
            raise DownloadError(problem, hint=OTHER_SOURCE)
    return bytes(content)


def range_headers(start: int, validator: str) -> dict[str, str]:
    """Return headers that request bytes from `start` on, if the file still has this ETag or date."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "edgeinfer"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if validator:
            headers["If-Range"] = validator
    return headers


def parse_range(response: httpx2.Response, start: int) -> tuple[int, int | None]:
    """Return where the response's body begins in the file, and the file's length (None if unknown).

    `start` is the requested offset (bytes). Raises RetryableError if the body begins elsewhere,
    DownloadError if it is compressed.
    """
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        problem = f"{response.url.host} sends the file in an encoding that was not requested"
        raise DownloadError(problem, hint=OTHER_SOURCE)
    length = response.headers.get("Content-Length", "")
    if response.status_code == 200:
        return 0, int(length) if length.isdecimal() else None
    unit, _, value = response.headers.get("Content-Range", "").partition(" ")
    span, _, total = value.partition("/")
    first, _, _last = span.partition("-")
    if unit != "bytes" or not first.isdecimal() or int(first) != start:
        answer = value or "without a Content-Range"
        raise RetryableError(f"requested the file from byte {start}, but the server answers {answer}")
    if total.isdecimal():
        return start, int(total)
    return start, start + int(length) if length.isdecimal() else None


def validator(response: httpx2.Response) -> str:
    """Return the file's validator for If-Range: a strong ETag, otherwise Last-Modified; "" for none."""
    etag = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified", "")


def refuse_status(origin: str, response: httpx2.Response, login: str | None) -> None:
    """Raise RetryableError for a temporary error status, DownloadError for any other error status.

    `login` is the hint if access is refused; None stands for a general one.
    """
    status = response.status_code
    if status in (200, 206):
        return
    if status in _AGAIN:
        after = response.headers.get("Retry-After", "")
        raise RetryableError(f"the server answers {status}", float(after) if after.isdecimal() else 0.0)
    raise status_error(origin, "server", status, login)


def status_error(origin: str, server: str, status: int, login: str | None = None) -> DownloadError:
    """Make the error for an HTTP error status. `server` is a word for the server, such as "registry".

    `login` is the hint if access is refused; None stands for a general one.
    """
    if status in (401, 403):
        problem = f"the {server} refuses access ({status})"
        return AuthenticationError(f"{origin}: {problem}", hint=login or _NO_LOGIN)
    if status in (404, 410):
        problem = f"the {server} has no such file or revision ({status})"
        return SourceNotFoundError(f"{origin}: {problem}", hint="check the address")
    hint = "check the address; if it is correct, run the same command again later"
    return DownloadError(f"{origin}: the {server} answers {status}", hint=hint)


def hang_up(response: httpx2.Response) -> None:
    """Make another thread's pending read of this response fail; the connection is lost."""
    if stream := response.extensions.get("network_stream"):
        shut_down(stream)


def shut_down(stream: Any) -> None:
    """Make a pending read fail. `stream` is httpx's extension object "network_stream"."""
    connection = stream.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            # shut down the socket itself, because the TLS layer's shutdown could wait for the server
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


def is_untrusted(error: BaseException | None) -> bool:
    """Return whether an untrusted certificate has caused `error`; a retry cannot help then."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def describe_transport_error(error: Exception) -> str:
    descriptions: dict[type[Exception], str] = {
        httpx2.ConnectError: "cannot connect",
        httpx2.ConnectTimeout: "the server does not answer",
        httpx2.ReadTimeout: "the server stopped sending",
        httpx2.RemoteProtocolError: "the connection was dropped",
        httpx2.ReadError: "the connection was dropped",
    }
    problem = descriptions.get(type(error), type(error).__name__)
    reason = without_errno(str(error))
    return f"{problem} ({reason})" if reason else problem


def without_errno(text: str) -> str:
    return re.sub(r"\[Errno -?\d+\] ", "", text)
