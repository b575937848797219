"""`edgeinfer backend`: list libraries that let llama.cpp use a GPU."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table
from edgeinfer.host import Host
from edgeinfer.runtime.llama.backends import files
from edgeinfer.runtime.llama.backends.devices import Device, LoadedBackend, ask
from edgeinfer.units import format_bytes


class ListedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """One backend: its library, and its devices here. `path` is "" if there is no library."""

    name: str
    path: str = ""
    added: bool = False
    size_bytes: int = 0
    devices: tuple[Device, ...] = ()
    reason: str = ""
    fix: str = ""


class BackendsResult(Result, frozen=True, kw_only=True):
    """Every known backend, preferred ones first. `folder` holds the user's own libraries."""

    folder: str
    backends: tuple[ListedBackend, ...]

    def human(self) -> str:
        rows = [("NAME", "LIBRARY", "SIZE", "HERE"), *map(_row, self.backends)]
        fixes = [f"{one.name}: {one.fix}" for one in self.backends if one.fix and one.path]
        own = f"to add one, put libggml-NAME.so and libggml-NAME.json into {self.folder}"
        return "\n".join([table(rows, right=frozenset({2})), *fixes, own])


def _row(one: ListedBackend) -> tuple[str, ...]:
    if not one.path:
        return (one.name, "-", "-", "not here")
    devices = ", ".join(f"{d.description} ({format_bytes(d.total_bytes)})" for d in one.devices)
    where = "added" if one.added else "the program's"
    return (one.name, where, format_bytes(one.size_bytes), devices or one.reason)


def run(_options: argparse.Namespace, _host: Host) -> BackendsResult:
    """Load each library in a process of its own and list its devices."""
    return BackendsResult(folder=str(files.added_dir()), backends=tuple(map(_probe, files.NAMES)))


def _probe(name: str) -> ListedBackend:
    file = files.find(name)
    if file is None:
        return ListedBackend(name=name)
    answer = ask(name)
    if isinstance(answer, LoadedBackend):
        return _listed_file(answer.file, devices=answer.devices, fix=answer.warning)
    return _listed_file(file, reason=answer.reason, fix=answer.fix)


def _listed_file(file: files.BackendFile, **devices: Any) -> ListedBackend:
    size = file.facts.size_bytes if file.facts else 0
    return ListedBackend(name=file.name, path=file.path, added=file.added, size_bytes=size, **devices)
