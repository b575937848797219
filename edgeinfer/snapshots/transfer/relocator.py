"""Turn an imported snapshot into one of this home: resume it once, relocate it, dump it again.

`python -m edgeinfer.snapshots.transfer.relocator FD FOLDER`, started by
`edgeinfer.snapshots.transfer.importing` and ended by it, as the builder of a snapshot is. FOLDER holds
what arrived, checked and with CRIU's images rewritten.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import msgspec

from edgeinfer.launcher import messages
from edgeinfer.platform import process
from edgeinfer.snapshots import criu, format
from edgeinfer.snapshots.build import builder, criu_images
from edgeinfer.snapshots.build.park import Parked
from edgeinfer.snapshots.transfer.description import ParkedProcess

#: Under the folder that is built: the exporter's images and memory, until they are dumped again.
ARRIVED = "arrived"


class ImportRequest(builder.SnapshotRequest, frozen=True, kw_only=True):
    """A snapshot to make of the parked process that arrived; `moved`: the exporter's paths → ours."""

    system_tokens: int
    canary: bytes
    parked_process: ParkedProcess
    moved: dict[str, str]


class Relocator(builder.Builder):
    """One relocation."""

    def __init__(self, order: socket.socket, folder: Path, request: builder.SnapshotRequest) -> None:
        super().__init__(order, folder, request)
        assert isinstance(request, ImportRequest)
        self._import = request
        self._arrived = folder / ARRIVED
        self._rouse_read, self._rouse_write = os.pipe()
        os.write(self._rouse_write, b"!")  # the restored process finds it there and goes on

    def _start(self, flags: int, link: int) -> int:
        """Restore the process that is to be dumped, with the pid it had; return CRIU's."""
        pid = os.fork()
        if pid == 0:
            try:
                log = os.open(self._folder / format.PARK_LOG, os.O_WRONLY | os.O_CREAT, 0o600)
                process.silence()
                os.dup2(log, 2)
                process.close_all_but(link, self._rouse_read)
                images = str(self._arrived / format.IMAGES)
                criu.exec_restore(self._parked_process(), images, link, self._rouse_read)
            finally:
                os._exit(127)
        return pid

    def _parked_process(self) -> format.Manifest:
        parked_process = self._import.parked_process
        return format.Manifest(
            name="",
            model="",
            criu=self._request.criu,
            tier=self._request.tier,
            pid=parked_process.pid,
            link_inode=parked_process.link,
            wake_inode=parked_process.wake,
        )

    def _send_request(self, link: socket.socket) -> None:
        memory = str(self._arrived / format.MEMORY)
        request = messages.Relocate(moved=self._import.moved, memory=memory)
        messages.send(link, request, [self._wake_read])

    def _park_and_dump(self) -> Parked:
        self._say("relocate", None)
        parked = super()._park_and_dump()
        criu_images.make_anonymous(self._images, str(self._arrived / format.MEMORY))
        shutil.rmtree(self._arrived)
        return msgspec.structs.replace(
            parked, canary=self._import.canary, system_tokens=self._import.system_tokens
        )


if __name__ == "__main__":
    from edgeinfer.snapshots.transfer import relocator  # classes of this module, not of `__main__`

    builder.main(relocator.Relocator, relocator.ImportRequest)
