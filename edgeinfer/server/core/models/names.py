"""Names that requests may use for models: aliases, patterns like `claude-*`, Ollama's spellings."""

from __future__ import annotations

from collections.abc import Container, Mapping
from fnmatch import fnmatchcase

from edgeinfer.models.external_stores.ollama import PREFIX

#: The target that means the endpoint's default model.
DEFAULT = "default"
#: The tag that a name without one has in Ollama.
LATEST = ":latest"


class Aliases:
    """A table of names and the models they mean. An exact name goes before a pattern.

    `says_all`: there is an entry for every name, `"*"`; without a target it only switches off that a
    lone model answers to any name.
    """

    def __init__(self, table: Mapping[str, str]) -> None:
        self.exact = {name: target for name, target in table.items() if "*" not in name}
        self._patterns = {name: target for name, target in table.items() if "*" in name and target}
        self.says_all = "*" in table

    def by_pattern(self, name: str) -> str | None:
        """The target of the longest pattern that fits `name`."""
        fitting = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        return self._patterns[max(fitting, key=len)] if fitting else None


def spellings(name: str) -> tuple[str, ...]:
    """What a name may stand for: itself, `x` for `x:latest`, and a model in Ollama's own store."""
    plain = name.removesuffix(LATEST)
    return (name, plain, PREFIX + plain)


def listed_name(name: str, others: Container[str] = ()) -> str:
    """A name as Ollama lists it: with a tag, and without the place, unless `others` have that name."""
    short = name.removeprefix(PREFIX)
    plain = name if short in others else short
    return plain if ":" in plain else plain + LATEST
