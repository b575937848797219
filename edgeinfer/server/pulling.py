"""Pull models for HTTP clients: check the source they name, and report progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable

from edgeinfer.errors import InvalidRequestError, UnknownModelError, UsageError
from edgeinfer.models import names, sources
from edgeinfer.models.gguf import file_type
from edgeinfer.models.progress import OnProgress, PullProgress
from edgeinfer.server.model_names import LATEST

#: Prefixes that Ollama's clients use for Hugging Face repositories.
_HUBS = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/")
Work = Callable[[OnProgress, threading.Event], None]
Reports = AsyncGenerator[PullProgress, None]


async def reports_of(work: Work) -> Reports:
    """Run `work(report, cancel)` in a thread; yield its reports. Closing sets `cancel`."""
    loop = asyncio.get_running_loop()
    reports: asyncio.Queue[PullProgress | Exception | None] = asyncio.Queue()
    cancel = threading.Event()

    def report(now: PullProgress | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: no client is left
            loop.call_soon_threadsafe(reports.put_nowait, now)

    def run() -> None:
        outcome: Exception | None = None
        try:
            work(report, cancel)
        except Exception as error:  # noqa: BLE001  the client that waits for reports gets the exception
            outcome = error
        report(outcome)

    threading.Thread(target=run, name="models", daemon=True).start()
    try:
        while (now := await reports.get()) is not None:
            if isinstance(now, Exception):
                raise now
            yield now
    finally:
        cancel.set()


def source_of(name: str) -> str:
    """Return the model that a client wants to pull: a catalogue name, or `hf:OWNER/REPOSITORY:QUANT`.

    Raises InvalidRequestError for other sources, because clients must not make the server read its
    files or connect to other servers.
    """
    plain = name.removesuffix(LATEST)
    hub = next((hub for hub in _HUBS if plain.startswith(hub)), "")
    plain = f"hf:{plain.removeprefix(hub)}" if hub else plain
    if not (names.is_path(plain) or sources.looks_like_source(plain)):
        _refuse_sizes(plain)
        return plain
    with contextlib.suppress(UsageError):
        if isinstance(sources.parse(plain), sources.HubFile | sources.HubQuant):
            return plain
    names_taken = "a name of the catalogue, or hf.co/OWNER/REPOSITORY:QUANTIZATION"
    message = f"model must be {names_taken}; `edgeinfer pull` on the server pulls from other sources"
    raise InvalidRequestError(message, param="model")


def _refuse_sizes(name: str) -> None:
    """Raise UnknownModelError for `llama3.2:3b`, with a hint to `llama3.2-3b`.

    In Ollama, a tag may be the model's size. Here it is the quantization: `llama3.2-3b:Q4_K_M`.
    """
    base, colon, tag = name.partition(":")
    if not colon or "/" in name or file_type(tag) is not None:
        return
    # this import takes 8 ms, and only errors need it
    from edgeinfer.models.catalog import load_catalog, similar_names_hint

    hint = similar_names_hint(f"{base}-{tag}", load_catalog())
    raise UnknownModelError(f"there is no model {name!r}", hint=hint)
