"""Snapshots in a registry of containers: pushed blob by blob, fetched to a folder that lasts an import.

The protocol is that of https://github.com/opencontainers/distribution-spec; a user who logged in with
docker or podman is logged in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urljoin

import httpx2  # 75–120 ms: imported for a registry only

from edgeinfer.errors import DownloadError, SnapshotMissingError, SourceNotFoundError
from edgeinfer.models.fetching import download, http_client
from edgeinfer.models.fetching.oci import Registry
from edgeinfer.models.progress import Job
from edgeinfer.models.sources import OciArtifact
from edgeinfer.snapshots.transfer.description import MANIFEST_TYPE
from edgeinfer.snapshots.transfer.oci import Layout

_TIMEOUT_S = 60.0


@contextmanager
def opened(artifact: OciArtifact) -> Iterator[RegistryStore]:
    """Open a registry. Raises OfflineError before any connection, DownloadError."""
    try:
        with http_client.client(str(artifact), _TIMEOUT_S) as client:
            yield RegistryStore(artifact, client)
    except httpx2.TransportError as error:
        raise DownloadError(f"{artifact}: {http_client.describe_transport_error(error)}") from error


class RegistryStore(Registry):
    """A repository that blobs are put in. Raises what `asked` raises."""

    def has(self, digest: str, size: int) -> bool:
        answer = self.asked("HEAD", f"{self.base}/blobs/{digest}", {}, wanted=(200, 404))
        return answer.status_code == 200 and answer.headers.get("Content-Length") == str(size)

    def put(self, digest: str, size: int, chunks: Iterator[bytes]) -> None:
        begun = self.asked(
            "POST", f"{self.base}/blobs/uploads/", {"Content-Length": "0"}, wanted=(202,)
        )
        url = urljoin(str(begun.url), begun.headers.get("Location", ""))
        url += f"{'&' if '?' in url else '?'}digest={digest}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        self.asked("PUT", url, headers, chunks, wanted=(201,))

    def put_manifest(self, name: str, content: bytes) -> None:
        """Publish a manifest under a tag."""
        headers = {"Content-Type": MANIFEST_TYPE}
        self.asked("PUT", f"{self.base}/manifests/{name}", headers, content, wanted=(200, 201))


class FetchedSnapshot(Layout):
    """A snapshot of a registry, its blobs fetched into `folder` when they are read."""

    def __init__(self, registry: Registry, reference: str, folder: Path, job: Job) -> None:
        super().__init__(folder)
        self._registry = registry
        self._reference = reference
        self._job = job

    def manifest(self, _name: str = "") -> bytes:
        """Return the manifest of the requested tag. Raises SnapshotMissingError for none."""
        try:
            return self._registry.manifest_content(self._reference)
        except SourceNotFoundError as error:
            raise SnapshotMissingError(error.message, hint="check the name and the tag") from error

    def chunks(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield a blob, fetched first if needed. Raises DownloadError and its kin."""
        if not self.has(digest, size):
            place = self.blob(digest)
            place.parent.mkdir(parents=True, exist_ok=True)
            remote = self._registry.blob({"digest": digest, "size": size}, place.name)
            self._job.begin("downloading", digest, total=size)
            download.fetch(remote, place.parent, self._job).replace(place)
        return super().chunks(digest, size)
