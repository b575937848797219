"""`edgeinfer backend list|install|remove`: libraries with which llama.cpp reaches GPUs."""

from __future__ import annotations

import argparse

import msgspec

from edgeinfer.cli.options import add_quiet
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import stoppable
from edgeinfer.host import EngineHost
from edgeinfer.runtime.llama import backends
from edgeinfer.runtime.llama.backends import BackendOutcome, MissingBackend


class BackendResult(Result, frozen=True, kw_only=True):
    """The state of each library for GPUs. `message`: a heading, or what was installed or removed."""

    message: str
    libraries: tuple[BackendOutcome, ...]

    def human(self) -> str:
        lines = [self.message]
        for answer in self.libraries:
            lines.append(f"  {backends.describe(answer)}")
            if isinstance(answer, MissingBackend) and answer.fix:
                lines.append(f"    → {answer.fix}")
        return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = ("list", "install", "remove")
    parser.add_argument("action", nargs="?", default="list", choices=actions, help="default: list")
    parser.add_argument("name", nargs="?", default="cuda", choices=("cuda",), help="the library")
    add_quiet(parser)


def run(options: argparse.Namespace, _host: EngineHost) -> BackendResult:
    """List, install or remove a library. Raises the errors of `shipping.backend_install`."""
    from edgeinfer.models.progress import FETCHED_IS_KEPT, Job, progress_on
    from edgeinfer.shipping import backend_install  # slow import (200 ms and more)
    from edgeinfer.shipping.update import channel

    message = "libraries for GPUs (Vulkan's is in the one-file program; a checkout has `make gpu`):"
    if options.action == "remove":
        backend_install.remove(options.name)
        message = f"{options.name} is removed; running processes keep using it"
    if options.action == "install":
        with (
            progress_on(quiet=options.quiet) as report,
            stoppable(f"stopped; {FETCHED_IS_KEPT}", "run the same command again"),
        ):
            message = backend_install.install(options.name, channel(), Job(report))
        if isinstance(backends.ask(options.name), MissingBackend):
            message += f", but does not work here: `edgeinfer backend remove {options.name}`"
    return BackendResult(message=message, libraries=tuple(map(_ask, backends.NAMES)))


def _ask(name: str) -> BackendOutcome:
    """Ask a library for its devices; of a missing CUDA library, say whether the driver could run it."""
    if backends.find(name) is not None:
        return backends.ask(name)
    driver = backends.driver_problem() if name == "cuda" else None
    return msgspec.structs.replace(driver, name=name) if driver else backends.not_installed(name)
