"""The pool's record of one model that is loading or loaded, and what /status says about it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import msgspec

from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import ReplicasInfo
from edgeinfer.server.wire_types import Reply

Where = Literal["process", "worker"]


class LoadedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded engine, and how it was loaded.

    `where` is "worker" if the engine runs in another process. `how` is "resumed" (from a snapshot),
    "cold", or "held" (the process already had the engine). `stages_ms` has the time (ms) from exec to
    each stage of the process's start, as in `host.ProcessStart`.
    """

    engine: Engine
    where: Where = "process"
    how: str = "cold"
    stages_ms: dict[str, float] = {}


class LoadingReply(Reply, frozen=True, kw_only=True):
    """A model that is being loaded. `progress` is 0 to 1, or null if unknown."""

    model: str
    stage: str
    progress: float | None


class LoadedReply(Reply, frozen=True, kw_only=True):
    """A model that is loading or loaded.

    `where` is "process" (the endpoint's), "worker" (another process), or "" while the model is loading.
    `in_use` is the number of requests that use the model. `expires_in_s` is null while a request uses
    the model, and if it stays loaded forever. `replicas` is null unless the model may have several
    processes.
    """

    id: str
    state: str
    where: str
    in_use: int
    expires_in_s: float | None
    size_bytes: int
    load_ms: float
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    replicas: ReplicasInfo | None = None


class ModelEntry:
    """The pool's record of a model that is loading or loaded."""

    def __init__(self, name: str, need_bytes: int) -> None:
        self.name = name
        self.need_bytes = need_bytes
        self.loaded: LoadedEngine | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.users = 0
        self.last_used = time.monotonic()
        self.expiry: asyncio.TimerHandle | None = None
        self.stage = "waiting for memory"
        self.fraction: float | None = None

    def report(self, stage: str, fraction: float | None) -> None:
        """Set stage and progress, without a lock: a reader may see the previous stage's progress."""
        self.stage, self.fraction = stage, fraction

    def describe(self, now: float) -> LoadedReply:
        """Describe the model for /status, without replicas. `now` is the event loop's time() (s)."""
        described: dict[str, Any] = {}
        if self.loaded is not None:
            info = self.loaded.engine.info
            described = msgspec.to_builtins(info)
            described["lora"] = [{"name": a.name, "scale": a.scale} for a in info.lora]
        return LoadedReply(
            id=self.name,
            state="loading" if self.loaded is None else "loaded",
            where="" if self.loaded is None else self.loaded.where,
            in_use=self.users,
            expires_in_s=None if self.expiry is None else max(0.0, self.expiry.when() - now),
            size_bytes=self.need_bytes,
            load_ms=described.get("load_ms", 0.0),
            info=described,
        )
