"""Read models.toml: the catalogue of models that edgeinfer ships, and the user's own.

The user's models.toml, in the configuration directory, adds models and overrides keys of shipped ones.
If it gives other `sources` for a shipped model, the shipped `sha256`, `size-bytes` and `file-name` are
dropped, because they describe another file. An unknown key is an error.
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from edgeinfer.config.config_file import key_doc, sampling_keys
from edgeinfer.config.load_options import LORA
from edgeinfer.config.sampling_options import SAMPLING_OPTIONS
from edgeinfer.config.toml_file import Keys, TomlFile, convert
from edgeinfer.errors import ConfigError, UsageError
from edgeinfer.models import names
from edgeinfer.models import sources as source_types
from edgeinfer.models.gguf import FILE_TYPES, file_type
from edgeinfer.platform import paths
from edgeinfer.platform.disk import stamps
from edgeinfer.runtime.requests import Sampling, default_sampling

FILE_NAME = "models.toml"
_TABLE_HINT = "write each model as a table: a line [models.NAME], then its keys"
_LORA_HINT = 'write { name = "NAME" } for a pulled adapter, { path = "FILE.gguf" } for a file'
_SOURCES_HINT = (
    'a new model needs `sources`, such as ["hf:OWNER/REPOSITORY:Q4_K_M"] or ["file:/FOLDER/FILE.gguf"]'
)
#: Keys of a model in models.toml that describe the file at `sources`. If a user's models.toml gives a
#: shipped model other `sources`, the shipped values of these keys are dropped.
_FILE_KEYS = ("sha256", "size-bytes", "file-name")
_PARAMETERS = re.compile(r"\d+(\.\d+)?[KMB]")
#: Mean bits per weight of a whole file, by quantization: more than the type's own bits, because
#: embeddings and output often have a larger type.
_BITS_PER_WEIGHT = {
    "Q4_0": 4.6,
    "Q4_1": 5.1,
    "Q4_K_M": 4.9,
    "Q5_K_M": 5.7,
    "Q6_K": 6.6,
    "Q8_0": 8.5,
    "MXFP4_MOE": 4.6,
    "F16": 16.0,
    "BF16": 16.0,
}


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Base of the tables of models.toml. An unknown key is an error."""


_SamplingKeys = msgspec.defstruct(
    "_SamplingKeys",
    sampling_keys(option for option in SAMPLING_OPTIONS if option.field != "seed"),
    bases=(_Table,),
    frozen=True,
    kw_only=True,
)


#: Keys of samplers that only version 0.2 had. They are ignored in models.toml.
_OLD_SAMPLERS = frozenset({"typical-p", "mirostat", "mirostat-tau", "mirostat-eta"})


class SamplingDefaults(_SamplingKeys):  # type: ignore[misc, valid-type]  # its fields are computed
    """The sampling options that a model's entry sets; None: default for the model's size."""

    def chosen_options(self) -> dict[str, float]:
        """Return the options that the entry sets, by field name of `Sampling`."""
        return {key: value for key, value in msgspec.structs.asdict(self).items() if value is not None}

    def over(self, base: Sampling) -> Sampling:
        return msgspec.structs.replace(base, **self.chosen_options())


def parameter_count(text: str) -> float:
    """Parse a number of parameters: "1.7B" → 1.7e9, "" → 0.0."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:], 0.0)
    return float(text[:-1]) * unit if unit else float(text or 0)


class LoraTable(_Table, frozen=True, kw_only=True):
    """An adapter that a model's entry applies: a pulled one (`name`) or a file (`path`)."""

    path: Annotated[str, key_doc("A GGUF adapter's file; ~ is the home directory.")] = ""
    name: Annotated[str, key_doc("Name of a pulled adapter.")] = ""
    scale: Annotated[float, key_doc("Factor by which the adapter is scaled.", ge=-100, le=100)] = 1.0

    @property
    def option(self) -> str:
        """Value for `--lora`: `NAME:SCALE` or `PATH:SCALE`."""
        return f"{self.path or self.name}:{self.scale:g}"


class Model(_Table, frozen=True, kw_only=True):
    """An entry of the catalogue, [models.NAME].

    `sources` are tried in order. If a source is a list, its items are wheels, each with a
    part of one file.
    """

    sources: Annotated[
        tuple[str | tuple[str, ...], ...],
        key_doc("Sources of its files, tried in order.", min_length=1),
    ]
    title: Annotated[str, key_doc("Name for people; default: the table's name.", min_length=1)] = ""
    name: Annotated[str, key_doc("The table's name; not a key.")] = ""
    family: Annotated[str, key_doc("The model's family.")] = ""
    parameters: Annotated[str, key_doc('Parameters as its makers count them: "135M", "7B".')] = ""
    active_parameters: Annotated[
        str, key_doc('Mixture of experts: parameters that each token uses: "3B".')
    ] = ""
    licence: Annotated[str, key_doc("SPDX name of the licence, or its own name.")] = ""
    context_length: Annotated[int, key_doc("Context of the training (tokens).", ge=0, le=1 << 24)] = 0
    purpose: Annotated[
        Literal["chat", "base", "code", "reasoning", "embedding", "reranker"],
        key_doc("Purpose of the model."),
    ] = "chat"
    quantization: Annotated[str, key_doc("Quantization of the file at the sources.")] = ""
    quantize: Annotated[str, key_doc("Quantize to this after pulling; empty keeps the file.")] = ""
    file_name: Annotated[str, key_doc("Name of the file; empty: the source's name.")] = ""
    size_bytes: Annotated[int, key_doc("Exact size (bytes), if known.", ge=0)] = 0
    sha256: Annotated[str, key_doc("SHA-256 of the file, if known.")] = ""
    chat_template: Annotated[str, key_doc("Jinja template instead of the file's own.")] = ""
    stop: Annotated[tuple[str, ...], key_doc("Stop strings, added to the model's end tokens.")] = ()
    system_prompt: Annotated[str, key_doc("System prompt of requests without one.")] = ""
    lora: Annotated[
        tuple[LoraTable, ...], key_doc("Adapters that are applied: a list of { path or name, scale }.")
    ] = ()
    draft: Annotated[
        str, key_doc("A smaller model of the same vocabulary, which drafts tokens if it was pulled.")
    ] = ""
    projector: Annotated[
        str, key_doc("The projector (GGUF) for pictures: a path, or a source pulled with the model.")
    ] = ""
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def default_sampling(self) -> Sampling:
        """Sampling defaults: those for models of this size, overridden by the entry's own."""
        return self.sampling.over(default_sampling(parameter_count(self.parameters)))

    @property
    def projector_source(self) -> source_types.Source | None:
        """Source of the projector; None if `projector` is "" or a local path. Raises UsageError."""
        text = self.projector
        is_source = source_types.looks_like_source(text) and not paths.is_model_path(text)
        return source_types.parse(text) if is_source else None

    def parsed_sources(self) -> list[tuple[source_types.Source, ...]]:
        """Parse `sources`, alternatives that are tried in order. Raises UsageError.

        A tuple has one source, or several wheels whose files are concatenated.
        """
        several = ((text,) if isinstance(text, str) else text for text in self.sources)
        return [tuple(map(source_types.parse, parts)) for parts in several]

    @property
    def final_quantization(self) -> str:
        """Quantization after the pull: `quantize`, or else that at the source; "" if unknown."""
        return (self.quantize or self.quantization).upper()

    @property
    def stored_is_estimate(self) -> bool:
        return bool(self.quantize) or not self.size_bytes

    @property
    def stored_bytes(self) -> int:
        """Size (bytes) of the model after the pull, maybe estimated; 0 if unknown."""
        if not self.stored_is_estimate:
            return self.size_bytes
        bits = _BITS_PER_WEIGHT.get(self.final_quantization, 5.0)
        return int(float(f"{parameter_count(self.parameters) * bits / 8:.2g}"))


#: All entries by name, those of the shipped models.toml first.
Catalog = dict[str, Model]


def shipped_path() -> Path:
    return paths.shipped_file(FILE_NAME)


def user_path() -> Path:
    """Return the path of the user's models.toml; it need not exist."""
    return paths.config_dir() / FILE_NAME


def load_catalog(user: Path | None = None) -> Catalog:
    """Load the shipped catalogue, overridden by the user's. Raises ConfigError for an invalid file.

    The result, or the error, is cached until a file changes: reading takes 13 ms, and would delay all
    streams of an endpoint at each request for an unknown model.
    """
    user = user or user_path()
    try:
        files = [str(path) for path in (shipped_path(), user) if path.exists()]
        loaded = _load(user, stamps(files))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", hint=paths.DENIED_HINT) from error
    if isinstance(loaded, ConfigError):
        raise ConfigError(loaded.message, hint=loaded.hint) from loaded
    return dict(loaded)


@lru_cache(maxsize=2)
def _load(user: Path, file_stamps: str) -> Catalog | ConfigError:
    try:
        return _read_both(user)
    except ConfigError as error:
        return error


def _read_both(user: Path) -> Catalog:
    shipped_file, shipped = _read(shipped_path())
    catalog = {name: _model(name, table, shipped_file) for name, table in shipped.items()}
    if not user.exists():
        return catalog
    user_file, user_tables = _read(user)
    for name, table in user_tables.items():
        inherited = shipped.get(name, {})
        if "sources" in table:
            inherited = {key: value for key, value in inherited.items() if key not in _FILE_KEYS}
        elif name not in shipped:
            near = difflib.get_close_matches(name, shipped, n=1)
            question = f"did you mean [models.{near[0]}]? If not, " if near else ""
            problem = f'model "{name}": the key `sources` is missing'
            position = user_file.position(("models", name))
            raise ConfigError(f"{position}: {problem}", hint=question + _SOURCES_HINT)
        catalog[name] = _model(name, inherited | table, user_file)
    return catalog


class _Document(_Table, frozen=True, kw_only=True):
    models: dict[str, dict[str, Any]] = {}


def _read(path: Path) -> tuple[TomlFile, dict[str, dict[str, Any]]]:
    file = TomlFile(path, path.read_bytes())
    models = convert(file.tables, _Document, file.position, hint=_TABLE_HINT).models
    for table in models.values():
        if isinstance(sampling := table.get("sampling"), dict):
            table["sampling"] = {k: v for k, v in sampling.items() if k not in _OLD_SAMPLERS}
    return file, models


def _model(name: str, table: dict[str, Any], file: TomlFile) -> Model:
    def position(keys: Keys) -> str:
        return f'{file.position(("models", name, *keys))}: model "{name}"'

    if "name" in table:
        hint = "remove this key: the table's name is the model's name"
        raise ConfigError(f"{position(('name',))}: unknown key `name`", hint=hint)
    try:
        names.model_name(name)
        model = convert({"title": name} | table | {"name": name}, Model, position)
        _check(model)
    except UsageError as error:
        raise ConfigError(f"{position(())}: {error.message}", hint=error.hint) from error
    return model


def _check(model: Model) -> None:
    every_source = (model.projector_source, *chain(*model.parsed_sources()))
    for source in every_source:
        if isinstance(source, source_types.Url) and source.url.startswith("http:"):
            raise UsageError(f"the source {source} is not encrypted", hint="use its https: address")
    if model.sha256:
        names.parse_digest(model.sha256)
    if model.file_name:
        names.check_file_name(model.file_name)
    for key in ("parameters", "active-parameters"):
        count = getattr(model, key.replace("-", "_"))
        if count and not _PARAMETERS.fullmatch(count):
            hint = 'write a number with K, M or B, such as "7B"'
            raise UsageError(f'key "{key}": {count!r} is not a number of parameters', hint=hint)
    try:
        LORA.parse(",".join(adapter.option for adapter in model.lora))
    except ValueError as error:
        raise UsageError(f'key "lora": {error}', hint=_LORA_HINT) from error
    if any(bool(adapter.path) == bool(adapter.name) for adapter in model.lora):
        raise UsageError('key "lora": an adapter needs either a path or a name', hint=_LORA_HINT)
    for key in ("quantize", "quantization"):
        value = getattr(model, key)
        if value and file_type(value) is None:
            near = difflib.get_close_matches(value.upper(), FILE_TYPES.values(), n=1)
            hint = f'did you mean "{near[0]}"?' if near else 'examples: "Q4_K_M", "Q8_0"'
            raise UsageError(f'key "{key}": {value!r} is not a quantization of llama.cpp', hint=hint)
