"""`edgeinfer backend list|add|remove`: libraries that let llama.cpp use a GPU."""

from __future__ import annotations

import argparse
from typing import ClassVar

import msgspec

from edgeinfer.catalog.fetching import backends
from edgeinfer.catalog.progress.bar import progress_on
from edgeinfer.catalog.progress.job import FETCHED_IS_KEPT, Job
from edgeinfer.commands.table import table
from edgeinfer.errors import InterruptedByUser, OfflineError, UsageError
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.runtime.backends import files
from edgeinfer.runtime.backends.devices import Device, Loaded, NotLoaded, device_line
from edgeinfer.runtime.backends.survey import ask
from edgeinfer.settings.config import offline
from edgeinfer.units import format_bytes

#: The backends that nobody of ours has ever run.
UNTESTED = {"cuda": "never run", "rocm": "never built or run", "sycl": "never built or run"}


class ListedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """One backend: its library and what loading it gives here. `path` "" where there is none."""

    name: str
    path: str = ""
    added: bool = False
    size_bytes: int = 0
    devices: tuple[Device, ...] = ()
    reason: str = ""
    fix: str = ""


class BackendsResult(Result, frozen=True, kw_only=True):
    """Every backend there is a name for, those to prefer first."""

    kind: ClassVar[str] = "backends"

    backends: tuple[ListedBackend, ...]

    def human(self) -> str:
        rows = [("NAME", "LIBRARY", "SIZE", "HERE"), *map(_row, self.backends)]
        fixes = [f"{one.name}: {one.fix}" for one in self.backends if one.fix and one.path]
        return "\n".join([table(rows, right=frozenset({2})), *fixes])


def _row(one: ListedBackend) -> tuple[str, ...]:
    if not one.path:
        return (one.name, "-", "-", "not here")
    found = ", ".join(f"{d.description} ({format_bytes(d.total_bytes)})" for d in one.devices)
    where = "added" if one.added else "the program's"
    return (one.name, where, format_bytes(one.size_bytes), found or one.reason)


class AddedResult(Result, frozen=True, kw_only=True):
    """A library that is here now, verified."""

    kind: ClassVar[str] = "backend-added"

    backend: ListedBackend
    sha256: str

    def human(self) -> str:
        one = self.backend
        head = f"{one.path}: {format_bytes(one.size_bytes)}, sha256 {self.sha256[:12]}…"
        untested = UNTESTED.get(one.name)
        told = [f"{one.name} was {untested} by those who make edgeinfer"] if untested else []
        if one.devices:
            return "\n".join([head, *told, *(device_line(device) for device in one.devices)])
        return "\n".join([head, *told, f"but {one.reason}", *([one.fix] if one.fix else [])])


class RemovedResult(Result, frozen=True, kw_only=True):
    """A library that is gone."""

    kind: ClassVar[str] = "backend-removed"

    name: str
    freed_bytes: int

    def human(self) -> str:
        return f"{self.name} is removed: {format_bytes(self.freed_bytes)} freed"


def backend(options: argparse.Namespace, host: Host) -> Result:
    """Raises what `backends.add` and `backends.remove` raise, and OfflineError."""
    if options.action == "add":
        return _add(options, host)
    if options.action == "remove":
        files.file_name(options.name)
        return RemovedResult(name=options.name, freed_bytes=backends.remove(options.name))
    return BackendsResult(backends=tuple(map(_listed, files.NAMES)))


def _listed(name: str) -> ListedBackend:
    file = files.find(name)
    if file is None:
        return ListedBackend(name=name)
    return _described(name, ask(name))


def _described(name: str, answer: Loaded | NotLoaded) -> ListedBackend:
    file = answer.file if isinstance(answer, Loaded) else files.find(name)
    here = ListedBackend(
        name=name,
        path=file.path if file else "",
        added=bool(file and file.added),
        size_bytes=file.facts.size_bytes if file and file.facts else 0,
    )
    if isinstance(answer, Loaded):
        return msgspec.structs.replace(here, devices=answer.devices, fix=answer.warning)
    return msgspec.structs.replace(here, reason=answer.reason, fix=answer.fix)


def _add(options: argparse.Namespace, host: Host) -> AddedResult:
    from edgeinfer.runtime.backends.loading import this_build  # 60 ms: llama.cpp

    name, place = options.name, options.source or host.config.gpu.source
    files.file_name(name)
    if not place:
        raise UsageError(
            f"where is the library of {name}?",
            hint=f"edgeinfer backend add {name} --from FOLDER or https://…, or `source` under [gpu] "
            "in config.toml",
        )
    if backends.is_address(place) and offline(host.config):
        raise OfflineError(f"{place} needs the network, and the offline switch is on")
    with progress_on(quiet=options.quiet) as report:
        try:
            file = backends.add(name, place, this_build(), Job(report), options.sha256)
        except KeyboardInterrupt as error:
            raise InterruptedByUser(
                f"stopped; {FETCHED_IS_KEPT}",
                hint="type the same command again: it goes on where it stopped",
            ) from error
    sha256 = file.facts.sha256 if file.facts else ""
    return AddedResult(backend=_described(name, ask(name)), sha256=sha256)
