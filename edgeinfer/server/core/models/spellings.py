"""How clients of Ollama spell the names of models."""

from __future__ import annotations

from collections.abc import Container

from edgeinfer.catalog.found.ollama import PREFIX

#: The tag that a name without one has.
LATEST = ":latest"


def spellings(name: str) -> tuple[str, ...]:
    """What a name may stand for: itself, `x` for `x:latest`, and a model in Ollama's own store."""
    plain = name.removesuffix(LATEST)
    return (name, plain, PREFIX + plain)


def listed_name(name: str, others: Container[str] = ()) -> str:
    """A name as Ollama lists it: with a tag, and without the place, unless `others` have that name."""
    short = name.removeprefix(PREFIX)
    plain = name if short in others else short
    return plain if ":" in plain else plain + LATEST
