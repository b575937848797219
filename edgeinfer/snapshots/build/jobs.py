"""Warming a model: room, lock, build, prune. What `edgeinfer warm` and the background warm both do."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from edgeinfer.config.config_file import SnapshotsConfig
from edgeinfer.config.load_options import snapshot_options
from edgeinfer.errors import DiskFullError, EdgeInferError, SnapshotError, from_fields
from edgeinfer.launcher import messages
from edgeinfer.platform import paths, process
from edgeinfer.platform.disk import free_bytes, is_locked, locked
from edgeinfer.runtime.options import Adapter, LoadOptions, ModelFiles
from edgeinfer.snapshots import criu, failures, fingerprint, format, prune
from edgeinfer.snapshots.process_description import read_files, stamps_of
from edgeinfer.snapshots.registry import Details
from edgeinfer.units import format_bytes

#: (stage, fraction 0..1 or None when unknown)
Progress = Callable[[str, float | None], None]
_GIB = 1 << 30
#: Held by whoever builds while something else computes: one at a time.
BACKGROUND_LOCK = ".auto-warm.lock"
#: Besides the weights: Python's heap, KV cache and compute buffers that were touched.
_EXTRA_BYTES = 400 << 20
_BUILDER = "edgeinfer.snapshots.build.builder"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot to build. `given_name` "": derived; `system` "": the template's own.

    `became` are the options with the choices of another load, which are to be made again, `adapters`
    those of the options under the names they had there. `stamps` are what the model's files must be
    (`fingerprint.stamp`); none: what they are.
    """

    model: str
    files: ModelFiles
    options: LoadOptions
    system: str = ""
    given_name: str = ""
    became: LoadOptions | None = None
    adapters: tuple[Adapter, ...] | None = None
    stamps: dict[str, str] = {}

    @property
    def name(self) -> str:
        return format.snapshot_name(self.model, snapshot_options(self.options), self.given_name)

    @property
    def depends_on(self) -> str:
        """What a build depends on, as a digest. Raises OSError when a file of the model is gone."""
        adapters = self.options.adapters(self.files) if self.adapters is None else self.adapters
        what = (self.files, snapshot_options(self.options), self.system, adapters)
        return failures.digest_of(read_files(self.files, self.options), msgspec.json.encode(what))

    @property
    def as_loaded(self) -> LoadOptions:
        """The options, with choices made where they are known."""
        return self.became or self.options


def step_back() -> None:
    """Give this process and its children idle-class scheduling and the lowest niceness."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    process.step_back()


def build(order: Order, config: SnapshotsConfig, progress: Progress) -> Details:
    """Build, publish, and remove the snapshot of that name before; its processes go on.

    Raises SnapshotsUnavailableError, DiskFullError, DumpError, RestoreError, and as loading does.
    """
    found = criu.available()
    root = paths.private_dir(paths.snapshots_dir())
    format.refuse_unsafe_ancestors(str(root))
    with locked(
        build_lock(root, order.name), lambda: progress("wait for another warm of this model", None)
    ):
        sweep(root)
        prune.make_room(root, _need_bytes(order), config, keep=order.name)
        refuse_full(root, order, config)
        depends_on = order.depends_on
        folder = root / format.folder_name(order.name, time.time_ns(), fingerprint.program_tag())
        request: dict[str, messages.Value] = {
            "model": order.model,
            "name": order.name,
            "files": msgspec.json.encode(order.files),
            "options": msgspec.json.encode(order.options),
            "became": b"" if order.became is None else msgspec.json.encode(order.became),
            "requested": msgspec.json.encode(snapshot_options(order.options)),
            "adapters": msgspec.json.encode(order.adapters),
            "stamps": msgspec.json.encode(order.stamps or stamps_of(order.files, order.options)),
            "depends_on": depends_on,
            "system": order.system,
            "criu": found.criu,
            "version": found.version,
            "tier": found.tier or "",
        }
        failure = failures.Failure(
            name=order.name, model=order.model, message="", at_s=time.time(), depends_on=depends_on
        )
        try:
            details = _run_builder(folder, request, progress)
        except EdgeInferError as error:
            failures.remember(msgspec.structs.replace(failure, message=error.message), error)
            raise
        failures.forget(order.name)
        prune.drop_older(root, order.name)
    prune.to_limit(root, config, keep=order.name)
    return details


def repack_choice(
    options: LoadOptions, files: ModelFiles, config: SnapshotsConfig
) -> tuple[LoadOptions, str]:
    """Choose `--repack auto`, and why: on unless the disk has no room for repacked weights."""
    if options.repack != "auto":
        return options, "as asked"
    need, free = sum(os.path.getsize(path) for path in files.paths), free_bytes(paths.snapshots_dir())
    if free - need - _EXTRA_BYTES < config.disk_margin_gib * _GIB:
        return msgspec.structs.replace(options, repack="off"), (
            f"the disk has no room for {format_bytes(need)} of repacked weights: they stay in the "
            "model's file"
        )
    return options, "repacked where llama.cpp can: the snapshot keeps the result"


def refuse_full(root: Path, order: Order, config: SnapshotsConfig) -> None:
    """Raise DiskFullError when building would leave less free than the margin."""
    need, free = _need_bytes(order), free_bytes(root)
    if free - need < config.disk_margin_gib * _GIB:
        raise DiskFullError(
            f"a snapshot of {order.model} needs about {format_bytes(need)} and "
            f"{format_bytes(free)} are free; "
            f"{config.disk_margin_gib:g} GiB stay free (snapshots.disk-margin-gib)"
        )


def _need_bytes(order: Order) -> int:
    weights = sum(os.path.getsize(path) for path in (*order.files.paths, *order.files.draft_paths))
    return _EXTRA_BYTES + (weights if order.as_loaded.repack != "off" else 0)


def is_building(name: str) -> bool:
    """Whether somebody builds this snapshot now."""
    return is_locked(build_lock(paths.snapshots_dir(), name))


def being_built() -> list[str]:
    """The names of what this program builds now, in whatever process."""
    end = f"-{fingerprint.program_tag()}.lock"
    found = sorted(paths.snapshots_dir().glob(f".*{end}"))
    return [path.name[1 : -len(end)] for path in found if is_locked(path)]


def build_lock(root: Path, name: str) -> Path:
    """The file that this program locks while it builds a name."""
    return root / f".{name}-{fingerprint.program_tag()}.lock"


def sweep(root: Path) -> None:
    """Remove what killed builds left: folders without a manifest whose lock nobody holds."""
    for folder in root.iterdir():
        if format.SEPARATOR not in folder.name or (folder / format.MANIFEST).exists():
            continue
        if not is_locked(folder / format.LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def _run_builder(folder: Path, request: dict[str, messages.Value], progress: Progress) -> Details:
    folder.mkdir(mode=0o700)
    try:
        with locked(folder / format.LOCK):
            return run_builder(folder, request, progress)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def run_builder(
    folder: Path, request: dict[str, messages.Value], progress: Progress, module: str = _BUILDER
) -> Details:
    """Run a builder in a folder that is there and locked, and pass its stages on.

    Raises what it raises, SnapshotError when it dies.
    """
    mine, theirs = socket.socketpair()
    command = process.child_command(module, str(theirs.fileno()), str(folder))
    log = folder / "builder.log"
    with mine, open(os.open(log, os.O_RDWR | os.O_CREAT, 0o600), "wb") as errors_to:
        builder = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=errors_to,
            stderr=errors_to,
        )
        theirs.close()
        try:
            return _listen(mine, request, progress, builder, log)
        finally:
            builder.kill()
            builder.wait()
            log.unlink(missing_ok=True)


def _listen(
    link: socket.socket,
    request: dict[str, messages.Value],
    progress: Progress,
    builder: subprocess.Popen[bytes],
    log: Path,
) -> Details:
    messages.send(link, request)
    while (received := messages.receive(link)) is not None:
        fields = received[0]
        if fields["op"] == b"stage":
            progress(fields["name"].decode(), float(fields["fraction"]) if fields["fraction"] else None)
        elif fields["op"] == b"built":
            return msgspec.json.decode(fields["details"], type=Details)
        else:
            raise from_fields(fields)
    if builder.wait() == -signal.SIGKILL:
        raise failures.killed("the process that builds the snapshot")
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    raise SnapshotError(f"the process that builds the snapshot died{': ' + last[0] if last else ''}")
