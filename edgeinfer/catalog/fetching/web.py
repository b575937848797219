"""The one HTTP client that models and snapshots come and go through.

It asks the offline switch, and its redirects stay on HTTP and encrypted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2  # 75–120 ms, which is why nothing but a pull imports this module

from edgeinfer.errors import DownloadError
from edgeinfer.settings.config import refuse_offline


@contextmanager
def client(origin: str, timeout: float | httpx2.Timeout) -> Iterator[httpx2.Client]:
    """Open a client for requests about `origin`, the name that errors say.

    Raises OfflineError before any connection; requests raise DownloadError for a redirect to another
    scheme, before it is followed.
    """
    refuse_offline(origin)

    def refuse_redirect(response: httpx2.Response) -> None:
        if response.has_redirect_location:
            refuse_downgrade(origin, response.url, response.url.join(response.headers["Location"]))

    hooks = {"response": [refuse_redirect]}
    with httpx2.Client(timeout=timeout, follow_redirects=True, event_hooks=hooks) as made:
        yield made


def refuse_downgrade(origin: str, asked: httpx2.URL, target: httpx2.URL) -> None:
    """Raise DownloadError when a server sends us from `asked` to a `target` of another kind."""
    if target.scheme == "https" or target.scheme == asked.scheme == "http":
        return
    what = "an unencrypted address" if target.scheme == "http" else f"a {target.scheme}: address"
    raise DownloadError(f"{origin}: the server redirects to {what}")


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine by its name."""
    name = host.rpartition(":")[0] if host.count(":") == 1 else host
    return name == "localhost" or name.startswith("127.") or name in ("::1", "[::1]")
