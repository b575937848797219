"""The host: the object that gives a verb its engine and connects the verb to the launcher.

The host loads the model in this process, returns the engine of the resumed snapshot, or starts a
worker; the verb sees no difference. The host also knows how this process started.
"""

from __future__ import annotations

import atexit
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from edgeinfer.config.config_file import Config, load_config
from edgeinfer.errors import SnapshotsUnavailableError, SnapshotUnsafeError
from edgeinfer.platform import paths, process_metadata
from edgeinfer.runtime.events import CacheReport
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import LoadOptions, ModelFiles

if TYPE_CHECKING:
    from edgeinfer.models.reference import ModelRef
    from edgeinfer.runtime.engine import LlamaEngine

_log = logging.getLogger("edgeinfer.blocks")
#: If loading takes longer (s), a verb without a progress display writes the loading stages to stderr.
_MOMENT_S = 0.5

#: Callback, in any thread. Arguments: the loading stage (a text) and its done fraction (None: unknown).
LoadProgress = Callable[[str, float | None], None]


class ProcessStart(msgspec.Struct, frozen=True, kw_only=True):
    """How this process started: resumed from the snapshot `snapshot`, or cold (`reason` says why).

    `stages_ms` has the time (ms) from exec at which each stage began: `launcher`, `restore`,
    `running` and `request` if there is a launcher; then `load` (an engine was requested) and
    `ready` (the engine can compute).
    """

    how: Literal["resumed", "cold"] = "cold"
    reason: str = ""
    snapshot: str = ""
    stages_ms: dict[str, float] = {}

    @property
    def ready_ms(self) -> float:
        """Time (ms) from exec to the last stage, normally `ready`; 0 if there is none."""
        return max(self.stages_ms.values(), default=0.0)


class TakenSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `take_snapshot`. `was_built` is False if an equal snapshot already existed.

    `seconds` is the time that the call took.
    """

    name: str
    disk_bytes: int
    was_built: bool
    seconds: float


def _slow_stages_on_stderr() -> LoadProgress:
    """Return a callback that writes a stage of loading to stderr once loading takes over 0.5 s."""
    shown: set[str] = set()
    began = time.monotonic()

    def progress(stage: str, _fraction: float | None) -> None:
        if stage not in shown and time.monotonic() - began > _MOMENT_S:
            shown.add(stage)
            sys.stderr.write(f"edgeinfer: {stage}\n")

    return progress


class EngineHost:
    """The host of a process without a launcher: it loads engines in this process.

    `AppHost`, a subclass, is the host of a process that the launcher has started or resumed.
    """

    _is_worker = False

    def __init__(
        self, start: ProcessStart | None = None, config: Config | None = None, exec_ns: int = 0
    ) -> None:
        self.start = start or ProcessStart(reason="started without the launcher")
        #: Listening sockets that the launcher has opened for `serve`; empty without a launcher.
        self.listeners: tuple[socket.socket, ...] = ()
        self._config = config
        self._cache_report = process_metadata.ProcessRecord(process_metadata.CACHE_REPORT)
        #: Publishes the ReplicasInfo of a model for `edgeinfer ps`.
        self.replicas = process_metadata.ProcessRecord(process_metadata.REPLICAS)
        # Python has no call for the time of exec. This process has not waited for anything yet, so its
        # CPU time is its age
        self._exec_ns = exec_ns or time.monotonic_ns() - time.process_time_ns()

    @property
    def config(self) -> Config:
        """The user's configuration, read on first use. Raises ConfigError."""
        if self._config is None:
            self._config = load_config(on_removed=self._warn_of_key)
        return self._config

    def _warn_of_key(self, message: str) -> None:
        """Write a warning about config.toml to stderr; not in a worker, whose parent has written it."""
        if not self._is_worker:
            sys.stderr.write(f"warning: {message}\n")

    @property
    def loaded_model(self) -> str:
        """Model of the snapshot from which this process was resumed; "" after a cold start."""
        return ""

    def files(
        self, model: str | ModelRef, progress: LoadProgress | None = None, *, draft: str = ""
    ) -> ModelFiles:
        """Find the files of a model, and of its `draft` model (name or path; "": the catalogue's).

        The first use of a file in another program's model store takes long, because the file is hashed;
        `progress` (by default, stderr) reports that stage.
        Raises UnknownModelError, ModelNotPulledError, InvalidGgufError, ChecksumError, ModelLoadError.
        """
        if isinstance(model, str):
            # imported late, because a resumed process does not need the catalogue
            from edgeinfer.models.reference import resolve

            model = resolve(model)
        files = model.files(progress or _slow_stages_on_stderr(), draft=draft)
        if draft and files.draft_paths:
            from edgeinfer.models.fits import refuse_unfit_draft

            refuse_unfit_draft(files)
        return files

    def engine(
        self, model: str | ModelRef, options: LoadOptions, progress: LoadProgress | None = None
    ) -> Engine:
        """Load `model` in this process. Raises ModelLoadError, OutOfMemoryError, errors of `files`."""
        self._note_stage("load")
        return self._load(self.files(model, progress, draft=options.draft), options, progress)

    def _load(
        self, files: ModelFiles, options: LoadOptions, progress: LoadProgress | None
    ) -> LlamaEngine:
        from edgeinfer.runtime.engine import load_engine  # slow import (170 ms)

        engine = load_engine(files, options, progress)
        self._prepare(engine, files, options)
        return engine

    def _prepare(self, engine: LlamaEngine, files: ModelFiles, options: LoadOptions) -> None:
        """Give a loaded or resumed engine the prefix cache, daily counts and GPUs of this launch."""
        self.open_prefix_cache(engine)
        self.record_drift(engine, files, options)
        self.attach_devices(engine, options)
        self._note_stage("ready")

    def attach_devices(self, engine: LlamaEngine, options: LoadOptions) -> None:
        """Let `engine` move layers to this launch's GPUs. Until then, the CPU computes all of them."""
        from edgeinfer.runtime.llama.backends import OffloadRequest

        engine.attach_devices(
            OffloadRequest(layers=options.gpu_layers, devices=self.config.gpu.devices)
        )

    def open_prefix_cache(self, engine: LlamaEngine) -> None:
        """Give `engine` the on-disk prefix cache, if the configuration enables it.

        If the cache cannot be opened, the log gets a warning, and the engine works without it.
        """
        if not self.config.blocks.enabled:
            return
        from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
        from edgeinfer.runtime.prefix_cache.retention import CacheLimits

        limits = CacheLimits(max_bytes=int(self.config.blocks.max_total_gib * (1 << 30)))
        try:
            engine.open_prefix_cache(BlockStore(paths.blocks_dir(), limits, _log.warning))
        except (OSError, SnapshotUnsafeError) as error:
            _log.warning("the on-disk prefix cache is off: %s", error)
            return
        atexit.register(engine.store_blocks_before_exit)

    def record_drift(self, engine: LlamaEngine, files: ModelFiles, options: LoadOptions) -> None:
        """Let the engine's requests and answers be counted by day, for `edgeinfer drift`.

        Nothing is counted if the configuration or `options` forbid it.
        """
        if options.is_counted and self.config.drift.record:
            from edgeinfer.usage.daily_counts import DriftRecorder, drift_path

            recorder = DriftRecorder(drift_path(), files.name, files.sha256)
            engine.add_observer(recorder)
            atexit.register(recorder.close)

    def note_prompt(self, last: CacheReport) -> None:
        """Publish, for `edgeinfer ps`, how much of the latest prompt was cached."""
        self._cache_report.write(last)

    def _note_stage(self, stage: str) -> None:
        """Record when a stage is first reached; leave out the time before a load is retried."""
        stages = self.start.stages_ms
        now_ms = round((time.monotonic_ns() - self._exec_ns) / 1e6, 1)
        if stage == "load" and stage in stages and "ready" not in stages:
            self._exec_ns += int((now_ms - stages[stage]) * 1e6)
        elif stage not in stages:
            self.start = msgspec.structs.replace(self.start, stages_ms={**stages, stage: now_ms})

    def worker(self, model: str, options: LoadOptions, progress: LoadProgress | None = None) -> Engine:
        """Load `model` in a worker process; here, without a launcher, in this process.

        Raises what `engine` raises.
        """
        return self.engine(model, options, progress)

    def listens_at(self, url: str) -> None:
        """Publish the endpoint's URL for `edgeinfer ps`. Here, without a launcher, nothing is done."""

    def take_snapshot(self, model: str, name: str) -> TakenSnapshot:
        """Build a snapshot of the loaded `model` in another process, at low priority, and wait for it.

        If `name` is "", the model and its options give the name. Raises SnapshotError if that fails;
        SnapshotsUnavailableError if it is impossible, as here, without a launcher.
        """
        reason = self.start.reason or "the `edgeinfer` command did not start this process"
        raise SnapshotsUnavailableError(
            f"no snapshot can be taken: {reason}",
            hint=f"`edgeinfer warm {model}` builds one in another process",
        )

    def warm_models(self) -> frozenset[str]:
        """Return the names of the models with a snapshot that this machine can resume."""
        return frozenset()

    def warm(
        self,
        model: str,
        options: LoadOptions,
        progress: LoadProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Build a snapshot of `model` in another process.

        Raises InterruptedByUser once `cancel` is set, SnapshotError if building fails, and
        SnapshotsUnavailableError if it is impossible, as here, without a launcher.
        """
        reason = f": {self.start.reason}" if self.start.reason else ""
        problem = f"this process cannot build snapshots{reason}"
        raise SnapshotsUnavailableError(problem, hint=f"run `edgeinfer warm {model}`")
