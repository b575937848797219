"""`edgeinfer serve`: run the HTTP endpoint."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from typing import Literal

from edgeinfer.cli import options as shared
from edgeinfer.cli.parser import ENDPOINT, add_option
from edgeinfer.cli.result import Result
from edgeinfer.host import EngineHost

#: Maximum number of replicas in one endpoint.
_MOST_REPLICAS = 64


class ServeResult(Result, frozen=True, kw_only=True):
    """Why the endpoint ended. `cut_short`: requests still ran when the time to finish them was over."""

    reason: Literal["signal", "idle"]
    cut_short: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_model(parser, "model for requests that name none (default: the configured one)")
    add_endpoint_options(parser)
    shared.add_load_options(parser)
    shared.add_launch_options(parser)


def add_endpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the endpoint. Their default, None, stands for config.toml's value, if any."""
    where = parser.add_argument_group(ENDPOINT)
    add_option(where, "--host ADDRESS", "address (default: 127.0.0.1); non-loopback needs an API key")
    add_option(where, "--port N", "port (default: 8080); 0 chooses a free port", type=port_number)
    help = "also listen on Ollama's port (127.0.0.1:11434); its clients may pull and delete models"
    add_option(where, "--ollama", help, default=None)
    help = "API keys, one per line; the first is the administrator's; also EDGEINFER_API_KEY"
    add_option(where, "--api-key-file FILE", help)
    help = "also accept this Host header; .NAME: all names below it"
    add_option(where, "--allow-host NAME...", help, type=_host)
    add_option(where, "--allow-origin ORIGIN...", "allow web pages of this origin (CORS)", type=_origin)
    add_option(where, "--tls-cert FILE", "certificate chain in PEM, with --tls-key")
    add_option(where, "--tls-key FILE", "private key in PEM")
    add_option(where, "--idle-exit S", "exit after S seconds without a request", type=positive_s)
    replicas = shared.number_between(int, 1, _MOST_REPLICAS)
    add_option(where, "--replicas N", "replicas of the model, each in its own process", type=replicas)
    help = "log lines on stderr (default: text on a terminal)"
    where.add_argument("--log", choices=("json", "text", "off"), help=help)
    shared.add_traces(where)
    help = "write every request with its answer to files in FOLDER"
    add_option(where, "--log-payloads FOLDER", help, type=os.path.abspath)


def _text_like(pattern: str, description: str) -> Callable[[str], str]:
    """Return a function that checks a text by `pattern`, as the `type` of an argument."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
        return text

    return parse


_host = _text_like(r"\.?[\w-][\w.-]*|\[[\da-fA-F:.]+\]", "a name without port, such as models.example")
#: Browsers send `null` or `file://` as the origin of pages that they read from files.
_ORIGIN = r"null|file://|[a-z][a-z\d+.-]*://[^/\sA-Z]+"
_origin = _text_like(_ORIGIN, "an origin, such as https://models.example")
port_number = shared.number_between(int, 0, 65_535)


#: Parses a time in seconds: more than 0, at most a year.
positive_s = shared.number_between(float, 0.001, 31_536_000)


def run(options: argparse.Namespace, host: EngineHost) -> ServeResult:
    """Serve until a signal, or until no request has arrived for `--idle-exit` seconds.

    Raises the errors of `endpoint_setup.serve`.
    """
    from edgeinfer.cli.endpoint_setup import serve  # slow import: 240 ms

    outcome = serve(options, host)
    return ServeResult(reason=outcome.reason, cut_short=outcome.cut_short)
