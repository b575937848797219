"""Import a snapshot: fetch the files of a signed image that are missing here, and build it.

No file is read before the signer is known to be trusted, and no file is stored before its digest is
verified. A model that this machine has under any name is not fetched again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edgeinfer.config.load_options import LOAD_OPTIONS, LORA
from edgeinfer.errors import SnapshotStaleError
from edgeinfer.host import EngineHost, LoadProgress
from edgeinfer.models import adapters, pull, store
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.names import Reference, parse_reference
from edgeinfer.models.progress import Job
from edgeinfer.models.reference import resolve
from edgeinfer.platform import paths
from edgeinfer.platform.disk import disk_full_errors, sha256_of, sync
from edgeinfer.runtime.options import Adapter, LoadOptions
from edgeinfer.snapshot_format import storage
from edgeinfer.snapshots.builder import jobs
from edgeinfer.snapshots.inputs import SnapshotInputs, adapters_text
from edgeinfer.snapshots.registry import Details
from edgeinfer.snapshots.transfer import signing
from edgeinfer.snapshots.transfer.image import (
    ImageStore,
    SnapshotDescription,
    SnapshotFile,
    read_signed,
    refuse_other_bytes,
)

_MISFIT = "the snapshot does not fit this machine"


def import_snapshot(image: ImageStore, host: EngineHost, progress: LoadProgress) -> tuple[Details, str]:
    """Build the snapshot that an image describes; return its details and the signer's fingerprint.

    Files that this machine lacks are fetched from the image. Raises SnapshotUntrustedError,
    SnapshotCorruptError, DiskFullError, SnapshotStaleError if this machine has other files under the
    name of the model or of an adapter, and the errors of pulling and building.
    """
    description, public = read_signed(image)
    signer = signing.trusted_fingerprint(public)
    _refuse_other_options(description)
    _store_files(image, description, progress)
    model, requested = description.model, description.requested
    if description.adapters:  # the adapters' paths on this machine replace the exported ones
        lora = adapters_text([_local_adapter(file) for file in description.adapters])
        requested |= {LORA.field: lora}
    fields = {option.field: option for option in LOAD_OPTIONS}
    parsed = {field: fields[field].parse(text) for field, text in requested.items() if field in fields}
    options = msgspec.convert(parsed, LoadOptions)
    inputs = SnapshotInputs(
        model=model,
        files=host.files(model, draft=options.draft),
        options=options,
        system=description.system,
        given_name=storage.user_name_of(description.name),
    )
    return jobs.build(inputs, host.config.snapshots, progress), signer


def _local_adapter(file: SnapshotFile) -> Adapter:
    return Adapter(file.name, str(adapters.adapter_path(file.name)), file.scale)


def _refuse_other_options(description: SnapshotDescription) -> None:
    """Raise SnapshotStaleError if the local models.toml adds adapters to this model."""
    model = description.model
    entry = load_catalog().get(parse_reference(model).name)
    if entry and entry.lora and LORA.field not in description.requested:
        problem = f"your models.toml sets `{LORA.field}` for {model}, but the snapshot has no adapters"
        hint = f"remove `{LORA.field}` of {model} from models.toml, then import again"
        raise SnapshotStaleError(f"{_MISFIT}: {problem}", key="models.toml", hint=hint)


def _store_files(image: ImageStore, description: SnapshotDescription, progress: LoadProgress) -> None:
    """Fetch and store the missing model and adapters, but store nothing unless all were fetched."""
    model = _find_pulled(description)
    missing = [file for file in description.adapters if not _has_adapter(file)]
    missing += description.model_files if model is None else []
    job = Job(
        lambda now: progress("fetch", now.done_bytes / now.total_bytes if now.total_bytes else None)
    )
    with _temporary_folder() as work:
        fetched = {}
        for file in missing:
            folder = work / ("adapters" if file.kind == "adapter" else "model")
            folder.mkdir(exist_ok=True)
            path = image.fetch_blob(file.digest, file.size, folder, job)
            refuse_other_bytes(file.digest, f"sha256:{sha256_of(path)}")
            fetched[file] = path.replace(folder / file.name)
        if model is None:
            _pull(description.model, fetched[description.model_files[0]], in_place=False)
        elif model.name != description.model:
            _pull(description.model, model.paths[0], in_place=True)
        _find_pulled(description)
        for file in description.adapters:
            _store_adapter(file, fetched)


def _find_pulled(description: SnapshotDescription) -> store.PulledModel | None:
    """Return the pulled model with these files; None if there is none.

    Raises SnapshotStaleError if the described model is pulled, but has other files.
    """
    digests = [file.sha256 for file in description.model_files]
    pulled = resolve(description.model).pulled
    if pulled is None:
        same_file = (model for model in store.list_pulled() if model.files[0].sha256 == digests[0])
        return next((model for model in same_file if _digests(model) == digests), None)
    if _digests(pulled) != digests:
        raise _mismatch("model", description.model, ", ".join(digests), ", ".join(_digests(pulled)))
    return pulled


def _digests(model: store.PulledModel) -> list[str]:
    projector = resolve(model.name).files().projector
    digests = [file.sha256 for file in model.files]
    return [*digests, sha256_of(Path(projector))] if projector else digests


def _pull(name: str, path: Path, *, in_place: bool) -> None:
    pull.pull(str(path), options=pull.PullOptions(name=name, in_place=in_place))


def _has_adapter(file: SnapshotFile) -> bool:
    """Return whether the adapter is stored. Raises SnapshotStaleError if the stored one differs."""
    path = adapters.adapter_path(file.name)
    if not path.exists():
        return False
    if sha256_of(path) != file.sha256:
        raise _mismatch("adapter", file.name, file.sha256, sha256_of(path))
    return True


def _store_adapter(file: SnapshotFile, fetched: dict[SnapshotFile, Path]) -> None:
    paths.private_dir(paths.adapters_dir())
    with store.model_lock(Reference(file.name)):
        if not _has_adapter(file):
            sync(fetched[file])
            os.replace(fetched[file], adapters.adapter_path(file.name))


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    partial = paths.models_dir() / store.PARTIAL
    paths.make_folder(partial)
    work = Path(tempfile.mkdtemp(prefix="snapshot-", dir=partial))
    try:
        with disk_full_errors(work):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _mismatch(key: str, name: str, exported: str, local: str) -> SnapshotStaleError:
    problem = f"{_MISFIT}: the exported {key} {name} has SHA-256 {exported}, but yours has {local}"
    return SnapshotStaleError(problem, key=key, hint=f"remove or rename yours: `edgeinfer rm {name}`")
