"""Find the model that a user means: `resolve` returns a `ModelRef`, which callers pass on.

A model reference is a path, a name of a model that was pulled or that another program has stored (by
`lookup.find`), a source, or a name in the catalogue.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from edgeinfer.config.load_options import DRAFT, LORA, NO_DRAFT
from edgeinfer.errors import (
    CatalogError,
    InvalidGgufError,
    ModelNotPulledError,
    UnknownModelError,
    UsageError,
)
from edgeinfer.models import gguf, lookup, names, projectors, sources
from edgeinfer.models.catalog import Model, load_catalog
from edgeinfer.models.external_stores import stores
from edgeinfer.models.external_stores.reader import ExternalModel
from edgeinfer.models.store import PulledFile, PulledModel, find_pulled, list_pulled
from edgeinfer.platform import paths
from edgeinfer.runtime.options import ModelFiles

_ROOT = 0  # user id


class ModelRef(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a user has named. `name` is its full name; for a file, the absolute path.

    `pulled` or `external` describes it, depending on `kind`. `entry` is its entry in the catalogue, if
    any. An "absent" model is not on this machine. `verified` are its files if they were just verified.
    """

    text: str
    kind: Literal["file", "pulled", "external", "absent"]
    name: str
    pulled: PulledModel | None = None
    external: ExternalModel | None = None
    entry: Model | None = None
    verified: ModelFiles | None = None

    @property
    def parts(self) -> list[Path]:
        """Paths of the model's files in order, not verified and maybe missing."""
        if self.kind == "file":
            return names.split_parts(Path(self.name))
        if self.external is not None:
            return [Path(path) for path in self.external.paths]
        return list(self.pulled.paths) if self.pulled is not None else []

    def files(self, progress: stores.Progress | None = None, *, draft: str = "") -> ModelFiles:
        """Verify the files of the model and of its draft model; return what a load needs.

        `draft` names the draft model; "" means the catalogue's. If the catalogue's cannot be used, a
        warning says so. `progress` reports the hashing of another program's file, which is done once.

        Raises UnknownModelError, ModelNotPulledError, InvalidGgufError if a file is not a valid GGUF or
        was changed after its pull, ChecksumError if another program's file does not match its digest.
        """
        if self.verified is not None:
            return self.verified
        files = self._own_files(progress)
        name = str(DRAFT.parse(draft or (self.entry.draft if self.entry is not None else "")))
        if name in ("", NO_DRAFT):
            return files
        try:
            model = resolve(name)
            if model.kind == "absent" and not draft:
                no_draft = f"{name} is not on this machine: `edgeinfer pull {name}`"
                return msgspec.structs.replace(files, no_draft=no_draft)
            paths = model._own_files(progress).paths
        except (CatalogError, UsageError) as error:
            if draft:
                hint = f"{error.hint or '`edgeinfer list`'}, or --draft none"
                raise type(error)(f"draft model: {error.message}", hint=hint) from error
            no_draft = f"{error}: `edgeinfer pull {name}`"
            return msgspec.structs.replace(files, draft=name, no_draft=no_draft)
        return msgspec.structs.replace(files, draft=name, draft_paths=paths)

    def _own_files(self, progress: stores.Progress | None) -> ModelFiles:
        if self.kind == "file":
            return _files_of_path(Path(self.name))
        if self.external is not None:
            return stores.verified_files(self.external, progress)
        if self.pulled is None:
            raise self.absence()
        for file in self.pulled.all_files:
            _refuse_changed(self.pulled.folder / file.path, file, self.name)
        return _files_of_pulled(self.pulled, self.entry)

    def absence(self) -> CatalogError:
        """Make the error for a model that is not on this machine: unknown, or not pulled."""
        if stores.is_name(self.text):
            return stores.not_found_error(self.text)
        if self.entry is not None or sources.looks_like_source(self.text):
            way = f"pull it first: `edgeinfer pull {self.text}`{_offer()}"
            return ModelNotPulledError(f"{self.text} is not on this machine yet", hint=way)
        _, question = _suggest(self.text)
        near = f"{question}`edgeinfer list` shows every model" if question else None
        hint = names.path_hint(self.text) or near
        return UnknownModelError(f"no model is called {self.text!r}", hint=hint)


def resolve(text: str) -> ModelRef:
    """Return the model that `text` means, of kind "absent" if it is not on this machine.

    Raises UsageError if `text` cannot be a reference, CatalogError if a stored record is damaged.
    """
    if paths.is_model_path(text):
        return ModelRef(text=text, kind="file", name=paths.absolute_path(text))
    if pulled := find_pulled(text):
        entry = load_catalog().get(pulled.base)
        return ModelRef(text=text, kind="pulled", name=pulled.name, pulled=pulled, entry=entry)
    external = stores.find(text)
    if external is not None and not _hides_the_catalogue(text, external):
        return ModelRef(text=text, kind="external", name=external.name, external=external)
    if sources.looks_like_source(text):
        if not stores.is_name(text):
            sources.parse(text)  # raises UsageError if `text` is not a valid source
        return ModelRef(text=text, kind="absent", name=text)
    ref = names.find_reference(text)
    entry = load_catalog().get(ref.name) if ref is not None else None
    return ModelRef(text=text, kind="absent", name=str(ref or text), entry=entry)


def _hides_the_catalogue(text: str, model: ExternalModel) -> bool:
    """Return whether another user, who is not root, has given a name of the catalogue to a file."""
    if stores.is_name(text) or "/" in text:
        return False
    ref = names.find_reference(text)
    existing = filter(os.path.exists, model.paths)
    is_foreign = any(os.stat(path).st_uid not in (_ROOT, os.getuid()) for path in existing)
    return is_foreign and ref is not None and ref.name in load_catalog()


def find(text: str) -> ModelRef | None:
    """Return the model that `text` names; None if `text` is something else, such as a prompt.

    Raises CatalogError if a stored record is damaged.
    """
    if any(map(str.isspace, text)) and not paths.is_model_path(text):
        return None  # a prompt: no name has spaces, so the search is saved
    try:
        ref = resolve(text)
    except UsageError:
        return None
    if ref.kind == "file":
        is_file = text.lower().endswith(".gguf") and Path(text).expanduser().is_file()
        return ref if is_file else None
    return ref if ref.kind != "absent" or ref.entry is not None else None


def find_unless_misspelt(word: str, default_model: str) -> ModelRef | None:
    """Like `find`, but raise UnknownModelError if `word` is almost a name, so probably not a prompt.

    A word with a digit or a hyphen is almost a name if it resembles one; any other word, if a name
    begins with it ("gemma", but not "hi"). The hint runs the word as a prompt of `default_model`.
    """
    ref = find(word)
    if ref is None and re.fullmatch(r"[\w.:-]+", word):
        near, question = _suggest(word)
        begins_name = len(word) >= 4 and any(name.startswith(word.lower()) for name in near)
        if begins_name or (near and re.search(r"[\d-]", word)):
            hint = f"{question}if it is the prompt: `edgeinfer run {default_model} {word}`"
            raise UnknownModelError(f"no model is called {word!r}", hint=hint)
    return ref


def _suggest(text: str) -> tuple[list[str], str]:
    """Return the names that are similar to `text`, and the question whether one of them was meant."""
    models: list[lookup.NamedModel] = [*list_pulled(), *stores.usable()]
    near = lookup.similar_names(text, load_catalog(), [model.name for model in models])
    return near, lookup.did_you_mean(near, models)


def _offer() -> str:
    local_models = [(model.name, "") for model in list_pulled()]
    local_models = local_models or [(model.name, f", from {model.store}") for model in stores.usable()]
    if not local_models:
        return ""
    name, origin = local_models[0]
    more = f" ({len(local_models) - 1} more: `edgeinfer list`)" if len(local_models) > 1 else ""
    return f", or use one that is here{origin}: `edgeinfer chat {name}`{more}"


def _files_of_pulled(pulled: PulledModel, entry: Model | None) -> ModelFiles:
    files = ModelFiles(
        name=pulled.name,
        paths=tuple(map(str, pulled.paths)),
        sha256=pulled.sha256,
        quantization=pulled.quantization,
        projector=_projector(pulled, entry),
    )
    if entry is None:
        return files
    return msgspec.structs.replace(
        files,
        chat_template=entry.chat_template or None,
        stop=entry.stop,
        sampling=entry.default_sampling,
        system_prompt=entry.system_prompt,
        lora=str(LORA.parse(",".join(adapter.option for adapter in entry.lora))),
    )


def _projector(pulled: PulledModel, entry: Model | None) -> str:
    """Return the path of the catalogue's, the pulled or a neighbouring projector; "" for none."""
    if entry is not None and entry.projector and entry.projector_source is None:
        path = Path(entry.projector).expanduser().absolute()
        projectors.check(path)
        return str(path)
    if pulled.projector is not None:
        return str(pulled.folder / pulled.projector.path)
    candidates = projectors.in_folder_of(pulled.paths[0])
    return projectors.find_fitting(candidates, gguf.read_header(pulled.paths[0])) if candidates else ""


def _refuse_changed(path: Path, file: PulledFile, name: str) -> None:
    try:
        info = path.stat()
    except OSError as error:
        problem = f"{path}, a file of {name}, cannot be found: {error.strerror}"
        raise ModelNotPulledError(problem, hint=f"fetch it again: `edgeinfer pull {name}`") from error
    if (info.st_size, info.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        hint = f"verify it again: `edgeinfer pull {name}`"
        raise InvalidGgufError(f"{path} was changed after {name} was pulled", hint=hint)


def _files_of_path(path: Path) -> ModelFiles:
    if path.is_dir():
        problem = f"{path} is a folder: convert it once, then use the model by name"
        raise ModelNotPulledError(problem, hint=f"`edgeinfer pull {path}`")
    parts = names.split_parts(path)
    first, *_ = [gguf.read_model_header(file) for file in parts]
    projector = projectors.find_fitting(projectors.in_folder_of(parts[0]), first)
    return ModelFiles(name=path.stem, paths=tuple(map(str, parts)), projector=projector)
