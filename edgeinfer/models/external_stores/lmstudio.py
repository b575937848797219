"""LM Studio's folders: `PUBLISHER/REPOSITORY/FILE.gguf` under one folder, which its settings may move.

A model's name here is `lmstudio/PUBLISHER/REPOSITORY:QUANT`. The files carry no digest: their sizes
and times vouch for them, as for a file that is named by its path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from edgeinfer.models.external_stores import gguf_folders
from edgeinfer.models.external_stores.model import Found
from edgeinfer.models.external_stores.reading import UnusableError, folders, ggufs, small_file
from edgeinfer.system import places

STORE = "LM Studio"
PREFIX = places.FOUND[2]
_HOMES = (".lmstudio", ".cache/lm-studio")
_POINTER = ".lmstudio-home-pointer"
_DEPTH = 2


class _Settings(msgspec.Struct, frozen=True):
    downloadsFolder: str = ""


def roots(_environment: Mapping[str, str]) -> list[Path]:
    """The folders of its homes, old and new, and the one that its settings name."""
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


def search(root: Path) -> Iterator[Found]:
    """Yield every model of a folder. Raises UnusableError when it is closed."""
    root = Path(os.path.realpath(root))
    for publisher in folders(root):
        for repo in folders(publisher):
            yield from _repository(root, repo, f"{publisher.name}/{repo.name}")


def _repository(root: Path, repo: Path, called: str) -> Iterator[Found]:
    def name(path: str, quant: str) -> str:
        stem = path[: -len(".gguf")]
        return f"{PREFIX}{called}:{quant}" if quant else f"{PREFIX}{called}/{stem}"

    fix = f"fetch it again in {STORE}"
    try:
        files = list(ggufs(repo, _DEPTH))
    except UnusableError as error:
        yield Found(name=f"{PREFIX}{called}", store=STORE, problem=error.message, fix=fix)
        return
    yield from gguf_folders.models(files, repo, root, store=STORE, name=name, fix=lambda _name: fix)
