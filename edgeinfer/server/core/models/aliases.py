"""Other names that requests may use for models: exact ones, and patterns like `claude-*`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

#: The target that means the endpoint's default model.
DEFAULT = "default"


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
