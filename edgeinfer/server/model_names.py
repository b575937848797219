"""Names of models in requests: aliases of the configuration, and Ollama's spellings."""

from __future__ import annotations

from collections.abc import Container, Mapping
from fnmatch import fnmatchcase

from edgeinfer.models.external_stores.ollama import PREFIX

#: In `[serve.aliases]`, a target that stands for the endpoint's default model.
DEFAULT = "default"
#: The tag that Ollama adds to a name without one.
LATEST = ":latest"


class Aliases:
    """The table `[serve.aliases]`: name or pattern → model. Exact names take precedence over patterns.

    `has_catch_all`: the table has the pattern `"*"`. `"*" = ""` refuses unknown names, even if the
    endpoint has only one model.
    """

    def __init__(self, table: Mapping[str, str]) -> None:
        self.exact = {name: target for name, target in table.items() if "*" not in name}
        self._patterns = {name: target for name, target in table.items() if "*" in name and target}
        self.has_catch_all = "*" in table

    def by_pattern(self, name: str) -> str | None:
        """Return the model of the longest pattern that matches `name`; None if there is none."""
        fitting = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        return self._patterns[max(fitting, key=len)] if fitting else None


def spellings(name: str) -> tuple[str, ...]:
    """Return the models that `x:latest` may mean: `x:latest`, `x`, and Ollama's own `ollama/x`."""
    plain = name.removesuffix(LATEST)
    return (name, plain, PREFIX + plain)


def ollama_name(name: str, taken_names: Container[str] = ()) -> str:
    """Return a model's name as Ollama's API lists it: with a tag, and without the prefix `ollama/`.

    The prefix stays if another model already has the short name.
    """
    short = name.removeprefix(PREFIX)
    plain = name if short in taken_names else short
    return plain if ":" in plain else plain + LATEST


def where_to_get(missing: str) -> str:
    """Return a hint that says how to get the model `missing`."""
    from edgeinfer.models.catalog import load_catalog  # this import takes 8 ms, and only errors need it

    if "/" in missing or missing.partition(":")[0] in load_catalog():
        return f"`edgeinfer pull {missing}`, or GET /v1/models"
    return "GET /v1/models lists the models; `[serve.aliases]` in the configuration adds names"
