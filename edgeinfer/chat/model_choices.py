"""The models to pick from, whether each fits this machine, and the offer of a first run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from edgeinfer.config.config_file import save
from edgeinfer.errors import DownloadError, EdgeInferError, OfflineError
from edgeinfer.models import fits, gguf
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.fits import FirstRunChoice, first_run_choices, header_plan
from edgeinfer.models.listing import ModelSummary, every_model
from edgeinfer.models.progress import PullProgress
from edgeinfer.platform.machine import Machine, read_machine, read_memory_rate
from edgeinfer.platform.paths import DEFAULT_MODEL
from edgeinfer.runtime.options import LoadOptions

if TYPE_CHECKING:
    from edgeinfer.chat.launch import Launch  # 100 ms at run time: numpy

#: Context that the memory of a model that is not here is judged with.
_N_CTX = 4096


class ModelChoice(ModelSummary, frozen=True, kw_only=True):
    """A model in the picker, and the memory that it needs and that is free (bytes), 0 if unknown.

    `tokens_per_s` is estimated, 0 if unknown.
    """

    needs_bytes: int = 0
    available_bytes: int = 0
    warm: bool = False
    tokens_per_s: float = 0.0

    @property
    def verdict(self) -> str:
        """ "fits", "slow" if one reads faster than it answers, "too big", or "" if unknown."""
        if self.fits and 0 < self.tokens_per_s < fits.READABLE_TOKENS_PER_S:
            return "slow"
        return {True: "fits", False: "too big", None: ""}[self.fits]

    @property
    def state(self) -> Literal["warm", "here", ""]:
        """ "warm" with a snapshot, "here" with its files, otherwise ""."""
        if self.warm:
            return "warm"
        return "here" if self.pulled else ""

    @property
    def fits(self) -> bool | None:
        """Return True if it fits into free memory; None if unknown."""
        known = self.needs_bytes and self.available_bytes
        return self.needs_bytes <= self.available_bytes if known else None


#: Measured once a process: 0.2 s.
_memory_rate = cache(read_memory_rate)


def list_choices(warm: Collection[str] = ()) -> list[ModelChoice]:
    """List every model that can chat: pulled ones, other programs', then the catalogue in its order.

    Reads GGUF headers: too slow for the first paint.
    """
    machine = read_machine()
    available = machine.memory.available_bytes if machine.memory.total_bytes else 0
    catalog, rate = load_catalog(), _memory_rate()
    return [
        ModelChoice(
            **msgspec.structs.asdict(model),
            needs_bytes=_needs(model, paths, machine),
            available_bytes=available,
            warm=model.pulled and model.name in warm,
            tokens_per_s=fits.speed_of(
                model.size_bytes,
                fits.active_share(catalog.get(model.name), model.name, model.parameters),
                rate,
            ),
        )
        for model, paths in every_model(catalog)
        if isinstance(model, ModelSummary) and model.purpose not in ("embedding", "reranker")
    ]


def _needs(model: ModelSummary, paths: Sequence[str | Path], machine: Machine) -> int:
    """Return the memory (bytes) by the files' headers; 0 for files that cannot be read."""
    if not model.pulled:
        return fits.needed_bytes(model.size_bytes) if model.size_bytes else 0
    try:
        headers = [gguf.read_header(path) for path in paths]
        options = LoadOptions(n_ctx=min(_N_CTX, headers[0].n_ctx_train or _N_CTX), n_parallel=4)
        return header_plan(headers, options, machine).buffers.total_bytes
    except (EdgeInferError, OSError):
        return 0


def size_words(n_bytes: int) -> str:
    """Return `92 MB` or `4.4 GB`, in powers of ten, as on the models' pages."""
    if n_bytes >= 10**9:
        return f"{n_bytes / 1e9:.1f} GB"
    if n_bytes < 10**6:
        return f"{n_bytes / 1e3:.0f} kB"
    return f"{n_bytes / 1e6:.0f} MB"


def first_run_offer(launch: Launch, rows: Sequence[ModelChoice]) -> list[FirstRunChoice]:
    """Return models that suit this machine if none is here and none was named; takes 0.2 s."""
    if launch.model != launch.host.config.default_model or any(row.pulled for row in rows):
        return []
    return first_run_choices()


def describe_offer(choice: FirstRunChoice) -> str:
    """Return `comfortable · 812 MB · Apache-2.0 · about 24 tokens/s`."""
    size = size_words(choice.size_bytes)
    return f"{choice.role} · {size} · {choice.licence} · about {choice.tokens_per_s:.0f} tokens/s"


def pull_first(
    name: str, report: Callable[[PullProgress], None], cancel: threading.Event | None = None
) -> tuple[str, str]:
    """Pull the chosen model, or the default one if its source cannot be reached.

    The pulled model becomes `default-model`. Return its name, and why it is another one, or "".
    Raises what `pull` raises.
    """
    from edgeinfer.models.pull import pull  # 30 ms: hashing, and what the network needs

    note = ""
    try:
        pulled = pull(name, report, cancel)
    except OfflineError:
        raise
    except DownloadError as error:
        if name == DEFAULT_MODEL:
            raise
        note = f"{name} could not be fetched: {error.message}. {DEFAULT_MODEL} is used instead."
        pulled = pull(DEFAULT_MODEL, report, cancel)
    save(("default-model",), pulled.name)
    return pulled.name, note
