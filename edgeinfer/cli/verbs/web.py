"""`edgeinfer web`: open the chat page in the browser; start an endpoint if none is running."""

from __future__ import annotations

import argparse
import os
import sys

from edgeinfer.agents.endpoint import RemoteEndpoint
from edgeinfer.cli.options import add_model
from edgeinfer.cli.result import Result
from edgeinfer.cli.verbs.launch import own_endpoint
from edgeinfer.errors import ServeError
from edgeinfer.host import EngineHost
from edgeinfer.models.reference import find, resolve
from edgeinfer.server.web.access import PATH, make_code


class WebResult(Result, frozen=True, kw_only=True):
    """The page's URL, valid for one visit within two minutes; and whether a browser was opened."""

    url: str
    opened: bool

    def human(self) -> str:
        return self.url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model of a new conversation, if an endpoint must be started")


def run(options: argparse.Namespace, host: EngineHost) -> WebResult:
    """Open the page in a browser, unless `--json`. Raises ServeError and the errors of `host.files`."""
    # raise the error for a missing model here, because a running endpoint would not report it
    if options.model and find(options.model) is None:
        raise resolve(options.model).absence()
    remote = own_endpoint(options, host)
    if not remote.has(PATH):
        raise ServeError(f"{remote.url} has no chat page", hint="remove `web = false` from [serve]")
    opened = not options.json and _open(remote)
    return WebResult(url=f"{remote.url}/#code={make_code()}", opened=opened)


def _open(remote: RemoteEndpoint) -> bool:
    """Open the page in a graphical browser; return whether one was started.

    The browser's URL contains no sign-in code, as other users can read a process's arguments: instead,
    the endpoint accepts the next browser of this user. A text browser would hide the printed URL.
    """
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    import webbrowser

    remote.request("POST", f"{PATH}/session", {"code": make_code(), "announce": True})
    return webbrowser.open(remote.url)
