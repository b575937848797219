"""The models to pick from, whether each fits this machine, and the offer of a first run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from edgeinfer.config.config_file import save
from edgeinfer.errors import DownloadError, EdgeInferError, OfflineError
from edgeinfer.models import fits, gguf
from edgeinfer.models.catalog import Model, load_catalog
from edgeinfer.models.external_stores import stores
from edgeinfer.models.external_stores.reader import ExternalModel
from edgeinfer.models.fits import FirstRunChoice, first_run_choices, header_plan
from edgeinfer.models.progress import PullProgress
from edgeinfer.models.store import PulledModel, list_pulled
from edgeinfer.platform.machine import Machine, read_machine
from edgeinfer.platform.paths import DEFAULT_MODEL
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.units import format_parameters

if TYPE_CHECKING:
    from edgeinfer.chat.launch import Launch  # 100 ms at run time: numpy

#: Context that the memory of a model that is not here is judged with.
_N_CTX = 4096


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the picker. Bytes are 0 if unknown, `guessed` if estimated from its parameters."""

    name: str
    title: str
    parameters: str = ""
    licence: str = ""
    purpose: str = "chat"
    context_length: int = 0
    size_bytes: int = 0
    needs_bytes: int = 0
    available_bytes: int = 0
    guessed: bool = False
    pulled: bool = False
    warm: bool = False
    store: str = ""

    @property
    def state(self) -> Literal["warm", "here", ""]:
        """ "warm" with a snapshot, "here" with its files, otherwise ""."""
        if self.warm:
            return "warm"
        return "here" if self.pulled else ""

    @property
    def fits(self) -> bool | None:
        """Return True if it fits into free memory; None if unknown."""
        return (
            self.needs_bytes <= self.available_bytes
            if self.needs_bytes and self.available_bytes
            else None
        )


def list_choices(warm: Collection[str] = ()) -> list[ModelChoice]:
    """List every model that can chat: pulled ones, other programs', then the catalogue in its order.

    Reads GGUF headers: too slow for the first paint.
    """
    machine = read_machine()
    available = _available(machine)
    catalog = load_catalog()
    here = {p.name: p for p in list_pulled()}
    rows = [_pulled(p, catalog.get(p.base), machine, p.name in warm) for p in here.values()]
    sources = {p.source for p in here.values()}
    rows += [_found(m, machine, m.name in warm) for m in stores.usable() if m.name not in sources]
    rows += [_catalogued(m, available) for m in catalog.models.values() if m.name not in here]
    return [row for row in rows if row.purpose not in ("embedding", "reranker")]


def _available(machine: Machine) -> int:
    return machine.memory.available_bytes if machine.memory.total_bytes else 0


def _pulled(pulled: PulledModel, model: Model | None, machine: Machine, warm: bool) -> ModelChoice:
    return ModelChoice(
        name=pulled.name,
        title=model.title if model else pulled.name,
        parameters=model.parameters if model else format_parameters(pulled.n_params),
        licence=model.licence if model else "",
        purpose=model.purpose if model else pulled.purpose,
        context_length=pulled.n_ctx_train,
        size_bytes=pulled.size_bytes,
        needs_bytes=_needs(pulled.paths, machine),
        available_bytes=_available(machine),
        pulled=True,
        warm=warm,
    )


def _needs(paths: Sequence[str | Path], machine: Machine) -> int:
    """Return the memory (bytes) by the files' headers; 0 for files that cannot be read."""
    try:
        headers = [gguf.read_header(path) for path in paths]
        options = LoadOptions(n_ctx=min(_N_CTX, headers[0].n_ctx_train or _N_CTX), n_parallel=4)
        return header_plan(headers, options, machine).buffers.total_bytes
    except (EdgeInferError, OSError):
        return 0


def _found(found: ExternalModel, machine: Machine, warm: bool) -> ModelChoice:
    return ModelChoice(
        name=found.name,
        title=f"from {found.store}, used where it is",
        size_bytes=found.size_bytes,
        needs_bytes=_needs(found.paths, machine),
        available_bytes=_available(machine),
        pulled=True,
        warm=warm,
        store=found.store,
    )


def _catalogued(model: Model, available: int) -> ModelChoice:
    size = model.stored_bytes
    return ModelChoice(
        name=model.name,
        title=model.title,
        parameters=model.parameters,
        licence=model.licence,
        purpose=model.purpose,
        context_length=model.context_length,
        size_bytes=size,
        needs_bytes=fits.needed_bytes(size) if size else 0,
        available_bytes=available,
        guessed=model.stored_is_estimate,
    )


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
