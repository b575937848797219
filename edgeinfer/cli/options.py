"""Command-line options that several verbs share, by scope: load, launch, request."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeinfer.cli.parser import LAUNCH, LOAD, SAMPLING, HelpAll, add_option
from edgeinfer.config import sampling_options
from edgeinfer.config.load_options import LOAD_OPTIONS, AdaptersOption, LoadOption
from edgeinfer.config.sampling_options import SamplingOption
from edgeinfer.platform.disk import folder_for

MAX_TOKENS = "at most N tokens (default: 1,500, 8,000 or no limit)"
SYSTEM = "system prompt: text, @FILE or name of a saved prompt"


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the load options. Their default, None, stands for the value in config.toml."""
    has_sampling = any(group.title == SAMPLING for group in parser._action_groups)
    help = f"show every option, such as {'--temperature' if has_sampling else '--ctx'}"
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help=help)
    group = parser.add_argument_group(LOAD)
    for option in LOAD_OPTIONS:
        if option.flag and option.of_snapshot:
            add_load_option(group, option)


def add_attached_options(parser: argparse._ActionsContainer) -> None:
    """Add the load options that work with any snapshot: threads and GPU layers."""
    for option in LOAD_OPTIONS:
        if option.flag and not option.of_snapshot:
            add_load_option(parser, option)


def add_load_option(parser: argparse._ActionsContainer, option: LoadOption) -> None:
    """Add a load option; its parsed value becomes the attribute `option.field` of the namespace."""
    choices = option.choices if option.metavar is None else None
    parser.add_argument(
        option.flag,
        action=_Join if option.many else "store",
        dest=option.field,
        type=_parser_of(option),
        choices=choices,
        metavar=option.metavar,
        help=option.help,
    )


def _parser_of(option: LoadOption | SamplingOption) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return option.parse(text)
        except ValueError as error:
            is_list = isinstance(option, AdaptersOption)
            problem = str(error) if is_list else f"{text!r} is not {option.describe_range()}"
            raise argparse.ArgumentTypeError(problem) from None

    return parse


class _Join(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def add_launch_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the launch options, which work with every snapshot; return their group."""
    group = parser.add_argument_group(LAUNCH)
    add_attached_options(group)
    which = group.add_mutually_exclusive_group()
    which.add_argument("--resume", choices=("auto", "always", "never"), help="resume from a snapshot")
    add_option(which, "--snapshot SNAPSHOT", "resume this snapshot, with its model and load options")
    return group


def add_sampling_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the sampling options; return their group. The default, None, stands for the model's value."""
    group = parser.add_argument_group(SAMPLING)
    for option in sampling_options.TYPED:
        metavar = "N" if option.kind is int else "X"
        group.add_argument(option.flag, type=_parser_of(option), metavar=metavar, help=option.help)
    return group


def number_between(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], Any]:
    """Return a function that parses a number from `low` to `high`, as the `type` of an argument."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between {low:,} and {high:,}")

    return parse


count = number_between(int, 1, 1_000_000)


def add_think(parser: argparse.ArgumentParser) -> None:
    help = "reasoning before the answer, if the model supports it"
    parser.add_argument("--think", choices=("on", "off"), help=help)


def add_traces(parser: argparse._ActionsContainer) -> None:
    help = "append spans (load, resume, tokenize, queue, prefill, decode) as OTLP JSON"
    add_option(parser, "--traces FILE", help, type=_traces_file)


def _traces_file(text: str) -> str:
    folder_for(Path(text), "name another file for --traces")
    return os.path.abspath(text)


def add_yes(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--yes", "do not ask for confirmation")


def add_model(
    parser: argparse.ArgumentParser, help: str = "model name or GGUF file (default: the configured one)"
) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help=help)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--quiet", "print no progress on stderr")


def add_everywhere(parser: argparse._ActionsContainer) -> None:
    add_option(parser, "--everywhere", "include processes with another data folder (EDGEINFER_HOME)")
