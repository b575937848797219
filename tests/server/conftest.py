"""Fixtures of endpoints (`served_endpoint`), of real engines behind them, and of other users."""

import contextlib
import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_engine import FakeEngine
from fake_hub import FaultServer
from made_models import FIM, make_llama
from other_processes import wait_until
from served_endpoint import Served, serving

from edgeinfer.runtime.interface import Engine


def _starter() -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:
        yield lambda engine=None, **setup: stack.enter_context(serving(engine, **setup))


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    """The official client of Anthropic, which takes 1.3 s to import."""
    return importlib.import_module("anthropic")


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    """The official client of OpenAI, which takes 0.6 s to import."""
    return importlib.import_module("openai")


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Return `serve(engine, ...)`, which starts an endpoint for this test (arguments: `serving`)."""
    yield from _starter()


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Callable[..., Served]]:
    """Return the same as `serve`, for endpoints that all tests of a file share."""
    yield from _starter()


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    """The scripted engine of `live_server`."""
    return FakeEngine()


@pytest.fixture(scope="module")
def live_server(serve_module: Callable[..., Served], engine: FakeEngine) -> Served:
    """An endpoint that all tests of a file share."""
    return serve_module(engine)


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.setfsuid(65_534)  # it applies only to this thread
    try:
        yield
    finally:
        libc.setfsuid(0)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager in which sockets seem to belong to another user."""
    uid = os.getuid()
    if uid == 0:
        return _as_nobody
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    return contextlib.nullcontext


@pytest.fixture
def another_user() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager in which sockets belong to another user. Skips without root."""
    if os.getuid() != 0:
        pytest.skip("a socket of another user needs root")
    return _as_nobody


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Return `wait_until(condition, awaited)`."""
    return wait_until


def _load_model(path: Path, name: str, *, projector: Path | None = None, **options: Any) -> Engine:
    from edgeinfer.runtime.engine import load_engine
    from edgeinfer.runtime.options import LoadOptions, ModelFiles

    files = ModelFiles(name=name, paths=(str(path),), sha256="ab" * 32, projector=str(projector or ""))
    return load_engine(files, LoadOptions(**{"n_parallel": 2, "n_threads": 1} | options))


@pytest.fixture(scope="session")
def load_model() -> Callable[..., Engine]:
    """Return `load_model(path, name, n_ctx=...)`, which loads a real engine with load options."""
    return _load_model


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Iterator[Served]:
    """The real small model behind an endpoint that all tests share."""
    engine = _load_model(smollm2, "smollm2", n_ctx=4096, n_parallel=4)
    # keep the model loaded, because the endpoint could not load it again
    with serving(engine, aliases={"*": ""}, keep_alive_s=-1) as live_server:
        yield live_server


@pytest.fixture
def chatterer(tmp_path: Path) -> Callable[[], Engine]:
    """Return a function that loads a tiny real model with random weights."""
    import edgeinfer.runtime.engine  # noqa: F401  `--fast` skips the test here; in the server's thread it could not

    path = make_llama(tmp_path / "chatterer.gguf")
    return lambda: _load_model(path, "chatterer", n_ctx=256, n_parallel=4)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """The file of a tiny model with a chat template."""
    return make_llama(tmp_path_factory.mktemp("made") / "made.gguf", fim=tuple(FIM))


@pytest.fixture
def hub(gguf, monkeypatch):
    """A fake Hugging Face with that model as `hf.co/someone/Tiny-GGUF:Q8_0`."""
    server = FaultServer()
    thread = threading.Thread(target=server.httpd.serve_forever, daemon=True)
    thread.start()
    server.repos["someone/Tiny-GGUF"] = {"Tiny-Q8_0.gguf": gguf.read_bytes()}
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.release.set()
    server.httpd.shutdown()
    server.httpd.server_close()
    thread.join()
