"""Find models by name, by one rule for the command line, the chat and every API; suggest similar names.

A local model has a name and maybe further ones: a pulled model has its source and `NAME:QUANT`. Letter
case (except in addresses of files) and Ollama's tag `:latest` do not matter. The prefixes `ollama/` and
`hf:` may be left out, unless another model has the name without the prefix.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from edgeinfer.errors import UsageError
from edgeinfer.models import sources
from edgeinfer.models.gguf import FILE_TYPES
from edgeinfer.models.names import plain_name
from edgeinfer.platform.paths import model_spellings

#: Prefixes of sources in which letter case matters.
_CASE_MATTERS = ("http:", "https:", "file:", "s3:", "gs:", "oci:", "wheel:", "/")
#: Minimum similarity (0 to 1) of a misspelt name to the one that is suggested.
_LEAST_LIKENESS = 0.7


class NamedModel(Protocol):
    """A model that users can name. `find` prefers a model's `name` to any model's `other_names`."""

    @property
    def name(self) -> str: ...

    @property
    def other_names(self) -> tuple[str, ...]: ...


M = TypeVar("M", bound=NamedModel)


def find(text: str, models: Collection[M]) -> M | None:
    """Return the model that `text` names, exactly or in another spelling; None if there is none."""
    aliases = [(name, model) for model in reversed(list(models)) for name in model.other_names]
    by_name = {plain_name(name): model for name, model in aliases if not name.startswith(_CASE_MATTERS)}
    by_name |= {plain_name(model.name): model for model in models}
    by_name |= dict(aliases)
    by_name |= {model.name: model for model in models}
    return next((by_name[name] for name in (text, *spellings(text)) if name in by_name), None)


def spellings(text: str) -> Iterator[str]:
    """Yield the names that `text` may stand for, in lower case and the likeliest first.

    If `text` is also a valid source, its full form (`hf:OWNER/REPO:QUANT`) follows, then the full form
    in lower case, unless letter case matters.
    """
    case_matters = text.lower().startswith(_CASE_MATTERS)
    names = () if case_matters else model_spellings(text)
    yield from names
    if len(names) == 1:  # the name of an Ollama or LM Studio model, not a source
        return
    with suppress(UsageError):
        source = str(sources.parse(text))
        yield from (source,) if case_matters else (source, source.lower())


def did_you_mean(names: Sequence[str], models: Collection[NamedModel]) -> str:
    """Return the question `did you mean A or B (not pulled)? ` for the names A and B; "" without names.

    Each name that is not one of `models` is marked "(not pulled)".
    """
    marked = (name if find(name, models) else f"{name} (not pulled)" for name in names)
    return f"did you mean {' or '.join(marked)}? " if names else ""


def similar_names(text: str, catalog: Iterable[str], local_names: Iterable[str] = ()) -> list[str]:
    """Return up to three names for which `text` may be a misspelling, the likeliest first.

    Only letters and digits are compared: Ollama's `qwen3:4b` is like `qwen3-4b`. A quantization at the
    end of `text` is not compared, but appended to the names from the catalogue. Of two equally
    similar names, a local one comes first.
    """
    from difflib import get_close_matches  # slow import (5 ms), needed only after a mistake

    plain, quant = _split_quantization(plain_name(text))
    typed = _letters(plain)
    if len(typed) < 3:
        return []
    bases = {name: _split_quantization(name.lower())[0].rpartition("/")[2] for name in local_names}
    bases |= {f"{name}:{quant}" if quant else name: name for name in catalog}
    letters = {name: _letters(base) for name, base in bases.items()}
    if same := [name for name, whole in letters.items() if whole == typed]:
        return same[:3]
    near = [name for name, whole in letters.items() if whole.startswith(typed)]
    near += [name for name, base in bases.items() if _words(plain) <= _words(base)]
    near += [name for name, whole in letters.items() if typed in whole]
    starts = {whole[: len(typed)]: name for name, whole in reversed(letters.items())}
    starts |= {whole: name for name, whole in letters.items()}
    near += [starts[start] for start in get_close_matches(typed, starts, cutoff=_LEAST_LIKENESS)]
    return list(dict.fromkeys(near))[:3]


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", text))


_TYPES = {_letters(name): name for name in FILE_TYPES.values()} | {"fp16": "F16"}


def _split_quantization(text: str) -> tuple[str, str]:
    """Split `qwen3:4b-q4_K_M` into `qwen3:4b` and `Q4_K_M`; "" stands for no quantization."""
    for separator in re.finditer(r"[:._+-]", text):
        if quant := _TYPES.get(_letters(text[separator.end() :])):
            return text[: separator.start()], quant
    return text, ""
