"""Names of models in requests: aliases of the configuration, and names as Ollama lists them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from fnmatch import fnmatchcase

from edgeinfer.errors import ConfigError
from edgeinfer.models import lookup
from edgeinfer.models.external_stores.ollama import PREFIX
from edgeinfer.models.names import plain_name
from edgeinfer.platform.paths import LATEST

#: In `[serve.aliases]`, a target that stands for the endpoint's default model.
DEFAULT = "default"


class Aliases:
    """The table `[serve.aliases]`: name or pattern → model, in any letter case. Exact names come first.

    `has_catch_all` is true if the table has the pattern `"*"`. `"*" = ""` refuses unknown names, even
    if the endpoint has only one model.
    """

    def __init__(self, table: Mapping[str, str]) -> None:
        self.exact = {name: target for name, target in table.items() if "*" not in name}
        self._by_name = {plain_name(name): target for name, target in self.exact.items()}
        self._patterns = {name: target for name, target in table.items() if "*" in name and target}
        self.has_catch_all = "*" in table

    def by_name(self, name: str) -> str | None:
        """Return the model with the alias `name`, in any spelling; None if there is no such alias."""
        aliases = (spelled for spelled in lookup.spellings(name) if spelled in self._by_name)
        return next(map(self._by_name.__getitem__, aliases), None)

    def by_pattern(self, name: str) -> str | None:
        """Return the model of the longest pattern that matches `name`; None if none does."""
        matching = [p for p in self._patterns if fnmatchcase(name.lower(), p.lower())]
        return self._patterns[max(matching, key=len)] if matching else None


def ollama_name(name: str, taken_names: Container[str] = ()) -> str:
    """Return a model's name as Ollama's API lists it: with a tag, and without the prefix `ollama/`.

    The prefix stays if another model already has the short name.
    """
    short = name.removeprefix(PREFIX)
    listed_name = name if short in taken_names else short
    return listed_name if ":" in listed_name else listed_name + LATEST


def where_to_get(missing: str, local_names: Iterable[str]) -> str:
    """Return a hint: how to get the model `missing`, or local names that resemble it."""
    from edgeinfer.models.catalog import load_catalog  # this import takes 8 ms, and only errors need it

    try:
        catalog = load_catalog()
    except ConfigError:  # a mistake in models.toml must not fail requests
        catalog = {}
    if "/" in missing or missing.partition(":")[0] in catalog:
        return f"`edgeinfer pull {missing}`, or GET /v1/models"
    similar = lookup.similar_names(missing, catalog, local_names)
    guess = f"did you mean {' or '.join(similar)}? " if similar else ""
    return f"{guess}GET /v1/models lists the models; `[serve.aliases]` in the configuration adds names"
