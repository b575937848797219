"""Load models on demand, once each; close them when idle or when another needs the room.

Everything here runs on the event loop; loading and closing run in threads. A request waits for its own
model only: loads of different models run side by side when memory allows. How a model comes to be
loaded is somebody else's: `load` is passed in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec

from edgeinfer.errors import EdgeInferError, OutOfMemoryError, UnknownModelError
from edgeinfer.machine import read_memory
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import EngineInfo
from edgeinfer.server.core.aliases import DEFAULT, Aliases
from edgeinfer.server.core.model_names import spellings
from edgeinfer.server.core.wire import Reply

Progress = Callable[[str, float | None], None]
Where = Literal["process", "worker"]

#: Left free for the page cache, the endpoint itself and everybody else.
_RESERVE_BYTES = 512 << 20
#: Models that are being unloaded when the endpoint ends have this long.
_CLOSE_S = 5.0


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
    """A model in memory. `expires_in_s` is null while it is kept for ever or in use."""

    id: str
    state: str
    where: str
    in_use: int
    expires_in_s: float | None
    size_bytes: int
    load_ms: float
    info: dict[str, Any] = msgspec.field(default_factory=dict)


class _Slot:
    """One model that is loading or loaded."""

    def __init__(self, name: str, need_bytes: int) -> None:
        self.name = name
        self.need_bytes = need_bytes
        self.loaded: Loaded | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.users = 0
        self.last_used = time.monotonic()
        self.keep_alive_s = 0.0
        self.expiry: asyncio.TimerHandle | None = None
        self.stage = "waiting for memory"
        self.fraction: float | None = None

    def report(self, stage: str, fraction: float | None) -> None:
        """Called from the loading thread; two plain assignments need no lock."""
        self.stage, self.fraction = stage, fraction


class Lease:
    """A request's hold on a loaded model. While it is held the model is not unloaded."""

    def __init__(self, models: Models, slot: _Slot, keep_alive_s: float) -> None:
        self._models = models
        self._slot = slot
        self._keep_alive_s = keep_alive_s
        self._held = True

    @property
    def engine(self) -> Engine:
        assert self._slot.loaded is not None
        return self._slot.loaded.engine

    @property
    def model(self) -> str:
        return self._slot.name

    @property
    def in_worker(self) -> bool:
        """Whether a call of the engine waits for another process."""
        return self._slot.loaded is not None and self._slot.loaded.where == "worker"

    def failed(self) -> None:
        """The engine died: the next request gets a fresh one."""
        self._models.discard(self._slot)

    def release(self) -> None:
        """Idempotent."""
        if self._held:
            self._held = False
            self._models.released(self._slot, self._keep_alive_s)


class Models:
    """The loaded models, and the one way to get at them."""

    def __init__(
        self,
        sources: Sources,
        *,
        default: str,
        keep_alive_s: float,
        room_s: float = 60.0,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.default = default
        self._aliases = Aliases(aliases or {})
        self._sources = sources
        self._keep_alive_s = keep_alive_s
        self._room_s = room_s
        self._slots: dict[str, _Slot] = {}
        self._sizes: dict[str, int] = {}
        self._closing: dict[str, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()
        self._threads = ThreadPoolExecutor(8, "models")
        self._tasks: set[asyncio.Task[None]] = set()
        self.last_error = ""

    # --- asking

    def resolve(self, name: str | None) -> str:
        """Name the model that `name` means, or the default, never a path. Raises UnknownModelError.

        An exact alias goes before a model's own name, which goes before a pattern. A name may be
        spelled as clients of Ollama do.
        """
        if name is None:
            return self.default
        found = spellings(name)
        alias = next((self._aliases.exact[one] for one in found if one in self._aliases.exact), None)
        wanted = found if alias is None else (alias,)
        for meant in wanted:
            if meant in (DEFAULT, self.default) or meant in self._slots:
                return self._named(meant)
        here = {DEFAULT, self.default, *self._slots, *(p.name for p in self._sources.pulled())}
        by_pattern = None if alias else self._aliases.by_pattern(name)
        for meant in wanted if by_pattern is None else (*wanted, by_pattern):
            if meant in here:
                return self._named(meant)
        missing = alias or by_pattern or found[1]
        said = f" ('{name}' is an alias of it)" if alias or by_pattern else ""
        raise UnknownModelError(
            f"The model '{missing}' is not here{said}",
            hint=f"`edgeinfer pull {missing}`, or GET /v1/models",
        )

    def _named(self, meant: str) -> str:
        return self.default if meant == DEFAULT else meant

    def is_loaded(self, name: str) -> bool:
        slot = self._slots.get(name)
        return slot is not None and slot.loaded is not None

    def state(self, name: str) -> str:
        """cold, loading or loaded."""
        slot = self._slots.get(name)
        if slot is None:
            return "cold"
        return "loading" if slot.loaded is None else "loaded"

    def stage(self, name: str) -> tuple[str, float | None]:
        """What loading does now; ("", None) when it is not loading."""
        slot = self._slots.get(name)
        return ("", None) if slot is None or slot.loaded else (slot.stage, slot.fraction)

    def loading(self) -> list[LoadingModel]:
        return [
            LoadingModel(model=s.name, stage=s.stage, progress=s.fraction)
            for s in self._slots.values()
            if s.loaded is None
        ]

    def engines(self) -> list[tuple[str, Engine]]:
        return [(s.name, s.loaded.engine) for s in self._slots.values() if s.loaded is not None]

    def info(self, name: str) -> EngineInfo | None:
        """What is known of a model while it is loaded."""
        slot = self._slots.get(name)
        return None if slot is None or slot.loaded is None else slot.loaded.engine.info

    def pulled(self) -> list[Pulled]:
        """Every model a request may name, the default first, and every alias of one."""
        listed = list(self._sources.pulled())
        if all(pulled.name != self.default for pulled in listed):
            listed.append(Pulled(name=self.default))
        own = {pulled.name: pulled for pulled in listed}
        for alias, target in self._aliases.exact.items():
            model = own.get(self._named(target))
            if model is not None and alias not in own:
                listed.append(msgspec.structs.replace(model, name=alias, alias_of=model.name))
        return sorted(listed, key=lambda pulled: (pulled.name != self.default, pulled.name))

    def report(self) -> list[LoadedModel]:
        now = asyncio.get_running_loop().time()
        return [_describe(slot, now) for slot in self._slots.values()]

    # --- holding

    async def acquire(self, name: str, keep_alive_s: float | None = None) -> Lease:
        """Hold `name`, loading it if needed. Raises OutOfMemoryError, and as loading does."""
        slot = self._slots.get(name) or self._start(name)
        slot.users += 1
        if slot.expiry is not None:
            slot.expiry.cancel()
            slot.expiry = None
        try:
            if slot.loaded is None:
                await asyncio.shield(slot.ready)
        except BaseException:
            self.released(slot, self._keep_alive_s)
            raise
        return Lease(self, slot, self._keep_alive_s if keep_alive_s is None else keep_alive_s)

    async def unload(self, name: str) -> Literal["unloaded", "unloading", "not loaded"]:
        """Unload now if idle, else as soon as its requests end."""
        slot = self._slots.get(name)
        if slot is None:
            return "not loaded"
        if slot.users or slot.loaded is None:
            slot.keep_alive_s = 0.0
            del self._slots[name]  # requests from now on load it afresh
            return "unloading"
        await self._unload(slot)
        return "unloaded"

    def released(self, slot: _Slot, keep_alive_s: float) -> None:
        slot.users -= 1
        slot.last_used = time.monotonic()
        self._changed.set()
        if slot.users or slot.loaded is None:
            return
        slot.keep_alive_s = keep_alive_s
        detached = self._slots.get(slot.name) is not slot
        if detached or keep_alive_s == 0:
            self._spawn(self._unload(slot))
        elif keep_alive_s > 0:
            slot.expiry = asyncio.get_running_loop().call_later(keep_alive_s, self._expire, slot)

    def discard(self, slot: _Slot) -> None:
        """Forget a model whose engine died."""
        if self._slots.get(slot.name) is slot:
            del self._slots[slot.name]

    async def close(self) -> None:
        """Unload everything. Requests must have ended."""
        for slot in list(self._slots.values()):
            if slot.loaded is not None:
                await self._unload(slot)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_CLOSE_S)
        for task in list(self._tasks):
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- loading

    def _start(self, name: str) -> _Slot:
        slot = _Slot(name, self._need_bytes(name))
        slot.ready.add_done_callback(
            lambda ready: ready.cancelled() or ready.exception()
        )  # a load nobody waits for any more
        self._slots[name] = slot
        self._spawn(self._load(slot))
        return slot

    async def _load(self, slot: _Slot) -> None:
        try:
            await self._until_closed(slot)
            await self._make_room(slot)
            slot.stage = "loading"
            begun = time.perf_counter()
            loop = asyncio.get_running_loop()
            loaded = await loop.run_in_executor(
                self._threads, self._sources.load, slot.name, slot.report
            )
        except EdgeInferError as error:
            self.last_error = error.message
            self.discard(slot)
            slot.ready.set_exception(error)
            self._changed.set()
            return
        except asyncio.CancelledError:
            slot.ready.cancel()
            raise
        except Exception as error:  # noqa: BLE001  whatever a loader raises, its waiters must be told
            self.discard(slot)
            slot.ready.set_exception(error)
            return
        slot.loaded = loaded
        self._sources.loaded_hook(slot.name, loaded, time.perf_counter() - begun)
        info = loaded.engine.info
        kv_bytes = info.least_kv_bytes or info.kv_bytes  # an automatic context is cut to what is free
        self._sizes[slot.name] = slot.need_bytes = (
            info.weights_bytes + kv_bytes + info.compute_bytes or slot.need_bytes
        )
        slot.ready.set_result(None)
        self._changed.set()
        if slot.users == 0:
            slot.users = 1
            self.released(slot, self._keep_alive_s)

    async def _until_closed(self, slot: _Slot) -> None:
        """Wait for the model's last engine to write what it has read: the new one finds it then."""
        closing = self._closing.get(slot.name)
        if closing is not None:
            slot.stage = "writing what it has read"
            await asyncio.wait([closing])
            slot.stage = "waiting for memory"

    def _need_bytes(self, name: str) -> int:
        known = self._sizes.get(name)
        if known is not None:
            return known
        files = next((pulled.size_bytes for pulled in self._sources.pulled() if pulled.name == name), 0)
        return files + files // 4 + (256 << 20)

    async def _make_room(self, slot: _Slot) -> None:
        """Evict the least recently used until `slot` fits. Raises OutOfMemoryError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._room_s
        while not self._fits(slot):
            idle = [s for s in self._slots.values() if s.loaded is not None and s.users == 0]
            if idle:
                await self._unload(min(idle, key=lambda s: s.last_used))
                continue
            others = any(s is not slot for s in self._slots.values())
            if not others:
                # nothing of ours is in the way: let the loader decide, it knows better than an estimate
                return
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - loop.time()))
            except TimeoutError:
                raise OutOfMemoryError(
                    f"No memory for {slot.name} ({slot.need_bytes >> 20} MiB) while other models are "
                    f"in use"
                ) from None

    def _fits(self, slot: _Slot) -> bool:
        promised = sum(
            s.need_bytes
            for s in self._slots.values()
            if s.loaded is None and s is not slot and s.stage == "loading"
        )
        return slot.need_bytes + promised + _RESERVE_BYTES <= self._sources.available_bytes()

    # --- unloading

    def _expire(self, slot: _Slot) -> None:
        slot.expiry = None
        if slot.users == 0 and slot.loaded is not None:
            self._spawn(self._unload(slot))

    async def _unload(self, slot: _Slot) -> None:
        if slot.loaded is None:
            return
        loaded, slot.loaded = slot.loaded, None
        if slot.expiry is not None:
            slot.expiry.cancel()
        self.discard(slot)
        loop = asyncio.get_running_loop()
        closing = loop.run_in_executor(self._threads, loaded.engine.close)
        self._closing[slot.name] = closing
        try:
            await closing
        finally:
            if self._closing.get(slot.name) is closing:
                del self._closing[slot.name]
            self._changed.set()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _describe(slot: _Slot, now: float) -> LoadedModel:
    if slot.loaded is None:
        return LoadedModel(
            id=slot.name,
            state="loading",
            where="",
            in_use=slot.users,
            expires_in_s=None,
            size_bytes=slot.need_bytes,
            load_ms=0.0,
        )
    info = slot.loaded.engine.info
    expires = None if slot.expiry is None else max(0.0, slot.expiry.when() - now)
    return LoadedModel(
        id=slot.name,
        state="loaded",
        where=slot.loaded.where,
        in_use=slot.users,
        expires_in_s=expires,
        size_bytes=slot.need_bytes,
        load_ms=info.load_ms,
        info=msgspec.to_builtins(info),
    )
