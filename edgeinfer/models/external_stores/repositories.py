"""Read models of Hugging Face's cache and of LM Studio: folders with GGUF files.

    HUB/models--OWNER--REPO/refs/REF                 the revision of a branch or tag
    HUB/models--OWNER--REPO/snapshots/REVISION/…     links, under the files' own names
    HUB/models--OWNER--REPO/blobs/SHA256             a fetched file
    LMSTUDIO/PUBLISHER/REPOSITORY/FILE.gguf

Models are called `hf:OWNER/REPO:QUANT` and `lmstudio/PUBLISHER/REPOSITORY:QUANT`. LM Studio stores no
digests, so its files cannot be verified.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from edgeinfer.models import names
from edgeinfer.models.external_stores import reader
from edgeinfer.models.external_stores.reader import ExternalFile, ExternalModel, ExternalStore
from edgeinfer.models.projectors import is_projector
from edgeinfer.platform import paths

_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPO = re.compile(r"models--([A-Za-z0-9][\w.-]*?)--([A-Za-z0-9][\w.-]*)", re.ASCII)


class _RepositoryStore(ExternalStore):
    """A store of repositories, with GGUFs up to `depth` folders deep. Model names omit `suffix`."""

    depth: int
    suffix: str

    def in_repository(self, folder: Path, root: Path, prefix: str) -> Iterator[ExternalModel]:
        """Yield the models in the repository `folder` of the store `root`.

        A model is called `prefix:QUANT`, or `prefix/FILE` if several files have its quantization. All
        the repository's projectors are candidates for each of its models. Raises UnusableError.
        """
        gguf_names = [str(path.relative_to(folder)) for path in reader.ggufs(folder, self.depth)]
        firsts = sorted({min(_parts(file)) for file in gguf_names if "mmproj" not in file.lower()})
        encoders = tuple(_projectors(folder, gguf_names, root))
        quants = [names.quantization_of(first) for first in firsts]
        for first, quant in zip(firsts, quants, strict=True):
            name = f"{prefix}/{first[: len(first) - len(self.suffix)]}"
            if quant and quants.count(quant) == 1:
                name = f"{prefix}:{quant}"
            try:
                files = [_external_file(folder / file, root) for file in _parts(first)]
            except reader.UnusableError as error:
                yield self.unusable(name, error)
                continue
            stamp = max(os.stat(file.path).st_mtime for file in files)
            yield ExternalModel(
                name=name, store=self.name, files=tuple(files), projectors=encoders, modified_s=stamp
            )


def _projectors(folder: Path, gguf_names: list[str], root: Path) -> Iterator[ExternalFile]:
    for file in gguf_names:
        if is_projector(os.path.basename(file)):
            with contextlib.suppress(reader.UnusableError):
                yield _external_file(folder / file, root)


def _parts(file: str) -> list[str]:
    return [str(path) for path in names.split_parts(Path(file))]


def _external_file(path: Path, root: Path) -> ExternalFile:
    if not os.path.lexists(path):
        raise reader.UnusableError(f"the part {path.name} is missing")
    real, info = reader.resolve_inside(path, root)
    # Hugging Face names a large file by its SHA-256, a small one by Git's SHA-1
    blob = os.path.basename(real)
    digest = blob if _SHA256.fullmatch(blob) else ""
    return ExternalFile(path=real, size_bytes=info.st_size, sha256=digest)


class HuggingFaceCache(_RepositoryStore):
    name = "Hugging Face"
    prefix = paths.EXTERNAL_PREFIXES[1]
    fix = "`edgeinfer pull {}` fetches a separate copy"
    depth = 3
    suffix = ""

    def roots(self, environment: Mapping[str, str]) -> list[Path]:
        """Return the cache's folder, which environment variables may name."""
        for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            if environment.get(variable):
                return [Path(environment[variable]).expanduser()]
        home = environment.get("HF_HOME")
        if not home:
            home = f"{environment.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/huggingface"
        return [Path(home).expanduser() / "hub"]

    def search(self, root: Path) -> Iterator[ExternalModel]:
        for repo in reader.folders(root):
            owner_and_name = _REPO.fullmatch(repo.name)
            if owner_and_name is not None:
                prefix = f"{self.prefix}{owner_and_name[1]}/{owner_and_name[2]}"
                try:
                    yield from self._repository(root, repo, prefix)
                except reader.UnusableError as error:
                    yield self.unusable(prefix, error)

    def _repository(self, root: Path, repo: Path, prefix: str) -> Iterator[ExternalModel]:
        revisions = reader.folders(repo / "snapshots")
        latest_first = sorted(revisions, key=lambda path: -path.stat().st_mtime)
        main = _main_revision(root, repo, latest_first)
        seen: set[tuple[str, ...]] = set()
        for revision in sorted(latest_first, key=lambda path: path.name != main):
            called = prefix if revision.name == main else f"{prefix}@{revision.name}"
            for model in self.in_repository(revision, root, called):
                if not model.files or model.paths not in seen:
                    yield model
                seen.add(model.paths)


def _main_revision(root: Path, repo: Path, revisions: list[Path]) -> str:
    """Return the cached revision of the branch `main`; if there is none, the newest cached revision."""
    revision_names = [revision.name for revision in revisions]
    if (repo / "refs/main").is_file():
        revision_name = reader.small_file(repo / "refs/main", root).decode("ascii", "replace").strip()
        if revision_name in revision_names:
            return revision_name
    return revision_names[0] if revision_names else ""


class _Settings(msgspec.Struct, frozen=True):
    downloadsFolder: str = ""


class LmStudioFolder(_RepositoryStore):
    name = "LM Studio"
    prefix = paths.EXTERNAL_PREFIXES[2]
    fix = "fetch it again in LM Studio"
    depth = 2
    suffix = ".gguf"

    def roots(self, _environment: Mapping[str, str]) -> list[Path]:
        """Return the folder in LM Studio's settings, and the default one."""
        home = Path.home() / ".lmstudio"
        try:
            content = reader.small_file(home / "settings.json", Path(os.path.realpath(home)))
            folder = msgspec.json.decode(content, type=_Settings).downloadsFolder
        except (reader.UnusableError, msgspec.MsgspecError, RecursionError):
            folder = ""
        return [Path(folder)] * (folder.startswith("/") and "\0" not in folder) + [home / "models"]

    def search(self, root: Path) -> Iterator[ExternalModel]:
        for publisher in reader.folders(root):
            for repo in reader.folders(publisher):
                prefix = f"{self.prefix}{publisher.name}/{repo.name}"
                try:
                    yield from self.in_repository(repo, root, prefix)
                except reader.UnusableError as error:
                    yield self.unusable(prefix, error)
