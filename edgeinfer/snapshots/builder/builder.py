"""Build one snapshot: start the process to park in new namespaces, dump it, bake it, try it.

`python -m edgeinfer.snapshots.builder.builder FD FOLDER` runs it. FD is a socket to the client
(`builder.jobs`), which sends a BuildRequest. The answers are `Stage` messages, then a `Payload` with
the snapshot's details, or `Failed`. The builder is a separate process because only a process with one
thread may clone itself into new namespaces.

A rename makes the snapshot visible at the very end, when all files are on the disk and a process
resumed from it has computed the same canary (`LoadedModel.canary`), bit by bit, as before the dump.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from edgeinfer.config.load_options import snapshot_options
from edgeinfer.errors import (
    DiskFullError,
    DumpError,
    EdgeInferError,
    RestoreError,
    SnapshotStaleError,
    from_fields,
    to_fields,
)
from edgeinfer.launcher import messages
from edgeinfer.platform import linux, process
from edgeinfer.platform.disk import free_bytes, sha256_of, sync, write_durably
from edgeinfer.snapshot_format import criu, fingerprint, storage
from edgeinfer.snapshots import registry
from edgeinfer.snapshots.builder.bake import BakeResult, bake
from edgeinfer.snapshots.inputs import SnapshotInputs
from edgeinfer.snapshots.parked import ParkedProcess, Stages
from edgeinfer.snapshots.registry import Details
from edgeinfer.snapshots.restore import checks

_DUMP_TIMEOUT_S = 600
#: Message from the builder to the init process of the namespaces: the process whose memory is to be
#: dumped has died. The init process answers with the wait status of that process.
_DIED = b"died"
_NEAR_FULL_BYTES = 16 << 20


class BuildRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The `inputs` of the snapshot to build. `depends_on` is their SHA-256, computed before the load.

    `criu` is the path of the criu binary, `version` its version, and `tier` ("root", "unprivileged" or
    "capabilities") says with which privileges the binary runs.
    """

    inputs: SnapshotInputs
    depends_on: str
    criu: str
    version: str
    tier: str


class Builder:
    """One build of a snapshot in `folder`. Its stages are reported to the socket `client`."""

    def __init__(self, client: socket.socket, folder: Path, request: BuildRequest) -> None:
        self._client = client
        self._folder = folder
        self._request = request
        self._images = folder / storage.IMAGES
        self._stages = Stages(client)
        self._wake_read, self._wake_write = os.pipe()

    def build(self) -> Details:
        """Build the snapshot. Launches can find it after the last step, which writes the manifest.

        Raises DumpError, RestoreError, DiskFullError, SnapshotStaleError if a file has changed during
        the build, and the errors of loading the model.
        """
        self._images.mkdir(mode=0o700)
        parked = self._park_and_dump()
        self._stages.begin("copy memory")
        baked = bake(self._images, self._folder / storage.MEMORY, parked.pid, self._stages.report)
        self._stages.begin("verify")
        manifest = self._manifest(parked)
        if checks.ask_resumed_process(manifest, str(self._folder), "canary") != parked.canary:
            problem = "the new snapshot computes other tokens than the process did before the dump"
            raise RestoreError(f"{problem}; the snapshot was deleted")
        self._stages.begin("")
        details = self._details(manifest, parked, baked)
        self._publish(manifest, details)
        return details

    # --- parking and dumping

    def _park_and_dump(self) -> ParkedProcess:
        link, parked_link = socket.socketpair()
        init_link, builder_link = socket.socketpair()
        user, group = os.getuid(), os.getgid()
        flags = criu.NAMESPACES[self._request.tier]
        linux.refuse_threads()
        init = linux.clone(flags) if flags else os.fork()
        if init == 0:
            link.close()
            init_link.close()
            self._init(flags, user, group, parked_link, builder_link)
        parked_link.close()
        builder_link.close()
        parked = self._wait_until_parked(link, init_link)
        self._stages.begin("dump")
        init_link.sendall(b"%d\n" % parked.pid)
        if init_link.recv(64) != b"dumped":
            raise _disk_full(self._folder) or DumpError(
                "CRIU could not dump the process: " + _tail(self._folder / storage.DUMP_LOG, "Error"),
                hint="run `edgeinfer doctor`; without a snapshot each launch loads the model",
            )
        os.waitpid(init, 0)
        return parked

    def _wait_until_parked(self, link: socket.socket, init_link: socket.socket) -> ParkedProcess:
        """Send the inputs to the process to park; return its report once it is parked."""
        messages.send(link, messages.Payload(content=msgspec.json.encode(self._request.inputs)))
        try:
            content = wait_for_payload(link, lambda stage: messages.send(self._client, stage))
        except EdgeInferError as error:
            raise _disk_full(self._folder) or error from None
        if content is None or messages.receive(link) is not None:
            init_link.sendall(_DIED)
            if int(init_link.recv(64) or b"0") == signal.SIGKILL:
                raise registry.killed_error("the process that loaded the model")
            last_lines = _tail(self._folder / storage.PARK_LOG)
            raise DumpError(f"the process that loaded the model for the snapshot died: {last_lines}")
        return msgspec.json.decode(content, type=ParkedProcess)

    def _init(
        self, flags: int, user: int, group: int, link: socket.socket, builder_link: socket.socket
    ) -> NoReturn:
        """Run as init of the namespaces: start the process to park, then run CRIU on request."""
        try:
            process.die_with_parent()
            linux.become_init(flags, user, group)
            if flags:
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(storage.PARKED_PID - 1))
            parked = os.fork()
            if parked == 0:
                self._exec_parked(link.fileno())
            link.close()
            os.close(self._wake_read)
            order = builder_link.recv(64)
            if order == _DIED:
                builder_link.sendall(b"%d" % os.waitpid(parked, 0)[1])
            elif order:
                builder_link.sendall(b"failed" if self._run_criu(int(order)) else b"dumped")
        finally:
            os._exit(0)

    def _exec_parked(self, link: int) -> NoReturn:
        try:
            linux.drop_privileges(can_map_root=True)
            os.setsid()
            process.keep_lowest_priority()
            os.chdir("/")
            os.umask(0o077)
            null = os.open("/dev/null", os.O_RDONLY)
            append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            log = os.open(self._folder / storage.PARK_LOG, append, 0o600)
            fds = (null, log, log, link, self._wake_read)
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
            for fd, target in zip(high, (0, 1, 2, storage.LINK_FD, storage.WAKE_FD), strict=True):
                os.dup2(fd, target)
            process.close_all_but(storage.LINK_FD, storage.WAKE_FD)
            command = process.child_command("edgeinfer.snapshots.parked")
            os.execve(command[0], command, parked_environment())
        finally:
            os._exit(127)

    def _run_criu(self, pid: int) -> int:
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(_DUMP_TIMEOUT_S)
                request, log = self._request, str(self._folder / storage.DUMP_LOG)
                criu.exec_dump(request.criu, request.tier, pid, str(self._images), log)
            finally:
                os._exit(127)
        while True:
            ended_pid, status = os.wait()
            if ended_pid == child:
                return status

    # --- trying and publishing

    def _manifest(self, parked: ParkedProcess) -> storage.Manifest:
        request, inputs = self._request, self._request.inputs
        manifest = storage.Manifest(
            name=inputs.name,
            model=inputs.model,
            criu=request.criu,
            tier=request.tier,
            pid=parked.pid,
            link_inode=parked.link_inode,
            wake_inode=parked.wake_inode,
        )
        manifest.requested = snapshot_options(inputs.options)
        manifest.actual = parked.actual
        keys = {"sha256": parked.info.sha256, "criu": request.version}
        keys |= {storage.QUANTIZATION: inputs.files.quantization}
        manifest.keys = fingerprint.machine_keys() | keys
        foreign = [path for path in parked.files if not path.startswith(f"{self._folder}/")]
        # `foreign` has resolved paths. Before a resume, the paths as the user typed them are compared,
        # too: a symlink in such a path may then point to another file
        named = request.inputs.stamps
        stamps = {path: fingerprint.stamp(path) for path in (*foreign, *named, request.criu)}
        self._refuse_changed(stamps)
        manifest.files = stamps | fingerprint.package_stamps()
        manifest.images = {storage.MEMORY: os.path.getsize(self._folder / storage.MEMORY)}
        for path in sorted(self._images.iterdir()):
            path.chmod(0o600)
            manifest.images[f"{storage.IMAGES}/{path.name}"] = path.stat().st_size
        return manifest

    def _refuse_changed(self, stamps: dict[str, str]) -> None:
        for path, stamp in self._request.inputs.stamps.items():
            if stamps.get(path, stamp) != stamp:
                problem = f"{path} was changed while the snapshot was built; the snapshot was deleted"
                hint = "run the command again once the file is complete"
                raise SnapshotStaleError(problem, key=path, hint=hint)

    def _details(self, manifest: storage.Manifest, parked: ParkedProcess, baked: BakeResult) -> Details:
        images_bytes = sum(manifest.images.values()) - manifest.images[storage.MEMORY]
        return Details(
            name=manifest.name,
            model=manifest.model,
            folder=str(self._folder),
            created_s=time.time(),
            tier=manifest.tier,
            criu=manifest.keys["criu"],
            sha256=parked.info.sha256,
            requested=manifest.requested,
            actual=manifest.actual,
            reasons={name: chosen.reason for name, chosen in parked.info.choices.items()},
            system=self._request.inputs.system,
            system_tokens=parked.system_tokens,
            memory_bytes=baked.memory_bytes,
            images_bytes=images_bytes,
            disk_bytes=baked.disk_bytes + images_bytes,
            mappings=baked.mappings,
            digests={name: sha256_of(self._folder / name) for name in manifest.images},
            stages_ms=parked.stages_ms | self._stages.ms,
            depends_on=self._request.depends_on,
            sources=self._source_digests(manifest),
            canary=hashlib.sha256(parked.canary).hexdigest(),
        )

    def _source_digests(self, manifest: storage.Manifest) -> dict[str, str]:
        """Return the SHA-256 (hex), by path, of each file that the process has mapped or read."""
        files = self._request.inputs.files
        pulled = {os.path.realpath(files.paths[0]): files.sha256} if len(files.paths) == 1 else {}
        paths = filter(os.path.isfile, manifest.files)
        return {path: pulled.get(os.path.realpath(path)) or sha256_of(Path(path)) for path in paths}

    def _publish(self, manifest: storage.Manifest, details: Details) -> None:
        """Flush all files to the disk, then rename the manifest into place, which ends the build."""
        for name in (storage.PARK_LOG, storage.DUMP_LOG):
            (self._folder / name).unlink(missing_ok=True)
        for name in manifest.images:
            sync(self._folder / name)
        sync(self._images)
        write_durably(self._folder / storage.DETAILS, msgspec.json.encode(details), 0o600)
        text = storage.manifest_text(manifest).encode("utf-8", "surrogateescape")
        write_durably(self._folder / storage.MANIFEST, text, 0o600)


def parked_environment() -> dict[str, str]:
    """Return the environment variables of the process to park; only PYTHONPATH is taken from the user.

    MALLOC_ARENA_MAX is 1, because glibc gives freed pages of further arenas back to the kernel and
    relies on zeros when it uses them again. After a resume, such pages would have their old content.
    OPENBLAS_NUM_THREADS is 1, because a restore would have to create each further thread of numpy.
    """
    sources = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return sources | {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "MALLOC_ARENA_MAX": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _tail(log: Path, only: str = "") -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if only in line]
    except OSError:
        return "no log was written"
    return " | ".join(lines[-3:]) or "its log is empty"


def _disk_full(folder: Path) -> DiskFullError | None:
    free = free_bytes(folder)
    if free > _NEAR_FULL_BYTES:
        return None
    problem = f"the disk of {folder} is full: {free >> 20} MiB free"
    return DiskFullError(f"{problem}; the snapshot was deleted")


def wait_for_payload(link: socket.socket, on_stage: Callable[[messages.Stage], None]) -> bytes | None:
    """Return the content of the next `Payload`; None if the process at the other end has ended.

    `on_stage` gets each `Stage` message that comes first. Raises the error in a `Failed` message.
    """
    while (received := messages.receive(link)) is not None:
        message = received[0]
        if isinstance(message, messages.Failed):
            raise from_fields(message.error)
        if isinstance(message, messages.Payload):
            return message.content
        if isinstance(message, messages.Stage):
            on_stage(message)
    return None


def main() -> None:
    """Build a snapshot in the folder argv[2], as requested on the socket with the descriptor argv[1].

    If the build fails, the folder is deleted, and the client gets the error.
    """
    client, folder = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    content = wait_for_payload(client, lambda _stage: None)
    if content is None:
        return
    try:
        details = Builder(client, folder, msgspec.json.decode(content, type=BuildRequest)).build()
    except (EdgeInferError, OSError) as error:
        own_error = error if isinstance(error, EdgeInferError) else None
        message = f"the snapshot could not be written: {error}"
        problem = own_error or _disk_full(folder) or DumpError(message)
        shutil.rmtree(folder, ignore_errors=True)
        messages.send(client, messages.Failed(error=to_fields(problem)))
        return
    messages.send(client, messages.Payload(content=msgspec.json.encode(details)))


def wrong_files(folder: Path) -> list[str]:
    """List the files whose SHA-256 has changed since the build: the snapshot's own, and mapped ones.

    Files are read from the disk, not from the page cache. Raises SnapshotStaleError,
    SnapshotUnsafeError, and SnapshotCorruptError for a damaged manifest.
    """
    manifest = storage.read_manifest(str(folder))
    fingerprint.refuse_stale(manifest, str(folder))
    details = registry.read_details(folder)
    expected = {name: details.digests.get(name, "") for name in manifest.images} | details.sources
    return [name for name, digest in expected.items() if _digest_on_disk(folder / name) != digest]


def _digest_on_disk(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sha256_of(path)


def computes_canary(folder: Path) -> bool:
    """Resume the snapshot; return whether the canary (scores of fixed prompts) is as before the dump.

    Raises RestoreError if the snapshot cannot be resumed.
    """
    manifest = storage.read_manifest(str(folder))
    content = checks.ask_resumed_process(manifest, str(folder), "canary", criu.CHECK_LIMIT_S)
    return hashlib.sha256(content).hexdigest() == registry.read_details(folder).canary


def repeated_randomness(folder: Path) -> list[str]:
    """Resume the snapshot twice; list sources of random values that were equal. Raises RestoreError."""
    manifest = storage.read_manifest(str(folder))
    drawn = []
    for _ in range(2):
        facts = checks.ask_resumed_process(manifest, str(folder), "facts", criu.CHECK_LIMIT_S)
        drawn.append(msgspec.json.decode(facts, type=checks.Facts).random)
    return [name for name, value in drawn[0].items() if drawn[1].get(name) == value]


if __name__ == "__main__":
    # run the imported `main`: classes of `__main__` would differ from those that other modules import
    from edgeinfer.snapshots.builder import builder

    builder.main()
