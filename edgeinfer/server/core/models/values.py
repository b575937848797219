"""What the pool of models is given and what it says: plain values, and who changes its models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from edgeinfer.models.progress import OnProgress
from edgeinfer.platform.machine import read_memory
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import ReplicasInfo
from edgeinfer.server.core.wire import Reply

Progress = Callable[[str, float | None], None]
Where = Literal["process", "worker"]


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose files are here, or another name for one. `created` is Unix time."""

    name: str
    size_bytes: int = 0
    sha256: str = ""
    created: int = 0
    alias_of: str = ""
    n_ctx_train: int = 0
    architecture: str = ""
    quantization: str = ""
    n_params: int = 0


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a loader gives back. Stages are in milliseconds.

    `how` is "resumed", "cold" or "held" (it was in this process already).
    """

    engine: Engine
    where: Where = "process"
    how: str = "cold"
    stages_ms: dict[str, float] = {}


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager is built from. `load` runs in a thread and reports progress from it."""

    load: Callable[[str, Progress], Loaded]
    pulled: Callable[[], Sequence[Pulled]]
    available_bytes: Callable[[], int] = lambda: read_memory().available_bytes
    loaded_hook: Callable[[str, Loaded, float], None] = lambda name, loaded, seconds: None


class LoadingModel(Reply, frozen=True, kw_only=True):
    """`progress` is 0 to 1, or null while unknown."""

    model: str
    stage: str
    progress: float | None


class LoadedModel(Reply, frozen=True, kw_only=True):
    """A model in memory. `expires_in_s` is null while it is kept for ever or in use.

    `replicas` tells of the processes it runs in, where there may be several.
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


class Shelf(Protocol):
    """Changes which models are here. Every call blocks, and raises what its command raises."""

    def pull(self, text: str, report: OnProgress, cancel: threading.Event) -> None:
        """Fetch what a name or a source means."""

    def create(self, name: str, path: str, report: OnProgress, cancel: threading.Event) -> None:
        """Name a GGUF file of this machine, which stays where it is."""

    def copy(self, source: str, name: str) -> None:
        """Give a model another name beside its own."""

    def remove(self, name: str) -> None:
        """Remove a model with its snapshots and what it has read."""
