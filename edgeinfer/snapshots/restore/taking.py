"""The app's side of `snapshots take`: what it leaves for it, and asking the launcher for one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from edgeinfer.errors import SnapshotError, from_fields
from edgeinfer.host import TakenSnapshot
from edgeinfer.launcher import messages
from edgeinfer.platform import process_metadata
from edgeinfer.runtime.options import Adapter
from edgeinfer.snapshots.process_description import Description

#: Sends a message to the launcher, with descriptors.
Tell = Callable[["Mapping[str, messages.Value]", Sequence[int]], None]


class _Named(msgspec.Struct, frozen=True):
    name: str
    disk_bytes: int


class _Result(msgspec.Struct, frozen=True):
    snapshot: _Named
    was_built: bool
    wall_s: float


class _Envelope(msgspec.Struct, frozen=True):
    """What `edgeinfer snapshots take --json` prints; `error` as in `errors.to_fields`."""

    ok: bool
    result: _Result | None = None
    error: dict[str, str] = {}


class OwnDescription:
    """This process's description, with what is known of its launch."""

    def __init__(self) -> None:
        self._note = process_metadata.Note(process_metadata.DESCRIPTION)
        self._found: Description | None = None
        self._url = ""

    def write(self, found: Description | None, snapshot: str, *, is_worker: bool) -> None:
        """Leave what was loaded, resumed from `snapshot`; nothing where that is not known."""
        if found is not None:
            found = found.resumed_from(snapshot)
            self._found = msgspec.structs.replace(found, is_worker=is_worker)
            self._leave()

    def has_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """Leave that the model has these adapters from now on."""
        if self._found is not None:
            self._found = self._found.with_adapters(adapters)
            self._leave()

    def listens_at(self, url: str) -> None:
        """Leave where its endpoint listens too."""
        self._url = url
        self._leave()

    def _leave(self) -> None:
        if self._found is not None:
            self._note.write(msgspec.structs.replace(self._found, url=self._url))


def take(tell: Tell, model: str, name: str) -> TakenSnapshot:
    """Have the launcher take a snapshot, and wait for it. Raises the error that it ended with."""
    read_fd, write_fd = os.pipe()
    words = messages.join((f"--model={model}", f"--name={name}"))
    tell({"op": "take", "words": words}, [write_fd])
    os.close(write_fd)
    with open(read_fd, "rb") as answer:
        raw = answer.read()
    try:
        said = msgspec.json.decode(raw, type=_Envelope)
    except msgspec.MsgspecError:
        raise SnapshotError("the process that takes the snapshot ended without a word") from None
    if said.result is None:
        raise from_fields(said.error)
    return TakenSnapshot(
        name=said.result.snapshot.name,
        disk_bytes=said.result.snapshot.disk_bytes,
        was_built=said.result.was_built,
        seconds=said.result.wall_s,
    )
