"""Ollama's store: manifests name the blobs that a model is made of, by their SHA-256.

    MODELS/manifests/REGISTRY/NAMESPACE/MODEL/TAG    JSON: layers by kind, digest and size
    MODELS/blobs/sha256-HEX                          what was fetched, under its own digest

A model's name here is `ollama/` and what a person types to `ollama run`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from edgeinfer.models.external_stores.reader import (
    ExternalFile,
    ExternalModel,
    UnusableError,
    entries,
    file_in,
    folders,
    small_file,
)
from edgeinfer.platform import places

STORE = "Ollama"
PREFIX = places.FOUND[0]
_SERVICE = "/usr/share/ollama/.ollama/models"
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
_TAG = ":latest"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_KIND = "application/vnd.ollama.image."


class _Layer(msgspec.Struct, frozen=True):
    mediaType: str
    digest: str
    size: int = 0


class _Manifest(msgspec.Struct, frozen=True):
    layers: list[_Layer]


def roots(environment: Mapping[str, str]) -> list[Path]:
    """Where Ollama keeps models: what it is told, this user's folder, the service's."""
    told = environment.get("OLLAMA_MODELS", "")
    return [Path(told)] * bool(told) + [Path.home() / ".ollama/models", Path(_SERVICE)]


def search(root: Path) -> Iterator[ExternalModel]:
    """Yield every model of a store, by name. Raises UnusableError when the store is closed."""
    root = Path(os.path.realpath(root))
    for registry in folders(root / "manifests"):
        for namespace in folders(registry):
            for model in folders(namespace):
                for tag in entries(model):
                    if not tag.name.startswith("."):
                        yield _model(root, Path(tag.path))


def _name(manifest: Path) -> str:
    registry, namespace, model, tag = manifest.parts[-4:]
    place = [] if registry == _REGISTRY else [registry]
    place += [] if not place and namespace == _LIBRARY else [namespace]
    return PREFIX + "/".join([*place, f"{model}:{tag}"]).removesuffix(_TAG)


def _model(root: Path, manifest: Path) -> ExternalModel:
    name = _name(manifest)
    try:
        _, info = file_in(manifest, root)
        layers = _layers(small_file(manifest, root), manifest)
        files = {kind: _blob(root, layer) for kind, layer in layers.items()}
        weights = _weights(files)
    except UnusableError as error:
        typed = name.removeprefix(PREFIX)
        return ExternalModel(
            name=name,
            store=STORE,
            problem=error.message,
            fix=error.hint or f"fetch it again with its owner: `ollama pull {typed}`",
        )
    others = {kind: file.path for kind, file in files.items() if kind != "model"}
    return ExternalModel(
        name=name, store=STORE, files=(weights,), layers=others, modified_s=info.st_mtime
    )


def _layers(raw: bytes, manifest: Path) -> dict[str, _Layer]:
    try:
        found = msgspec.json.decode(raw, type=_Manifest).layers
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableError(f"its manifest {manifest} can't be understood: {error}") from error
    kinds = [layer.mediaType.removeprefix(_KIND) for layer in found]
    if kinds.count("model") != 1:
        raise UnusableError(
            f"its manifest names {kinds.count('model')} GGUF files, not one",
            hint="only models that Ollama keeps as one GGUF can be used",
        )
    return dict(zip(kinds, found, strict=True))


def _blob(root: Path, layer: _Layer) -> ExternalFile:
    digest = _DIGEST.fullmatch(layer.digest)
    if digest is None:
        raise UnusableError(f"its manifest names {layer.digest[:80]!r}, which is no SHA-256")
    path, info = file_in(root / "blobs" / f"sha256-{digest[1]}", root)
    if layer.size and info.st_size != layer.size:
        raise UnusableError(f"{path} has {info.st_size} bytes, and its manifest says {layer.size}")
    return ExternalFile(path=path, size_bytes=info.st_size, sha256=digest[1])


def _weights(files: Mapping[str, ExternalFile]) -> ExternalFile:
    if "adapter" in files:
        paths = files["model"].path, files["adapter"].path
        raise UnusableError(
            f"it is {paths[0]} with the adapter {paths[1]}",
            hint=f"name both: `edgeinfer chat {paths[0]} --lora {paths[1]}`",
        )
    return files["model"]
