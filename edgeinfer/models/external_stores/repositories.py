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
from collections.abc import Iterable, Iterator, Mapping
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
    unusable,
)
from edgeinfer.platform import paths

_SHA256 = re.compile(r"[0-9a-f]{64}")


def _grouped(
    ggufs: Iterable[Path],
    folder: Path,
    root: Path,
    *,
    store: str,
    prefix: str,
    fix: str,
    suffix: str = ".gguf",
) -> Iterator[ExternalModel]:
    """Yield the models among a repository's files, `folder` being its top and `root` its store's.

    A model is called `prefix` and its quantization, if it is the only one of it, otherwise its path
    without `suffix`. Projectors are skipped. `fix` has the name for "{}".
    """
    found = {str(path.relative_to(folder)): path for path in ggufs}
    firsts = {min(_parts(file)): file for file in sorted(found, reverse=True)}
    firsts = {first: file for first, file in firsts.items() if "mmproj" not in first.lower()}
    quants = {first: names.quantization_of(first) for first in firsts}
    count = Counter(quants.values())
    for first, quant in quants.items():
        by_quant = quant and count[quant] == 1
        name = f"{prefix}:{quant}" if by_quant else f"{prefix}/{first[: len(first) - len(suffix)]}"
        try:
            files = [_found_file(folder / part, root) for part in _parts(first)]
        except UnusableError as error:
            yield unusable(name, store, error, fix.replace("{}", name))
            continue
        stamp = max(os.stat(file.path).st_mtime for file in files)
        yield ExternalModel(name=name, store=store, files=tuple(files), modified_s=stamp)


def _parts(file: str) -> list[str]:
    return [str(part) for part in names.split_parts(Path(file))]


def _found_file(path: Path, root: Path) -> ExternalFile:
    if not os.path.lexists(path):
        raise UnusableError(f"its part {path.name} is missing")
    real, info = file_in(path, root)
    blob = os.path.basename(
        real
    )  # Hugging Face names large files by SHA-256, small ones by Git's digest
    digest = blob if _SHA256.fullmatch(blob) else ""
    return ExternalFile(path=real, size_bytes=info.st_size, sha256=digest)


HUGGING_FACE = "Hugging Face"
HF_PREFIX = paths.FOUND[1]
_REPO = re.compile(r"models--([A-Za-z0-9][\w.-]*?)--([A-Za-z0-9][\w.-]*)", re.ASCII)
_HF_FIX = "`edgeinfer pull {}` fetches a copy of our own"
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
        name = f"{HF_PREFIX}{called}"
        yield unusable(name, HUGGING_FACE, error, _HF_FIX.replace("{}", name))
        return
    seen: set[tuple[str, ...]] = set()
    for revision in revisions:
        source = called if revision.name == main else f"{called}@{revision.name}"
        models = _grouped(
            listed[revision.name],
            revision,
            root,
            store=HUGGING_FACE,
            prefix=f"{HF_PREFIX}{source}",
            fix=_HF_FIX,
            suffix="",
        )
        for model in models:
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


LM_STUDIO = "LM Studio"
LM_PREFIX = paths.FOUND[2]
_LM_DEPTH = 2


class _Settings(msgspec.Struct, frozen=True):
    downloadsFolder: str = ""


def lm_roots(_environment: Mapping[str, str]) -> list[Path]:
    """Return the configured folder, and the usual one."""
    home = Path.home() / ".lmstudio"
    try:
        content = small_file(home / "settings.json", Path(os.path.realpath(home)))
        told = msgspec.json.decode(content, type=_Settings).downloadsFolder
    except (UnusableError, msgspec.MsgspecError, RecursionError):
        told = ""
    return [Path(told)] * (told.startswith("/") and "\0" not in told) + [home / "models"]


def search_lm(root: Path) -> Iterator[ExternalModel]:
    """Yield every model of a folder. Raises UnusableError if it is not readable."""
    root = Path(os.path.realpath(root))
    for publisher in folders(root):
        for repo in folders(publisher):
            yield from _lm_repository(root, repo, f"{publisher.name}/{repo.name}")


def _lm_repository(root: Path, repo: Path, called: str) -> Iterator[ExternalModel]:
    prefix, fix = f"{LM_PREFIX}{called}", f"fetch it again in {LM_STUDIO}"
    try:
        files = list(ggufs(repo, _LM_DEPTH))
    except UnusableError as error:
        yield unusable(prefix, LM_STUDIO, error, fix)
        return
    yield from _grouped(files, repo, root, store=LM_STUDIO, prefix=prefix, fix=fix)
