"""`edgeinfer snapshots export|import|trust`: move a snapshot to another machine."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeinfer.cli.result import Result, TimedResult
from edgeinfer.cli.terminal import StageProgress, stoppable
from edgeinfer.config.load_options import LORA, NO_ADAPTERS
from edgeinfer.errors import UsageError
from edgeinfer.host import Host
from edgeinfer.models import sources
from edgeinfer.models.progress import Job
from edgeinfer.platform import paths
from edgeinfer.runtime.options import parse_adapters
from edgeinfer.snapshots import format, registry
from edgeinfer.snapshots.registry import Details
from edgeinfer.snapshots.transfer import exporting, importing, signing
from edgeinfer.snapshots.transfer.oci import Layout
from edgeinfer.units import format_bytes


class SnapshotsExportResult(TimedResult, frozen=True, kw_only=True):
    """An exported snapshot. `written_bytes` counts only layers new at the destination."""

    name: str
    tag: str
    destination: str
    digest: str
    signer: str
    layers_bytes: int
    written_bytes: int

    def human(self) -> str:
        reused_bytes = self.layers_bytes - self.written_bytes
        reused = f"; {format_bytes(reused_bytes)} were there already" if reused_bytes else ""
        command = ["edgeinfer", "snapshots", "import", self.destination]
        command += [] if self.destination.startswith("oci:") else ["--name", self.tag]
        return (
            f"{self.name} is in {self.destination}: {format_bytes(self.written_bytes)} written{reused}"
            f"; {self.wall_s:.1f} s\n"
            f"signed by {self.signer}: the importer needs this fingerprint\n"
            f"to import it: edgeinfer snapshots trust {self.signer}; {shlex.join(command)}"
        )


class SnapshotsImportResult(TimedResult, frozen=True, kw_only=True):
    """A snapshot that was imported."""

    snapshot: Details
    signer: str

    def human(self) -> str:
        d = self.snapshot
        return (
            f"{d.name} was built here as it was there: {format_bytes(d.disk_bytes)} on disk; "
            f"{self.wall_s:.1f} s\n"
            f"signed by {self.signer}\n"
            f"try it: {_launch(d.name, d.model, d.requested)}"
        )


def _launch(name: str, model: str, requested: dict[str, str]) -> str:
    if format.is_given(name, model, requested):
        return f"edgeinfer chat --snapshot {name}"
    adapters = [
        one.name if one.scale == 1 else f"{one.name}:{one.scale:g}"
        for one in parse_adapters(requested.get(LORA.field, NO_ADAPTERS))
    ]
    lora = ("--lora", ",".join(adapters)) if adapters else ()
    return " ".join(["edgeinfer chat", model, *lora])


class SnapshotsTrustResult(Result, frozen=True, kw_only=True):
    """Trusted keys: this user's own, "" before the first export, and others'."""

    own: str
    trusted: dict[str, str]

    def human(self) -> str:
        own = f"your key: {self.own}" if self.own else "you have no key yet: the first export makes it"
        return "\n".join([own, *(f"{who} since {day}" for who, day in self.trusted.items())])


def export(options: argparse.Namespace, _host: Host) -> SnapshotsExportResult:
    """Export a snapshot. Raises what `exporting.export` raises, UsageError for a bad destination."""
    folder = registry.find(options.name)
    progress = StageProgress(sys.stderr, quiet=options.quiet)
    name = registry.read_details(folder).name
    with _destination(options.destination) as (where, tag), progress:
        done = exporting.export(
            folder, where, tag or re.sub(r"[^A-Za-z0-9_.-]", "-", name), progress.report
        )
    return SnapshotsExportResult(
        name=name,
        tag=done.name,
        destination=options.destination,
        digest=done.digest,
        signer=done.signer,
        layers_bytes=done.layers_bytes,
        written_bytes=done.written_bytes,
    )


@contextmanager
def _destination(text: str) -> Iterator[tuple[exporting.Store, str]]:
    artifact = _artifact(text)
    if artifact is None:
        yield Layout(_folder_to_fill(text)), ""
        return
    if artifact.reference.startswith("sha256:"):
        raise UsageError(f"{text} names a digest", hint="name a tag: oci://REGISTRY/NAME:TAG")
    from edgeinfer.snapshots.transfer import remote  # 100 ms: httpx2

    with remote.opened(artifact) as store:
        yield store, artifact.reference


def _folder_to_fill(text: str) -> Path:
    folder = Path(text).expanduser()
    if not text or (folder.exists() and not (folder.is_dir() and _may_fill(folder))):
        raise UsageError(
            f"{text or 'nothing'} is no folder to export to: it holds something else",
            hint="name a new folder, one of an earlier export, or oci://REGISTRY/NAME:TAG",
        )
    return folder


def _may_fill(folder: Path) -> bool:
    return (folder / "oci-layout").is_file() or not any(folder.iterdir())


def import_(options: argparse.Namespace, host: Host) -> SnapshotsImportResult:
    """Import a snapshot. Raises what `importing` raises, UsageError for a bad source or fingerprint."""
    progress = StageProgress(sys.stderr, quiet=options.quiet)
    with (
        stoppable("stopped; nothing of the snapshot is kept"),
        progress,
        _source(options.source, progress) as source,
    ):
        offer = importing.offered(source, options.name)
        details = importing.import_snapshot(source, offer, host, progress.report)
    return SnapshotsImportResult(snapshot=details, signer=offer.signer)


@contextmanager
def _source(text: str, progress: StageProgress) -> Iterator[Layout]:
    artifact = _artifact(text)
    if artifact is None:
        yield Layout(Path(text).expanduser())
        return
    from edgeinfer.snapshots.transfer import remote  # 100 ms: httpx2

    paths.cache_dir().mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=paths.cache_dir(), prefix="import-") as folder,
        remote.opened(artifact) as store,
    ):
        job = Job(
            lambda at: progress.report(
                "download", at.done_bytes / at.total_bytes if at.total_bytes else None
            )
        )
        yield remote.FetchedSnapshot(store, artifact.reference, Path(folder), job)


def _artifact(text: str) -> sources.OciArtifact | None:
    artifact = sources.parse(text) if text.startswith("oci:") else None
    return artifact if isinstance(artifact, sources.OciArtifact) else None


def trust(options: argparse.Namespace, _host: Host) -> SnapshotsTrustResult:
    """List trusted keys, after adding one. Raises UsageError for a bad fingerprint."""
    if options.fingerprint:
        signing.trust(options.fingerprint)
    return _trusted_keys()


def distrust(options: argparse.Namespace, _host: Host) -> SnapshotsTrustResult:
    """Remove a trusted key. Raises UsageError for an unknown fingerprint."""
    signing.distrust(options.fingerprint)
    return _trusted_keys()


def _trusted_keys() -> SnapshotsTrustResult:
    own = signing.own_key(make=False)
    return SnapshotsTrustResult(own=own.fingerprint if own else "", trusted=signing.trusted())


ACTIONS: dict[str, Callable[[argparse.Namespace, Host], Result]] = {
    "export": export,
    "import": import_,
    "trust": trust,
    "distrust": distrust,
}
