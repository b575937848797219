"""From options typed to values of the engine; the configuration fills what was not typed.

The options of the three times meet here and nowhere else: load (another snapshot), launch (rides in the
launch request), request (one generation).
"""

from __future__ import annotations

import argparse

import msgspec

from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.requests import Sampling, with_options
from edgeinfer.settings.config import LoadConfig
from edgeinfer.settings.load_options import LOAD_OPTIONS
from edgeinfer.settings.sampling_options import TYPED


def load_options(options: argparse.Namespace, config: LoadConfig) -> LoadOptions:
    """What was ordered whole, else what was typed, else what the configuration says."""
    ordered = getattr(options, "load_options", None)
    if ordered:
        return msgspec.json.decode(ordered, type=LoadOptions)
    typed = {
        option.field: getattr(options, option.field, None) for option in LOAD_OPTIONS if option.flag
    }
    configured = {option.field: config.value(option) for option in LOAD_OPTIONS if option.key}
    given = {field: value for field, value in typed.items() if value is not None}
    return msgspec.convert(configured | given, LoadOptions)


def typed_sampling(options: argparse.Namespace) -> dict[str, float | int | None]:
    """The sampling options that were typed, by field."""
    typed = {option.field: getattr(options, option.field, None) for option in TYPED}
    return {field: value for field, value in typed.items() if value is not None}


def sampling(options: argparse.Namespace, default: Sampling) -> Sampling:
    """The model's sampling defaults with what was typed on top."""
    return with_options(default, typed_sampling(options))
