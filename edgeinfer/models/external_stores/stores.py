"""Find models in other programs' stores, and verify one before it is used.

A search reads only names and sizes. Before a model is used, its header is checked as untrusted input,
and the whole file is compared once with the digest in its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from edgeinfer.errors import ChecksumError, ModelNotPulledError
from edgeinfer.models import gguf, lookup, names, projectors
from edgeinfer.models.external_stores import ollama
from edgeinfer.models.external_stores.ollama import OllamaSettings, OllamaStore
from edgeinfer.models.external_stores.reader import ExternalModel, ExternalStore, UnusableError, verify
from edgeinfer.models.external_stores.repositories import HuggingFaceCache, LmStudioFolder
from edgeinfer.runtime.options import ModelFiles
from edgeinfer.runtime.requests import Sampling

#: Progress callback: stage, and fraction from 0 to 1 or None.
Progress = Callable[[str, float | None], None]

_OLLAMA, _LM_STUDIO = OllamaStore(), LmStudioFolder()
_STORES: tuple[ExternalStore, ...] = (_OLLAMA, HuggingFaceCache(), _LM_STUDIO)


def is_name(text: str) -> bool:
    """Return whether `text` begins with "ollama/" or "lmstudio/", and so cannot be a source."""
    return text.lower().startswith((_OLLAMA.prefix, _LM_STUDIO.prefix))


def search(prefix: str = "") -> list[ExternalModel]:
    """List all models whose names begin with `prefix`, also those that cannot be used."""
    models: dict[str, ExternalModel] = {}
    for store in _STORES:
        if store.prefix.startswith(prefix) or prefix.startswith(store.prefix):
            for model in _in_store(store):
                models.setdefault(model.name, model)
    return list(models.values())


def _in_store(store: ExternalStore) -> Iterator[ExternalModel]:
    searched: set[str] = set()
    for root in store.roots(os.environ):
        real = os.path.realpath(root)
        if real in searched:
            continue
        searched.add(real)
        try:
            yield from map(_printable, store.search(Path(real)))
        except (UnusableError, OSError) as error:
            name, fix = f"{store.prefix}*", f"let this user read {root}, or ignore this message"
            yield ExternalModel(name=name, store=store.name, problem=str(error), fix=fix)


def _printable(model: ExternalModel) -> ExternalModel:
    if model.name.isprintable():
        return model
    shown = "".join(c if c.isprintable() else "?" for c in model.name)
    problem = "the name has unprintable characters"
    return ExternalModel(name=shown, store=model.store, problem=problem, fix="rename it")


def find(text: str) -> ExternalModel | None:
    """Return the model that `text` names, exactly or in another spelling; None if there is none."""
    prefix = next((s.prefix for s in _STORES if text.lower().startswith(s.prefix)), "")
    return lookup.find(text, search(prefix))


def usable() -> list[ExternalModel]:
    return [model for model in search() if not model.problem]


def headers(model: ExternalModel, *, vocabulary: bool = True) -> list[gguf.GgufHeader]:
    """Return the headers of a model's files.

    Raises ModelNotPulledError if the model has a `problem`, InvalidGgufError if a header is invalid or,
    with `vocabulary`, lists two equal tokens.
    """
    if model.problem:
        problem = f"{model.name} can't be used: {model.problem}"
        raise ModelNotPulledError(problem, hint=model.fix or None)
    headers = [gguf.read_model_header(path, vocabulary=vocabulary) for path in model.paths]
    for index, header in enumerate(headers):
        gguf.check_part(header, header.path, index, len(headers))
    return headers


def settings(model: ExternalModel, header: gguf.GgufHeader) -> OllamaSettings:
    """Return Ollama's settings of a model with this GGUF header; empty for other programs' models."""
    return ollama.read_settings(model.layers, has_template=bool(header.chat_template))


def verified_files(model: ExternalModel, progress: Progress | None = None) -> ModelFiles:
    """Return a model's files, after checking their headers, and their SHA-256 against their names.

    Raises what `headers` raises, ModelNotPulledError for an unreadable file, ChecksumError.
    """
    files = describe_files(model)
    report = progress or (lambda stage, fraction: None)
    hint = f"fetch it again with {model.store}"
    encoder = [file for file in model.projectors if file.path == files.projector]
    for file in (*model.files, *encoder):
        stage = f"checking {os.path.basename(file.path)[:20]}… of {model.store}, once"
        try:
            verify(file, partial(report, stage))
        except ChecksumError as error:
            raise ChecksumError(error.message, hint=hint) from error
        except OSError as error:
            problem = f"{file.path}, a file of {model.name}, can't be read: {error.strerror}"
            raise ModelNotPulledError(problem, hint=hint) from error
    return files


def describe_files(model: ExternalModel) -> ModelFiles:
    """Return a model's files without hashing them. Raises what `headers` raises."""
    header = headers(model)[0]
    stored = settings(model, header)
    return ModelFiles(
        name=model.name,
        paths=model.paths,
        sha256=digest(model),
        stop=stored.stop,
        sampling=msgspec.structs.replace(Sampling(), **stored.sampling),
        system_prompt=stored.system_prompt,
        projector=projectors.find_fitting([file.path for file in model.projectors], header),
    )


def digest(model: ExternalModel) -> str:
    """Return a model's SHA-256, from the digests in its files' names; "" if a name has none."""
    digests = [file.sha256 for file in model.files]
    return names.combined_digest(digests) if all(digests) else ""


def not_found_error(text: str) -> ModelNotPulledError:
    """Make the error for a name such as `ollama/NAME` if that program's store has no such model."""
    store = next(s for s in _STORES if text.lower().startswith(s.prefix))
    roots = " or ".join(dict.fromkeys(map(str, store.roots(os.environ))))
    typed = text[len(store.prefix) :]
    fetch = f"`ollama pull {typed}` fetches it; " if store is _OLLAMA else ""
    hint = f"{fetch}`edgeinfer list` shows what is here"
    return ModelNotPulledError(f"{store.name} has no {typed} in {roots}", hint=hint)
