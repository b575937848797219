"""`edgeinfer rm`: remove models, finished or half fetched."""

from __future__ import annotations

import argparse
from typing import ClassVar

from edgeinfer.catalog.remove import Removed, remove
from edgeinfer.result import Result
from edgeinfer.units import bytes_words


class RmResult(Result, frozen=True, kw_only=True):
    """What is gone."""

    kind: ClassVar[str] = "rm"

    removed: tuple[Removed, ...]

    def human(self) -> str:
        return "\n".join(_line(one) for one in self.removed)


def _line(one: Removed) -> str:
    if one.left_in_place:
        return f"{one.name} is removed; {', '.join(one.left_in_place)} was used in place and is left alone"
    return f"{one.name} is removed: {bytes_words(one.freed_bytes)} freed"


def rm(options: argparse.Namespace) -> RmResult:
    """Raises UnknownModelError, ModelNotPulledError, ModelBusyError; models before the failing one are gone then."""
    return RmResult(removed=tuple(remove(text, forget=options.forget) for text in options.models))
