"""Names of models in requests: aliases, and how clients of Ollama spell them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from fnmatch import fnmatchcase

from edgeinfer.models.external_stores.ollama import PREFIX

#: Name in an alias that stands for the endpoint's default model.
DEFAULT = "default"
#: The tag that Ollama adds to a name without one.
LATEST = ":latest"


class Aliases:
    """Aliases of models. An exact name precedes a pattern.

    `says_all`: there is a pattern `"*"`. Without a target it only stops the only model from answering
    to any name.
    """

    def __init__(self, table: Mapping[str, str]) -> None:
        self.exact = {name: target for name, target in table.items() if "*" not in name}
        self._patterns = {name: target for name, target in table.items() if "*" in name and target}
        self.says_all = "*" in table

    def by_pattern(self, name: str) -> str | None:
        """Return the target of the longest pattern that matches `name`."""
        fitting = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        return self._patterns[max(fitting, key=len)] if fitting else None


def spellings(name: str) -> tuple[str, ...]:
    """Return the models that a name may mean: itself, `x` for `x:latest`, or one of Ollama's store."""
    plain = name.removesuffix(LATEST)
    return (name, plain, PREFIX + plain)


def ollama_name(name: str, taken_names: Container[str] = ()) -> str:
    """Return a name as Ollama lists it: with a tag, and without `ollama/` unless that name is taken."""
    short = name.removeprefix(PREFIX)
    plain = name if short in taken_names else short
    return plain if ":" in plain else plain + LATEST


def where_to_get(missing: str) -> str:
    """Return the hint for a model that is not here."""
    from edgeinfer.models.catalog import load_catalog  # imported only after an error

    if "/" in missing or missing.partition(":")[0] in load_catalog().models:
        return f"`edgeinfer pull {missing}`, or GET /v1/models"
    return "GET /v1/models lists the models; `[serve.aliases]` in the configuration adds names"
