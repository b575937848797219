"""The store of pulled models: a folder for each, with a record of its files.

    models/NAME/model.json       the record; a folder without it is not a model
    models/NAME/FILE.gguf        the files, unless they are used in place elsewhere
    models/NAME.lock.json        pins: the SHA-256 of each file at the first pull; `rm` leaves them
    models/.partial/NAME/        data of an unfinished pull
    models/.locks/NAME           locked (flock) by the process that changes the model

The record is written last, by a rename, so a folder is a complete model or none. The pull has hashed
the files; later, only their size and mtime are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from edgeinfer.errors import CatalogError, InvalidGgufError, ModelBusyError, UsageError
from edgeinfer.models import gguf, lookup, names
from edgeinfer.models.catalog import Model, load_catalog
from edgeinfer.models.names import Reference
from edgeinfer.models.pull_plan import FetchedFile
from edgeinfer.platform import disk, paths

RECORD = "model.json"
#: Prefix of the `source` of a model that was quantized here; the original model's name follows.
QUANTIZED_FROM = "quantized from "
PARTIAL = ".partial"
LOCKS = ".locks"

T = TypeVar("T")


@contextmanager
def locked_work_folder(ref: Reference, not_lost: str = "", suffix: str = "") -> Iterator[Path]:
    """Lock a model and yield a folder for unfinished files. At the end, the folder is removed if empty.

    `not_lost` says in the error of a full disk which data is kept. `suffix` distinguishes an adapter's
    folder from a model's. Raises ModelBusyError, DiskFullError, CatalogError for other disk errors.
    """
    work = paths.models_dir() / PARTIAL / (ref.folder + suffix)
    try:
        with disk.disk_full_errors(paths.models_dir(), not_lost), model_lock(ref):
            paths.make_folder(work)
            try:
                yield work
            finally:
                with suppress(OSError):
                    work.rmdir()
    except OSError as error:
        location = f"{error.filename}: " if error.filename else ""
        way = "allow your user to write there, or use another folder: `export EDGEINFER_HOME=FOLDER`"
        problem = f"{ref} cannot be stored: {location}{error.strerror or error}"
        raise CatalogError(problem, hint=f"{way}; then run the same command again") from error


@contextmanager
def model_lock(ref: Reference) -> Iterator[None]:
    """Lock a model. Raises ModelBusyError at once if another process has locked it."""
    path = _lock_path(ref.folder)
    paths.make_folder(path.parent)

    def busy() -> None:
        holder = path.read_text("ascii", "replace").strip()
        process = f"process {holder}" if holder.isdecimal() else "another process"
        raise ModelBusyError(f"{ref} is being changed by {process}")

    with disk.locked(path, busy) as descriptor:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield


def _lock_path(folder: str) -> Path:
    return paths.models_dir() / LOCKS / folder


class PulledFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a model. `path` is relative to the model's folder, absolute if used in place."""

    path: str
    size_bytes: int
    sha256: str
    mtime_ns: int


class PulledModel(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a pulled model (model.json). `base` is its catalogue entry's name, or `name`.

    `more_sources` have the same files as `source`, by their SHA-256.
    """

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
    projector: PulledFile | None = None
    more_sources: tuple[str, ...] = ()
    version: Literal[1] = 1

    @property
    def reference(self) -> Reference:
        return names.parse_reference(self.name)

    @property
    def other_names(self) -> tuple[str, ...]:
        """Further names that `lookup.find` accepts: the model's sources, and `NAME:QUANT`."""
        has_type = bool(self.quantization) and ":" not in self.name
        return (self.source, *self.more_sources, *[f"{self.name}:{self.quantization}"] * has_type)

    @property
    def folder(self) -> Path:
        return names.pulled_folder(self.reference)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Absolute paths of the files in order, without the projector."""
        return tuple(self.folder / file.path for file in self.files)

    @property
    def all_files(self) -> tuple[PulledFile, ...]:
        return self.files if self.projector is None else (*self.files, self.projector)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.all_files)

    def entry_by_header(self) -> Model:
        """Return an entry of the catalogue, without sources, made from the first file's header.

        The purpose is "" if the header is unreadable.
        """
        entry = Model(title=self.name, sources=(), purpose="")  # type: ignore[arg-type]
        with suppress(InvalidGgufError):
            header = gguf.read_header(self.paths[0])
            licence = header.label("general.license")
            entry = msgspec.structs.replace(entry, purpose=header.purpose, licence=licence)
        return entry

    @property
    def in_place(self) -> bool:
        """Return whether the files are used in place, outside the store."""
        return any(os.path.isabs(file.path) for file in self.files)

    @property
    def sha256(self) -> str:
        """SHA-256 of the model's file; for a split model, of the files' digests in order."""
        return names.combined_digest([file.sha256 for file in self.files])


def hidden_model_warning(record: PulledModel) -> str:
    """Return a line for stderr if a model of the catalogue has the name of `record`, otherwise ""."""
    entry = load_catalog().get(record.name)
    sources = [" + ".join(map(str, parts)) for parts in entry.parsed_sources()] if entry else []
    if entry is None or not {record.source, *record.more_sources}.isdisjoint(sources):
        return ""
    return (
        f"warning: {record.name} now means this model instead of the catalogue's {record.name}, whose "
        f"settings apply to this model; `edgeinfer rm {record.name}` removes this model\n"
    )


def read_record(folder: Path) -> PulledModel | None:
    """Return the record in `folder`, None if there is none. Raises CatalogError if it is damaged."""
    return _read_json(folder / RECORD, PulledModel, folder.name)


def find_pulled(text: str) -> PulledModel | None:
    """Return the pulled model that `text` names; None if there is none.

    Raises CatalogError for a damaged record.
    """
    with suppress(UsageError):
        if record := read_record(names.pulled_folder(names.parse_reference(text))):
            return record
    return lookup.find(text, list_pulled())


def _read_json(path: Path, kind: type[T], rm_argument: str) -> T | None:
    """Read a file of the store; None if it is missing. Raises CatalogError if it is damaged."""
    try:
        return msgspec.json.decode(disk.read_regular(path), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        denied = isinstance(error, PermissionError)
        hint = paths.DENIED_HINT if denied else f"remove it: `edgeinfer rm {rm_argument}`"
        raise CatalogError(f"{path} cannot be read: {error}", hint=hint) from error


def write_record(record: PulledModel) -> None:
    """Write a model's record, which makes it a pulled model. The files must be verified before."""
    _write_json(record.folder / RECORD, record)


def _write_json(path: Path, value: msgspec.Struct) -> None:
    disk.write_durably(path, msgspec.json.format(msgspec.json.encode(value), indent=2))


def list_pulled() -> list[PulledModel]:
    """List the pulled models by name, without those whose record is damaged."""
    pulled = []
    for folder in paths.models_dir().glob("[!.]*"):
        with suppress(CatalogError):
            pulled.append(read_record(folder))
    return sorted(filter(None, pulled), key=lambda model: model.name)


def publish(
    ref: Reference,
    fetched: list[FetchedFile],
    *,
    base: str,
    source: str,
    requantized_from: str,
    projector: FetchedFile | None = None,
) -> PulledModel:
    """Move verified files into the store as the model `ref`, replacing an earlier one.

    `base` and `source` are those of the returned record. `requantized_from` is the type before a
    quantization here, otherwise "". `projector` is None for a model without one.
    """
    folder = names.pulled_folder(ref)
    paths.make_folder(folder)
    (folder / RECORD).unlink(missing_ok=True)
    files = tuple(_place(file, folder) for file in fetched)
    encoder = None if projector is None else _place(projector, folder)
    disk.sync(folder)
    headers = [gguf.read_header(folder / file.path) for file in files]
    record = PulledModel(
        name=str(ref),
        base=base,
        files=files,
        source=source,
        quantization=headers[0].quantization,
        architecture=headers[0].architecture,
        n_params=sum(header.n_params for header in headers),
        n_ctx_train=headers[0].n_ctx_train,
        pulled_at=datetime.now(UTC).isoformat(timespec="seconds"),
        requantized_from=requantized_from,
        projector=encoder,
    )
    write_record(record)
    published = {RECORD, *(file.path for file in record.all_files)}
    for child in folder.iterdir():  # remove the files of an earlier pull
        if child.is_file() and child.name not in published:
            child.unlink()
    return record


def _place(file: FetchedFile, folder: Path) -> PulledFile:
    path = file.path
    if file.is_ours:
        disk.sync(file.path)
        path = folder / file.file_name
        os.replace(file.path, path)
    info = path.stat()
    return PulledFile(
        path=path.name if file.is_ours else str(path),
        size_bytes=info.st_size,
        sha256=file.found_sha256,
        mtime_ns=info.st_mtime_ns,
    )


def unfinished_pulls() -> dict[str, int]:
    """Return model name → size (bytes) of the files that an interrupted pull has left."""
    sizes = {}
    for folder in sorted((paths.models_dir() / PARTIAL).glob("*")):
        size = 0 if disk.is_locked(_lock_path(folder.name)) else disk.bytes_below(folder)
        if size:
            sizes[folder.name.replace("+", ":")] = size
    return sizes


_PINS_SUFFIX = ".lock.json"


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """The SHA-256 that a file had at its first pull; later pulls of the file must match."""

    source: str
    file_name: str
    sha256: str
    size_bytes: int
    first_pulled_at: str


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    pins: tuple[Pin, ...] = ()
    version: Literal[1] = 1


def pins_path(ref: Reference) -> Path:
    """Return the path of a model's pins, NAME.lock.json; the file need not exist."""
    return paths.models_dir() / (ref.folder + _PINS_SUFFIX)


def read_pins(ref: Reference) -> Pins:
    """Return a model's pins. Raises CatalogError if they are damaged."""
    return _read_json(pins_path(ref), Pins, f"{ref} --forget") or Pins()


def pinned_digest(ref: Reference, source: str, file_name: str) -> str:
    """Return the SHA-256 of a file's first pull; "" if there was none. Raises CatalogError."""
    pins = {(pin.source, pin.file_name): pin.sha256 for pin in read_pins(ref).pins}
    return pins.get((source, file_name), "")


def pin_files(ref: Reference, source: str, fetched: Iterable[FetchedFile]) -> None:
    """Record the SHA-256 of files that are pulled for the first time. Raises what `read_pins` does."""
    old = read_pins(ref).pins
    have = {(pin.source, pin.file_name) for pin in old}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    new = tuple(
        Pin(
            source=source,
            file_name=file.file_name,
            sha256=file.found_sha256,
            size_bytes=file.size_bytes,
            first_pulled_at=now,
        )
        for file in fetched
        if file.pinned and (source, file.file_name) not in have
    )
    if new:
        _write_json(pins_path(ref), Pins(pins=old + new))
