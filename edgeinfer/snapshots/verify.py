"""Reading every byte of a snapshot and comparing it with what was built. A launch compares sizes only."""

from __future__ import annotations

import hashlib
from pathlib import Path

from edgeinfer.snapshots import fingerprint, format, records


def wrong_files(folder: Path) -> list[str]:
    """The files of a snapshot that are not what was built, by name.

    Raises SnapshotStaleError, SnapshotUnsafeError or SnapshotCorruptError when the manifest alone refuses it.
    """
    manifest = format.read_manifest(str(folder))
    fingerprint.refuse_stale(manifest, str(folder))
    digests = records.read_details(folder).digests
    return [name for name in manifest.images if _digest(folder / name) != digests.get(name)]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
