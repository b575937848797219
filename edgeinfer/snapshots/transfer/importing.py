"""Import: check a snapshot from elsewhere, store what is missing of its files, build the same here.

Nothing of it is read before its signer is known, nothing stored before every digest was checked.
Models and adapters are found here by their digests, else stored where `pull` stores them, under the
exporter's names.
"""

from __future__ import annotations

import base64
import binascii
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edgeinfer.config.load_options import LOAD_OPTIONS, LORA
from edgeinfer.errors import SnapshotStaleError, SnapshotUntrustedError
from edgeinfer.host import Host
from edgeinfer.models import adapters, pull, store
from edgeinfer.models.catalog import load_catalog
from edgeinfer.models.names import Reference, parse_reference, sanitize_file_name
from edgeinfer.models.reference import resolve
from edgeinfer.models.store import model_lock
from edgeinfer.platform import paths
from edgeinfer.platform.disk import need_room, room_errors, sha256_of, sync
from edgeinfer.platform.ed25519 import is_signed_by
from edgeinfer.runtime.options import Adapter, LoadOptions
from edgeinfer.snapshots import format, registry
from edgeinfer.snapshots.build import jobs
from edgeinfer.snapshots.inputs import SnapshotInputs, adapters_text
from edgeinfer.snapshots.transfer import signing
from edgeinfer.snapshots.transfer.description import (
    SIGNATURE,
    SIGNER,
    AdapterFile,
    SnapshotDescription,
    read_config,
    read_manifest,
)
from edgeinfer.snapshots.transfer.oci import Layout


class Offered(msgspec.Struct, frozen=True):
    """A snapshot to import, and its trusted signer."""

    description: SnapshotDescription
    signer: str


def offered(source: Layout, name: str = "") -> Offered:
    """Read the snapshot of a name whose signer this user trusts.

    Raises SnapshotCorruptError, SnapshotUntrustedError.
    """
    manifest = read_manifest(source.manifest(name))
    config = source.read(manifest.config.digest, manifest.config.size)
    signer = _signer(manifest.annotations, config)
    return Offered(read_config(config), signer)


def _signer(annotations: dict[str, str], config: bytes) -> str:
    try:
        public = base64.b64decode(annotations[SIGNER], validate=True)
        signature = base64.b64decode(annotations[SIGNATURE], validate=True)
    except (KeyError, binascii.Error, ValueError) as error:
        raise SnapshotUntrustedError(
            "the snapshot is not signed", hint="export it again: `edgeinfer snapshots export`"
        ) from error
    if not is_signed_by(public, signature, config):
        raise SnapshotUntrustedError(
            "the snapshot's signature is not of what it describes: it was altered after it was signed",
            hint="fetch or export it again",
        )
    return signing.refuse_unknown(public)


def import_snapshot(
    source: Layout, offer: Offered, host: Host, progress: jobs.Progress
) -> registry.Details:
    """Have the model and adapters here, and build the same snapshot of them.

    Raises SnapshotStaleError for a name that means something else here, SnapshotCorruptError,
    DiskFullError, and what pulling and building raise.
    """
    what = with_local_names(offer.description)
    placing = Placing(source, offer.description, progress)
    placing.refuse_other_options()
    with _scratch() as work:
        placing.place(placing.fetch_missing(work))
    typed = {
        option.field: option.parse(what.requested[option.field])
        for option in LOAD_OPTIONS
        if option.field in what.requested
    }
    options = msgspec.convert(typed, LoadOptions)
    inputs = SnapshotInputs(
        model=what.model,
        files=host.files(what.model),
        options=options,
        system=what.system,
        given_name=format.given_part(what.name, what.model, what.requested),
    )
    return jobs.build(inputs, host.config.snapshots, progress)


def with_local_names(what: SnapshotDescription) -> SnapshotDescription:
    """Return the description with the adapters' paths here, which are part of its name."""
    if not what.adapters:
        return what
    ours = [Adapter(one.name, str(adapters.place(one.name)), one.scale) for one in what.adapters]
    requested = what.requested | {LORA.field: adapters_text(ours)}
    given = format.given_part(what.name, what.model, what.requested)
    name = format.snapshot_name(what.model, requested, given)
    return msgspec.structs.replace(what, name=name, requested=requested)


class Placing:
    """The model and adapters of one snapshot that is offered."""

    def __init__(self, source: Layout, what: SnapshotDescription, progress: jobs.Progress) -> None:
        self._source = source
        self._what = what
        self._progress = progress

    def fetch_missing(self, work: Path) -> dict[str, Path]:
        """Write what is not here into `work`, every digest checked; digests → paths.

        Raises SnapshotStaleError if a name is taken, SnapshotCorruptError, DiskFullError.
        """
        missing: dict[str, tuple[int, Path]] = {}
        if self._known_model() is None:
            missing |= {
                one.digest: (one.size, work / "model" / sanitize_file_name(one.name))
                for one in self._what.files
            }
        for one in self._what.adapters:
            if self._known_adapter(one) is None:
                missing[one.digest] = (one.size, work / f"{one.name}.gguf")
        need_room(work, 2 * sum(size for size, _ in missing.values()), self._what.model)
        for number, (digest, (size, path)) in enumerate(missing.items()):
            self._progress("fetch", number / len(missing))
            path.parent.mkdir(exist_ok=True)
            with open(path, "xb") as out:
                for chunk in self._source.chunks(digest, size):
                    out.write(chunk)
        return {digest: path for digest, (_, path) in missing.items()}

    def place(self, fetched: dict[str, Path]) -> None:
        """Have everything here under its name."""
        name, here = self._what.model, self._known_model()
        if here is None:
            _pull(name, fetched[self._what.files[0].digest], in_place=False)
        elif here.name != name:
            _pull(name, here.paths[0], in_place=True)
        self._known_model()
        for adapter in self._what.adapters:
            self._place_adapter(adapter, fetched)

    def refuse_other_options(self) -> None:
        """Raise SnapshotStaleError if this user's models.toml names what the snapshot lacks."""
        what = self._what
        entry = load_catalog().get(parse_reference(what.model).name)
        if entry and entry.lora and LORA.field not in what.requested:
            raise SnapshotStaleError(
                f"the snapshot does not fit this machine: models.toml: yours gives {what.model} "
                f"`{LORA.field}`, and the snapshot was made without",
                key="models.toml",
            )

    def _known_model(self) -> store.PulledModel | None:
        """Find the model here, by any name. Raises SnapshotStaleError if another has this one."""
        name, wanted = self._what.model, [one.sha256 for one in self._what.files]
        here = resolve(name).pulled
        if here is None:
            first = (one for one in store.list_pulled() if one.files[0].sha256 == wanted[0])
            return next((one for one in first if _digests(one) == wanted), None)
        ours = _digests(here)
        if ours != wanted:
            raise _other_here("model", name, ", ".join(wanted), ", ".join(ours))
        return here

    def _known_adapter(self, wanted: AdapterFile) -> Path | None:
        """Find this file here, by any name. Raises SnapshotStaleError if another has this one."""
        place = adapters.place(wanted.name)
        if place.exists():
            ours = sha256_of(place)
            if ours != wanted.sha256:
                raise _other_here("adapter", wanted.name, wanted.sha256, ours)
            return place
        return next((path for path in paths.adapters_dir().glob("*.gguf") if _is(path, wanted)), None)

    def _place_adapter(self, wanted: AdapterFile, fetched: dict[str, Path]) -> None:
        place = adapters.place(wanted.name)
        paths.private_dir(paths.adapters_dir())
        with model_lock(Reference(wanted.name)):
            known = self._known_adapter(wanted)
            if known is None:
                sync(fetched[wanted.digest])
                os.replace(fetched[wanted.digest], place)
            elif known != place:
                os.link(known, place)


def _is(path: Path, file: AdapterFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size and sha256_of(path) == file.sha256


def _digests(here: store.PulledModel) -> list[str]:
    """Return the digests of a model's files, its projector's last."""
    encoder = resolve(here.name).files().projector
    encoders = [sha256_of(Path(encoder))] if encoder else []
    return [*(file.sha256 for file in here.files), *encoders]


def _pull(name: str, first: Path, *, in_place: bool) -> None:
    pull.pull(str(first), options=pull.PullOptions(name=name, in_place=in_place))


@contextmanager
def _scratch() -> Iterator[Path]:
    partial = paths.models_dir() / store.PARTIAL
    partial.mkdir(mode=0o700, parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="snapshot-", dir=partial))
    try:
        with room_errors(work):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _other_here(what: str, name: str, there: str, here: str) -> SnapshotStaleError:
    return SnapshotStaleError(
        f"the snapshot does not fit this machine: {what}: {name} is sha256 {there} there, {here} here",
        key=what,
        hint=f"remove or rename yours: `edgeinfer rm {name}`",
    )
