"""Models that the picker lists, whether they fit this machine, and which a first run offers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from edgeinfer.config.config_file import save
from edgeinfer.errors import DownloadError, OfflineError
from edgeinfer.models.fits import Estimator, FirstRunChoice, Fit, first_run_choices
from edgeinfer.models.listing import ModelSummary, every_model
from edgeinfer.models.progress import PullProgress
from edgeinfer.platform.paths import DEFAULT_MODEL
from edgeinfer.units import format_bytes

if TYPE_CHECKING:
    from edgeinfer.chat.startup import ChatSetup


class ModelChoice(ModelSummary, frozen=True, kw_only=True):
    """A model in the picker. `warm`: the model has a snapshot.

    `fit` says how well the model runs on this machine; None if the model's size is unknown.
    """

    warm: bool = False
    fit: Fit | None = None

    @property
    def verdict(self) -> Literal["fits", "slow", "too big", ""]:
        """Return whether the model fits this machine; "" if unknown.

        A "slow" model fits, but generates text more slowly than people read.
        """
        if self.fit is None:
            return ""
        return self.fit.group if self.fit.group in ("slow", "too big") else "fits"

    @property
    def state(self) -> Literal["warm", "here", ""]:
        """ "warm" if the model has a snapshot, "here" if it is on this machine, otherwise ""."""
        if self.warm:
            return "warm"
        return "here" if self.pulled else ""


def list_choices(warm: Collection[str] = ()) -> list[ModelChoice]:
    """Return every chat model, pulled or not. `warm`: names of the models that have a snapshot.

    Call this after the first paint, because measuring memory may take 0.2 s.
    """
    estimator = Estimator()
    return [
        ModelChoice(
            **msgspec.structs.asdict(model),
            warm=model.pulled and model.name in warm,
            fit=estimator.fit(model) if model.size_bytes else None,
        )
        for model, _ in every_model(estimator.catalog)
        if isinstance(model, ModelSummary) and model.purpose not in ("embedding", "reranker")
    ]


def first_run_offer(setup: ChatSetup, rows: Sequence[ModelChoice]) -> list[FirstRunChoice]:
    """Return the models that a first run offers to pull; takes 0.2 s.

    `rows` has all chat models. Returns [] if one of them is pulled already, or if the user named one.
    """
    if setup.model != setup.host.config.default_model or any(row.pulled for row in rows):
        return []
    return first_run_choices()


def describe_offer(choice: FirstRunChoice) -> str:
    """Describe a model in one line: `comfortable · 812.0 MB · Apache-2.0 · about 24 tokens/s`."""
    size, licence = format_bytes(choice.model.stored_bytes), choice.model.licence
    return f"{choice.role} · {size} · {licence} · about {choice.tokens_per_s:.0f} tokens/s"


def pull_first(
    name: str, report: Callable[[PullProgress], None], cancel: threading.Event | None = None
) -> tuple[str, str]:
    """Pull the model `name`, or DEFAULT_MODEL if the source of `name` cannot be reached.

    The pulled model becomes `default-model` in config.toml. Returns the name of the pulled model, and a
    note for the user if that is not `name` (otherwise ""). `report` gets the progress; `cancel` stops
    the pull when it is set. Raises the errors of `models.pull.pull`.
    """
    from edgeinfer.models.pull import pull  # imported here: the import takes 30 ms

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
