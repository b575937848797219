"""`edgeinfer list`: list models on this machine, and models that can be pulled."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

import msgspec

from edgeinfer.cli.parser import add_option
from edgeinfer.cli.result import Result
from edgeinfer.cli.terminal import table
from edgeinfer.errors import ConfigError, UnknownModelError
from edgeinfer.host import EngineHost
from edgeinfer.models import fits
from edgeinfer.models.adapters import PulledAdapter, list_adapters
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.fits import Estimator, Fit
from edgeinfer.models.listing import ModelSummary, UnusableModel, every_model
from edgeinfer.models.lookup import similar_names
from edgeinfer.models.store import list_pulled, unfinished_pulls
from edgeinfer.platform.paths import DEFAULT_MODEL
from edgeinfer.snapshot_format.storage import generations, model_prefix, model_prefix_of
from edgeinfer.units import format_bytes

#: Titles of the groups into which `list --fits` sorts models.
_GROUPS = {
    "comfortable": f"comfortable: at least {fits.READABLE_TOKENS_PER_S:g} tokens/s, the largest first",
    "slow": f"slow: below {fits.READABLE_TOKENS_PER_S:g} tokens/s",
    "too big": "too big for the memory of this machine: weights are read from the disk for each token",
    "embedding": "embedding and reranking",
}


class ModelRow(ModelSummary, frozen=True, kw_only=True):
    """A model in the list, with its number of `snapshots`. `fit` is None without `--fits`."""

    snapshots: int = 0
    fit: Fit | None = None


class ListResult(Result, frozen=True, kw_only=True):
    """Models by name: first pulled ones, then those of external stores, then the rest of the catalogue.

    With `fits`, they are grouped by speed, on the CPU or on `gpus`. `busy`: the machine was busy while
    speed was measured. `unfinished`: size (bytes) of the downloaded part of each interrupted pull, by
    model. `unusable`: models of other programs that cannot be used.
    """

    models: tuple[ModelRow, ...]
    fits: bool = False
    busy: bool = False
    gpus: tuple[str, ...] = ()
    nothing_pulled: bool = False
    unfinished: dict[str, int] = msgspec.field(default_factory=dict)
    unusable: tuple[UnusableModel, ...] = ()
    adapters: tuple[PulledAdapter, ...] = ()

    def human(self) -> str:
        lines = [f"{m.name} can't be used: {m.problem} ({m.fix})" for m in self.unusable]
        lines += [
            f"adapter {adapter.name}{f' for {adapter.base}' if adapter.base else ''}: "
            f"`--lora {adapter.name}`, {format_bytes(adapter.size_bytes)}"
            for adapter in self.adapters
        ]
        lines += [
            f"{name}: {format_bytes(size)} of an unfinished pull; the same pull continues it, "
            f"`edgeinfer rm {name}` removes it"
            for name, size in self.unfinished.items()
        ]
        if not self.models and not lines:
            return f"no model is pulled yet: `edgeinfer pull {DEFAULT_MODEL}`"
        return "\n".join([self._table(), *lines] if self.models else lines)

    def _table(self) -> str:
        if self.fits:
            gpus = f"{' and '.join(self.gpus)} where WHY says so, otherwise for the " * bool(self.gpus)
            note = f"speeds are estimates for {gpus or 'this '}CPU"
            busy = "; the machine was busy: real speeds are higher" if self.busy else ""
            return f"{_fits_table(self.models)}\n\n{note}{busy}"
        head = ("NAME", "HERE", "SIZE", "PARAMETERS", "QUANT", "CONTEXT", "SNAPSHOTS", "LICENCE", "FOR")
        return table([head, *map(_row, self.models)], right=frozenset({2, 3, 5, 6}))


def _row(model: ModelRow) -> tuple[str, ...]:
    return (
        model.name,
        _location(model),
        _size(model),
        model.parameters or "?",
        model.quantization or "?",
        f"{model.context_length:,}" if model.context_length else "?",
        str(model.snapshots) if model.snapshots else "-",
        model.licence or "?",
        f"{model.purpose}, pictures" if model.can_see else model.purpose,
    )


def _fits_table(models: Sequence[ModelRow]) -> str:
    head = ("NAME", "HERE", "QUANT", "SIZE", "~TOKENS/S", "FOR", "WHY")
    grouped = [(model.fit.group, _fit_row(model, model.fit)) for model in models if model.fit]
    top, *lines = table([head, *(row for _, row in grouped)], right=frozenset({3, 4})).splitlines()
    text = [top]
    for group, title in _GROUPS.items():
        rows = [line for (row_group, _), line in zip(grouped, lines, strict=True) if row_group == group]
        text += ["", title, *rows] if rows else []
    return "\n".join(text)


def _fit_row(model: ModelRow, fit: Fit) -> tuple[str, ...]:
    speed = "-" if fit.group == "embedding" else f"{fit.tokens_per_s:.1f}"
    facts = (model.name, _location(model), model.quantization, _size(model), speed)
    return (*facts, model.purpose, fit.shortage or fit.why)


def _size(model: ModelRow) -> str:
    prefix = "~" if model.size_is_estimate else ""
    return prefix + format_bytes(model.size_bytes) if model.size_bytes else "?"


def _location(model: ModelRow) -> str:
    if model.store:
        return f"from {model.store}"
    if model.in_place:
        return "in place"
    return "yes" if model.pulled else "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "only models whose name, title or purpose contains every word"
    parser.add_argument("words", nargs="*", metavar="WORD", help=help)
    add_option(parser, "--pulled", "only models on this machine")
    add_option(parser, "--fits", "group models by whether they fit into memory, and by speed")


def run(options: argparse.Namespace, host: EngineHost) -> ListResult:
    """List models; warn about an invalid config.toml.

    Raises ConfigError if models.toml is invalid, UnknownModelError if no model matches the typed words.
    """
    try:
        host.config  # noqa: B018  reads config.toml
    except ConfigError as error:
        sys.stderr.write(f"warning: {error.message}\n")
    models_here = [model for model, _ in every_model(load_catalog())]
    summaries = [model for model in models_here if isinstance(model, ModelSummary)]
    broken = [model for model in models_here if isinstance(model, UnusableModel)]
    counts = Counter(model_prefix_of(name) for name in generations())
    rows = (
        ModelRow(**msgspec.structs.asdict(model), snapshots=counts.get(model_prefix(model.name), 0))
        for model in summaries
        if model.pulled or not options.pulled
    )

    def matches(*texts: str) -> bool:
        return all(word.lower() in " ".join(texts).lower() for word in options.words)

    listed = [m for m in rows if matches(m.name, m.title, m.purpose, m.quantization, m.store)]
    if options.fits:
        listed = _group_by_fit(listed)
    result = ListResult(
        models=tuple(listed),
        fits=options.fits,
        busy=any(model.fit.busy for model in listed if model.fit),
        gpus=tuple(card.description for card in fits.cards()) if options.fits else (),
        nothing_pulled=options.pulled and not any(model.pulled for model in summaries),
        unfinished={name: size for name, size in unfinished_pulls().items() if matches(name)},
        adapters=tuple(adapter for adapter in list_adapters() if matches(adapter.name)),
        unusable=tuple(model for model in broken if matches(model.name)),
    )
    if options.words and not (listed or result.unfinished or result.adapters or result.unusable):
        raise _no_match_error(" ".join(options.words), only_pulled=options.pulled)
    return result


def _no_match_error(text: str, *, only_pulled: bool) -> UnknownModelError:
    if only_pulled:
        hint = f"`edgeinfer list {text}` includes models that are not pulled"
        return UnknownModelError(f"no pulled model matches {text!r}", hint=hint)
    near = " or ".join(similar_names(text, load_catalog(), [model.name for model in list_pulled()]))
    hint = "`edgeinfer list` lists every model"
    return UnknownModelError(
        f"no model matches {text!r}", hint=f"did you mean {near}? {hint}" if near else hint
    )


def _group_by_fit(models: Sequence[ModelRow]) -> list[ModelRow]:
    estimator = Estimator()
    with_size = (model for model in models if model.size_bytes)
    fitting = (msgspec.structs.replace(model, fit=estimator.fit(model)) for model in with_size)
    return sorted(fitting, key=_rank)


def _rank(model: ModelRow) -> tuple[int, float]:
    """Return a key that sorts by group; then comfortable models by size, slow ones by speed."""
    assert model.fit
    group = model.fit.group
    within = {"comfortable": -model.size_bytes, "slow": -model.fit.tokens_per_s}
    return [*_GROUPS].index(group), within.get(group, model.size_bytes)
