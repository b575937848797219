"""Build the HTTP endpoint: on sockets for `serve`, in memory for `batch` and `eval`."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from edgeinfer import typed_options
from edgeinfer.agents.prompt_normalization import PromptNormalizer
from edgeinfer.chat.history.store import purge_deleted
from edgeinfer.errors import ServeError, UsageError
from edgeinfer.host import EngineHost, LoadProgress
from edgeinfer.models.external_stores import stores
from edgeinfer.models.reference import ModelRef, resolve
from edgeinfer.models.store import list_pulled
from edgeinfer.platform import listening, paths
from edgeinfer.platform.machine import read_processors
from edgeinfer.receipts.receipt import load_key
from edgeinfer.runtime.memory_plan import choose_threads
from edgeinfer.runtime.options import EngineInfo, LoadOptions, ReplicasInfo
from edgeinfer.server.app import EndpointApp
from edgeinfer.server.endpoint import Endpoint
from edgeinfer.server.guards import keys
from edgeinfer.server.guards.security import LOOPBACK_HOSTS, Gate
from edgeinfer.server.lifecycle import EndpointServer, RunOptions, ServeOutcome
from edgeinfer.server.limits import Limits
from edgeinfer.server.logs import Log
from edgeinfer.server.model_entry import LoadedEngine
from edgeinfer.server.model_pool import AvailableModel, ModelPool
from edgeinfer.server.payload_log import PayloadLog
from edgeinfer.server.response_store import ResponseStore
from edgeinfer.server.web.access import Access, Web
from edgeinfer.workers.remote_engine import RemoteEngine
from edgeinfer.workers.replica_supervisor import ReplicaSupervisor
from edgeinfer.workers.replicas import Replica

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from edgeinfer.models.progress import OnProgress

T = TypeVar("T")
#: Number of file descriptors reserved for files, models and workers; connections may use the rest.
_OWN_DESCRIPTORS = 128
_MAX_DESCRIPTORS = 65_536

_PURGE_EVERY_S = 24 * 3600
#: The list of other programs' models is cached for this time (s): clients request it often.
FRESH_S = 2.0


def serve(options: argparse.Namespace, host: EngineHost) -> ServeOutcome:
    """Serve until a signal, or until no request has arrived for `--idle-exit` seconds.

    Raises ServeError if the address cannot be bound or other users may read the API key file, and the
    errors of `reference.resolve` and `EngineHost.files`.
    """
    loader = _default_loader(options, host)
    address = pick(options.host, host.config.serve.host), pick(options.port, host.config.serve.port)
    listeners = list(host.listeners) or bind(*address)
    if _speaks_ollama(options, host):
        listeners += _bind_ollama(options, listeners)
    gate = make_gate(options, host, listeners)
    return asyncio.run(_serve(options, host, loader, listeners, gate))


def _default_loader(
    options: argparse.Namespace, host: EngineHost, *, is_counted: bool = True
) -> ModelLoader:
    """Verify the default model's files; return a loader. Raises errors of `resolve`, `host.files`."""
    typed: str = options.model or host.config.default_model
    model = typed if typed == host.loaded_model else resolve(typed)
    loading = typed_options.load_options(options, host.config.load)
    files = host.files(model, draft=loading.draft)
    if not isinstance(model, str):
        model = msgspec.structs.replace(model, verified=files)
    return ModelLoader(host, files.name, model, msgspec.structs.replace(loading, is_counted=is_counted))


async def _serve(
    options: argparse.Namespace,
    host: EngineHost,
    loader: ModelLoader,
    listeners: list[socket.socket],
    gate: Gate,
) -> ServeOutcome:
    config = host.config.serve
    most = limits(options, config.max_queue)
    log = Log(options.log or ("text" if sys.stderr.isatty() else "json"))
    replicas = options.replicas or 1
    models = ModelPool(
        load=ReplicaLoader(loader, replicas, log) if replicas > 1 else loader,
        list_pulled=pulled_models(),
        default=loader.name,
        keep_alive_s=config.keep_alive_s,
        aliases=config.aliases,
    )
    for name, target in models.aliases_without_model().items():
        problem = f"`serve.aliases` in config.toml: {name} means {target}, which is not on this machine"
        log.warning("alias", message=problem)
    endpoint = Endpoint(
        models,
        most,
        log,
        host,
        normalizer=PromptNormalizer(config.normalize_prompts),
        responses=ResponseStore(most) if config.store_responses else None,
        traces=options.traces or "",
        model_admin=ModelAdmin() if _speaks_ollama(options, host) else None,
    )
    load_key(host.config.receipts.key)  # fail at the start if the key is invalid
    if folder := pick(options.log_payloads, config.log_payloads):
        endpoint.payload_log = PayloadLog(Path(folder), endpoint)
    if config.web:
        name_of_socket = listeners[0].getsockname()
        port = name_of_socket[1] if listeners[0].family != socket.AF_UNIX else 0
        endpoint.web = Web(Access(port, gate.keys), endpoint, ModelAdmin())
    run_options = RunOptions(
        idle_exit_s=options.idle_exit, tls_cert=options.tls_cert, tls_key=options.tls_key
    )
    purging = asyncio.create_task(_purge_daily())
    try:
        return await EndpointServer(endpoint, gate, listeners, run_options).run()
    finally:
        purging.cancel()


def offline_endpoint(
    options: argparse.Namespace, host: EngineHost, extra_models: Sequence[str] = ()
) -> tuple[Endpoint, ASGIApp]:
    """Build an endpoint without sockets or limits, for `batch` and `eval`; return it and its ASGI app.

    Besides local models, requests may name `extra_models`, such as GGUF files. If there are any, the
    default model's answers are not counted for `ps --usage`.
    """
    loader = _default_loader(options, host, is_counted=not extra_models)
    local, extra = pulled_models(), [AvailableModel(name=name) for name in extra_models]
    models = ModelPool(
        load=loader,
        list_pulled=lambda: [*local(), *extra],
        default=loader.name,
        keep_alive_s=host.config.serve.keep_alive_s,
    )
    limits = Limits(max_requests=1_000_000, max_queue=1_000_000)
    endpoint = Endpoint(models, limits, Log("off"), host)
    return endpoint, EndpointApp(endpoint, Gate(keys=keys.Keys([])))


async def _purge_daily() -> None:
    while True:
        await asyncio.to_thread(purge_deleted)
        await asyncio.sleep(_PURGE_EVERY_S)


class ModelLoader:
    """Loads the default model into this process once, and every later model into a worker.

    `name` is the default model's name in requests. `model` is its reference or, if this process was
    resumed with the default model, its full name.
    """

    def __init__(
        self, host: EngineHost, name: str, model: str | ModelRef, options: LoadOptions
    ) -> None:
        self.name = name
        self.host = host
        self._model = model
        self._options = options
        self._loads_here = True

    def __call__(self, name: str, progress: LoadProgress) -> LoadedEngine:
        """Load a model in a thread of the model pool. Raises errors of `host.engine`, `host.worker`."""
        if name != self.name:
            return self._worker(name, self._options.for_another_model(), progress)
        if not self._loads_here:
            return self.worker(progress)
        self._loads_here = False
        engine = self.host.engine(self._model, self._options, progress)
        start = self.host.start
        return LoadedEngine(engine=engine, how=start.how, stages_ms=start.stages_ms)

    def worker(self, progress: LoadProgress | None = None, **changed: Any) -> LoadedEngine:
        """Load the default model into a worker; `changed` has load options to replace."""
        name = self._model if isinstance(self._model, str) else self._model.name
        return self._worker(name, msgspec.structs.replace(self._options, **changed), progress)

    def n_threads(self) -> int:
        """Return the number of decode threads of the default model."""
        return int(choose_threads(self._options.n_threads, read_processors()).value)

    def _worker(self, model: str, options: LoadOptions, progress: LoadProgress | None) -> LoadedEngine:
        engine = self.host.worker(model, options, progress)
        if not isinstance(engine, RemoteEngine):  # without a launcher, the model was loaded here
            return LoadedEngine(engine=engine)
        start = engine.start
        return LoadedEngine(engine=engine, where="worker", how=start.how, stages_ms=start.stages_ms)


@dataclass
class ReplicaLoader:
    """Loads `count` replicas of the default model, each in a separate worker.

    If a worker crashes, the other replicas continue. Other models are loaded by `loader`.
    """

    loader: ModelLoader
    count: int
    log: Log

    def __call__(self, name: str, progress: LoadProgress) -> LoadedEngine:
        """Load replicas of the default model, or a worker of another one. Raises errors of `loader`."""
        if name != self.loader.name:
            return self.loader(name, progress)
        loaded: list[LoadedEngine] = []

        def start(first: EngineInfo | None, n_threads: int) -> Replica:
            shown = None if first else progress
            worker = self.loader.worker(shown, n_threads=n_threads, **_context_options(first))
            loaded.append(worker)
            return Replica(cast(RemoteEngine, worker.engine), worker.how, n_threads)

        cores = self.loader.n_threads()
        supervisor = ReplicaSupervisor(start, self.count, cores, self._report)
        return msgspec.structs.replace(loaded[0], engine=supervisor.engine, where="worker")

    def _report(self, info: ReplicasInfo) -> None:
        fields = {"running": len(info.running), "reason": info.reason}
        self.log.info("replicas", model=self.loader.name, **fields)
        self.loader.host.replicas.write(info)


def _context_options(first: EngineInfo | None) -> dict[str, Any]:
    """Return the `first` replica's context options, for later replicas; {} if there is no first one."""
    if first is None:
        return {}
    sizes = {"n_ctx": first.n_ctx, "n_parallel": first.n_parallel}
    kv_type = first.choices.get("kv_type")
    return sizes if kv_type is None else sizes | {"kv_type": str(kv_type.value)}


def pulled_models() -> Callable[[], Sequence[AvailableModel]]:
    """Return a function that lists the models on this machine, those of external stores last."""

    @lru_cache(maxsize=1)
    def external_models(_period: int) -> list[AvailableModel]:
        return [
            AvailableModel(
                name=m.name,
                size_bytes=m.size_bytes,
                sha256=stores.digest(m),
                created=int(m.modified_s),
                can_see=bool(m.projectors),
            )
            for m in stores.usable()
        ]

    return lambda: [*_stored_models(), *external_models(int(time.monotonic() / FRESH_S))]


def _stored_models() -> list[AvailableModel]:
    return [
        AvailableModel(
            name=m.name,
            size_bytes=m.size_bytes,
            sha256=m.sha256,
            created=_to_unix_time(m.pulled_at),
            n_ctx_train=m.n_ctx_train,
            architecture=m.architecture,
            quantization=m.quantization,
            n_params=m.n_params,
            can_see=m.projector is not None,
            other_names=m.other_names,
        )
        for m in list_pulled()
    ]


def _to_unix_time(stamp: str) -> int:
    try:
        return int(datetime.fromisoformat(stamp).timestamp())
    except ValueError:
        return 0


def _speaks_ollama(options: argparse.Namespace, host: EngineHost) -> bool:
    return bool(pick(options.ollama, host.config.serve.ollama))


def bind(host: str, port: int) -> list[socket.socket]:
    """Listen on every TCP address of `host` (IPv4 and IPv6). Raises ServeError if that fails."""
    return [socket.socket(fileno=descriptor) for descriptor in listening.bind(host, port)]


def _addresses(listeners: Sequence[socket.socket]) -> list[tuple[str, int]]:
    """Return address and port of each listener, except for unix sockets."""
    inet = [listener.getsockname() for listener in listeners if listener.family != socket.AF_UNIX]
    return [(name[0].partition("%")[0], name[1]) for name in inet]


def _bind_ollama(
    options: argparse.Namespace, listeners: Sequence[socket.socket]
) -> list[socket.socket]:
    if options.tls_cert is not None:
        problem = "--ollama serves plain HTTP: it cannot be combined with --tls-cert"
        raise UsageError(problem, hint="leave out one of them")
    port = paths.ollama_port()
    if any(bound == port for _, bound in _addresses(listeners)):
        return []
    try:
        return bind(paths.OLLAMA_HOST, port)
    except ServeError as error:
        raise ServeError(
            error.message,
            hint="stop the running Ollama, or leave out --ollama: "
            "the endpoint's own address also serves Ollama's API (/api/*)",
        ) from error


def make_gate(
    options: argparse.Namespace, host: EngineHost, listeners: Sequence[socket.socket]
) -> Gate:
    """Build the gate, which checks each request's address, Host, Origin and API key.

    If an address is not loopback and no API key is configured, the user's stored key is required,
    which the first call creates.
    """
    api_keys = keys.configured_keys(options.api_key_file)
    addresses = [address for address, _ in _addresses(listeners)]
    is_loopback = all(ipaddress.ip_address(address).is_loopback for address in addresses)
    if not api_keys and not is_loopback:
        api_keys, created = keys.stored_keys()
        if created:
            sys.stderr.write(f"made an API key for this endpoint: {keys.key_path()}\n")
    config = host.config.serve
    hosts = {*LOOPBACK_HOSTS, *map(str.lower, options.allow_host)}
    hosts |= {f"[{address}]" if ":" in address else address for address in addresses}
    if not is_loopback:
        hosts.add(socket.gethostname().lower())
    return Gate(
        keys=api_keys,
        hosts=frozenset(hosts),
        origins=frozenset(options.allow_origin),
        any_address=not is_loopback,
        owner=os.getuid(),
        any_user=config.any_user,
    )


def limits(options: argparse.Namespace, max_queue: int = Limits().max_queue) -> Limits:
    """Return limits on connections and requests; at most `max_queue` requests may wait.

    Raises UsageError if a TLS option is missing, ServeError if OpenSSL refuses the certificate or key.
    """
    if options.tls_cert is None and options.tls_key is not None:
        raise UsageError("--tls-key needs a certificate", hint="add `--tls-cert FILE`")
    if options.tls_cert is not None and options.tls_key is None:
        raise UsageError("--tls-cert needs the certificate's key", hint="add `--tls-key FILE`")
    if options.tls_cert is not None:
        _check_certificate(options.tls_cert, options.tls_key)
    descriptors = max(_raise_descriptor_limit() - _OWN_DESCRIPTORS, _OWN_DESCRIPTORS // 8)
    return Limits(max_connections=min(Limits().max_connections, descriptors), max_queue=max_queue)


def _raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit, at most 65,536; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def _check_certificate(cert: str, key: str) -> None:
    """Raise ServeError unless OpenSSL accepts the certificate and its key."""
    import ssl  # slow import (10 ms), needed only for TLS

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except OSError as error:  # also SSLError, a subclass
        reason = error.strerror or str(error)
        problem = f"--tls-cert {cert} and --tls-key {key} cannot be used: {reason}"
        raise ServeError(
            problem, hint="name a certificate and its unencrypted key, both PEM files"
        ) from error


def pick(typed: T | None, default: T) -> T:
    return default if typed is None else typed


class ModelAdmin:
    """Pulls and removes models for the web page and Ollama's clients. Thread-safe."""

    def pull(self, text: str, report: OnProgress, cancel: threading.Event) -> None:
        from edgeinfer.models import pull

        pull.pull(text, report, cancel, pull.PullOptions(for_client=True))

    def remove(self, name: str) -> None:
        from edgeinfer.models.removal import remove_models
        from edgeinfer.snapshots.registry import remove_snapshots_of

        remove_snapshots_of(remove_models([name])[0].name)
