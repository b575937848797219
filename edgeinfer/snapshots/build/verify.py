"""Read a whole snapshot, compare it with what was built, and resume it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgeinfer.snapshots import fingerprint, format, registry
from edgeinfer.snapshots.build.digests import digest
from edgeinfer.snapshots.restore import checks


def wrong_files(folder: Path) -> list[str]:
    """The files of a snapshot that are not what was built, by name.

    Raises SnapshotStaleError, SnapshotUnsafeError, SnapshotCorruptError by the manifest alone.
    """
    manifest = format.read_manifest(str(folder))
    fingerprint.refuse_stale(manifest, str(folder))
    digests = registry.read_details(folder).digests
    return [name for name in manifest.images if digest(folder / name) != digests.get(name)]


def repeated_randomness(folder: Path) -> list[str]:
    """Resume it twice; name the randomness on which both agree. Raises RestoreError."""
    manifest = format.read_manifest(str(folder))
    drawn = [
        msgspec.json.decode(checks.ask(manifest, str(folder), "facts"), type=checks.Facts).random
        for _ in range(2)
    ]
    return [name for name, value in drawn[0].items() if drawn[1].get(name) == value]
