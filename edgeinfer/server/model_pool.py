"""Load each model when a request needs it; unload it when it is idle or another model needs memory.

The pool is used on the event loop only; it loads and closes engines in threads. Different models load
concurrently if memory allows. The pool's argument `load` decides how a model is loaded.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Literal, Protocol

import msgspec

from edgeinfer.errors import ConfigError, EdgeInferError, OutOfMemoryError, UnknownModelError
from edgeinfer.host import LoadProgress
from edgeinfer.models import lookup
from edgeinfer.models.names import plain_name
from edgeinfer.models.progress import OnProgress
from edgeinfer.platform.machine import read_memory
from edgeinfer.platform.paths import LATEST
from edgeinfer.runtime.interface import Engine
from edgeinfer.runtime.options import Adapter, EngineInfo
from edgeinfer.server.model_entry import LoadedEngine, LoadedReply, LoadingReply, ModelEntry

#: Target in `[serve.aliases]` that means the endpoint's default model, as in `"claude-*" = "default"`.
DEFAULT = "default"
#: Memory (bytes) that stays free for the page cache, the endpoint itself and other processes.
_RESERVE_BYTES = 512 << 20
#: How long (s) an ending endpoint waits for loads and unloads that began earlier.
_CLOSE_S = 5.0


class Lease:
    """Keeps a model loaded until `release`, which the end of a `with` block calls."""

    def __init__(self, models: ModelPool, entry: ModelEntry, keep_alive_s: float) -> None:
        self._models = models
        self._entry = entry
        self._keep_alive_s = keep_alive_s
        self._held = True

    @property
    def engine(self) -> Engine:
        assert self._entry.loaded is not None
        return self._entry.loaded.engine

    @property
    def model(self) -> str:
        return self._entry.name

    @property
    def in_worker(self) -> bool:
        """Return whether the engine runs in another process, so that the engine's methods block."""
        return self._entry.loaded is not None and self._entry.loaded.where == "worker"

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the model. If its process has ended, the next request reloads it. Idempotent."""
        if self._held:
            self._held = False
            if self._entry.loaded is None or not self._entry.loaded.engine.is_open:
                self._models.discard(self._entry)
            self._models.end_use(self._entry, self._keep_alive_s)


class ModelPool:
    """The loaded models of an endpoint. Requests `acquire` a model and release the lease.

    `load(model, progress)` loads a model in a thread; `list_pulled()` lists the models on the disk.
    """

    def __init__(
        self,
        *,
        load: Callable[[str, LoadProgress], LoadedEngine],
        list_pulled: Callable[[], Sequence[AvailableModel]],
        available_bytes: Callable[[], int] = lambda: read_memory().available_bytes,
        default: str,
        keep_alive_s: float,
        memory_wait_s: float = 60.0,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.default = default
        self._aliases = Aliases(aliases or {})
        self._load_model = load
        self._list_pulled = list_pulled
        self._available_bytes = available_bytes
        self._keep_alive_s = keep_alive_s
        self._memory_wait_s = memory_wait_s
        self._entries: dict[str, ModelEntry] = {}
        self._sizes: dict[str, int] = {}
        self._closing: dict[str, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()
        self._threads = ThreadPoolExecutor(8, "models")
        self._tasks: set[asyncio.Task[None]] = set()
        self._adapters: dict[str, tuple[Adapter, ...]] = {}
        self._changing_adapters = asyncio.Lock()
        self.last_error = ""
        #: Called on the event loop after each load: model, engine, and how long (s) the load took.
        self.on_loaded: Callable[[str, LoadedEngine, float], None] = lambda model, loaded, seconds: None

    def resolve(self, name: str | None) -> str:
        """Return the model that a request means by `name`; None means the default model.

        `name` is compared with aliases first, then with models (in any spelling that `lookup.find`
        accepts), then with alias patterns. Raises UnknownModelError.
        """
        if name is None:
            return self.default
        alias = self._aliases.by_name(name)
        pattern = self._aliases.by_pattern(name) if alias is None else None
        for target in (name, pattern) if alias is None else (alias,):
            if target and (model := self._find(target)):
                return model
        missing = alias or pattern or name.removesuffix(LATEST)
        note = f" ('{name}' is an alias of it)" if alias or pattern else ""
        hint = where_to_get(missing, self._models())
        raise UnknownModelError(f"There is no model '{missing}'{note}", hint=hint)

    def _find(self, name: str) -> str | None:
        for spelled in (name, name.removesuffix(LATEST)):  # first without a search on the disk
            if spelled in (DEFAULT, self.default):
                return self.default
            if spelled in self._entries:
                return spelled
        model = lookup.find(name, self._models())
        return None if model is None else model.name

    def _models(self) -> list[AvailableModel]:
        """List the default model, loaded models, and models on the disk; a model may occur twice."""
        names = (self.default, *self._entries)
        return [*(AvailableModel(name=name) for name in names), *self._list_pulled()]

    def aliases_without_model(self) -> dict[str, str]:
        """Return name → model of the aliases whose model is not on this machine."""
        aliases = self._aliases.table.items()
        return {name: target for name, target in aliases if target and self._find(target) is None}

    def only_model(self) -> str | None:
        """Return the default model if every unknown name means this model; otherwise None.

        That is so if there is no other model, and no alias `*`.
        """
        is_lone = len({model.name for model in self._models()}) == 1 and not self._aliases.has_catch_all
        return self.default if is_lone else None

    def is_loaded(self, name: str) -> bool:
        return self.info(name) is not None

    def state(self, name: str) -> str:
        """Return the state of the model `name`: "cold", "loading" or "loaded"."""
        entry = self._entries.get(name)
        if entry is None:
            return "cold"
        return "loading" if entry.loaded is None else "loaded"

    def stage(self, name: str) -> tuple[str, float | None]:
        """Return the stage in which a model's loading is, and the stage's progress.

        The progress is 0 to 1, None if unknown. Return ("", None) if the model is not being loaded.
        """
        entry = self._entries.get(name)
        return ("", None) if entry is None or entry.loaded else (entry.stage, entry.fraction)

    def loading(self) -> list[LoadingReply]:
        return [
            LoadingReply(model=s.name, stage=s.stage, progress=s.fraction)
            for s in self._entries.values()
            if s.loaded is None
        ]

    def engines(self) -> list[tuple[str, Engine]]:
        return [(s.name, s.loaded.engine) for s in self._entries.values() if s.loaded is not None]

    def info(self, name: str) -> EngineInfo | None:
        entry = self._entries.get(name)
        return None if entry is None or entry.loaded is None else entry.loaded.engine.info

    def list_available(self) -> list[AvailableModel]:
        """List all names of models, aliases and loaded adapters, the default model first."""
        listed = list(self._list_pulled())
        if all(pulled.name != self.default for pulled in listed):
            listed.append(AvailableModel(name=self.default))
        by_name = {pulled.name: pulled for pulled in listed}
        for alias, target in self._aliases.exact.items():
            model = lookup.find(self.default if target == DEFAULT else target, by_name.values())
            if model is not None and alias not in by_name:
                listed.append(msgspec.structs.replace(model, name=alias, alias_of=model.name))
        listed += [
            AvailableModel(name=adapter.name, alias_of=model)
            for model, engine in self.engines()
            for adapter in engine.info.lora
            if adapter.name not in by_name
        ]
        return sorted(listed, key=lambda pulled: (pulled.name != self.default, pulled.name))

    def report(self) -> list[LoadedReply]:
        now = asyncio.get_running_loop().time()
        return [entry.describe(now) for entry in self._entries.values()]

    def owner_of_adapter(self, name: str) -> str | None:
        """Return the loaded model that has the LoRA adapter `name`; None if no model has it.

        If several models have it, the default model takes precedence.
        """
        owners = [
            model for model, engine in self.engines() if name in {a.name for a in engine.info.lora}
        ]
        return min(owners, key=lambda model: model != self.default, default=None)

    async def acquire(self, name: str, keep_alive_s: float | None = None) -> Lease:
        """Return a lease of a model, which is loaded if needed.

        `keep_alive_s`: how long (s) the model stays loaded after the last lease (negative: forever;
        None: the configured time). Raises OutOfMemoryError, and what loading raises.
        """
        entry = self._entries.get(name) or self._start(name)
        entry.users += 1
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        try:
            if entry.loaded is None:
                await asyncio.shield(entry.ready)
        except BaseException:
            self.end_use(entry, self._keep_alive_s)
            raise
        return Lease(self, entry, self._keep_alive_s if keep_alive_s is None else keep_alive_s)

    async def use_adapters(
        self, lease: Lease, change: Callable[[tuple[Adapter, ...]], Sequence[Adapter]]
    ) -> tuple[Adapter, ...]:
        """Change the LoRA adapters of a model, now and whenever it is loaded again; return them.

        `change` gets the loaded adapters and returns the adapters to load. Raises what `change` raises,
        and what `Engine.use_adapters` raises.
        """
        async with self._changing_adapters:
            adapters = change(lease.engine.info.lora)
            loop = asyncio.get_running_loop()
            loaded = await loop.run_in_executor(self._threads, lease.engine.use_adapters, adapters)
            self._adapters[lease.model] = loaded
            return loaded

    async def unload(self, name: str) -> Literal["unloaded", "unloading", "not loaded"]:
        """Unload a model at once if it is idle, otherwise when its requests have ended."""
        entry = self._entries.get(name)
        if entry is None:
            return "not loaded"
        if entry.users or entry.loaded is None:
            del self._entries[name]  # so that new requests load the model again
            return "unloading"
        await self._unload(entry)
        return "unloaded"

    def end_use(self, entry: ModelEntry, keep_alive_s: float) -> None:
        entry.users -= 1
        entry.last_used = time.monotonic()
        self._changed.set()
        if entry.users or entry.loaded is None:
            return
        detached = self._entries.get(entry.name) is not entry
        if detached or keep_alive_s == 0:
            self._spawn(self._unload(entry))
        elif keep_alive_s > 0:
            entry.expiry = asyncio.get_running_loop().call_later(keep_alive_s, self._expire, entry)

    def discard(self, entry: ModelEntry) -> None:
        """Remove a model's entry without closing the engine; the next request loads the model again."""
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]

    async def close(self) -> None:
        """Unload all models. Call it when all requests have ended."""
        for entry in list(self._entries.values()):
            if entry.loaded is not None:
                await self._unload(entry)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_CLOSE_S)
        for task in list(self._tasks):
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, name: str) -> ModelEntry:
        entry = ModelEntry(name, self._need_bytes(name))
        # retrieve the exception: asyncio would log it as an error if no request waits for this load
        entry.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._entries[name] = entry
        self._spawn(self._load(entry))
        return entry

    async def _load(self, entry: ModelEntry) -> None:
        try:
            await self._wait_until_closed(entry)
            await self._wait_for_memory(entry)
            entry.stage = "loading"
            began_s = time.perf_counter()
            loop = asyncio.get_running_loop()
            loaded = await loop.run_in_executor(self._threads, self._load_engine, entry)
        except asyncio.CancelledError:
            entry.ready.cancel()
            raise
        except Exception as error:  # noqa: BLE001  the requests that wait for this load get the exception
            if isinstance(error, EdgeInferError):
                self.last_error = error.message
            self.discard(entry)
            entry.ready.set_exception(error)
            self._changed.set()
            return
        entry.loaded = loaded
        self.on_loaded(entry.name, loaded, time.perf_counter() - began_s)
        info = loaded.engine.info
        # if the context's size is automatic, count the minimum: the engine uses it if memory is short
        kv_bytes = info.least_kv_bytes or info.kv_bytes
        size_bytes = info.weights_bytes + kv_bytes + info.compute_bytes
        self._sizes[entry.name] = entry.need_bytes = size_bytes or entry.need_bytes
        entry.ready.set_result(None)
        self._changed.set()
        if entry.users == 0:
            entry.users = 1
            self.end_use(entry, self._keep_alive_s)

    def _load_engine(self, entry: ModelEntry) -> LoadedEngine:
        loaded = self._load_model(entry.name, entry.report)
        adapters = self._adapters.get(entry.name)
        if adapters is not None:
            try:
                loaded.engine.use_adapters(adapters)
            except EdgeInferError:
                del self._adapters[entry.name]  # without adapters, the next load may succeed
                loaded.engine.close()
                raise
        return loaded

    async def _wait_until_closed(self, entry: ModelEntry) -> None:
        """Wait until the model's previous engine has stored its cached prefixes for the new one."""
        closing = self._closing.get(entry.name)
        if closing is not None:
            entry.stage = "writing cached prefixes"
            await asyncio.wait([closing])
            entry.stage = "waiting for memory"

    def _need_bytes(self, name: str) -> int:
        size_bytes = self._sizes.get(name)
        if size_bytes is not None:
            return size_bytes
        files = next((pulled.size_bytes for pulled in self._list_pulled() if pulled.name == name), 0)
        return files + files // 4 + (256 << 20)

    async def _wait_for_memory(self, entry: ModelEntry) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._memory_wait_s
        while not self._fits(entry):
            idle = [s for s in self._entries.values() if s.loaded is not None and s.users == 0]
            if idle:
                await self._unload(min(idle, key=lambda s: s.last_used))
                continue
            if all(s is entry for s in self._entries.values()):
                return  # nothing can be unloaded: try to load anyway
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - loop.time()))
            except TimeoutError:
                need = f"{entry.name} ({entry.need_bytes >> 20} MiB)"
                raise OutOfMemoryError(
                    f"No memory for {need} while other models are in use",
                    hint="try again when their requests have ended, or use a smaller model",
                ) from None

    def _fits(self, entry: ModelEntry) -> bool:
        reserved_bytes = sum(
            s.need_bytes
            for s in self._entries.values()
            if s.loaded is None and s is not entry and s.stage == "loading"
        )
        return entry.need_bytes + reserved_bytes + _RESERVE_BYTES <= self._available_bytes()

    def _expire(self, entry: ModelEntry) -> None:
        entry.expiry = None
        if entry.users == 0 and entry.loaded is not None:
            self._spawn(self._unload(entry))

    async def _unload(self, entry: ModelEntry) -> None:
        if entry.loaded is None:
            return
        loaded, entry.loaded = entry.loaded, None
        if entry.expiry is not None:
            entry.expiry.cancel()
        self.discard(entry)
        loop = asyncio.get_running_loop()
        closing = loop.run_in_executor(self._threads, loaded.engine.close)
        self._closing[entry.name] = closing
        try:
            await closing
        finally:
            if self._closing.get(entry.name) is closing:
                del self._closing[entry.name]
            self._changed.set()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Aliases:
    """The table `[serve.aliases]`: name or pattern → model, in any letter case. Exact names come first.

    `has_catch_all` is true if the table has the pattern `"*"`. `"*" = ""` refuses unknown names, even
    if the endpoint has only one model.
    """

    def __init__(self, table: Mapping[str, str]) -> None:
        self.table = table
        self.exact = {name: target for name, target in table.items() if "*" not in name}
        self._by_name = {plain_name(name): target for name, target in self.exact.items()}
        self._patterns = {name: target for name, target in table.items() if "*" in name and target}
        self.has_catch_all = "*" in table

    def by_name(self, name: str) -> str | None:
        """Return the model with the alias `name`, in any spelling; None if there is no such alias."""
        aliases = (spelled for spelled in lookup.spellings(name) if spelled in self._by_name)
        return next(map(self._by_name.__getitem__, aliases), None)

    def by_pattern(self, name: str) -> str | None:
        """Return the model of the longest pattern that matches `name`; None if none does."""
        matching = [p for p in self._patterns if fnmatchcase(name.lower(), p.lower())]
        return self._patterns[max(matching, key=len)] if matching else None


def where_to_get(missing: str, models: Collection[AvailableModel]) -> str:
    """Return a hint for clients: how to get the model `missing`, or similar names of other models."""
    from edgeinfer.models.catalog import load_catalog  # this import takes 8 ms, and only errors need it

    try:
        catalog = load_catalog()
    except ConfigError:  # a mistake in models.toml must not fail requests
        catalog = {}
    if "/" in missing or missing.partition(":")[0] in catalog:
        return f"`edgeinfer pull {missing}`, or GET /v1/models"
    near = lookup.similar_names(missing, catalog, [model.name for model in models])
    ways = 'GET /v1/models lists the models; `"*" = "default"` in `[serve.aliases]` accepts any name'
    return f"{lookup.did_you_mean(near, models)}{ways}"


class AvailableModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name that a request may use: a pulled model, or an alias or adapter of the model `alias_of`.

    `created` is a Unix time. `can_see` is true if the model has a projector for pictures. `other_names`
    are accepted too, but not listed.
    """

    name: str
    size_bytes: int = 0
    sha256: str = ""
    created: int = 0
    alias_of: str = ""
    n_ctx_train: int = 0
    architecture: str = ""
    quantization: str = ""
    n_params: int = 0
    can_see: bool = False
    other_names: tuple[str, ...] = ()


class ModelAdministrator(Protocol):
    """Pulls and removes models. Each method blocks, and raises what `edgeinfer pull` or `rm` raises."""

    def pull(self, text: str, report: OnProgress, cancel: threading.Event) -> None:
        """Pull the model `text` (catalogue name or source); stop if `cancel` is set."""

    def remove(self, name: str) -> None:
        """Remove a model with its snapshots and cached prefixes."""
