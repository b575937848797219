"""Read Ollama's models. A manifest names the files of a model by their SHA-256.

    MODELS/manifests/REGISTRY/NAMESPACE/MODEL/TAG    JSON: layers by kind, digest and size
    MODELS/blobs/sha256-HEX                          a fetched file, named by its digest

A model is called `ollama/NAME`, with the NAME of `ollama run`. Ollama's own templates are ignored,
because they are Go templates: the Jinja template in the GGUF is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from edgeinfer.config.sampling_options import BY_FIELD, SamplingOption
from edgeinfer.models.external_stores import reader
from edgeinfer.models.external_stores.reader import ExternalFile, ExternalModel, ExternalStore
from edgeinfer.platform import paths

PREFIX = paths.EXTERNAL_PREFIXES[0]
_SERVICE = "/usr/share/ollama/.ollama/models"
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_KIND = "application/vnd.ollama.image."


class _Layer(msgspec.Struct, frozen=True):
    mediaType: str
    digest: str
    size: int = 0


class _Manifest(msgspec.Struct, frozen=True):
    layers: list[_Layer]


class OllamaStore(ExternalStore):
    name = "Ollama"
    prefix = PREFIX
    fix = "fetch it again with Ollama: `ollama pull {}`"

    def roots(self, environment: Mapping[str, str]) -> list[Path]:
        """Return $OLLAMA_MODELS if set, this user's folder, and that of Ollama's system service."""
        folder = environment.get("OLLAMA_MODELS", "")
        return [Path(folder)] * bool(folder) + [Path.home() / ".ollama/models", Path(_SERVICE)]

    def search(self, root: Path) -> Iterator[ExternalModel]:
        for registry in reader.folders(root / "manifests"):
            for namespace in reader.folders(registry):
                for model in reader.folders(namespace):
                    for tag in reader.entries(model):
                        yield self._model(root, tag)

    def _model(self, root: Path, manifest: Path) -> ExternalModel:
        name = _name(manifest)
        try:
            _, info = reader.resolve_inside(manifest, root)
            layers = _layers(reader.small_file(manifest, root), manifest)
            files = {kind: _blob(root, layer) for kind, layer in layers.items()}
            weights = _weights(files)
        except reader.UnusableError as error:
            return self.unusable(name, error)
        more_files = {kind: file.path for kind, file in files.items() if kind != "model"}
        return ExternalModel(
            name=name,
            store=self.name,
            files=(weights,),
            layers=more_files,
            projectors=(files["projector"],) if "projector" in files else (),
            modified_s=info.st_mtime,
        )


def _name(manifest: Path) -> str:
    registry, namespace, model, tag = manifest.parts[-4:]
    prefix = [] if registry == _REGISTRY else [registry]
    prefix += [] if not prefix and namespace == _LIBRARY else [namespace]
    return PREFIX + "/".join([*prefix, f"{model}:{tag}"]).removesuffix(paths.LATEST)


def _layers(raw: bytes, manifest: Path) -> dict[str, _Layer]:
    try:
        layers = msgspec.json.decode(raw, type=_Manifest).layers
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise reader.UnusableError(f"the manifest {manifest} is invalid: {error}") from error
    kinds = [layer.mediaType.removeprefix(_KIND) for layer in layers]
    if kinds.count("model") != 1:
        problem = f"the manifest names {kinds.count('model')} GGUF files, not one"
        raise reader.UnusableError(problem, hint="use a model that is one GGUF in Ollama's store")
    return dict(zip(kinds, layers, strict=True))


def _blob(root: Path, layer: _Layer) -> ExternalFile:
    digest = _DIGEST.fullmatch(layer.digest)
    if digest is None:
        raise reader.UnusableError(f"the manifest names {layer.digest[:80]!r}, which is not a SHA-256")
    path, info = reader.resolve_inside(root / "blobs" / f"sha256-{digest[1]}", root)
    if layer.size and info.st_size != layer.size:
        raise reader.UnusableError(f"{path} has {info.st_size} bytes; the manifest says {layer.size}")
    return ExternalFile(path=path, size_bytes=info.st_size, sha256=digest[1])


def _weights(files: Mapping[str, ExternalFile]) -> ExternalFile:
    if "adapter" in files:
        paths = files["model"].path, files["adapter"].path
        hint = f"use both: `edgeinfer chat {paths[0]} --lora {paths[1]}`"
        raise reader.UnusableError(f"it is two files, {paths[0]} and the adapter {paths[1]}", hint=hint)
    return files["model"]


#: Maximum number of stop strings that are used, and maximum length (characters) of one.
_STOPS, _STOP_CHARACTERS = 32, 200


class OllamaSettings(msgspec.Struct, kw_only=True):
    """Ollama's settings of a model.

    `used` and `unused` are descriptions for `show`: of settings with and without effect in edgeinfer.
    """

    system_prompt: str = ""
    stop: tuple[str, ...] = ()
    sampling: dict[str, float] = {}
    used: list[str] = []
    unused: list[str] = []


def read_settings(layers: Mapping[str, str], *, has_template: bool) -> OllamaSettings:
    """Read a model's settings from Ollama's files (`layers`: kind → path); skip unreadable files.

    `has_template`: the GGUF has a chat template, so that Ollama's is not needed.
    """
    settings = OllamaSettings()
    for kind, path in sorted(layers.items()):
        if kind == "system":
            settings.system_prompt = _text(path).strip()
            settings.used += ["system prompt"] * bool(settings.system_prompt)
        elif kind == "params":
            _read_parameters(settings, _text(path))
        elif kind == "template":
            ignored = "the GGUF's own is used instead"
            unsupported = "Go templates are not supported; set `chat-template` in models.toml"
            settings.unused.append(f"template: {ignored if has_template else unsupported}")
        elif kind not in ("license", "projector"):
            settings.unused.append(f"{kind}: not supported here")
    return settings


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(reader.MAX_TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _read_parameters(settings: OllamaSettings, text: str) -> None:
    try:
        parameters = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        settings.unused.append("params: the file can't be read")
        return
    for key, value in parameters.items():
        option = BY_FIELD.get(key)
        if key == "stop":
            stops = value if isinstance(value, list) else [value]
            fitting = [s for s in stops if isinstance(s, str) and 0 < len(s) <= _STOP_CHARACTERS]
            settings.stop = tuple(fitting[:_STOPS])
            settings.used += ["stop strings"] * bool(fitting)
        elif option and key != "seed" and _is_valid(option, value):
            settings.sampling[key] = option.kind(value)
            settings.used.append(f"{option.label} {value:g}")
        else:
            settings.unused.append(f"{key[:40]} {value!r:.40}")


def _is_valid(option: SamplingOption, value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return option.low <= value <= option.high and option.kind(value) == value
