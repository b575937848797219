"""Hugging Face's cache: snapshots link to blobs, which large files' SHA-256 is the name of.

    HUB/models--OWNER--REPO/refs/REF                 the revision that a branch or tag was
    HUB/models--OWNER--REPO/snapshots/REVISION/…     links, under the files' own names
    HUB/models--OWNER--REPO/blobs/SHA256             what was fetched

A model's name here is the source it would be pulled by: `hf:OWNER/REPO:QUANT`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from edgeinfer.models.external_stores import gguf_folders
from edgeinfer.models.external_stores.model import Found
from edgeinfer.models.external_stores.reading import UnusableError, folders, ggufs, small_file
from edgeinfer.system import places

STORE = "Hugging Face"
PREFIX = places.FOUND[1]
_REPO = re.compile(r"models--([A-Za-z0-9][\w.-]*?)--([A-Za-z0-9][\w.-]*)", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DEPTH = 3


def roots(environment: Mapping[str, str]) -> list[Path]:
    """The cache that Hugging Face's own tools would use; the first variable that is set says it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(variable):
            return [Path(environment[variable]).expanduser()]
    home = environment.get("HF_HOME")
    if not home:
        home = f"{environment.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface"
    return [Path(home).expanduser() / "hub"]


def search(root: Path) -> Iterator[Found]:
    """Yield every model of a cache. Raises UnusableError when it is closed."""
    root = Path(os.path.realpath(root))
    for repo in folders(root):
        owner_and_name = _REPO.fullmatch(repo.name)
        if owner_and_name is not None:
            yield from _repository(root, repo, f"{owner_and_name[1]}/{owner_and_name[2]}")


def _repository(root: Path, repo: Path, called: str) -> Iterator[Found]:
    try:
        latest_first = sorted(folders(repo / "snapshots"), key=lambda path: -path.stat().st_mtime)
        main = _main(root, repo, latest_first)
        revisions = sorted(latest_first, key=lambda path: path.name != main)
        listed = {revision.name: list(ggufs(revision, _DEPTH)) for revision in revisions}
    except UnusableError as error:
        fix = error.hint or _pull(f"{PREFIX}{called}")
        yield Found(name=f"{PREFIX}{called}", store=STORE, problem=error.message, fix=fix)
        return
    seen: set[tuple[str, ...]] = set()
    for revision in revisions:
        source = called if revision.name == main else f"{called}@{revision.name}"
        for model in gguf_folders.models(
            listed[revision.name],
            revision,
            root,
            store=STORE,
            name=_naming(source),
            fix=_pull,
            promised=_promised,
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


def _naming(source: str) -> gguf_folders.Naming:
    def name(path: str, quant: str) -> str:
        return f"{PREFIX}{source}:{quant}" if quant else f"{PREFIX}{source}/{path}"

    return name


def _pull(name: str) -> str:
    return f"`edgeinfer pull {name}` fetches a copy of our own"


def _promised(path: str) -> str:
    """Large files are called by their SHA-256, small ones by Git's digest."""
    blob = os.path.basename(path)
    return blob if _SHA256.fullmatch(blob) else ""
