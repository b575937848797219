"""From command-line options to engine values: load options and sampling, with the configuration filling
what was not typed.

The options of the three times meet here and nowhere else: load (another snapshot), launch (rides in the
launch request), request (one generation).
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from edgeinfer.config import LoadConfig
from edgeinfer.errors import UsageError
from edgeinfer.runtime.options import LoadOptions
from edgeinfer.runtime.requests import Sampling

SAMPLING_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "mirostat",
    "seed",
)


def load_options(options: argparse.Namespace, config: LoadConfig) -> LoadOptions:
    """What was typed, else what the configuration says. Raises UsageError for a malformed
    `--gpu-layers`.
    """

    def pick(name: str, default: Any) -> Any:
        typed = getattr(options, name, None)
        return default if typed is None else typed

    return LoadOptions(
        n_ctx=pick("ctx", config.ctx),
        n_parallel=pick("parallel", config.parallel),
        n_threads=pick("threads", config.threads),
        repack=pick("repack", config.repack),
        kv_type=pick("kv_type", config.kv_type),
        gpu_layers=gpu_layers(pick("gpu_layers", config.gpu_layers)),
    )


def gpu_layers(text: str) -> Any:
    """`auto`, `none` or a count. Raises UsageError."""
    if text in ("auto", "none"):
        return text
    if text.isdecimal():
        return int(text)
    raise UsageError(f'--gpu-layers takes "auto", "none" or a number, not "{text}"')


def sampling(options: argparse.Namespace, default: Sampling) -> Sampling:
    """The model's sampling defaults with what was typed on top."""
    typed = {name: getattr(options, name, None) for name in SAMPLING_OPTIONS}
    return msgspec.structs.replace(
        default, **{name: value for name, value in typed.items() if value is not None}
    )
