"""Models that are here or can be pulled, as `list` and the chat's picker show them."""

from __future__ import annotations

import msgspec

from edgeinfer.models.catalog import Model
from edgeinfer.models.external_stores import stores
from edgeinfer.models.external_stores.reader import ExternalModel
from edgeinfer.models.store import PulledModel
from edgeinfer.units import format_parameters


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `size_bytes` is 0 if unknown.

    `store` is the external store that has the file, "" for our own.
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


def of_pulled(model: PulledModel, entry: Model | None) -> ModelSummary:
    """List a pulled model; `entry` is its row of the catalogue, if it has one."""
    return ModelSummary(
        name=model.name,
        title=entry.title if entry else model.name,
        purpose=entry.purpose if entry else model.purpose,
        parameters=(entry.parameters if entry else "") or format_parameters(model.n_params),
        quantization=model.quantization,
        licence=entry.licence if entry else "",
        context_length=model.n_ctx_train,
        pulled=True,
        in_place=model.in_place,
        size_bytes=model.size_bytes,
    )


def of_external(model: ExternalModel) -> ModelSummary:
    """List a model of another program by its header. Raises CatalogError if it cannot be used."""
    parts = stores.headers(model, vocabulary=False)  # so many files, and none is loaded
    first = parts[0]
    return ModelSummary(
        name=model.name,
        title=first.text("general.name") or model.name,
        purpose=first.purpose,
        parameters=format_parameters(sum(part.n_params for part in parts)),
        quantization=first.quantization,
        licence=first.text("general.license"),
        context_length=first.n_ctx_train,
        pulled=True,
        in_place=True,
        store=model.store,
        size_bytes=model.size_bytes,
    )


def of_catalogue(entry: Model) -> ModelSummary:
    """List a model that can be pulled."""
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
