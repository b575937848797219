"""Pull models for HTTP clients: check the source that a client names, and report progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable

from edgeinfer.errors import InvalidRequestError, UsageError
from edgeinfer.models import sources
from edgeinfer.models.progress import OnProgress, PullProgress
from edgeinfer.platform import paths

#: Prefixes of Hugging Face URLs. `sources.parse` reads them as repositories without `https://`.
_HUBS = ("https://huggingface.co/", "https://hf.co/")
Work = Callable[[OnProgress, threading.Event], None]
Reports = AsyncGenerator[PullProgress, None]


async def reports_of(work: Work) -> Reports:
    """Run `work(report, cancel)` in a thread; yield its progress reports. Raises what `work` raises.

    Closing the generator (`aclose`) sets `cancel`, so that `work` stops.
    """
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

    Raises InvalidRequestError for other sources, because clients must not make the server read its own
    files or connect to other hosts. A plain name is returned even if that model was pulled from such a
    source; `PullOptions.for_client` then makes the pull fail.
    """
    plain = name.removesuffix(paths.LATEST)
    plain = plain.removeprefix("https://") if plain.startswith(_HUBS) else plain
    if not (paths.is_model_path(plain) or sources.looks_like_source(plain)):
        return plain
    with contextlib.suppress(UsageError):
        source = sources.parse(plain)
        if isinstance(source, sources.HubFile | sources.HubQuant):
            return str(source)  # not `name`, which `pull` could take for a path on this machine
    message = "model must be a name of the catalogue, or hf.co/OWNER/REPOSITORY:QUANTIZATION"
    hint = "`edgeinfer pull` on the server pulls from other sources"
    raise InvalidRequestError(message, param="model", hint=hint)
