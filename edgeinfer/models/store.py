"""Pulled models on disk: one folder each under `models_dir()`, with a record that says what is in it.

    models/NAME/model.json       the record; a folder without one holds no model
    models/NAME/FILE.gguf        the files, unless the record names files elsewhere (imported in place)
    models/NAME.lock.json        pins: the SHA-256 each source had at the first pull; outlives `rm`
    models/.partial/NAME/        what an unfinished pull has fetched
    models/.locks/NAME           flock of whoever changes the model

The record is written last, by rename, so a folder is a model or nothing. Files were hashed and their
headers checked before that; afterwards their size and modification time vouch for them, not a hash.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from edgeinfer.config.load_options import LORA
from edgeinfer.errors import (
    CatalogError,
    InvalidGgufError,
    ModelBusyError,
    ModelNotPulledError,
    UnknownModelError,
    UsageError,
)
from edgeinfer.models import gguf, names, sources
from edgeinfer.models.catalog import Catalog, Model, load_catalog, nearest
from edgeinfer.models.external_stores import stores
from edgeinfer.models.names import Reference
from edgeinfer.models.plan import Fetched
from edgeinfer.platform import paths
from edgeinfer.platform.disk import is_locked, locked, room_errors, sync, write_whole
from edgeinfer.runtime.options import ModelFiles
from edgeinfer.runtime.requests import Sampling

LOCKS = ".locks"


def lock_path(folder: str) -> Path:
    """Where the lock of the model in `folder` lies."""
    return paths.models_dir() / LOCKS / folder


@contextmanager
def changing(ref: Reference, but: str = "") -> Iterator[None]:
    """Hold the model's lock, and tell in words what the disk refuses; `but`: what is not lost then.

    Raises ModelBusyError, DiskFullError, CatalogError.
    """
    try:
        with room_errors(paths.models_dir(), but), model_lock(ref):
            yield
    except OSError as error:
        lock_path = f"{error.filename}: " if error.filename else ""
        raise CatalogError(
            f"{lock_path}{error.strerror or error}", hint="check who may write to the data directory"
        ) from error


@contextmanager
def model_lock(ref: Reference) -> Iterator[None]:
    """Hold the model's lock. Raises ModelBusyError at once when somebody else has it."""
    path = lock_path(ref.folder)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def busy() -> None:
        raise ModelBusyError(f"{ref} is being changed by {_lock_holder(path)}")

    with locked(path, busy) as descriptor:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield


def _lock_holder(path: Path) -> str:
    pid = path.read_text("ascii", "replace").strip()
    return f"process {pid}" if pid.isdecimal() else "another process"


RECORD = "model.json"
PARTIAL = ".partial"


class PulledFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `path` is relative to the model's folder, or absolute when it was imported in place."""

    path: str
    size_bytes: int
    sha256: str
    mtime_ns: int


class PulledModel(msgspec.Struct, frozen=True, kw_only=True):
    """A pulled model. `name` is its reference, `base` its catalogue name or the same."""

    name: str
    base: str
    files: tuple[PulledFile, ...]
    source: str
    quantization: str
    architecture: str
    n_params: int
    n_ctx_train: int
    pulled_at: str
    requantized_from: str = ""
    version: Literal[1] = 1

    @property
    def reference(self) -> Reference:
        return names.reference(self.name)

    @property
    def folder(self) -> Path:
        return names.folder(self.reference)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, absolute, in order."""
        return tuple(self.folder / file.path for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def purpose(self) -> str:
        """What its header says that it is for; "" for a file that cannot be read."""
        try:
            return gguf.read_header(self.paths[0]).purpose
        except InvalidGgufError:
            return ""

    @property
    def in_place(self) -> bool:
        """Whether the files belong to somebody else and are only pointed at."""
        return any(os.path.isabs(file.path) for file in self.files)

    @property
    def sha256(self) -> str:
        """The file's SHA-256; of a split model, the SHA-256 of its files' digests in order."""
        return names.whole_digest([file.sha256 for file in self.files])


def read_record(folder: Path) -> PulledModel | None:
    """Read the record in `folder`, None without one. Raises CatalogError for a broken one."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=PulledModel)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise CatalogError(
            f"{folder / RECORD} cannot be read: {error}", hint=f"`edgeinfer rm {folder.name}`"
        ) from error


def write_record(record: PulledModel) -> None:
    """Make the folder a model: its files are in place and verified."""
    write_whole(record.folder / RECORD, msgspec.json.format(msgspec.json.encode(record), indent=2))


def _folders() -> Iterator[Path]:
    try:
        children = sorted(paths.models_dir().iterdir())
    except FileNotFoundError:
        return
    yield from (child for child in children if not child.name.startswith("."))


def list_pulled() -> list[PulledModel]:
    """List every model that is here, by name, without those whose record cannot be read."""
    found = []
    for folder in _folders():
        try:
            record = read_record(folder)
        except CatalogError:
            continue
        if record is not None:
            found.append(record)
    return sorted(found, key=lambda model: model.name)


def find_pulled(text: str) -> PulledModel | None:
    """Find a pulled model by reference, by source, or by name and its own quantization."""
    if stores.is_name(text):
        return None
    if sources.looks_like_source(text):
        wanted = str(sources.parse(text))
        return next((model for model in list_pulled() if model.source == wanted), None)
    ref = names.reference(text)
    exact = read_record(names.folder(ref))
    if exact is not None or not ref.quant:
        return exact
    plain = read_record(names.folder(Reference(ref.name)))
    return plain if plain is not None and plain.quantization == ref.quant else None


def model_files(name_or_path: str, draft: str = "", heard: stores.Heard | None = None) -> ModelFiles:
    """Find the files of a model and of its draft: the catalogue's unless `draft` is given.

    `heard` is told how far a file of another program is checked, which is done once. "none" is no draft
    model. Raises, for either, UnknownModelError with near names, ModelNotPulledError with the command
    that pulls it, InvalidGgufError when a path is no GGUF or a pulled file was changed since,
    ChecksumError when another program's is not what its name says.
    """
    files = _model_files(name_or_path, heard)
    draft = draft or files.draft
    if draft in ("", "none"):
        return msgspec.structs.replace(files, draft="")
    return msgspec.structs.replace(files, draft=draft, draft_paths=_model_files(draft, heard).paths)


def _model_files(name_or_path: str, heard: stores.Heard | None = None) -> ModelFiles:
    if names.is_path(name_or_path):
        return _files_of_path(Path(name_or_path).expanduser())
    catalog = load_catalog()
    try:
        pulled = find_pulled(name_or_path)
    except UsageError as error:
        raise _with_found(error, name_or_path) from error
    if pulled is None:
        found = stores.model_files(name_or_path, heard)
        if found is None:
            raise missing(name_or_path, catalog)
        return found
    for path, file in zip(pulled.paths, pulled.files, strict=True):
        _vouch(path, file, pulled.name)
    return _files(pulled, catalog.get(pulled.base))


def full_name(name_or_path: str) -> str:
    """Resolve a model to its name here: a pulled one's full name, a file's absolute path.

    Raises what `model_files` raises; a file need not be there.
    """
    if names.is_path(name_or_path):
        return str(Path(name_or_path).expanduser().absolute())
    return _model_files(name_or_path).name


def is_model(text: str) -> bool:
    """Whether `text` is an existing GGUF file or a known or pulled model; never raises."""
    if names.is_path(text):
        return text.lower().endswith(".gguf") and Path(text).expanduser().is_file()
    if "/" in text:
        return not any(c.isspace() for c in text) and stores.find(text) is not None
    try:
        ref = names.reference(text)
    except UsageError:
        return False
    return ref.name in load_catalog().models or find_pulled(text) is not None


def missing(text: str, catalog: Catalog) -> CatalogError:
    """The error for a model that is not here: unknown, or known and not pulled."""
    base = text.partition(":")[0].lower()
    if sources.looks_like_source(text) or catalog.get(base) is not None:
        return ModelNotPulledError(
            f"{text} is not on this machine yet",
            hint=f"pull it first: `edgeinfer pull {text}`{_offer()}",
        )
    known = [*catalog.models, *(model.name for model in list_pulled())]
    error = UnknownModelError(f"no model is called {text!r}", hint=nearest(base, known))
    return _with_found(error, text)


def _offer() -> str:
    found = stores.usable() if not list_pulled() else []
    if not found:
        return ""
    more = f" ({len(found) - 1} more: `edgeinfer list`)" if len(found) > 1 else ""
    first = found[0]
    return f", or use one that is here, from {first.store}: `edgeinfer chat {first.name}`{more}"


E = TypeVar("E", CatalogError, UsageError)


def _with_found(error: E, text: str) -> E:
    found = stores.alike(text)
    return (
        type(error)(error.message, hint=f"did you mean {' or '.join(found[:3])}?") if found else error
    )


def _files(pulled: PulledModel, entry: Model | None) -> ModelFiles:
    files = ModelFiles(name=pulled.name, paths=tuple(map(str, pulled.paths)), sha256=pulled.sha256)
    if entry is None:
        return files
    return msgspec.structs.replace(
        files,
        chat_template=entry.chat_template or None,
        stop=entry.stop,
        sampling=entry.sampling.over(Sampling()),
        system_prompt=entry.system_prompt,
        draft=entry.draft,
        lora=str(LORA.parse(",".join(one.option for one in entry.lora))),
    )


def _vouch(path: Path, file: PulledFile, name: str) -> None:
    try:
        info = path.stat()
    except OSError as error:
        raise ModelNotPulledError(
            f"{path}, a file of {name}, is gone: {error.strerror}",
            hint=f"fetch it again: `edgeinfer pull {name}`",
        ) from error
    if (info.st_size, info.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise InvalidGgufError(
            f"{path} was changed after {name} was pulled",
            hint=f"verify it again: `edgeinfer pull {name}`",
        )


def _files_of_path(path: Path) -> ModelFiles:
    if path.is_dir():
        raise ModelNotPulledError(
            f"{path} is a folder: it is converted once, then used by its name",
            hint=f"`edgeinfer pull {path}`",
        )
    parts = names.split_parts(path.absolute())
    for part in parts:
        gguf.check(part)
    return ModelFiles(name=path.stem, paths=tuple(map(str, parts)))


def publish(
    ref: Reference,
    fetched: list[Fetched],
    header: gguf.GgufHeader,
    base: str,
    source: str,
    requantized_from: str,
) -> PulledModel:
    """Store verified files, the first of which has `header`, as the model `ref`. Return its record."""
    folder = names.folder(ref)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    files = tuple(_placed(one, folder) for one in fetched)
    sync(folder)
    record = PulledModel(
        name=str(ref),
        base=base,
        files=files,
        source=source,
        quantization=header.quantization,
        architecture=header.architecture,
        n_params=sum(gguf.read_header(folder / file.path).n_params for file in files),
        n_ctx_train=header.n_ctx_train,
        pulled_at=datetime.now(UTC).isoformat(timespec="seconds"),
        requantized_from=requantized_from,
    )
    write_record(record)
    remove_strangers(folder, record)
    return record


def _placed(one: Fetched, folder: Path) -> PulledFile:
    path = one.path
    if one.ours:
        sync(one.path)
        path = folder / one.file_name
        os.replace(one.path, path)
    info = path.stat()
    return PulledFile(
        path=path.name if one.ours else str(path),
        size_bytes=info.st_size,
        sha256=one.found_sha256,
        mtime_ns=info.st_mtime_ns,
    )


def unfinished() -> dict[str, int]:
    """Bytes of pulls that were stopped, by the model's name; one that still runs is none."""
    found = {}
    for folder in sorted((paths.models_dir() / PARTIAL).glob("*")):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if size and not is_locked(lock_path(folder.name)):
            found[folder.name.replace("+", ":")] = size
    return found


def remove_strangers(folder: Path, record: PulledModel) -> None:
    """Remove files an earlier pull under this name left in the model's own folder."""
    ours = {RECORD, *(file.path for file in record.files)}
    for child in folder.iterdir():
        if child.is_file() and child.name not in ours:
            child.unlink()


def copy(text: str, name: str) -> PulledModel:
    """Make the model `text` be here as `name` too; either can be removed without the other.

    Raises UsageError when `name` is taken or no name, UnknownModelError, ModelNotPulledError,
    ModelBusyError.
    """
    ref = names.reference(name)
    source = find_pulled(text)
    if source is None:
        raise _not_ours(text)
    with model_lock(ref):
        folder = names.folder(ref)
        if read_record(folder) is not None:
            raise UsageError(f"a model is called {ref} already", hint=f"`edgeinfer rm {ref}`")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = msgspec.structs.replace(
            source, name=str(ref), files=tuple(_linked(source, file, folder) for file in source.files)
        )
        sync(folder)
        write_record(record)
    return record


def _not_ours(text: str) -> CatalogError | UsageError:
    found = stores.find(text)
    if found is None:
        return missing(text, load_catalog())
    return UsageError(f"{found.name} belongs to {found.store}: it is used where it is, under its name")


def _linked(source: PulledModel, file: PulledFile, folder: Path) -> PulledFile:
    if os.path.isabs(file.path):
        return file
    place = folder / file.path
    try:
        place.unlink(missing_ok=True)
        os.link(source.folder / file.path, place)
    except OSError as error:
        raise CatalogError(f"{place}: {error.strerror or error}") from error
    return file
