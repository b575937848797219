"""`edgeinfer web`: open the chat page in the browser, and start an endpoint if none is running."""

from __future__ import annotations

import argparse
import os
import sys

from edgeinfer.agents.endpoint import RemoteEndpoint
from edgeinfer.cli.options import add_model
from edgeinfer.cli.result import Result
from edgeinfer.cli.verbs.launch import own_endpoint
from edgeinfer.errors import ServeError
from edgeinfer.host import Host
from edgeinfer.server.web.access import PATH, make_code


class WebResult(Result, frozen=True, kw_only=True):
    """The page's address, valid for one visit within two minutes; whether a browser was opened."""

    url: str
    opened: bool

    def human(self) -> str:
        return self.url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model of a new conversation, if an endpoint must be started")


def run(options: argparse.Namespace, host: Host) -> WebResult:
    """Open the page (not with `--json`). Raises ServeError, and what resolving a model raises."""
    if options.model and not host.find_model(options.model):  # a running endpoint would not report it
        raise host.resolve(options.model).absence()
    remote = own_endpoint(options, host)
    if not remote.has(PATH):
        raise ServeError(f"{remote.url} serves no page", hint="remove `web = false` from [serve]")
    opened = not options.json and _open(remote)
    return WebResult(url=f"{remote.url}/#code={make_code()}", opened=opened)


def _open(remote: RemoteEndpoint) -> bool:
    """Open a graphical browser; a text browser would hide the printed address.

    Other users can read a program's arguments, so the browser's arguments contain no code. Instead, the
    endpoint lets this user's next browser in.
    """
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    import webbrowser  # 20 ms

    remote.request("POST", f"{PATH}/session", {"code": make_code(), "announce": True})
    return webbrowser.open(remote.url)
