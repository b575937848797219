"""`edgeinfer list`: models that are here, and models that can be pulled."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from edgeinfer.catalog.adapters import PulledAdapter, list_adapters
from edgeinfer.catalog.found import stores
from edgeinfer.catalog.found.model import Found
from edgeinfer.catalog.models import Catalog, Model, load_catalog
from edgeinfer.catalog.progress.bar import progress_on
from edgeinfer.catalog.progress.job import Job
from edgeinfer.catalog.rates.fits import Fit, fit, parameters
from edgeinfer.catalog.rates.measured import measured_rates
from edgeinfer.catalog.rates.probe import kept_or_measured
from edgeinfer.catalog.store import PulledModel, list_pulled
from edgeinfer.commands.table import table
from edgeinfer.error_text import hint
from edgeinfer.errors import CatalogError
from edgeinfer.host import Host
from edgeinfer.result import Result
from edgeinfer.snapshots.shelf.format import generations, model_part, part_of
from edgeinfer.system.machine import read_memory
from edgeinfer.units import format_bytes


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `size_bytes` 0: not here, size unknown. `snapshots` counts warmed ones.

    `store` is the program whose file it is, "" for a model of ours.
    """

    name: str
    title: str
    purpose: str
    parameters: str
    quantization: str
    licence: str
    context_length: int
    pulled: bool
    in_place: bool = False
    store: str = ""
    size_bytes: int = 0
    snapshots: int = 0
    fit: Fit | None = None


class UnusableModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of another program that can't be used: why, and what to do about it."""

    name: str
    store: str
    problem: str
    fix: str


class ListResult(Result, frozen=True, kw_only=True):
    """Pulled models first, then other programs', then the rest of the catalogue, each by name."""

    kind: ClassVar[str] = "list"

    models: tuple[ListedModel, ...]
    fits: bool = False
    unusable: tuple[UnusableModel, ...] = ()
    adapters: tuple[PulledAdapter, ...] = ()

    def human(self) -> str:
        lines = [f"{one.name} can't be used: {one.problem} ({one.fix})" for one in self.unusable]
        lines += [
            f"adapter {one.name}{f' for {one.base}' if one.base else ''}: `--lora {one.name}`, "
            f"{format_bytes(one.size_bytes)}"
            for one in self.adapters
        ]
        return "\n".join([self._table(), *lines] if self.models or not lines else lines)

    def _table(self) -> str:
        if not self.models:
            return "no model matches"
        if self.fits:
            return _fits_table(self.models)
        head = ("NAME", "HERE", "SIZE", "PARAMETERS", "QUANT", "CONTEXT", "SNAPSHOTS", "LICENCE", "FOR")
        return table([head, *map(_row, self.models)], right=frozenset({2, 3, 5, 6}))


def _row(model: ListedModel) -> tuple[str, ...]:
    return (
        model.name,
        _here(model),
        format_bytes(model.size_bytes) if model.size_bytes else "?",
        model.parameters or "?",
        model.quantization or "?",
        str(model.context_length) if model.context_length else "?",
        str(model.snapshots) if model.snapshots else "-",
        model.licence or "?",
        model.purpose,
    )


def _fits_table(models: Sequence[ListedModel]) -> str:
    head = ("NAME", "HERE", "PARAMETERS", "QUANT", "SIZE", "FITS", "TOKENS/S", "", "WHY")
    rows = [_fit_row(model, model.fit) for model in models if model.fit]
    return table([head, *rows], right=frozenset({2, 4, 6}))


def _fit_row(model: ListedModel, fit: Fit) -> tuple[str, ...]:
    return (
        model.name,
        _here(model),
        model.parameters,
        fit.quantization,
        format_bytes(fit.size_bytes),
        "yes" if fit.fits else "no",
        f"{fit.decode:.1f}",
        fit.basis,
        fit.reason,
    )


def _here(model: ListedModel) -> str:
    """Where its files are."""
    if model.store:
        return f"from {model.store}"
    if model.in_place:
        return "in place"
    return "yes" if model.pulled else "-"


def list_models(options: argparse.Namespace, _host: Host) -> ListResult:
    """Raises ConfigError when models.toml is wrong."""
    catalog = load_catalog()
    counts = _snapshot_counts()
    pulled = list_pulled()
    here = [_pulled(model, catalog, counts) for model in pulled]
    names = {model.name for model in here}
    others = [_found(m, counts) for m in stores.search() if m.name not in {p.source for p in pulled}]
    here += [model for model in others if isinstance(model, ListedModel)]
    broken = [model for model in others if isinstance(model, UnusableModel)]
    rest = (
        []
        if options.pulled
        else [_available(m) for m in catalog.models.values() if m.name not in names]
    )
    wanted = [word.lower() for word in options.words]
    models = tuple(m for m in (*here, *rest) if _matches(m, wanted))
    return ListResult(
        models=_ranked(models, catalog) if options.fits else models,
        fits=options.fits,
        adapters=tuple(one for one in list_adapters() if all(word in one.name for word in wanted)),
        unusable=tuple(m for m in broken if all(word in m.name.lower() for word in wanted)),
    )


def _matches(model: ListedModel, wanted: list[str]) -> bool:
    text = f"{model.name} {model.title} {model.purpose} {model.quantization} {model.store}".lower()
    return all(word in text for word in wanted)


def _found(model: Found, counts: dict[str, int]) -> ListedModel | UnusableModel:
    """A model of another program, by its headers."""
    try:
        parts = stores.headers(model)
    except CatalogError as error:
        return UnusableModel(
            name=model.name,
            store=model.store,
            problem=model.problem or error.message,
            fix=model.fix or hint(error),
        )
    first = parts[0]
    return ListedModel(
        name=model.name,
        title=first.text("general.name") or model.name,
        purpose="chat",
        parameters=format_parameters(sum(part.n_params for part in parts)),
        quantization=first.quantization,
        licence=first.text("general.license"),
        context_length=first.n_ctx_train,
        pulled=True,
        in_place=True,
        store=model.store,
        size_bytes=model.size_bytes,
        snapshots=counts.get(part_of(model.name), 0),
    )


def _pulled(model: PulledModel, catalog: Catalog, counts: dict[str, int]) -> ListedModel:
    entry = catalog.get(model.base)
    return ListedModel(
        name=model.name,
        title=entry.title if entry else model.name,
        purpose=entry.purpose if entry else "chat",
        parameters=entry.parameters
        if entry and entry.parameters
        else format_parameters(model.n_params),
        quantization=model.quantization,
        licence=entry.licence if entry else "",
        context_length=model.n_ctx_train,
        pulled=True,
        in_place=model.in_place,
        size_bytes=model.size_bytes,
        snapshots=counts.get(part_of(model.name), 0),
    )


def _available(entry: Model) -> ListedModel:
    return ListedModel(
        name=entry.name,
        title=entry.title,
        purpose=entry.purpose,
        parameters=entry.parameters,
        quantization=entry.final_quantization,
        licence=entry.licence,
        context_length=entry.context_length,
        pulled=False,
        size_bytes=0 if entry.quantize else entry.size_bytes,
    )


def _ranked(models: Sequence[ListedModel], catalog: Catalog) -> tuple[ListedModel, ...]:
    """Models with what to expect of them here, the best first. Measures this CPU when nobody has."""
    with progress_on() as report:
        rates = kept_or_measured(Job(report))
    room = read_memory().available_bytes
    known = measured_rates()
    found = []
    for model in models:
        total = parameters(model.parameters)
        entry = catalog.get(model.name)
        if total:
            figures = fit(
                model.name,
                total,
                entry.active_parameters if entry else "",
                model.quantization,
                here=model.pulled,
                others=entry is not None and "hf:" in str(entry.sources),
                rates=rates,
                room=room,
                measured=known.get(model.name),
            )
            found.append((figures.rank, msgspec.structs.replace(model, fit=figures)))
    return tuple(model for _, model in sorted(found, key=lambda pair: pair[0]))


def format_parameters(n_params: int) -> str:
    """`134_515_008` → "135M"."""
    return f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.0f}M"


def _snapshot_counts() -> dict[str, int]:
    """Snapshots by the part of their names that says the model."""
    return Counter(model_part(name) for name in generations())
