"""`edgeinfer snapshots export|import|trust|distrust`: copy snapshots between machines."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edgeinfer.cli.result import Result, TimedResult
from edgeinfer.cli.terminal import StageProgress, stoppable
from edgeinfer.errors import UsageError
from edgeinfer.host import EngineHost
from edgeinfer.models import sources
from edgeinfer.snapshots import registry
from edgeinfer.snapshots.registry import Details
from edgeinfer.snapshots.transfer import exporting, importing, signing
from edgeinfer.snapshots.transfer.image import ImageStore
from edgeinfer.snapshots.transfer.layout import Layout
from edgeinfer.units import format_bytes


class SnapshotsExportResult(TimedResult, frozen=True, kw_only=True):
    """An exported snapshot. `signer` is the fingerprint of the user's key, which signed it.

    `digest` is the SHA-256 of the image's manifest. `layers_bytes` is the size of all layers,
    `written_bytes` the size of those that the destination did not have already.
    """

    name: str
    destination: str
    digest: str
    signer: str
    layers_bytes: int
    written_bytes: int

    def human(self) -> str:
        reused_bytes = self.layers_bytes - self.written_bytes
        reused = f"; {format_bytes(reused_bytes)} were there already" if reused_bytes else ""
        command = ["edgeinfer", "snapshots", "import", self.destination]
        return (
            f"{self.name} is in {self.destination}: {format_bytes(self.written_bytes)} written{reused}"
            f"; {self.wall_s:.1f} s\n"
            f"signed by {self.signer}: the importer needs this fingerprint\n"
            f"to import it: edgeinfer snapshots trust {self.signer}; {shlex.join(command)}"
        )


class SnapshotsImportResult(TimedResult, frozen=True, kw_only=True):
    snapshot: Details
    signer: str

    def human(self) -> str:
        name = self.snapshot.name
        return (
            f"{name} was built here, too: {format_bytes(self.snapshot.disk_bytes)} on disk; "
            f"{self.wall_s:.1f} s\n"
            f"signed by {self.signer}\n"
            f"try it: edgeinfer chat --snapshot {shlex.quote(name)}"
        )


class SnapshotsTrustResult(Result, frozen=True, kw_only=True):
    """Fingerprints of keys: this user's own ("": no export yet), and trusted ones with their dates."""

    own: str
    trusted: dict[str, str]

    def human(self) -> str:
        own_key = f"your key: {self.own}" if self.own else "no key yet: the first export makes one"
        return "\n".join([own_key, *(f"{signer} since {day}" for signer, day in self.trusted.items())])


def export(options: argparse.Namespace, _host: EngineHost) -> SnapshotsExportResult:
    """Export a snapshot. Raises what `exporting.export` raises, UsageError for a bad destination."""
    folder = registry.find(options.name)
    progress = StageProgress(sys.stderr, quiet=options.quiet)
    with _open_destination(options.destination) as store, progress:
        if isinstance(store, Layout):
            _refuse_filled(store.folder)
        exported = exporting.export(folder, store, progress.report)
    name, facts = registry.read_details(folder).name, msgspec.structs.asdict(exported)
    return SnapshotsExportResult(name=name, destination=options.destination, **facts)


@contextmanager
def _open_destination(destination: str) -> Iterator[ImageStore]:
    source = sources.parse(destination) if destination.startswith("oci:") else None
    if isinstance(source, sources.OciArtifact):
        from edgeinfer.models.fetching import oci  # slow import: httpx2 takes 100 ms

        with oci.connect(source) as registry:
            yield registry
    else:
        yield Layout(Path(destination).expanduser())


def _refuse_filled(folder: Path) -> None:
    names = {"blobs", "oci-layout"}  # a stopped export leaves these: the index is written last
    if folder.exists() and not (folder.is_dir() and {path.name for path in folder.iterdir()} <= names):
        raise UsageError(f"{folder} is not empty", hint="name a new folder, or oci://REGISTRY/NAME:TAG")


def import_(options: argparse.Namespace, host: EngineHost) -> SnapshotsImportResult:
    """Import a snapshot. Raises what `import_snapshot` raises, UsageError for a bad source."""
    progress = StageProgress(sys.stderr, quiet=options.quiet)
    with (
        stoppable("stopped; nothing of the snapshot is kept"),
        progress,
        _open_destination(options.source) as store,
    ):
        details, signer = importing.import_snapshot(store, host, progress.report)
    return SnapshotsImportResult(snapshot=details, signer=signer)


def trust(options: argparse.Namespace, _host: EngineHost) -> SnapshotsTrustResult:
    """Trust a key, if one is given; list trusted keys. Raises UsageError for a bad fingerprint."""
    if options.fingerprint:
        signing.trust(options.fingerprint)
    return _trusted_keys()


def distrust(options: argparse.Namespace, _host: EngineHost) -> SnapshotsTrustResult:
    """Stop trusting a key; list trusted keys. Raises UsageError for an unknown fingerprint."""
    signing.distrust(options.fingerprint)
    return _trusted_keys()


def _trusted_keys() -> SnapshotsTrustResult:
    key = signing.own_key(make=False)
    return SnapshotsTrustResult(own=key.fingerprint if key else "", trusted=signing.trusted_keys())


ACTIONS: dict[str, Callable[[argparse.Namespace, EngineHost], Result]] = {
    "export": export,
    "import": import_,
    "trust": trust,
    "distrust": distrust,
}
