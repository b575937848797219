"""List the models that are on this machine or can be pulled, for `list` and the model picker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from edgeinfer.error_text import hint
from edgeinfer.errors import CatalogError
from edgeinfer.models import projectors
from edgeinfer.models.catalog import Catalog, Model
from edgeinfer.models.external_stores import stores
from edgeinfer.models.external_stores.reader import ExternalModel
from edgeinfer.models.store import PulledModel, list_pulled
from edgeinfer.units import format_parameters


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a list shows of a model: a pulled one, one of another program, or one of the catalogue.

    `store` is that program ("" for edgeinfer). `pulled` is False if the files are not on this machine.
    `size_bytes` is 0 if unknown. `can_see` models accept pictures.
    """

    name: str
    title: str
    purpose: str = "chat"
    parameters: str = ""
    quantization: str = ""
    licence: str = ""
    context_length: int = 0
    pulled: bool = False
    in_place: bool = False
    store: str = ""
    size_bytes: int = 0
    size_is_estimate: bool = False
    can_see: bool = False


class UnusableModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of another program that cannot be used: `problem` says why, `fix` what to do."""

    name: str
    store: str
    problem: str
    fix: str


#: A model in the list, and the paths of its files on this machine.
Listed = tuple[ModelSummary | UnusableModel, Sequence[str | Path]]


def every_model(catalog: Catalog) -> Iterator[Listed]:
    """Yield the pulled models, other programs' models, then catalogue entries that are not pulled.

    Each comes with the paths of its files on this machine.
    """
    pulled = list_pulled()
    for model in pulled:
        yield _of_pulled(model, catalog.get(model.base) or model.entry_by_header()), model.paths
    sources = {model.source for model in pulled}
    for external in stores.search():
        if external.name not in sources:
            yield _of_external(external), external.paths
    names = {model.name for model in pulled}
    for entry in catalog.values():
        if entry.name not in names:
            yield summarize_entry(entry), ()


def _of_pulled(model: PulledModel, entry: Model) -> ModelSummary:
    return ModelSummary(
        name=model.name,
        title=entry.title,
        purpose=entry.purpose,
        parameters=entry.parameters or format_parameters(model.n_params),
        quantization=model.quantization,
        licence=entry.licence,
        context_length=model.n_ctx_train,
        pulled=True,
        in_place=model.in_place,
        size_bytes=model.size_bytes,
        can_see=bool(entry.projector or model.projector or projectors.in_folder_of(model.paths[0])),
    )


def _of_external(model: ExternalModel) -> ModelSummary | UnusableModel:
    try:
        parts = stores.headers(model, vocabulary=False)  # reading a vocabulary takes 0.2 s
    except CatalogError as error:
        problem, fix = model.problem or error.message, model.fix or hint(error)
        return UnusableModel(name=model.name, store=model.store, problem=problem, fix=fix)
    first = parts[0]
    return ModelSummary(
        name=model.name,
        title=first.label("general.name") or model.name,
        purpose=first.purpose,
        parameters=format_parameters(sum(part.n_params for part in parts)),
        quantization=first.quantization,
        licence=first.label("general.license"),
        context_length=first.n_ctx_train,
        pulled=True,
        in_place=True,
        store=model.store,
        size_bytes=model.size_bytes,
        can_see=bool(model.projectors),
    )


def summarize_entry(entry: Model) -> ModelSummary:
    return ModelSummary(
        name=entry.name,
        title=entry.title,
        purpose=entry.purpose,
        parameters=entry.parameters,
        quantization=entry.final_quantization,
        licence=entry.licence,
        context_length=entry.context_length,
        size_bytes=entry.stored_bytes,
        size_is_estimate=entry.stored_is_estimate,
    )
