"""What a model that is not loaded would take, from its GGUF header alone."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.models.gguf import GgufHeader
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.planning.choices import choose_repack
from edgeinfer.runtime.planning.plan import Plan, make_plan
from edgeinfer.runtime.planning.shape import Shape, make_shape
from edgeinfer.system.machine import Machine


def header_shape(headers: Sequence[GgufHeader]) -> Shape:
    """The sizes of a model from the headers of its files, the first of which has the metadata."""
    first = headers[0]
    return make_shape(
        first.metadata,
        n_vocab=first.n_vocab,
        n_params=sum(header.n_params for header in headers),
        weights_bytes=sum(header.weights_bytes for header in headers),
    )


def header_plan(headers: Sequence[GgufHeader], options: LoadOptions, machine: Machine) -> Plan:
    """The plan by which `runtime.loading.load` would load these files."""
    file_bytes = sum(header.file_bytes for header in headers)
    repack = choose_repack(options.repack, file_bytes, machine)
    return make_plan(header_shape(headers), options, machine, repack)
