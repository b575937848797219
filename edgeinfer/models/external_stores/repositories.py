"""Read stores of repositories' GGUF files: Hugging Face's cache and LM Studio's folders.

    HUB/models--OWNER--REPO/refs/REF                 the revision that a branch or tag was
    HUB/models--OWNER--REPO/snapshots/REVISION/…     links, under the files' own names
    HUB/models--OWNER--REPO/blobs/SHA256             what was fetched
    LMSTUDIO/PUBLISHER/REPOSITORY/FILE.gguf

A model of Hugging Face's cache is named by its source, `hf:OWNER/REPO:QUANT`, one of LM Studio
`lmstudio/PUBLISHER/REPOSITORY:QUANT`. LM Studio's files carry no digest: size and time vouch for them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from edgeinfer.models import names
from edgeinfer.models.external_stores.reader import (
    ExternalFile,
    ExternalModel,
    UnusableError,
    file_in,
    folders,
    ggufs,
    small_file,
)
from edgeinfer.platform import paths

#: (path in its repository, quantization or "") → the model's name
_Naming = Callable[[str, str], str]
#: the model's name → how to solve its problem
_Fix = Callable[[str], str]
#: file → the SHA-256 in its name, or ""
_Digest = Callable[[str], str]


def _grouped(
    ggufs: Iterable[Path],
    folder: Path,
    root: Path,
    *,
    store: str,
    name: _Naming,
    fix: _Fix,
    promised: _Digest = lambda _path: "",
) -> Iterator[ExternalModel]:
    """Yield the models among a repository's files, `folder` being its top and `root` its store's.

    A quantization names a model where it is the only one of it; projectors are passed over.
    """
    found = {str(path.relative_to(folder)): path for path in ggufs}
    firsts = {min(_parts(file)): file for file in sorted(found, reverse=True)}
    firsts = {first: file for first, file in firsts.items() if "mmproj" not in first.lower()}
    quants = {first: names.quantization_of(first) for first in firsts}
    count = Counter(quants.values())
    for first, quant in quants.items():
        called = name(first, quant if count[quant] == 1 else "")
        try:
            files = [_found_file(folder / part, root, promised) for part in _parts(first)]
        except UnusableError as error:
            yield ExternalModel(
                name=called, store=store, problem=error.message, fix=error.hint or fix(called)
            )
            continue
        stamp = max(os.stat(file.path).st_mtime for file in files)
        yield ExternalModel(name=called, store=store, files=tuple(files), modified_s=stamp)


def _parts(file: str) -> list[str]:
    folder, slash, last = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in names.split_names(last)] or [file]


def _found_file(path: Path, root: Path, promised: _Digest) -> ExternalFile:
    if not os.path.lexists(path):
        raise UnusableError(f"its part {path.name} is missing")
    real, info = file_in(path, root)
    return ExternalFile(path=real, size_bytes=info.st_size, sha256=promised(real))


HUGGING_FACE = "Hugging Face"
HF_PREFIX = paths.FOUND[1]
_REPO = re.compile(r"models--([A-Za-z0-9][\w.-]*?)--([A-Za-z0-9][\w.-]*)", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HF_DEPTH = 3


def hf_roots(environment: Mapping[str, str]) -> list[Path]:
    """Return the cache of Hugging Face's own tools; the first variable that is set decides."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(variable):
            return [Path(environment[variable]).expanduser()]
    home = environment.get("HF_HOME")
    if not home:
        home = f"{environment.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface"
    return [Path(home).expanduser() / "hub"]


def search_hf(root: Path) -> Iterator[ExternalModel]:
    """Yield every model of a cache. Raises UnusableError if it is not readable."""
    root = Path(os.path.realpath(root))
    for repo in folders(root):
        owner_and_name = _REPO.fullmatch(repo.name)
        if owner_and_name is not None:
            yield from _hf_repository(root, repo, f"{owner_and_name[1]}/{owner_and_name[2]}")


def _hf_repository(root: Path, repo: Path, called: str) -> Iterator[ExternalModel]:
    try:
        latest_first = sorted(folders(repo / "snapshots"), key=lambda path: -path.stat().st_mtime)
        main = _main(root, repo, latest_first)
        revisions = sorted(latest_first, key=lambda path: path.name != main)
        listed = {revision.name: list(ggufs(revision, _HF_DEPTH)) for revision in revisions}
    except UnusableError as error:
        fix = error.hint or _pull(f"{HF_PREFIX}{called}")
        yield ExternalModel(
            name=f"{HF_PREFIX}{called}", store=HUGGING_FACE, problem=error.message, fix=fix
        )
        return
    seen: set[tuple[str, ...]] = set()
    for revision in revisions:
        source = called if revision.name == main else f"{called}@{revision.name}"
        for model in _grouped(
            listed[revision.name],
            revision,
            root,
            store=HUGGING_FACE,
            name=_hf_naming(source),
            fix=_pull,
            promised=_blob_digest,
        ):
            if not model.files or model.paths not in seen:
                yield model
            seen.add(model.paths)


def _main(root: Path, repo: Path, revisions: list[Path]) -> str:
    known = [revision.name for revision in revisions]
    if (repo / "refs/main").is_file():
        wanted = small_file(repo / "refs/main", root).decode("ascii", "replace").strip()
        if wanted in known:
            return wanted
    return known[0] if known else ""


def _hf_naming(source: str) -> _Naming:
    def name(path: str, quant: str) -> str:
        return f"{HF_PREFIX}{source}:{quant}" if quant else f"{HF_PREFIX}{source}/{path}"

    return name


def _pull(name: str) -> str:
    return f"`edgeinfer pull {name}` fetches a copy of our own"


def _blob_digest(path: str) -> str:
    """Return the SHA-256 that names a large file; small ones have Git's digest."""
    blob = os.path.basename(path)
    return blob if _SHA256.fullmatch(blob) else ""


LM_STUDIO = "LM Studio"
LM_PREFIX = paths.FOUND[2]
_HOMES = (".lmstudio", ".cache/lm-studio")
_POINTER = ".lmstudio-home-pointer"
_LM_DEPTH = 2


class _Settings(msgspec.Struct, frozen=True):
    downloadsFolder: str = ""


def lm_roots(_environment: Mapping[str, str]) -> list[Path]:
    """Return the folders of its homes, old and new, and the configured one."""
    homes = [Path.home() / home for home in _HOMES]
    pointer = _text(Path.home() / _POINTER)
    if pointer.startswith("/") and "\0" not in pointer:
        homes.insert(0, Path(pointer))
    told = [folder for home in homes if (folder := _downloads(home)) is not None]
    return told + [home / "models" for home in homes]


def _downloads(home: Path) -> Path | None:
    try:
        settings = msgspec.json.decode(_text(home / "settings.json") or "{}", type=_Settings)
    except (msgspec.MsgspecError, RecursionError):
        return None
    told = settings.downloadsFolder
    return Path(told) if told.startswith("/") and "\0" not in told else None


def _text(path: Path) -> str:
    try:
        return small_file(path, Path(os.path.realpath(path.parent))).decode("utf-8", "replace").strip()
    except UnusableError:
        return ""


def search_lm(root: Path) -> Iterator[ExternalModel]:
    """Yield every model of a folder. Raises UnusableError if it is not readable."""
    root = Path(os.path.realpath(root))
    for publisher in folders(root):
        for repo in folders(publisher):
            yield from _lm_repository(root, repo, f"{publisher.name}/{repo.name}")


def _lm_repository(root: Path, repo: Path, called: str) -> Iterator[ExternalModel]:
    def name(path: str, quant: str) -> str:
        stem = path[: -len(".gguf")]
        return f"{LM_PREFIX}{called}:{quant}" if quant else f"{LM_PREFIX}{called}/{stem}"

    fix = f"fetch it again in {LM_STUDIO}"
    try:
        files = list(ggufs(repo, _LM_DEPTH))
    except UnusableError as error:
        yield ExternalModel(
            name=f"{LM_PREFIX}{called}", store=LM_STUDIO, problem=error.message, fix=fix
        )
        return
    yield from _grouped(files, repo, root, store=LM_STUDIO, name=name, fix=lambda _name: fix)
