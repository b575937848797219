"""Run builds of snapshots: for `edgeinfer warm`, for `snapshots take`, and in the background.

Each build takes the lock of the snapshot's name, frees disk space, runs a builder process and removes
older snapshots. `take` does not touch the running process: another process loads the same model with
the same options (docs/decisions/091-snapshot-of-a-running-service.md).

`python -m edgeinfer.snapshots.builder.jobs MODEL OPTIONS` is the background build after a cold launch.
It runs at idle priority and adds a line to `auto-warm.log` in the state directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from edgeinfer.config.config_file import Config, SnapshotsConfig
from edgeinfer.config.load_options import NO_DRAFT, first_difference, snapshot_options
from edgeinfer.errors import (
    DiskFullError,
    EdgeInferError,
    ModelLoadError,
    SnapshotError,
    SnapshotStaleError,
)
from edgeinfer.host import EngineHost, LoadProgress
from edgeinfer.launcher import builds, messages, selection
from edgeinfer.models.reference import resolve
from edgeinfer.platform import paths, process
from edgeinfer.platform.disk import free_bytes, is_locked, locked
from edgeinfer.runtime.options import LoadOptions, ModelFiles
from edgeinfer.snapshot_format import criu, fingerprint, storage
from edgeinfer.snapshots import registry
from edgeinfer.snapshots.builder.builder import BuildRequest, wait_for_payload
from edgeinfer.snapshots.inputs import ProcessDescription, SnapshotInputs, stamps_of
from edgeinfer.snapshots.registry import Details
from edgeinfer.units import format_bytes

#: Stage that a build reports while another process builds the same snapshot.
WAITING = "waiting for another build of this snapshot"
#: A build at low priority locks the first file while it runs. A second background build locks the
#: second file while it waits for the first build to end; a third one ends at once.
BACKGROUND_LOCK, _WAITING_LOCK = ".auto-warm.lock", ".auto-warm.waiting.lock"
#: Estimated disk space (bytes) of a snapshot: Python's heap, touched KV cache, compute buffers.
_NEED_BYTES = 400 << 20
_BUILDER = "edgeinfer.snapshots.builder.builder"


def build(inputs: SnapshotInputs, config: SnapshotsConfig, progress: LoadProgress) -> Details:
    """Build a snapshot, then delete its older builds; processes that were resumed from them continue.

    A background build of the same snapshot is ended first, because at idle priority it could take
    minutes. Raises SnapshotsUnavailableError, SnapshotUnsafeError, DiskFullError, DumpError,
    RestoreError, and the errors of loading a model.
    """
    probed, name = criu.available(), inputs.name
    root = paths.private_dir(paths.snapshots_dir())
    storage.refuse_unsafe_ancestors(str(root))
    lock = registry.build_lock(root, name)

    def on_busy() -> None:
        if not _end_background(lock):
            progress(WAITING, None)

    with locked(lock, on_busy):
        remove_unfinished(root)
        registry.make_room(root, config, name, _NEED_BYTES)
        refuse_full(root, name, _NEED_BYTES)
        details = _build_in_new_folder(root, inputs, probed, progress)
        registry.forget_failure(name)
        registry.drop_older(root, name)
    registry.make_room(root, config, name)
    return details


def _build_in_new_folder(
    root: Path, inputs: SnapshotInputs, probed: criu.Probe, progress: LoadProgress
) -> Details:
    """Run a builder in a new folder. If it fails, delete the folder and record the failure."""
    stamps = inputs.stamps or stamps_of(inputs.files, inputs.options)
    request = BuildRequest(
        inputs=msgspec.structs.replace(inputs, stamps=stamps),
        depends_on=inputs.depends_on,
        criu=probed.criu,
        version=probed.version,
        tier=probed.tier or "",
    )
    folder = root / storage.folder_name(inputs.name, time.time_ns(), fingerprint.program_tag())
    folder.mkdir(mode=0o700)
    try:
        with locked(folder / storage.LOCK):
            return run_builder(folder, request, progress)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        # do not record the failure to load a draft model, because the record would name the main model
        is_of_draft = inputs.options.draft not in ("", NO_DRAFT) and isinstance(error, ModelLoadError)
        if isinstance(error, EdgeInferError) and not is_of_draft:
            registry.record_failure(
                error,
                name=inputs.name,
                model=inputs.model,
                depends_on=request.depends_on,
                command=inputs.warm_command,
            )
        raise


def refuse_full(root: Path, name: str, need_bytes: int) -> None:
    """Raise DiskFullError if a snapshot of `need_bytes` would leave less than 4 GiB free."""
    free = free_bytes(root)
    if free - need_bytes < registry.DISK_MARGIN_BYTES:
        margin = format_bytes(registry.DISK_MARGIN_BYTES)
        space = f"{format_bytes(free)} are free, and {margin} must stay free"
        raise DiskFullError(f"the snapshot {name} needs about {format_bytes(need_bytes)}; {space}")


def being_built() -> list[str]:
    """List the names of this installation's snapshots that some process is building now."""
    suffix = f"-{fingerprint.program_tag()}.lock"
    locks = sorted(paths.snapshots_dir().glob(f".*{suffix}"))
    return [path.name[1 : -len(suffix)] for path in locks if is_locked(path)]


def _end_background(lock: Path) -> bool:
    """End the background build that holds `lock`, if any; return whether there was one."""
    with contextlib.suppress(OSError):
        # compare only the inode number: on Btrfs, the device number in /proc/locks differs from that of
        # stat
        holder = f":{lock.stat().st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, file, *_ = line.split()
            command = Path(f"/proc/{pid}/cmdline")
            is_holder = kind == "FLOCK" and file.endswith(holder)
            if is_holder and builds.JOBS.encode() in command.read_bytes():
                os.kill(int(pid), signal.SIGTERM)
                return True
    return False


def remove_unfinished(root: Path) -> None:
    """Remove the folders of killed builds: they have no manifest, and no process has locked them."""
    for folder in root.iterdir():
        if storage.SEPARATOR not in folder.name or (folder / storage.MANIFEST).exists():
            continue
        if not is_locked(folder / storage.LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def run_builder(folder: Path, request: BuildRequest, progress: LoadProgress) -> Details:
    """Run a builder process in `folder`, which the caller has locked; return the snapshot's details.

    Raises the error that the builder reports; SnapshotError or OutOfMemoryError if the builder dies.
    """
    mine, builder_link = socket.socketpair()
    command = process.child_command(_BUILDER, str(builder_link.fileno()), str(folder))
    log = folder / "builder.log"

    def on_stage(stage: messages.Stage) -> None:
        progress(stage.name, float(stage.fraction) if stage.fraction else None)

    with mine, open(os.open(log, os.O_RDWR | os.O_CREAT, 0o600), "wb") as errors_to:
        builder = process.start_child(
            command,
            pass_fds=(builder_link.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=errors_to,
            stderr=errors_to,
        )
        builder_link.close()
        try:
            messages.send(mine, messages.Payload(content=msgspec.json.encode(request)))
            content = wait_for_payload(mine, on_stage)
            if content is None:
                raise _death_of_builder(builder, log)
            return msgspec.json.decode(content, type=Details)
        finally:
            builder.kill()
            builder.wait()
            log.unlink(missing_ok=True)


def _death_of_builder(builder: subprocess.Popen[bytes], log: Path) -> EdgeInferError:
    if builder.wait() == -signal.SIGKILL:
        return registry.killed_error("the process that builds the snapshot")
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    problem = f"the process that builds the snapshot died{': ' + last[0] if last else ''}"
    return SnapshotError(problem, hint="run `edgeinfer doctor`, then `edgeinfer warm MODEL` again")


def take(
    description: ProcessDescription, given_name: str, config: SnapshotsConfig, progress: LoadProgress
) -> tuple[Details, bool]:
    """Build a snapshot with the model and options of a running process (`description`).

    Returns the snapshot's details, and whether it was built now: if an equal one exists, nothing is
    built. If `given_name` is "", the name of the snapshot from which the process was resumed is used.
    This process gets the lowest priority, and waits for other builds at low priority. Raises
    SnapshotStaleError if a file has changed since the process loaded it, and the errors of `build`.
    """
    process.use_lowest_priority()
    lock = paths.private_dir(paths.state_dir()) / BACKGROUND_LOCK
    with locked(lock, lambda: progress("wait for another build", None)):
        _refuse_changed(description)
        inputs = msgspec.structs.replace(description, given_name=given_name or description.given_name)
        existing = _find_same(inputs)
        return (existing, False) if existing else (build(inputs, config, progress), True)


def _refuse_changed(description: ProcessDescription) -> None:
    now = stamps_of(description.files, description.options)
    for path, before in description.stamps.items():
        if now.get(path) != before:
            problem = f"{path} {'was changed' if path in now else 'was removed'} since it was loaded"
            effect = "the snapshot would differ from the running model"
            hint = f"start the process again, or `{description.warm_command}` for the new file"
            raise SnapshotStaleError(f"{problem}: {effect}", key=path, hint=hint)


def _find_same(inputs: SnapshotInputs) -> Details | None:
    """Return the details of a valid snapshot with the same name and inputs, otherwise None."""
    root = str(paths.snapshots_dir())
    folders = storage.generations(root, fingerprint.program_tag()).get(inputs.name)
    if not folders:
        return None
    try:
        details = registry.read_details(Path(folders[0]))
    except EdgeInferError:
        return None
    requested = snapshot_options(inputs.options_to_repeat)
    has_changed = details.depends_on != inputs.depends_on
    if has_changed or first_difference(requested, details.requested, details.actual, is_named=True):
        return None
    return details if registry.state_of(Path(folders[0]))[0] else None


def reason_not_to_build(config: Config, inputs: SnapshotInputs) -> str:
    """Return why a background build of this snapshot would fail or is not needed; "" otherwise."""
    if not config.snapshots.auto_warm:
        return builds.SWITCHED_OFF
    probed = criu.probe()
    if probed.tier is None:
        return probed.reason
    if is_locked(registry.build_lock(paths.snapshots_dir(), inputs.name)):
        return builds.BEING_BUILT
    for failed in registry.list_failures():
        if (failed.name, failed.depends_on) == (inputs.name, inputs.depends_on):
            return f"its last build failed, and nothing has changed since: {failed.message}"
    try:
        selection.find(inputs.model, snapshot_options(inputs.options))
    except EdgeInferError:
        return ""
    return builds.ALREADY_BUILT


def build_if_useful(model: str, options: LoadOptions) -> str:
    """Build the snapshot unless there is a `reason_not_to_build`; return the outcome for the log."""
    host, files = EngineHost(), ModelFiles(name=model, paths=())
    inputs = SnapshotInputs(model=model, files=files, options=options)
    try:
        ref = resolve(model)
        files = host.files(ref, draft=options.draft)
        loaded = {"model": ref.name, "system": files.system_prompt}
        inputs = msgspec.structs.replace(inputs, files=files, **loaded)
        if why_not := reason_not_to_build(host.config, inputs):
            return builds.not_built(inputs.name, why_not, inputs.warm_command)
        began = time.monotonic()
        details = build(inputs, host.config.snapshots, lambda _stage, _fraction: None)
    except EdgeInferError as error:
        return builds.not_built(inputs.name, error.message, inputs.warm_command)
    took = f"{time.monotonic() - began:.1f} s"
    return f"{details.name}: built in {took}, {format_bytes(details.disk_bytes)} on disk"


def main() -> None:
    """Run one background build at idle priority; if another build at low priority runs, wait for it.

    If another build is waiting already, this process exits: a later cold start will request its
    snapshot again.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    process.use_lowest_priority()
    folder = paths.private_dir(paths.state_dir())
    with locked(folder / _WAITING_LOCK, sys.exit) as waiting, locked(folder / BACKGROUND_LOCK):
        fcntl.flock(waiting, fcntl.LOCK_UN)
        outcome = build_if_useful(sys.argv[1], msgspec.json.decode(sys.argv[2], type=LoadOptions))
        builds.log(outcome)


if __name__ == "__main__":
    main()
