"""The host of an app: the object that gives the verb a resumed, a newly loaded or a worker's engine."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from edgeinfer import typed_options
from edgeinfer.config.config_file import Config, LoadConfig
from edgeinfer.config.load_options import LOAD_OPTIONS, snapshot_options
from edgeinfer.errors import (
    DumpError,
    EdgeInferError,
    EngineClosedError,
    InterruptedByUser,
    UsageError,
    from_fields,
    to_fields,
)
from edgeinfer.host import EngineHost, LoadProgress, ProcessStart, TakenSnapshot
from edgeinfer.launcher import builds, messages, selection
from edgeinfer.launcher.messages import LaunchRequest
from edgeinfer.platform import paths, process_metadata
from edgeinfer.platform.disk import is_locked
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import Adapter, LoadOptions, ModelFiles
from edgeinfer.snapshot_format import criu, storage
from edgeinfer.snapshots import inputs
from edgeinfer.snapshots.inputs import ProcessDescription, SnapshotInputs
from edgeinfer.snapshots.restore.loaded_model import LoadedModel

if TYPE_CHECKING:
    from edgeinfer.models.reference import ModelRef
    from edgeinfer.runtime.engine import LlamaEngine
    from edgeinfer.workers.remote_engine import RemoteEngine


#: Idle time (s) after which a chat or endpoint that started cold requests a snapshot for later starts,
#: and interval (s) of the checks for idleness.
_IDLE_S, _CHECK_S = 15.0, 3.0


class AppHost(EngineHost):
    """The host of an app: it gives the verb its engines.

    A process that was resumed with one model starts a worker process for each other model.
    """

    def __init__(
        self,
        start: ProcessStart,
        link: socket.socket,
        loaded: LoadedModel | None,
        listeners: tuple[socket.socket, ...] = (),
        *,
        request: LaunchRequest = LaunchRequest(role="verb", argv=("serve",)),  # noqa: B008  read only
    ) -> None:
        super().__init__(start, exec_ns=request.exec_ns)
        self._link = link
        self._request = request
        self._is_worker = request.role == "worker"
        #: False for `run` and `batch`: they request a snapshot only if the same options are used twice.
        self._long_lived = self._is_worker or request.argv[0] in ("chat", "serve")
        # a chat shows the reason of a cold start in its status line; a worker sends it to its client,
        # because its stderr may be the terminal on which a chat draws
        is_silent = self._is_worker or request.argv[:1] == ("chat",)
        self._hint = "" if is_silent else request.hint
        self._named = request.is_named
        self._loaded = loaded
        self.listeners = listeners
        self._asking = threading.Lock()
        self._note = process_metadata.ProcessRecord(process_metadata.DESCRIPTION)
        self._description: ProcessDescription | None = None
        self._url = ""

    @property
    def config(self) -> Config:
        """The user's configuration. Raises ConfigError.

        If the launch named a snapshot, that snapshot's model is the default, and the table `[load]` is
        ignored.
        """
        config = super().config
        if self._named:
            config = msgspec.structs.replace(config, default_model=self.loaded_model, load=LoadConfig())
        return config

    @property
    def loaded_model(self) -> str:
        """Name of the model with which this process was resumed; "" after a cold start or `close`."""
        return self._loaded.model if self._loaded and self._loaded.is_open else ""

    def files(
        self, model: str | ModelRef, progress: LoadProgress | None = None, *, draft: str = ""
    ) -> ModelFiles:
        """Return the files of a model. Raises the errors of `EngineHost.files`.

        The resumed model's files are not checked again, because the launcher has compared them with the
        snapshot's manifest.
        """
        if self._loaded is not None and model == self.loaded_model:
            return self._loaded.description.files
        return super().files(model, progress, draft=draft)

    def engine(
        self, model: str | ModelRef, options: LoadOptions, progress: LoadProgress | None = None
    ) -> Engine:
        """Return an engine with this model and these options.

        After a cold start, this process loads the model. After a resume, it returns the resumed engine
        if that has the model and the options. If not, it starts a worker process and returns the
        worker's engine, or loads the model if it is a worker itself. Raises the errors of loading,
        UsageError if the launch named a snapshot of another model, EngineClosedError if the new worker
        ends too early.
        """
        self._note_stage("load")
        # if the resumed model is requested, its name needs no look-up, which would import the catalogue
        if isinstance(model, str) and model != self.loaded_model:
            from edgeinfer.models.reference import resolve

            model = resolve(model)
        name = model if isinstance(model, str) else model.name
        is_served = self._loaded is not None and self._loaded.serves(
            name, options, is_named=self._named
        )
        if self._is_worker and self._loaded is not None and not is_served:
            # a worker loads the model itself: if it started a second worker, that one would resume the
            # same snapshot
            self._loaded.engine.close()
            self._loaded = None
            reason = f"the snapshot does not serve {name}"
            self.start = msgspec.structs.replace(self.start, how="cold", snapshot="", reason=reason)
        if self._loaded is None:
            files = self.files(model, progress, draft=options.draft)
            engine = self._load_and_describe(name, files, options, progress)
            self._ask_for_warming(engine, name, options)
            return engine
        if is_served:
            engine = self._loaded.engine_for(options)
            self._describe(engine, self._loaded.description)
            self._prepare(engine, self._loaded.description.files, options)
            return engine
        if self._named:
            problem = f"the snapshot {self.start.snapshot} is of {self._loaded.model}, not of {name}"
            raise UsageError(problem, hint="leave the model out, or name a snapshot of that model")
        # this process was resumed with another model, so a worker has the requested one: report how the
        # worker started
        remote = self.worker(name, options, progress)
        how = {field: getattr(remote.start, field) for field in ("how", "reason", "snapshot")}
        self.start = msgspec.structs.replace(self.start, **how)
        self._has_other_hint(name, options)
        self._say_cold_start(storage.snapshot_name(name, snapshot_options(options)))
        self._note_stage("ready")
        return remote

    def _load_and_describe(
        self, model: str, files: ModelFiles, options: LoadOptions, progress: LoadProgress | None
    ) -> Engine:
        to_build = SnapshotInputs(
            model=model,
            files=files,
            options=options,
            system=files.system_prompt,
            stamps=inputs.stamps_of(files, options),
        )
        if self._has_other_hint(model, options):
            reason = f"the launcher expected the model {self._request.expected_model}"
            try:
                selection.find(model, snapshot_options(options))
            except EdgeInferError as error:
                reason = error.message
            self.start = msgspec.structs.replace(self.start, reason=reason)
        engine = self._load(files, options, progress)
        self._say_cold_start(to_build.name)
        self._describe(engine, inputs.describe(engine, to_build))
        return engine

    def _has_other_hint(self, model: str, options: LoadOptions) -> bool:
        """Return whether the launcher expected another model; if so, make the hint about `model`."""
        expected = self._request.expected_model
        if not self._hint or storage.model_prefix(expected) == storage.model_prefix(model):
            return False
        if self._hint != criu.FILTERED:
            self._hint = selection.LaunchChoice(model, snapshot_options(options), "auto").warm_hint
        return True

    def _say_cold_start(self, snapshot: str) -> None:
        if not self._hint or self.start.how != "cold":
            return
        from edgeinfer.snapshots.registry import build_lock  # only a printed hint needs this import

        is_building = is_locked(build_lock(paths.snapshots_dir(), snapshot))
        hint = "a snapshot is being built" if is_building else self._hint
        if not is_building and (failure := builds.failures().get(snapshot)):
            hint += f"; not built in the background: {failure[0]}; see {builds.log_file()}"
        sys.stderr.write(f"edgeinfer: cold start: {self.start.reason} ({hint})\n")

    def _describe(self, engine: LlamaEngine, description: ProcessDescription) -> None:
        description = description.resumed_from(self.start.snapshot)
        self._publish(msgspec.structs.replace(description, is_worker=self._is_worker))
        engine.on_new_adapters = self._has_adapters

    def _has_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        if self._description is not None:
            self._publish(self._description.with_adapters(adapters))

    def listens_at(self, url: str) -> None:
        self._url = url
        self._publish(self._description)

    def _publish(self, description: ProcessDescription | None) -> None:
        self._description = description
        if description is not None:
            self._note.write(msgspec.structs.replace(description, url=self._url))

    def take_snapshot(self, model: str, name: str) -> TakenSnapshot:
        """Let the launcher run `snapshots take` for this process, and return the result at its end.

        Raises the error that the command prints, DumpError if it ends without one.
        """
        arguments = (f"--model={model}", *([f"--name={name}"] if name else ()))
        outcome = read_build(self._tell_with_pipe(messages.TakeSnapshot(argv=arguments)), None)
        if outcome.result is None:
            raise from_fields(outcome.error)
        snapshot, was_built = outcome.result["snapshot"], outcome.result["was_built"]
        return TakenSnapshot(
            name=snapshot["name"],
            disk_bytes=snapshot["disk_bytes"],
            was_built=was_built,
            seconds=outcome.result["wall_s"],
        )

    def worker(
        self, model: str, options: LoadOptions, progress: LoadProgress | None = None
    ) -> RemoteEngine:
        """Start a process with an engine for `model`, resumed if possible; closing the engine ends it.

        Raises the errors of loading, and EngineClosedError if the process ends before it is ready.
        """
        from edgeinfer.workers.remote_engine import RemoteEngine  # slow import in a cold process: 5 ms

        request = messages.StartWorker(
            model=model, options=msgspec.json.encode(options), requested=snapshot_options(options)
        )
        with self._asking:
            messages.send(self._link, request)
            received = messages.receive(self._link)
        if received is None:
            problem = f"no process can be started for {model}: edgeinfer's launcher process has ended"
            raise EngineClosedError(problem)
        answer, fds = received
        if isinstance(answer, messages.Failed):
            raise from_fields(answer.error)
        return RemoteEngine(socket.socket(fileno=fds[0]), progress)

    def warm_models(self) -> frozenset[str]:
        from edgeinfer.snapshots.registry import list_snapshots  # only the model picker needs this

        return frozenset(snapshot.details.model for snapshot in list_snapshots() if snapshot.fresh)

    def warm(
        self,
        model: str,
        options: LoadOptions,
        progress: LoadProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Let the launcher run `edgeinfer warm`, and wait for the end.

        Raises InterruptedByUser after `cancel` was set, otherwise the error that the command prints.
        """
        output = self._tell_with_pipe(messages.WarmNow(argv=warm_argv(model, options)))
        follow_build(model, output, progress, cancel, lambda: self._tell(messages.StopWarming()))

    def _ask_for_warming(self, engine: Engine, model: str, options: LoadOptions) -> None:
        """Tell the launcher which snapshot would have avoided this cold start.

        The launcher builds it after the launch, or once a long-lived process has been idle.
        """
        if not self.config.snapshots.auto_warm or self.start.how != "cold":
            return
        if not self._long_lived and self._is_first_use(model, options):
            return
        request = messages.WantSnapshot(model=model, options=msgspec.json.encode(options))
        self._tell(request)
        if self._long_lived:
            request.now = True
            asking = (engine, lambda: self._tell(request))
            threading.Thread(target=_call_when_idle, args=asking, name="rest", daemon=True).start()

    def _is_first_use(self, model: str, options: LoadOptions) -> bool:
        """Return whether options that are not configured are used for the first time; log that use."""
        requested = snapshot_options(options)
        usual = snapshot_options(typed_options.load_options(argparse.Namespace(), self.config.load))
        name = storage.snapshot_name(model, requested)
        if requested == usual or name in storage.generations():
            return False
        note = f"{name}: not built before these options are used again"
        if builds.was_logged(note):
            return False
        with contextlib.suppress(OSError, EdgeInferError):  # the disk is full, or the folder unsafe
            builds.log(note)
        return True

    def _tell(self, message: messages.LauncherMessage, fds: Sequence[int] = ()) -> None:
        with self._asking, contextlib.suppress(OSError):
            messages.send(self._link, message, fds)

    def _tell_with_pipe(self, message: messages.LauncherMessage) -> int:
        """Send a message with the writing end of a new pipe; return the reading end's descriptor."""
        read_fd, write_fd = os.pipe()
        self._tell(message, [write_fd])
        os.close(write_fd)
        return read_fd


def _call_when_idle(engine: Engine, action: Callable[[], None]) -> None:
    """Call `action` once the engine has been idle for `_IDLE_S`, unless it is closed before."""
    idle_s, before = 0.0, (0, 0)
    while idle_s < _IDLE_S:
        time.sleep(_CHECK_S)
        try:
            now = engine.metrics()
        except EngineClosedError:
            return
        done = (now.requests_total, now.prompt_tokens_total)
        is_resting = done == before and not now.running + now.queued
        idle_s = idle_s + _CHECK_S if is_resting else 0.0
        before = done
    action()


class BuildEnd(msgspec.Struct, frozen=True):
    """The result or error of `warm` or `snapshots take`: the last JSON line that the command prints.

    If `result` is None, `error` has the fields of `errors.to_fields`.
    """

    result: dict[str, Any] | None = None
    error: dict[str, str] = {}


def read_build(output: int, progress: LoadProgress | None) -> BuildEnd:
    """Read a build's output (a descriptor) to its end, and close it; return the last JSON line.

    `progress` gets each other line as a stage. Without JSON, the returned error is a DumpError.
    """
    last = "the build ended without a message"
    outcome = None
    with open(output, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("{"):
                with contextlib.suppress(msgspec.MsgspecError):
                    outcome = msgspec.json.decode(line, type=BuildEnd)
            elif line.strip():
                last = line.strip().removesuffix("…").strip()
                if progress is not None:
                    progress(last, None)
    return outcome or BuildEnd(error=to_fields(DumpError(last)))


def warm_argv(model: str, options: LoadOptions) -> tuple[str, ...]:
    """Return the arguments of `edgeinfer warm` for a model and all its load options."""
    values = {option.flag: getattr(options, option.field) for option in LOAD_OPTIONS if option.flag}
    return (model, "--json", *(f"{flag}={value}" for flag, value in values.items() if value != ""))


def follow_build(
    model: str,
    output: int,
    progress: LoadProgress | None,
    cancel: threading.Event | None,
    stop: Callable[[], None],
) -> None:
    """Read the output of `edgeinfer warm` (a descriptor) to its end; call `stop` once `cancel` is set.

    Raises InterruptedByUser after a cancellation, otherwise the error in the output; DumpError if the
    output has neither a result nor an error.
    """
    from edgeinfer.models.progress import Job  # slow import: only the model picker follows a build

    with Job(cancel=cancel).call_on_cancel(stop):
        outcome = read_build(output, progress)
    if cancel is not None and cancel.is_set():
        raise InterruptedByUser("stopped; the unfinished snapshot was deleted")
    if outcome.result is None:
        reason = outcome.error.get("message", "")
        hint = {"hint": f"run `edgeinfer warm {model}`"}
        raise from_fields(hint | outcome.error | {"message": f"{model} was not warmed: {reason}"})
